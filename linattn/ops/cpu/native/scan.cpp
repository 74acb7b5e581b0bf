// The elementwise recurrences h = exp(decay) h + x and m = max(decay + m, x), with lanes over the channels.
#include "rows.h"

namespace linattn {
namespace LINATTN_ISA {
namespace {

constexpr int AHEAD = 16;  // tokens

// If exp(decay) is 0 the result is 0, also for an infinite h.
LINATTN_INLINE Int gone(Fade fade) { return (fade.two == 0.0f) & (fade.part == 0.0f); }
LINATTN_INLINE Float summed(Fade fade, Float h, Float x) { return gone(fade) ? x : carried(fade, h, x); }

// NaN if either operand is.
LINATTN_INLINE Float larger(Float a, Float b) {
    const Float most = a > b ? a : b;
    return a != a ? a : most;
}

// Share of the gradient of larger(a, b) for a: half if they are equal, all if they are unordered.
LINATTN_INLINE Float share(Float a, Float b) {
    const Float all = splat(1.0f), unequal = a < b ? zero() : all;
    return a == b ? splat(0.5f) : unequal;
}

template <bool SUM>
void forward(const Rows& decay, bool constant, const Rows& x, const Rows& y, Sequence at, Slab part, Float* h) {
    Float log[BLOCKS];
    Fade left[BLOCKS];
    for (int block = 0; block < part.blocks(); block++) {
        log[block] = constant ? decay.load(0, 0, part.first + block * LANES, part.lanes(block)) : zero();
        if (SUM) left[block] = fade(log[block]);
    }
    for (int64_t t = at.begin; t < at.end; t++)
        for (int block = 0; block < part.blocks(); block++) {
            const int lanes = part.lanes(block);
            const int64_t channel = part.first + block * LANES;
            if (!constant) {
                log[block] = decay.load(at.row, t, channel, lanes);
                if (SUM) left[block] = fade(log[block]);
            }
            const Float own = x.load(at.row, t, channel, lanes);
            h[block] = SUM ? summed(left[block], h[block], own) : larger(log[block] + h[block], own);
            y.store(at.row, t, channel, h[block], lanes);
        }
}

// The same for a whole slab of sums with a decay per token, the most frequent case, without branches per token.
template <class T>
void forward_whole(const Rows& decay, const Rows& x, const Rows& y, Sequence at, int64_t channel, Float* last) {
    Float h[BLOCKS];
    for (int block = 0; block < BLOCKS; block++) h[block] = last[block];
    for (int64_t t = at.begin; t < at.end; t++) {
        const float* log = (const float*)decay.data + decay.at(at.row, t) + channel;
        const T* own = (const T*)x.data + x.at(at.row, t) + channel;
        T* to = (T*)y.data + y.at(at.row, t) + channel;
        LINATTN_UNROLL
        for (int block = 0; block < BLOCKS; block++) {
            if (t + AHEAD < at.end) {
                __builtin_prefetch(log + AHEAD * decay.token + block * LANES);
                __builtin_prefetch(own + AHEAD * x.token + block * LANES);
                __builtin_prefetch(to + AHEAD * y.token + block * LANES, 1);
            }
            h[block] = summed(fade(load(log + block * LANES)), h[block], load(own + block * LANES));
            store(to + block * LANES, h[block]);
        }
    }
    for (int block = 0; block < BLOCKS; block++) last[block] = h[block];
}

// From the last token to the first; y is the forward result, dh the gradient of the state after the previous token.
template <bool SUM>
void backward(
    const Rows& decay, bool constant, const Rows& x, const Rows& y, const Float* initial, const Rows& dy, const Rows& dx,
    const Rows& ddecay, bool of_decay, Sequence at, Slab part, Float* dh, Float* total) {
    Float log[BLOCKS];
    Fade left[BLOCKS];
    for (int block = 0; block < part.blocks(); block++) {
        log[block] = constant ? decay.load(0, 0, part.first + block * LANES, part.lanes(block)) : zero();
        if (SUM) left[block] = fade(log[block]);
    }
    for (int64_t t = at.end - 1; t >= at.begin; t--)
        for (int block = 0; block < part.blocks(); block++) {
            const int lanes = part.lanes(block);
            const int64_t channel = part.first + block * LANES;
            if (!constant) {
                log[block] = decay.load(at.row, t, channel, lanes);
                if (SUM) left[block] = fade(log[block]);
            }
            Float before = zero();
            if (!SUM || of_decay) before = t > at.begin ? y.load(at.row, t - 1, channel, lanes) : initial[block];
            const Float all = dh[block] + dy.load(at.row, t, channel, lanes);
            Float of_x, of_log;
            if (SUM) {
                dh[block] = summed(left[block], all, zero());
                of_x = all;
                of_log = gone(left[block]) ? zero() : dh[block] * before;
            } else {
                dh[block] = all * share(log[block] + before, x.load(at.row, t, channel, lanes));
                of_x = all - dh[block];
                of_log = dh[block];
            }
            dx.store(at.row, t, channel, of_x, lanes);
            if (of_decay && constant) total[block] += of_log;
            if (of_decay && !constant) ddecay.store(at.row, t, channel, of_log, lanes);
        }
}

LINATTN_INLINE void load_state(const float* states, int64_t n, int64_t width, Slab part, float otherwise, Float* to) {
    for (int block = 0; block < part.blocks(); block++)
        to[block] = states ? load(states + n * width + part.first + block * LANES, part.lanes(block)) : splat(otherwise);
}
LINATTN_INLINE void store_state(float* states, int64_t n, int64_t width, Slab part, const Float* from) {
    for (int block = 0; block < part.blocks(); block++)
        store(states + n * width + part.first + block * LANES, from[block], part.lanes(block));
}

}  // namespace

// `sum`: h, else m; `constant`: decay is [D]. Without `initial` the state starts from 0, or from -inf.
LINATTN_ENTRY(scan_forward)
(int64_t sum, int64_t constant, LINATTN_ROWS(decay), LINATTN_ROWS(x), LINATTN_ROWS(y), const float* initial, const int64_t* ends,
 float* final, int64_t sequences, int64_t tokens, int64_t width, int64_t threads) {
    LINATTN_THESE_ROWS(decay);
    LINATTN_THESE_ROWS(x);
    LINATTN_THESE_ROWS(y);
    const int64_t slabs = (width + SLAB - 1) / SLAB;
    parallel(sequences * slabs, threads, [&](int64_t task) {
        const int64_t n = task / slabs;
        const Sequence at = sequence(n, tokens, ends);
        const Slab part = slab(task % slabs, width);
        Float h[BLOCKS];
        load_state(initial, n, width, part, sum ? 0.0f : -__builtin_inff(), h);
        const bool whole = sum && !constant && part.count == SLAB && decay.dtype == FLOAT32 && x.dtype == y.dtype;
        if (whole && x.dtype == FLOAT32) forward_whole<float>(decay, x, y, at, part.first, h);
        else if (whole && x.dtype == BFLOAT16) forward_whole<bfloat16>(decay, x, y, at, part.first, h);
        else (sum ? forward<true> : forward<false>)(decay, constant, x, y, at, part, h);
        store_state(final, n, width, part, h);
    });
}

// `ddecay` of a constant decay is the sum of `parts`, one row for each of `groups` groups of sequences.
LINATTN_ENTRY(scan_backward)
(int64_t sum, int64_t constant, int64_t of_decay, LINATTN_ROWS(decay), LINATTN_ROWS(x), LINATTN_ROWS(y), LINATTN_ROWS(dy),
 LINATTN_ROWS(dx), LINATTN_ROWS(ddecay), const float* initial, const int64_t* ends, const float* dfinal, float* dinitial, float* parts,
 int64_t sequences, int64_t groups, int64_t tokens, int64_t width, int64_t threads) {
    LINATTN_THESE_ROWS(decay);
    LINATTN_THESE_ROWS(x);
    LINATTN_THESE_ROWS(y);
    LINATTN_THESE_ROWS(dy);
    LINATTN_THESE_ROWS(dx);
    LINATTN_THESE_ROWS(ddecay);
    const int64_t slabs = (width + SLAB - 1) / SLAB;
    parallel(groups * slabs, threads, [&](int64_t task) {
        const int64_t group = task / slabs;
        const Slab part = slab(task % slabs, width);
        Float start[BLOCKS], dh[BLOCKS], total[BLOCKS] = {};
        for (int64_t n = group * sequences / groups; n < (group + 1) * sequences / groups; n++) {
            load_state(initial, n, width, part, sum ? 0.0f : -__builtin_inff(), start);
            load_state(dfinal, n, width, part, 0.0f, dh);
            (sum ? backward<true> : backward<false>)(
                decay, constant, x, y, start, dy, dx, ddecay, of_decay, sequence(n, tokens, ends), part, dh, total);
            store_state(dinitial, n, width, part, dh);
        }
        if (parts) store_state(parts, group, width, part, total);
    });
    if (parts) sum_parts(parts, groups, width, ddecay_data, ddecay_dtype, threads);
}

}  // namespace LINATTN_ISA
}  // namespace linattn

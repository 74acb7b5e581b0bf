// The short convolution along time, y_t = silu(b + sum over i < W of w_i x_{t - (W - 1) + i}), with lanes over the channels.
#include "rows.h"

namespace linattn {
namespace LINATTN_ISA {
namespace {

constexpr int64_t SPAN = 256;  // tokens of a task

// Tokens t < 0 are the last of `before` [batch, W - 1, width], or zeros without it.
template <class T, int W>
struct Input {
    const Rows& x;
    const T* before;
    int64_t width;

    LINATTN_INLINE Float at(int64_t row, int64_t t, int64_t channel, int n) const {
        if (t >= 0) return load((const T*)x.data + x.at(row, t) + channel, n);
        return before ? load(before + (row * (W - 1) + t + W - 1) * width + channel, n) : zero();
    }
};

// Tokens [begin, end) of one row and the channels of one block of lanes; `w` is [W, width], `b` [width] or null.
template <class T, int W>
void forward(
    const Input<T, W>& input, const float* w, const float* b, bool activation, const Rows& y, int64_t row, int64_t begin, int64_t end,
    int64_t channel, int n) {
    Float tap[W], seen[W];
    for (int i = 0; i < W; i++) {
        tap[i] = load(w + i * input.width + channel, n);
        seen[i] = i ? input.at(row, begin - W + i, channel, n) : zero();
    }
    const Float bias = b ? load(b + channel, n) : zero();
    for (int64_t t = begin; t < end; t++) {
        LINATTN_UNROLL
        for (int i = 1; i < W; i++) seen[i - 1] = seen[i];
        seen[W - 1] = input.at(row, t, channel, n);
        Float z = bias;
        LINATTN_UNROLL
        for (int i = 0; i < W; i++) z = fma(tap[i], seen[i], z);
        store((T*)y.data + y.at(row, t) + channel, activation ? z * sigmoid(z) : z, n);
    }
}

// The gradients of the inputs [begin, end), of those before the first if begin is 0, and these tokens' parts of those of w and b, `parts`
// [W + 1, width]. The W - 1 tokens behind `end` have met these inputs, and are computed anew.
template <class T, int W>
void backward(
    const Input<T, W>& input, const float* w, const float* b, bool activation, const Rows& dy, const Rows& dx, T* dbefore, float* parts,
    int64_t row, int64_t tokens, int64_t begin, int64_t end, int64_t channel, int n) {
    Float tap[W], seen[W], dz[W] = {}, total[W + 1] = {};
    for (int i = 0; i < W; i++) {
        tap[i] = load(w + i * input.width + channel, n);
        seen[i] = i ? input.at(row, begin - W + i, channel, n) : zero();
    }
    const Float bias = b ? load(b + channel, n) : zero(), one = splat(1.0f);
    for (int64_t t = begin; t < end + W - 1; t++) {
        LINATTN_UNROLL
        for (int i = 1; i < W; i++) {
            seen[i - 1] = seen[i];
            dz[W - i] = dz[W - i - 1];  // dz[i] is that of token t - i
        }
        dz[0] = zero();
        if (t < tokens) {
            seen[W - 1] = input.at(row, t, channel, n);
            dz[0] = load((const T*)dy.data + dy.at(row, t) + channel, n);
            if (activation) {
                Float z = bias;
                LINATTN_UNROLL
                for (int i = 0; i < W; i++) z = fma(tap[i], seen[i], z);
                const Float s = sigmoid(z);
                dz[0] *= s * (one + z * (one - s));
            }
            if (t < end) {
                LINATTN_UNROLL
                for (int i = 0; i < W; i++) total[i] = fma(dz[0], seen[i], total[i]);
                total[W] += dz[0];
            }
        }
        const int64_t s = t - (W - 1);  // the input that has met its last token
        if (s < begin && (begin || !dbefore)) continue;
        Float of = zero();
        LINATTN_UNROLL
        for (int i = 0; i < W; i++) of = fma(tap[i], dz[i], of);
        if (s >= begin) store((T*)dx.data + dx.at(row, s) + channel, of, n);
        else store(dbefore + (row * (W - 1) + s + W - 1) * input.width + channel, of, n);
    }
    for (int i = 0; i <= W; i++) store(parts + i * input.width + channel, total[i], n);
}

template <int W>
struct Taps {
    static constexpr int count = W;
};

// body with a number of the type, and the taps, of which there are from 1 to 4.
template <class T, class Body>
LINATTN_INLINE void with_taps(int64_t taps, Body&& body) {
    if (taps == 1) body(T{}, Taps<1>{});
    else if (taps == 2) body(T{}, Taps<2>{});
    else if (taps == 3) body(T{}, Taps<3>{});
    else body(T{}, Taps<4>{});
}
template <class Body>
LINATTN_INLINE void with_kind(int64_t dtype, int64_t taps, Body&& body) {
    if (dtype == BFLOAT16) with_taps<bfloat16>(taps, body);
    else if (dtype == FLOAT16) with_taps<float16>(taps, body);
    else with_taps<float>(taps, body);
}

}  // namespace

LINATTN_ENTRY(short_convolution_forward)
(int64_t activation, LINATTN_ROWS(x), const void* before, const float* w, const float* b, LINATTN_ROWS(y), int64_t batch, int64_t tokens,
 int64_t width, int64_t taps, int64_t threads) {
    LINATTN_THESE_ROWS(x);
    LINATTN_THESE_ROWS(y);
    const int64_t spans = (tokens + SPAN - 1) / SPAN, slabs = (width + SLAB - 1) / SLAB;
    parallel(batch * spans * slabs, threads, [&](int64_t task) {
        const Slab part = slab(task % slabs, width);
        const int64_t row = task / slabs / spans, begin = task / slabs % spans * SPAN, end = min(tokens, begin + SPAN);
        with_kind(x.dtype, taps, [&](auto number, auto count) {
            using T = decltype(number);
            const Input<T, decltype(count)::count> input{x, (const T*)before, width};
            for (int block = 0; block < part.blocks(); block++)
                forward(input, w, b, activation, y, row, begin, end, part.first + block * LANES, part.lanes(block));
        });
    });
}

// `parts` is [batch * spans, taps + 1, width] with spans of 256 tokens: what is added up to the gradients of w and b.
LINATTN_ENTRY(short_convolution_backward)
(int64_t activation, LINATTN_ROWS(x), const void* before, const float* w, const float* b, LINATTN_ROWS(dy), LINATTN_ROWS(dx), void* dbefore,
 float* parts, int64_t batch, int64_t tokens, int64_t width, int64_t taps, int64_t threads) {
    LINATTN_THESE_ROWS(x);
    LINATTN_THESE_ROWS(dy);
    LINATTN_THESE_ROWS(dx);
    const int64_t spans = (tokens + SPAN - 1) / SPAN, slabs = (width + SLAB - 1) / SLAB;
    parallel(batch * spans * slabs, threads, [&](int64_t task) {
        const Slab part = slab(task % slabs, width);
        const int64_t row = task / slabs / spans, begin = task / slabs % spans * SPAN, end = min(tokens, begin + SPAN);
        float* own = parts + task / slabs * (taps + 1) * width;
        with_kind(x.dtype, taps, [&](auto number, auto count) {
            using T = decltype(number);
            const Input<T, decltype(count)::count> input{x, (const T*)before, width};
            for (int block = 0; block < part.blocks(); block++)
                backward(
                    input, w, b, activation, dy, dx, (T*)dbefore, own, row, tokens, begin, end, part.first + block * LANES,
                    part.lanes(block));
        });
    });
}

}  // namespace LINATTN_ISA
}  // namespace linattn

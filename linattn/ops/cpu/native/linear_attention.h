// The recurrence S_t = Diag(α_t) S_{t-1} + w_t (r_t S_{t-1}) + k_t v_t, o_t = q_t S_t, by blocks of four tokens, or of one (Call::step).
//
// A block works on a state S in two sweeps. The read sweep computes weighted sums over the rows of S, for several tokens at a time. The
// write sweep computes S = a S + rows times columns, for all tokens. The tokens of a block act on each other through one number for each
// pair, in which the decay is the product of the factors between the two tokens, none above 1. The forward pass and every gradient consist
// of these two sweeps, over S or over its gradient, forwards or backwards in time, with keys in the rows and values in the lanes or vice
// versa. None needs a sum over lanes.
//
// The weights of the rows are stored in panels of 64 rows with one line per weight, so that every address is a register plus a constant.
#pragma once

#include <cstdlib>

#include "lanes.h"
#include "pool.h"

namespace linattn {
namespace LINATTN_ISA {

constexpr int TOKENS = 4;         // of a block, at most
constexpr int CHUNK = 64;         // tokens between the states saved for the backward pass, at most
constexpr int PANEL = 64;         // rows of a panel
constexpr int BLOCKS = CHUNK / TOKENS;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int REGISTERS = 32;
#else
constexpr int REGISTERS = 16;
#endif

enum Rank { NONE, HEAD, CHANNEL };
enum Rule { PLAIN, BONUS, DELTA, ERASE };

// A tensor [B, T, H, ...]: data, dtype and the strides of batch, tokens and heads. Without data: no tensor.
struct Strided {
    char* data;
    int64_t dtype, batch, token, head;

    int64_t at(int64_t row, int64_t t, int64_t h) const { return row * batch + t * token + h * head; }
    // Prefetches token t: the rows of one head are too far apart for the hardware prefetcher.
    LINATTN_INLINE void expect(int64_t row, int64_t t, int64_t h, int64_t numbers) const {
        const int64_t size = dtype == FLOAT32 ? 4 : 2;
        const char* line = data + at(row, t, h) * size;
        for (int64_t i = 0; i < numbers * size; i += 64) __builtin_prefetch(line + i, 0, 2);
    }
    // `streamed`: non-temporal stores, for tensors larger than the caches, so that lines are not fetched to be overwritten.
    LINATTN_INLINE void put(int64_t at, int m, Float x, bool streamed) const {
#if defined(__AVX512F__)
        if (streamed && m == LANES && dtype == FLOAT32 && (uintptr_t(data + 4 * at) & 63) == 0)
            return _mm512_stream_ps((float*)data + at, (__m512)x);
        if (streamed && m == LANES && dtype == BFLOAT16 && (uintptr_t(data + 2 * at) & 31) == 0) {
            bfloat16 rounded[LANES];
            store(rounded, x);
            return _mm256_stream_si256((__m256i*)(data + 2 * at), _mm256_loadu_si256((const __m256i*)rounded));
        }
#endif
        (void)streamed;
        store(data, dtype, at, x, m);
    }
};

// Arguments of a call, filled by linear_attention.py.
struct Call {
    int64_t rank, rule, ones, batch, tokens, heads, group, keys, values, parts, sequences, threads;  // group: heads of v to one of k
    int64_t constant;  // true if all tokens have the same decays
    int64_t together;  // true if the heads of a group are one task of the backward pass, which sums their gradients of q and k
    double scale;
    Strided q, k, v, decay, beta, read, write;
    const float *bonus, *initial, *initial_z;  // [H, K], [N, H, K, V], [N, H, K]
    const int64_t* ends;                       // [N + 1]: where packed sequences start
    Strided o;
    float *denominator, *final, *final_z, *kept;  // [B, T, H], like the initial ones, [slots, H, columns K]
    // Backward pass only. Gradients of q, k, decay and beta are [parts, B, T, H, ..]; those of q and k are per group if `together`.
    Strided d_o;
    const float *d_denominator, *d_final, *d_final_z;
    Strided dq, dk, dv, dread, dwrite;
    float *ddecay, *dbeta, *dbonus, *dinitial, *dinitial_z;

    // Tokens of a block. Four that erase may leave next to nothing of a state with so few keys, and a block's sums have terms of the size of
    // the state on its other side, so that what is left would keep few digits.
    int64_t step() const { return keys <= TOKENS && (rule == DELTA || rule == ERASE) ? 1 : TOKENS; }
    int64_t chunk() const { return BLOCKS * step(); }  // tokens between saved states, as in linear_attention.py
};

// Compile-time constants: the number of reads (of S) and writes (into S) of a token, and the layout of panels.
template <int RULE>
struct Family {
    static constexpr int READS = RULE == DELTA || RULE == ERASE ? 2 : 1;
    static constexpr int WRITES = RULE == ERASE ? 2 : 1;
    static constexpr int READ = READS * TOKENS, WRITE = WRITES * TOKENS;
    static constexpr int WIDTH = REGISTERS == 32 || READS == 1 ? 2 : 1;  // vectors of a slab: as many as registers hold
    // Lines of a panel of keys: q (and k or r) decayed from the block's start, k (and w) decayed to its end, the decay of the state over the
    // block as `keep` + `rest`; for the backward pass also α, and q, k (r and w) without decay.
    static constexpr int Y = 0, X = READ, KEEP = X + WRITE, REST = KEEP + 1, ALPHA = REST + 1, CAME = ALPHA + TOKENS;
    static constexpr int KEY_LINES = CAME + (RULE == ERASE ? 4 : 2) * TOKENS;
    // Lines of a panel of values: the values written, v − k D of the delta rule, and the gradients of reads and writes.
    static constexpr int VALUE = 0, MISSED = WRITE, GRADIENT = MISSED + (RULE == DELTA ? TOKENS : 0), VALUE_LINES = GRADIENT + READ;
    static constexpr int PAIRS = READS * WRITES * TOKENS * TOKENS;  // matrices [token that reads, token that writes]
};

// Fence after non-temporal stores, so that other threads see them.
LINATTN_INLINE void settle() {
#if defined(__AVX512F__)
    _mm_sfence();
#endif
}

// True if this many numbers per token exceed the caches of a core.
LINATTN_INLINE bool large(const Call& call, const Strided& of, int64_t numbers) {
    return call.batch * call.tokens * call.heads * numbers * (of.dtype == FLOAT32 ? 4 : 2) > (2 << 20);
}

LINATTN_INLINE int least(int64_t a, int64_t b) { return int(a < b ? a : b); }
LINATTN_INLINE int64_t up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// A block's panels: lines of weights for all rows.
template <int LINES>
struct Panels {
    float* data;
    static int64_t size(int64_t rows) { return up(rows, PANEL) * LINES; }
    LINATTN_INLINE float* at(int line, int64_t row) const { return data + (row / PANEL * LINES + line) * PANEL + row % PANEL; }
};

// ---------------------------------------------------------------- the two sweeps

// sum[i] += Σ_r weight[i][r] S[r], for the N lines of the panels from `line` on; S has rows of W vectors.
template <int N, int W, int LINES>
LINATTN_INLINE void read(const float* S, int64_t rows, Panels<LINES> panels, int line, Float (&sum)[N][W]) {
    for (int64_t first = 0; first < rows; first += PANEL) {
        const float* weight = panels.at(line, first);
        const int count = least(rows - first, PANEL);
        for (int r = 0; r < count; r++, S += W * LANES) {
            Float s[W];
            for (int w = 0; w < W; w++) s[w] = load(S + w * LANES);
            for (int i = 0; i < N; i++) {
                const Float x = splat(weight[i * PANEL + r]);
                for (int w = 0; w < W; w++) sum[i][w] = fma(x, s[w], sum[i][w]);
            }
        }
    }
}

// Decay of a state over a block as keep (1 or 0) + rest. A factor near 1 would be rounded to the same side in every block; its distance from
// 1 is not, so that slow decays do not drift.
struct Everything {
    LINATTN_INLINE void enter(int64_t) {}
    LINATTN_INLINE Float rest(int, int, Float s) const { return s; }
    LINATTN_INLINE Float keep(int, int, Float, Float sum) const { return sum; }
};
template <int LINES>
struct OfRows {
    Panels<LINES> panels;
    int line;  // of keep; that of rest follows
    const float* at;
    LINATTN_INLINE void enter(int64_t first) { at = panels.at(line, first); }
    LINATTN_INLINE Float rest(int r, int, Float s) const { return splat(at[PANEL + r]) * s; }
    LINATTN_INLINE Float keep(int r, int, Float s, Float sum) const { return fma(splat(at[r]), s, sum); }
};
template <int W>
struct OfLanes {
    Float keeps[W], rests[W];
    LINATTN_INLINE void enter(int64_t) {}
    LINATTN_INLINE Float rest(int, int w, Float s) const { return rests[w] * s; }
    LINATTN_INLINE Float keep(int, int w, Float s, Float sum) const { return fma(keeps[w], s, sum); }
};

// to[r] = a S[r] + Σ_i weight[i][r] value[i] for R rows; to may be S.
template <int R, int N, int W, class Decay>
LINATTN_INLINE void write_rows(const float* S, float* to, const float* weight, const Float (&value)[N][W], Decay decay, int r) {
    Float s[R][W], sum[R][W];
    for (int k = 0; k < R; k++)
        for (int w = 0; w < W; w++) sum[k][w] = decay.rest(r + k, w, s[k][w] = load(S + (k * W + w) * LANES));
    for (int i = 0; i < N; i++)
        for (int k = 0; k < R; k++) {
            const Float x = splat(weight[i * PANEL + r + k]);
            for (int w = 0; w < W; w++) sum[k][w] = fma(x, value[i][w], sum[k][w]);
        }
    for (int k = 0; k < R; k++)
        for (int w = 0; w < W; w++) store(to + (k * W + w) * LANES, decay.keep(r + k, w, s[k][w], sum[k][w]));
}

// The same for all rows, several at a time, because the sum of one row is a chain of dependent operations.
template <int N, int W, int LINES, class Decay>
LINATTN_INLINE void write(
    const float* S, float* to, int64_t rows, Panels<LINES> panels, int line, const Float (&value)[N][W], Decay decay) {
    constexpr int R = 4;
    for (int64_t first = 0; first < rows; first += PANEL) {
        const float* weight = panels.at(line, first);
        const int count = least(rows - first, PANEL);
        decay.enter(first);
        int r = 0;
        for (; r + R <= count; r += R, S += R * W * LANES, to += R * W * LANES) write_rows<R>(S, to, weight, value, decay, r);
        for (; r < count; r++, S += W * LANES, to += W * LANES) write_rows<1>(S, to, weight, value, decay, r);
    }
}

}  // namespace LINATTN_ISA
}  // namespace linattn

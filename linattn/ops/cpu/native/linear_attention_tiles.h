// Chunks of 64 tokens as matrices of bfloat16, with one decay for all channels of a head or none, under the plain rule and the delta rule.
//
// A has the products of each key of a chunk with the earlier ones, times the decay between them. The delta rule writes u = β m with the
// residual m = v − until ∘ k S − A (β m), a triangular system that is solved in float32. The rest is the plain rule with u in place of v.
//
// The decay between two tokens is the product of the factors between them, as in all kernels here. The state and its gradient are float32
// and are rounded to bfloat16 only as operands of products.
#pragma once

#include "linear_attention_slab.h"
#include "tiles.h"

// The instruction set used where these kernels are not faster.
#if defined(__x86_64__)
#define LINATTN_VECTORS avx512
#else
#define LINATTN_VECTORS portable
#endif
extern "C" void LINATTN_JOIN(linear_attention, LINATTN_VECTORS)(const void* call, int64_t threads);
extern "C" void LINATTN_JOIN(linear_attention_backward, LINATTN_VECTORS)(const void* call, int64_t threads);

namespace linattn {
namespace LINATTN_ISA {

constexpr int WIDE = Family<PLAIN>::WIDTH;
static_assert(WIDE == Family<DELTA>::WIDTH, "either kind of kernel reads the states that the other has kept");

// True where these kernels are faster: enough tokens, keys and values of bfloat16, the plain rule or the delta rule. A decay per channel
// costs as much vector work as the whole. Sums of keys (z) need more digits: in them the errors of rounded keys average out.
inline bool on_tiles(const Call& call) {
    const bool halves = call.q.dtype == BFLOAT16 && call.k.dtype == BFLOAT16 && call.v.dtype == BFLOAT16;
    const bool rule = (call.rule == PLAIN && !call.ones) || call.rule == DELTA;
    return halves && rule && call.rank != CHANNEL && call.tokens >= 32 * (call.ends ? call.sequences : 1) && call.keys >= 16 && call.values >= 16;
}

// Calls body<RANK, RULE>(call) with the rank and the rule of the call.
#define LINATTN_ON_TILES(body, call)                                                                          \
    if ((call).rule == DELTA) (call).rank == HEAD ? body<HEAD, DELTA>(call) : body<NONE, DELTA>(call);        \
    else (call).rank == HEAD ? body<HEAD, PLAIN>(call) : body<NONE, PLAIN>(call);

// Sizes of a task's matrices.
struct Sizes {
    Task task;
    Columns columns;
    int64_t rows, lanes, keys, width, state;  // of a state: rows, columns; in products: keys and columns
    Sizes(const Call& call, int64_t i)
        : task(call, i), columns(call, task.part), rows(up(call.keys, LANES)), lanes(columns.count()), keys(up(call.keys, DEPTH)),
          width(up(lanes, DEPTH)), state(rows * lanes) {}
};

// Scratch for a matrix, zeroed.
LINATTN_INLINE Halves take_halves(Pieces& pieces, int64_t rows, int64_t row) {
    float* data = pieces.take(rows * row / 2);
    if (data) memset(data, 0, rows * row * sizeof(bfloat16));
    return {(bfloat16*)data, row};
}
LINATTN_INLINE Floats take_floats(Pieces& pieces, int64_t rows, int64_t row) { return {pieces.take(rows * row), row}; }

// Loads the first m of DEPTH numbers (m may be larger), padded with zeros.
LINATTN_INLINE void copy_some(bfloat16* to, const bfloat16* from, int64_t m) {
#if defined(__AVX512BW__)
    const __mmask32 there = m >= DEPTH ? ~0u : (1u << m) - 1;
    _mm512_storeu_si512(to, there ? _mm512_maskz_loadu_epi16(there, from) : _mm512_setzero_si512());
#else
    if (m < DEPTH) memset(to, 0, DEPTH * sizeof *to);
    if (m > 0) memcpy(to, from, (m < DEPTH ? m : DEPTH) * sizeof *to);
#endif
}

// Loads `numbers` columns from c on of `count` tokens, padded with zeros to 64 tokens and whole rows.
inline void gather(const Strided& of, const Place& at, int64_t head, int64_t t, int count, int64_t c, int64_t numbers, Halves to) {
    for (int i = 0; i < CHUNK; i++) {
        const bfloat16* from = i < count ? (const bfloat16*)of.data + of.at(at.row, t + i, head) + c : nullptr;
        for (int64_t n = 0; n < to.row; n += DEPTH) copy_some(to.at(i, n), from + n, from && n < numbers ? numbers - n : 0);
    }
}

// Prefetches a chunk's rows during other work.
LINATTN_INLINE void expect(const Strided& of, const Place& at, int64_t head, int64_t t, int64_t numbers) {
    const int64_t last = least(at.last, t + CHUNK);
    for (; t < last; t++) of.expect(at.row, t, head, numbers);
}

// Loads one number per token of a chunk from a tensor [B, T, H], padded with zeros to 64.
inline void gather_numbers(const Strided& of, const Place& at, int64_t t, int count, float* to) {
    for (int i = 0; i < CHUNK; i++) {
        float one[LANES] = {};
        if (i < count) store(one, load(of.data, of.dtype, of.at(at.row, t + i, at.head), 1));
        to[i] = one[0];
    }
}

// Decays of a head within a chunk: of each token, from the start of the chunk to it, and from it to the end.
template <int RANK>
struct Fading {
    float alpha[CHUNK], until[CHUNK], since[CHUNK];
    Float keep, rest;
    Fading(const Call& call, const Place& at, int64_t t, int count) {
        float log[CHUNK], total = 0, product = 1;
        gather_numbers(call.decay, at, t, count, log);
        for (int i = 0; i < count; i++) total += log[i];
        for (int i = 0; i < CHUNK; i += LANES) store(alpha + i, exp_below(load(log + i)));
        for (int i = 0; i < CHUNK; i++) until[i] = product = product * alpha[i];
        factor(splat(total), splat(product), keep, rest);
        product = 1;
        for (int i = CHUNK - 1; i >= 0; i--) {
            since[i] = product;
            product = product * alpha[i];
        }
    }
    LINATTN_INLINE Float remains(Float s) const { return fma(keep, s, rest * s); }
};
template <>
struct Fading<NONE> {
    const float *alpha = nullptr, *until = nullptr, *since = nullptr;
    Fading(const Call&, const Place&, int64_t, int) {}
    LINATTN_INLINE Float remains(Float s) const { return s; }
};

LINATTN_INLINE Float with_one(Float x, int lane) {
#if defined(__AVX512F__)
    return (Float)_mm512_mask_blend_ps(__mmask16(1u << lane), (__m512)x, _mm512_set1_ps(1.0f));
#else
    x[lane] = 1.0f;
    return x;
#endif
}

// x with zeros in the lanes before `lane`.
LINATTN_INLINE Float behind(Float x, int lane) {
#if defined(__AVX512F__)
    return (Float)_mm512_maskz_mov_ps(__mmask16(0xfffeu << lane), (__m512)x);
#else
    for (int i = 0; i <= lane; i++) x[i] = 0;
    return x;
#endif
}

// Calls body(i, c, factor) for the vectors c of row i of a matrix [64, 64] up to the one with the diagonal: the decay from each token j <= i
// to token i, and 0 for later ones.
template <int RANK, class Body>
LINATTN_INLINE void remembered(const float* alpha, Body body) {
    Float f[CHUNK / LANES] = {};
    LINATTN_UNROLL
    for (int own = 0; own < CHUNK / LANES; own++)
        for (int lane = 0; lane < LANES; lane++) {
            const int i = own * LANES + lane;
            if (RANK == HEAD)
                for (int c = 0; c <= own; c++) f[c] = f[c] * alpha[i];
            f[own] = with_one(f[own], lane);
            for (int c = 0; c <= own; c++) body(i, c, f[c]);
        }
}

// Its transpose: calls body(j, c, factor), from the last row, and from the vector with the diagonal on.
template <int RANK, class Body>
LINATTN_INLINE void remembering(const float* alpha, Body body) {
    constexpr int N = CHUNK / LANES;
    Float f[N] = {};
    LINATTN_UNROLL
    for (int own = N - 1; own >= 0; own--)
        for (int lane = LANES - 1; lane >= 0; lane--) {
            const int j = own * LANES + lane;
            if (RANK == HEAD && j < CHUNK - 1)
                for (int c = own; c < N; c++) f[c] = f[c] * alpha[j + 1];
            f[own] = with_one(f[own], lane);
            for (int c = own; c < N; c++) body(j, c, f[c]);
        }
}

// Weaves the state for products with its readers, with its rounding error (`LOW`); calls then(place, vector) for all its vectors.
template <bool LOW, class T, class Then>
LINATTN_INLINE void weave_state(T* S, const Sizes& of, Halves to, Halves low, Then then) {
    slabs<WIDE>(of.lanes, [&](auto width, int64_t c) {
        constexpr int W = decltype(width)::value;
        T* s = S + c * of.rows;
        for (int64_t r = 0; r < of.rows; r += 2, s += 2 * W * LANES)
            for (int w = 0; w < W; w++) {
                const Float a = load(s + w * LANES), b = load(s + (W + w) * LANES);
                store_woven(to.woven(r, c + w * LANES), a, b);
                if (LOW) store_woven(low.woven(r, c + w * LANES), left_over(a), left_over(b));
                then(s + w * LANES, a);
                then(s + (W + w) * LANES, b);
            }
    });
}

// The same, and decays the state to the end of the chunk.
template <bool LOW, int RANK>
void weave_and_fade(float* S, const Sizes& of, const Fading<RANK>& fading, Halves to, Halves low) {
    weave_state<LOW>(S, of, to, low, [&](float* place, Float s) { store(place, fading.remains(s)); });
}

// S += A [rows, 64] B [64, columns].
inline void add_to_state(Halves a, Halves b, float* S, const Sizes& of) {
    slabs<WIDE>(of.lanes, [&](auto width, int64_t c) {
        constexpr int W = decltype(width)::value;
        product<true>(a, {b.woven(0, c), b.row}, {S + c * of.rows, W * LANES}, of.rows, W * LANES, CHUNK);
    });
}

// Solves x + A (β ∘ x) = the given x in place, by substitution; A [64, 64] is used below its diagonal (or above it).
template <bool UPPER>
void substitute(Floats A, const float* beta, Floats x, int64_t columns) {
    constexpr int R = 8;  // rows at a time that fit into the registers
    const float(*a)[CHUNK] = (const float(*)[CHUNK])A.data;
    slabs<WIDE>(columns, [&](auto width, int64_t c) {
        constexpr int W = decltype(width)::value;
        for (int n = 0; n < CHUNK; n += R) {
            const int first = UPPER ? CHUNK - R - n : n;
            Float sum[R][W];
            for (int r = 0; r < R; r++)
                for (int w = 0; w < W; w++) sum[r][w] = load(x.at(first + r, c + w * LANES));
            for (int j = UPPER ? first + R : 0; j < (UPPER ? CHUNK : first); j++) {
                Float y[W];
                for (int w = 0; w < W; w++) y[w] = load(x.at(j, c + w * LANES)) * splat(beta[j]);
                for (int r = 0; r < R; r++) {
                    const Float factor = splat(a[first + r][j]);
                    for (int w = 0; w < W; w++) sum[r][w] = sum[r][w] - factor * y[w];
                }
            }
            LINATTN_UNROLL
            for (int step = 0; step < R; step++) {
                const int j = UPPER ? R - 1 - step : step;
                Float y[W];
                for (int w = 0; w < W; w++) y[w] = sum[j][w] * splat(beta[first + j]);
                LINATTN_UNROLL
                for (int r = 0; r < R; r++) {
                    if (UPPER ? r >= j : r <= j) continue;
                    const Float factor = splat(a[first + r][first + j]);
                    for (int w = 0; w < W; w++) sum[r][w] = sum[r][w] - factor * y[w];
                }
            }
            for (int r = 0; r < R; r++)
                for (int w = 0; w < W; w++) store(x.at(first + r, c + w * LANES), sum[r][w]);
        }
    });
}

// The residual m of the delta rule. `of_keys` has A below its diagonal. The state enters with its rounding error, because errors of the
// writes would remain in the state and add up where β is near 2.
template <int RANK>
void miss(Halves k, Halves v, Halves S, Halves S_low, Floats of_keys, const Fading<RANK>& fading, const float* beta, const Sizes& of, Floats missed) {
    product<false>(k, S, missed, CHUNK, of.lanes, of.keys);
    product<true>(k, S_low, missed, CHUNK, of.lanes, of.keys);
    for (int i = 0; i < CHUNK; i++)
        for (int64_t c = 0; c < of.lanes; c += LANES) {
            const Float found = load(missed.at(i, c));
            store(missed.at(i, c), load(v.at(i, c)) - (RANK == HEAD ? found * fading.until[i] : found));
        }
    substitute<false>(of_keys, beta, missed, of.lanes);
}

}  // namespace LINATTN_ISA
}  // namespace linattn

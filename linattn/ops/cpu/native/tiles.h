// Products of bfloat16 matrices, summed in float32, on the tiles of AMX or by the dot products of pairs of AVX512-BF16 and ARM's BF16;
// and their memory layouts.
//
// C [M, N] += A [M, K] B [K, N]. A is row-major. B is woven: rows 2p and 2p + 1 are interleaved into one row. A matrix x is used as B by
// weaving it (the sum is over its rows), or by transposing and weaving it (the sum is over its columns).
#pragma once

#include "lanes.h"

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#include <arm_neon.h>
#endif

namespace linattn {
namespace LINATTN_ISA {

constexpr int TILE = LANES;       // rows of a tile
constexpr int DEPTH = 2 * LANES;  // numbers of a row of A that one tile holds

template <class T>
struct Matrix {
    T* data;
    int64_t row;  // numbers from row to row
    LINATTN_INLINE T* at(int64_t r, int64_t c) const { return data + r * row + c; }
    LINATTN_INLINE T* woven(int64_t r, int64_t c) const { return data + r / 2 * row + 2 * c; }  // r even
};
using Halves = Matrix<bfloat16>;
using Floats = Matrix<float>;

// ---------------------------------------------------------------- products

#if defined(__AMX_BF16__)
constexpr int STEP = DEPTH;   // rows of a triangle at a time
constexpr bool DOTS = false;  // true if products are sums of dot products

struct alignas(64) Shapes {
    uint8_t palette, start, none[14];
    uint16_t bytes[16];
    uint8_t rows[16];
};
constexpr Shapes SHAPES = {1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {TILE, TILE, TILE, TILE, TILE, TILE, TILE, TILE}};

// Tiles are configured only in this scope, because they make context switches of the thread slower.
template <class Body>
LINATTN_INLINE void with_tiles(Body body) {
    _tile_loadconfig(&SHAPES);
    body();
    _tile_release();
}

// The tiles of a block of C of 16 or 32 rows and columns.
template <bool ADD>
LINATTN_INLINE void product_of_tiles(Halves a, Halves b, Floats c, int64_t depth, bool below, bool beside) {
    const int64_t a_step = a.row * 2, b_step = b.row * 2, c_step = c.row * 4;
    if (ADD) {
        _tile_loadd(0, c.data, c_step);
        if (beside) _tile_loadd(1, c.data + TILE, c_step);
        if (below) _tile_loadd(2, c.at(TILE, 0), c_step);
        if (below && beside) _tile_loadd(3, c.at(TILE, TILE), c_step);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t k = 0; k < depth; k += DEPTH) {
        _tile_loadd(4, a.at(0, k), a_step);
        _tile_loadd(6, b.woven(k, 0), b_step);
        _tile_dpbf16ps(0, 4, 6);
        if (beside) {
            _tile_loadd(7, b.woven(k, TILE), b_step);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (below) {
            _tile_loadd(5, a.at(TILE, k), a_step);
            _tile_dpbf16ps(2, 5, 6);
            if (beside) _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, c.data, c_step);
    if (beside) _tile_stored(1, c.data + TILE, c_step);
    if (below) _tile_stored(2, c.at(TILE, 0), c_step);
    if (below && beside) _tile_stored(3, c.at(TILE, TILE), c_step);
}

// C = A B, or C += A B; M and N are multiples of 16, K is one of 32.
template <bool ADD>
void product(Halves a, Halves b, Floats c, int64_t M, int64_t N, int64_t K) {
    __asm__ volatile("" ::: "memory");  // compilers do not see that a tile load reads memory
    for (int64_t m = 0; m < M; m += 2 * TILE)
        for (int64_t n = 0; n < N; n += 2 * TILE) {
            const bool below = m + TILE < M, beside = n + TILE < N;
            product_of_tiles<ADD>({a.at(m, 0), a.row}, {b.woven(0, n), b.row}, {c.at(m, n), c.row}, K, below, beside);
        }
    __asm__ volatile("" ::: "memory");
}

#else
constexpr int STEP = TILE;
constexpr bool DOTS = true;

// sum + x y for pairs of bfloat16, one pair per lane.
LINATTN_INLINE Float dot(Float sum, Word x, Word y) {
#if defined(__AVX512BF16__)
    return (Float)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)y);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    return (Float)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)x, (bfloat16x8_t)y);
#endif
}

// Nothing to configure.
template <class Body>
LINATTN_INLINE void with_tiles(Body body) {
    body();
}

// A block of C of R rows and W vectors of columns, whose sums fit into the registers.
template <bool ADD, int R, int W>
LINATTN_INLINE void product_of_rows(Halves a, Halves b, Floats c, int64_t depth) {
    Float sum[R][W];
    for (int r = 0; r < R; r++)
        for (int w = 0; w < W; w++) sum[r][w] = ADD ? load(c.at(r, w * LANES)) : zero();
    for (int64_t k = 0; k < depth; k += 2) {
        Word y[W];
        for (int w = 0; w < W; w++) y[w] = bits<Word>(load((const float*)b.woven(k, w * LANES)));
        for (int r = 0; r < R; r++) {
            uint32_t pair;
            memcpy(&pair, a.at(r, k), sizeof pair);
            const Word x = Word{} + pair;
            for (int w = 0; w < W; w++) sum[r][w] = dot(sum[r][w], x, y[w]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int w = 0; w < W; w++) store(c.at(r, w * LANES), sum[r][w]);
}

// C = A B, or C += A B; M and N are multiples of TILE, K is even.
template <bool ADD>
void product(Halves a, Halves b, Floats c, int64_t M, int64_t N, int64_t K) {
    constexpr int R = TILE < 8 ? TILE : 8;
    for (int64_t m = 0; m < M; m += R) {
        const Halves rows = {a.at(m, 0), a.row};
        int64_t n = 0;
        for (; n + 2 * LANES <= N; n += 2 * LANES) product_of_rows<ADD, R, 2>(rows, {b.woven(0, n), b.row}, {c.at(m, n), c.row}, K);
        if (n < N) product_of_rows<ADD, R, 1>(rows, {b.woven(0, n), b.row}, {c.at(m, n), c.row}, K);
    }
}
#endif

// C += A B where A [M, M] is zero above its diagonal (below it if `UPPER`); M is a multiple of STEP.
template <bool UPPER>
void product_of_triangle(Halves a, Halves b, Floats c, int64_t M, int64_t N) {
    for (int64_t m = 0; m < M; m += STEP) {
        const int64_t first = UPPER ? m : 0, last = UPPER ? M : m + STEP;
        product<true>({a.at(m, first), a.row}, {b.woven(first, 0), b.row}, {c.at(m, 0), c.row}, STEP, N, last - first);
    }
}

// C = A B where C [M, M] is needed only up to its diagonal (or from it on).
template <bool UPPER>
void triangle_of_product(Halves a, Halves b, Floats c, int64_t M, int64_t K) {
    for (int64_t m = 0; m < M; m += STEP) {
        const int64_t first = UPPER ? m : 0, last = UPPER ? M : m + STEP;
        product<false>({a.at(m, 0), a.row}, {b.woven(0, first), b.row}, {c.at(m, first), c.row}, STEP, last - first, K);
    }
}

// ---------------------------------------------------------------- layouts

#if defined(__AVX512BF16__)
typedef uint16_t Shorts __attribute__((vector_size(64)));

// Two vectors as one of bfloat16, a before b.
LINATTN_INLINE void store_two(bfloat16* p, Float a, Float b) { _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a)); }

LINATTN_INLINE void store_woven(bfloat16* p, Float a, Float b) {
    constexpr Shorts turns = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    _mm512_storeu_si512(p, _mm512_permutexvar_epi16((__m512i)turns, (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a)));
}

// Rows a and b of DEPTH numbers, woven.
LINATTN_INLINE void store_woven(bfloat16* p, const bfloat16* a, const bfloat16* b) {
    constexpr Shorts turns = {0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i x = _mm512_loadu_si512(a), y = _mm512_loadu_si512(b);
    _mm512_storeu_si512(p, _mm512_permutex2var_epi16(x, (__m512i)turns, y));
    _mm512_storeu_si512(p + DEPTH, _mm512_permutex2var_epi16(x, (__m512i)(turns + 16), y));
}

// The rounding error of x in bfloat16.
LINATTN_INLINE Float left_over(Float x) {
    return x - bits<Float>((Word)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)x)), 16));
}
#else
LINATTN_INLINE void store_two(bfloat16* p, Float a, Float b) {
    store(p, a);
    store(p + LANES, b);
}

LINATTN_INLINE void store_woven(bfloat16* p, const bfloat16* a, const bfloat16* b, int count = DEPTH) {
    for (int i = 0; i < count; i += LANES)
        store((float*)(p + 2 * i), bits<Float>(widened(load_bits(a + i)) | widened(load_bits(b + i)) << 16));
}

LINATTN_INLINE void store_woven(bfloat16* p, Float a, Float b) {
    bfloat16 rounded[2 * LANES];
    store_two(rounded, a, b);
    store_woven(p, rounded, rounded + LANES, LANES);
}

LINATTN_INLINE Float left_over(Float x) {
    bfloat16 rounded[LANES];
    store(rounded, x);
    return x - load(rounded);
}
#endif

// x [rows, columns] woven; an even number of rows, and a multiple of DEPTH columns.
inline void weave(Halves x, Halves to, int64_t rows, int64_t columns) {
    for (int64_t r = 0; r < rows; r += 2)
        for (int64_t c = 0; c < columns; c += DEPTH) store_woven(to.woven(r, c), x.at(r, c), x.at(r + 1, c));
}

// The transpose of x [rows, columns] woven: pairs of columns become rows of pairs. Multiples of TILE rows and of DEPTH columns.
inline void turn(Halves x, Halves to, int64_t rows, int64_t columns) {
    for (int64_t r = 0; r < rows; r += TILE)
        for (int64_t c = 0; c < columns; c += DEPTH)
            transpose((const float*)x.at(r, c), x.row / 2, (float*)to.woven(c, r), to.row / 2);
}

// Unweaves x, with a `factor` per column; a multiple of DEPTH columns. A turned matrix becomes its transpose, row-major.
template <bool FACTORS>
void unweave(Halves x, const float* factor, Halves to, int64_t rows, int64_t columns) {
    for (int64_t r = 0; r < rows; r += 2)
        for (int64_t c = 0; c < columns; c += DEPTH) {
            Float even[2], odd[2];
            for (int i = 0; i < 2; i++) {
                const Word both = bits<Word>(load((const float*)x.woven(r, c + LANES * i)));
                even[i] = bits<Float>(both << 16);
                odd[i] = bits<Float>(both & 0xffff0000);
                if (!FACTORS) continue;
                even[i] = even[i] * load(factor + c + LANES * i);
                odd[i] = odd[i] * load(factor + c + LANES * i);
            }
            store_two(to.at(r, c), even[0], even[1]);
            store_two(to.at(r + 1, c), odd[0], odd[1]);
        }
}

}  // namespace LINATTN_ISA
}  // namespace linattn

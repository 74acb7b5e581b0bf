// Products of bfloat16 matrices, summed in float32, on the tiles of AMX; and the memory layouts that they take.
//
// C [M, N] += A [M, K] B [K, N]. A has its rows side by side. B is woven: rows 2p and 2p + 1 are one row, in which their numbers take
// turns. So x can be a B with its columns summed over once it is woven, and with its rows summed over once it is turned and woven.
#pragma once

#include "lanes.h"

namespace linattn {
namespace LINATTN_ISA {

constexpr int TILE = 16;   // rows of a tile
constexpr int DEPTH = 32;  // numbers of a row of A that one tile holds

typedef uint16_t Shorts __attribute__((vector_size(64)));

struct alignas(64) Shapes {
    uint8_t palette, start, none[14];
    uint16_t bytes[16];
    uint8_t rows[16];
};
constexpr Shapes SHAPES = {1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {TILE, TILE, TILE, TILE, TILE, TILE, TILE, TILE}};

// Only meanwhile this thread has tiles, which make it dearer to interrupt.
template <class Body>
LINATTN_INLINE void with_tiles(Body body) {
    _tile_loadconfig(&SHAPES);
    body();
    _tile_release();
}

template <class T>
struct Matrix {
    T* data;
    int64_t row;  // numbers from row to row
    LINATTN_INLINE T* at(int64_t r, int64_t c) const { return data + r * row + c; }
    LINATTN_INLINE T* woven(int64_t r, int64_t c) const { return data + r / 2 * row + 2 * c; }  // r even
};
using Halves = Matrix<bfloat16>;
using Floats = Matrix<float>;

// Of a block of C of 16 or 32 rows and columns.
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
    __asm__ volatile("" ::: "memory");  // to compilers a load of a tile does not look like one
    for (int64_t m = 0; m < M; m += 2 * TILE)
        for (int64_t n = 0; n < N; n += 2 * TILE) {
            const bool below = m + TILE < M, beside = n + TILE < N;
            product_of_tiles<ADD>({a.at(m, 0), a.row}, {b.woven(0, n), b.row}, {c.at(m, n), c.row}, K, below, beside);
        }
    __asm__ volatile("" ::: "memory");
}

// C += A B where A [M, M] is nothing above its diagonal (or below it, `UPPER`); M is a multiple of 32.
template <bool UPPER>
void product_of_triangle(Halves a, Halves b, Floats c, int64_t M, int64_t N) {
    for (int64_t m = 0; m < M; m += DEPTH) {
        const int64_t first = UPPER ? m : 0, last = UPPER ? M : m + DEPTH;
        product<true>({a.at(m, first), a.row}, {b.woven(first, 0), b.row}, {c.at(m, 0), c.row}, DEPTH, N, last - first);
    }
}

// C = A B where of C [M, M] nothing above its diagonal (or below it) is wanted.
template <bool UPPER>
void triangle_of_product(Halves a, Halves b, Floats c, int64_t M, int64_t K) {
    for (int64_t m = 0; m < M; m += DEPTH) {
        const int64_t first = UPPER ? m : 0, last = UPPER ? M : m + DEPTH;
        product<false>({a.at(m, 0), a.row}, {b.woven(0, first), b.row}, {c.at(m, first), c.row}, DEPTH, last - first, K);
    }
}

// ---------------------------------------------------------------- layouts

// Two vectors as one of bfloat16, a before b.
LINATTN_INLINE void store_two(bfloat16* p, Float a, Float b) { _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a)); }

LINATTN_INLINE void store_woven(bfloat16* p, Float a, Float b) {
    constexpr Shorts turns = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    _mm512_storeu_si512(p, _mm512_permutexvar_epi16((__m512i)turns, (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a)));
}

// What is left of x when it is rounded to bfloat16.
LINATTN_INLINE Float left_over(Float x) {
    return x - bits<Float>((Word)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)x)), 16));
}

// x [rows, columns] woven; an even number of rows, and a multiple of 32 columns.
inline void weave(Halves x, Halves to, int64_t rows, int64_t columns) {
    constexpr Shorts turns = {0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    for (int64_t r = 0; r < rows; r += 2)
        for (int64_t c = 0; c < columns; c += 32) {
            const __m512i a = _mm512_loadu_si512(x.at(r, c)), b = _mm512_loadu_si512(x.at(r + 1, c));
            _mm512_storeu_si512(to.woven(r, c), _mm512_permutex2var_epi16(a, (__m512i)turns, b));
            _mm512_storeu_si512(to.woven(r, c + 16), _mm512_permutex2var_epi16(a, (__m512i)(turns + 16), b));
        }
}

// The transpose of x [rows, columns] woven: pairs of columns become rows of pairs. Multiples of 16 rows and of 32 columns.
inline void turn(Halves x, Halves to, int64_t rows, int64_t columns) {
    for (int64_t r = 0; r < rows; r += TILE)
        for (int64_t c = 0; c < columns; c += DEPTH)
            transpose((const float*)x.at(r, c), x.row / 2, (float*)to.woven(c, r), to.row / 2);
}

// From a turned x to its transpose, with `factor` to every column; a multiple of 32 columns.
template <bool FACTORS>
void unweave(Halves x, const float* factor, Halves to, int64_t rows, int64_t columns) {
    for (int64_t r = 0; r < rows; r += 2)
        for (int64_t c = 0; c < columns; c += 32) {
            Float even[2], odd[2];
            for (int i = 0; i < 2; i++) {
                const Word both = bits<Word>(_mm512_loadu_si512(x.woven(r, c + 16 * i)));
                even[i] = bits<Float>(both << 16);
                odd[i] = bits<Float>(both & 0xffff0000);
                if (!FACTORS) continue;
                even[i] = even[i] * load(factor + c + 16 * i);
                odd[i] = odd[i] * load(factor + c + 16 * i);
            }
            store_two(to.at(r, c), even[0], even[1]);
            store_two(to.at(r + 1, c), odd[0], odd[1]);
        }
}

}  // namespace LINATTN_ISA
}  // namespace linattn

// Sums over lanes and transposition of rows and lanes, by shuffles of pairs of vectors.
#pragma once

#include "vector.h"

namespace linattn {
namespace LINATTN_ISA {

// Interleaves the lower, or the upper, halves of two vectors.
template <bool SECOND>
LINATTN_INLINE Float interleaved(Float a, Float b) {
#if defined(__AVX512F__)
    constexpr Int first = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
    return (Float)_mm512_permutex2var_ps((__m512)a, (__m512i)(first + (SECOND ? 8 : 0)), (__m512)b);
#elif defined(__clang__) && defined(__AVX2__)
    return SECOND ? __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15) : __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
#elif defined(__AVX2__)
    return __builtin_shuffle(a, b, Int{0, 8, 1, 9, 2, 10, 3, 11} + (SECOND ? 4 : 0));
#elif defined(__clang__)
    return SECOND ? __builtin_shufflevector(a, b, 2, 6, 3, 7) : __builtin_shufflevector(a, b, 0, 4, 1, 5);
#else
    return __builtin_shuffle(a, b, Int{0, 4, 1, 5} + (SECOND ? 2 : 0));
#endif
}

// Lane i is the sum of the lanes of x[i].
LINATTN_INLINE Float sums(const Float (&x)[LANES]) {
    Float y[LANES / 2];
    for (int i = 0; i < LANES / 2; i++) y[i] = interleaved<false>(x[i], x[i + LANES / 2]) + interleaved<true>(x[i], x[i + LANES / 2]);
    for (int half = LANES / 4; half > 0; half /= 2)
        for (int i = 0; i < half; i++) y[i] = interleaved<false>(y[i], y[i + half]) + interleaved<true>(y[i], y[i + half]);
    return y[0];
}

// Transposes LANES rows of `from` into columns of `to`.
LINATTN_INLINE void transpose(const float* from, int64_t from_row, float* to, int64_t to_row) {
    Float x[LANES], y[LANES];
    for (int i = 0; i < LANES; i++) x[i] = load(from + i * from_row);
    for (int stage = 1; stage < LANES; stage *= 2) {
        for (int i = 0; i < LANES / 2; i++) {
            y[2 * i] = interleaved<false>(x[i], x[i + LANES / 2]);
            y[2 * i + 1] = interleaved<true>(x[i], x[i + LANES / 2]);
        }
        for (int i = 0; i < LANES; i++) x[i] = y[i];
    }
    for (int i = 0; i < LANES; i++) store(to + i * to_row, x[i]);
}

}  // namespace LINATTN_ISA
}  // namespace linattn

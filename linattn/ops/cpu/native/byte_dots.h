// Products of vectors with matrices of 4 bits by dot products of bytes: four products of a code and a byte of a number in each lane.
//
// A rounded number is 256 times a signed byte plus another, so that sums stay exact: 64 bytes of codes take twelve instructions for 128 numbers.
#pragma once

#include "rounded.h"

#if defined(__AVX512VNNI__)
namespace linattn {
namespace LINATTN_ISA {

constexpr int PAIR = 2 * UNIT;  // numbers whose codes fill a vector

// Bytes [first, first + 16) of a chunk's codes are a block of 32; `there` has the bytes that exist, `WHOLE` says that all do.
template <int R, int V, bool FINE, bool WHOLE>
LINATTN_INLINE void chunk_products(
    const uint8_t* w, int64_t row, const float* const* scales, const Rounded* x, int64_t c, __mmask64 there, __m512 (&total)[R][V]) {
    const __m512i fours = _mm512_set1_epi8(15);
    const __m512i places = FINE ? _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3)
                                : _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    for (int r = 0; r < R; r++) {
        const uint8_t* p = w + r * row + c * (PAIR / 2);
        const __m512i codes = WHOLE ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi8(there, p);
        const __m512i low = _mm512_and_si512(codes, fours), high = _mm512_and_si512(_mm512_srli_epi16(codes, 4), fours);
        if (WHOLE) __builtin_prefetch((const char*)p + AHEAD_OF_CODES, 0, 2);
        for (int v = 0; v < V; v++) {
            const int8_t* numbers = (const int8_t*)(x[v].turned + c * PAIR);
            __m512i sum = _mm512_dpbusd_epi32(_mm512_setzero_si512(), low, _mm512_loadu_si512(numbers));
            __m512i rest = _mm512_dpbusd_epi32(_mm512_loadu_si512(x[v].eights + c * LANES), low, _mm512_loadu_si512(numbers + UNIT));
            sum = _mm512_dpbusd_epi32(sum, high, _mm512_loadu_si512(numbers + 2 * UNIT));
            rest = _mm512_dpbusd_epi32(rest, high, _mm512_loadu_si512(numbers + 3 * UNIT));
            const __m512 all = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(sum, 8), rest));
            const __m512 near = _mm512_castps128_ps512(_mm_loadu_ps(scales[r * V + v] + c * (FINE ? 4 : 2)));
            const __m512 scale = WHOLE ? _mm512_permutexvar_ps(places, near)
                                       : _mm512_maskz_permutexvar_ps(_mm512_movepi32_mask(_mm512_movm_epi8(there)), places, near);
            total[r][v] = _mm512_fmadd_ps(all, scale, total[r][v]);
        }
    }
}

// R rows of codes of 4 bits with V vectors, as in rounded.h.
template <int R, int V, bool FINE>
LINATTN_INLINE void products4(
    const uint8_t* w, int64_t row, const float* const* scales, const Rounded* x, int64_t count, float* totals, int64_t step) {
    __m512 total[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) total[r][v] = _mm512_setzero_ps();
    int64_t c = 0;
    for (; (c + 1) * PAIR <= count; c++) chunk_products<R, V, FINE, true>(w, row, scales, x, c, ~__mmask64(0), total);
    if (c * PAIR < count)
        chunk_products<R, V, FINE, false>(w, row, scales, x, c, (__mmask64(1) << (count - c * PAIR) / 2) - 1, total);
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) _mm512_storeu_ps(totals + r * LANES + v * step, total[r][v]);
}

}  // namespace LINATTN_ISA
}  // namespace linattn
#endif

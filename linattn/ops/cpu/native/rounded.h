// Vectors rounded to int16, and their products with matrices of 8 and 4 bits: sums of integers are exact, and each unit of 64 numbers has
// a scale, so that rounding adds at most 1 / 65278 of the largest number of its unit to any of them.
#pragma once

#include "lanes.h"

#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace linattn {
namespace LINATTN_ISA {

typedef int16_t Words __attribute__((vector_size(4 * LANES)));
typedef uint8_t Codes __attribute__((vector_size(2 * LANES)));
typedef int8_t SignedCodes __attribute__((vector_size(2 * LANES)));

constexpr int UNIT = 64, BLOCK32 = 32;
constexpr int WORDS = 2 * LANES;               // of a vector
constexpr int TOTALS = LANES == 16 ? 1 : 2;    // vectors of sums of a unit: with 16 lanes a block of 32 has half of one
constexpr int AHEAD_OF_CODES = 8192;           // prefetch distance in bytes
#if defined(__AVX512VNNI__)
constexpr int OFFSETS = LANES / 2;  // lanes of the sums of a unit
#else
constexpr int OFFSETS = TOTALS * LANES;
#endif
constexpr int LARGEST = 127 * 256 + 127;       // as two signed bytes, of which one counts 256

LINATTN_INLINE Words load_words(const int16_t* p) {
    Words x;
    memcpy(&x, p, sizeof x);
    return x;
}

LINATTN_INLINE Words widened(const uint8_t* p) {
    Codes x;
    memcpy(&x, p, sizeof x);
#if defined(__AVX512F__)
    return (Words)_mm512_cvtepu8_epi16((__m256i)x);
#elif defined(__AVX2__)
    return (Words)_mm256_cvtepu8_epi16((__m128i)x);
#else
    return __builtin_convertvector(x, Words);
#endif
}
LINATTN_INLINE Words widened(const int8_t* p) {
    SignedCodes x;
    memcpy(&x, p, sizeof x);
#if defined(__AVX512F__)
    return (Words)_mm512_cvtepi8_epi16((__m256i)x);
#elif defined(__AVX2__)
    return (Words)_mm256_cvtepi8_epi16((__m128i)x);
#else
    return __builtin_convertvector(x, Words);
#endif
}

// Adds products of neighbouring words to the lanes of `total`: the lower half of the words to the lower lanes, the upper to the upper.
LINATTN_INLINE Int dots(Words a, Words b, Int total) {
#if defined(__AVX512F__)
    return total + (Int)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return total + (Int)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
    return total + (Int)_mm_madd_epi16((__m128i)a, (__m128i)b);
#elif defined(__aarch64__)
    const int16x8_t one = (int16x8_t)a, other = (int16x8_t)b;
    return (Int)vmlal_high_s16(vmlal_s16((int32x4_t)total, vget_low_s16(one), vget_low_s16(other)), one, other);
#else
    for (int i = 0; i < LANES; i++) total[i] += int32_t(a[2 * i]) * b[2 * i] + int32_t(a[2 * i + 1]) * b[2 * i + 1];
    return total;
#endif
}

LINATTN_INLINE Float floats(Int x) { return __builtin_convertvector(x, Float); }

// A vector as words, `units` of 64 with zeros behind: `words` in its order for codes of 8 bits, and `turned` in that of codes of 4; as bytes
// where products4 is that of byte_dots.h.
struct Rounded {
    int16_t *words, *turned;
    float *scale, *twice;  // of each unit, and of each block of 32
    int32_t* eights;       // -8 times the sum of a block, in one of the lanes that it is summed in

    static int64_t padded(int64_t units) { return (units + 2 * LANES + 15) / 16 * 16; }
    static int64_t floats(int64_t units) { return units * (UNIT + TOTALS * LANES) + padded(units) + padded(2 * units); }
    Rounded() = default;
    Rounded(float* room, int64_t units)
        : words((int16_t*)room), turned(words + units * UNIT), scale(room + units * UNIT), twice(scale + padded(units)),
          eights((int32_t*)(twice + padded(2 * units))) {}
};

// Position of number i of a unit in the order of words for codes of 4 bits.
LINATTN_INLINE int turned_place(int i) { return LANES == 16 ? (i / 16 % 2) * 32 + i / 32 * 16 + i % 16 : i; }

// Stores LANES whole numbers from number i of unit `u` on in the order for codes of 4 bits.
LINATTN_INLINE void store_turned(const Rounded& to, int64_t u, int i, Int n) {
#if defined(__AVX512VNNI__)
    // Of 128 numbers: high bytes, then low bytes, of those that meet the codes in the lower halves of bytes, then of the others.
    int8_t* place = (int8_t*)(to.turned + u / 2 * 2 * UNIT) + i / 16 % 2 * 128 + (u % 2 * 2 + i / BLOCK32) * 16;
    const __m512i all = (__m512i)n, high = _mm512_srai_epi32(_mm512_add_epi32(all, _mm512_set1_epi32(128)), 8);
    _mm_storeu_si128((__m128i*)place, _mm512_cvtepi32_epi8(high));
    _mm_storeu_si128((__m128i*)(place + UNIT), _mm512_cvtepi32_epi8(all));
#else
    const Half h = narrowed(bits<Word>(n));
    memcpy(to.turned + u * UNIT + turned_place(i), &h, sizeof h);
#endif
}

// Rounds unit `u` of x.
inline void round_unit(const float* x, int64_t u, const Rounded& to) {
    Float most = zero(), odd = zero();
    for (int i = 0; i < UNIT; i += LANES) {
        const Float a = load(x + i);
        most = max(most, a < zero() ? -a : a);
        odd = fma(a, zero(), odd);  // NaN if a number is not finite
    }
    float lane[LANES], largest = 0;
    store(lane, most);
    for (int i = 0; i < LANES; i++) largest = lane[i] > largest ? lane[i] : largest;
    const bool some = largest > 1e-30f && largest < 1e38f;
    const float scale = (some ? largest / LARGEST : 0.0f) + sum(odd), inverse = some ? LARGEST / largest : 0.0f;
    uint32_t sums[UNIT / BLOCK32];  // unsigned: beside numbers that are not finite, whose scale is NaN, they may wrap around
    for (int b = 0; b < UNIT / BLOCK32; b++) {
        Int total = {};
        for (int i = b * BLOCK32; i < (b + 1) * BLOCK32; i += LANES) {
            const Float near = (some ? load(x + i) * inverse : zero()) + 0x1.8p23f;  // the nearest integer is in its last bits
            const Int n = bits<Int>(near) - 0x4b400000;
            const Half h = narrowed(bits<Word>(n));
            memcpy(to.words + u * UNIT + i, &h, sizeof h);
            store_turned(to, u, i, n);
            total += n;
        }
        sums[b] = 0;
        for (int i = 0; i < LANES; i++) sums[b] += uint32_t(total[i]);
        to.twice[2 * u + b] = scale;
    }
    to.scale[u] = scale;
    int32_t* eights = to.eights + u * OFFSETS;
    memset(eights, 0, OFFSETS * sizeof(int32_t));
    for (int b = 0; b < UNIT / BLOCK32; b++) eights[b * OFFSETS / 2] = int32_t(-8u * sums[b]);
}

// Rows of codes are read in whole units; an incomplete last unit is copied and padded with zeros. R rows are read together, so that their
// sums do not wait for each other.
template <int R, class Code, class Step>
LINATTN_INLINE void for_units(const Code* w, int64_t row, int64_t bytes, int unit_bytes, Step&& step) {
    int64_t u = 0;
    for (; (u + 1) * unit_bytes <= bytes; u++) {
        for (int r = 0; r < R; r++) __builtin_prefetch((const char*)w + r * row + u * unit_bytes + AHEAD_OF_CODES, 0, 2);
        step(w + u * unit_bytes, row, u);
    }
    if (u * unit_bytes == bytes) return;
    Code rest[R][UNIT] = {};
    for (int r = 0; r < R; r++) memcpy(rest[r], w + r * row + u * unit_bytes, bytes - u * unit_bytes);
    step(rest[0], UNIT, u);
}

// R rows of codes of 8 bits with V vectors, summed into lanes: totals[r * LANES + v * step].
template <int R, int V>
LINATTN_INLINE void products8(const int8_t* w, int64_t row, const Rounded* x, int64_t count, float* totals, int64_t step) {
    Float total[R][V] = {};
    for_units<R>(w, row, count, UNIT, [&](const int8_t* p, int64_t next, int64_t u) {
        Int sums[R][V] = {};
        for (int i = 0; i < UNIT; i += WORDS)
            for (int r = 0; r < R; r++) {
                const Words a = widened(p + r * next + i);
                for (int v = 0; v < V; v++) sums[r][v] = dots(a, load_words(x[v].words + u * UNIT + i), sums[r][v]);
            }
        for (int r = 0; r < R; r++)
            for (int v = 0; v < V; v++) total[r][v] = fma(floats(sums[r][v]), splat(x[v].scale[u]), total[r][v]);
    });
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) store(totals + r * LANES + v * step, total[r][v]);
}

// Products of the scales of a row's groups, `count` of `all` from `first` on, with those of x: one for each unit, or for each block of 32 if
// the groups are. Behind them is what is in memory.
LINATTN_INLINE void join_scales(
    const float16* groups, int64_t first, int64_t all, int64_t count, int64_t group, const Rounded& x, float* to) {
    for (int64_t i = 0; i < count; i += LANES) {
        const int64_t left = all - first - i;
        const Float scale = left < LANES ? load(groups + first + i, int(left)) : load(groups + first + i);
        if (group == 32) store(to + i, scale * load(x.twice + i));
        else if (group == 64) store(to + i, scale * load(x.scale + i));
        else {
            store(to + 2 * i, interleaved<false>(scale, scale) * load(x.scale + 2 * i));
            store(to + 2 * i + LANES, interleaved<true>(scale, scale) * load(x.scale + 2 * i + LANES));
        }
    }
    if (group == BLOCK32 && count % 2) to[count] = 0;  // half of the last unit: the scale behind is another row's, and may be infinite
}

#if !defined(__AVX512VNNI__)
// The scales of the lanes of vector t of a unit's sums.
template <bool FINE>
LINATTN_INLINE Float lane_scales(const float* scales, int64_t u, int t) {
    if (!FINE) return splat(scales[u]);
#if defined(__AVX512F__)
    (void)t;
    return (Float)_mm512_mask_broadcastss_ps(_mm512_set1_ps(scales[2 * u]), 0xff00, _mm_load_ss(scales + 2 * u + 1));
#else
    return splat(scales[2 * u + t]);
#endif
}

// The same for codes of 4 bits: byte i of the 16 of a block has the numbers i and i + 16, with an offset of 8. The scales of row r with
// vector v are scales[r * V + v].
template <int R, int V, bool FINE>
LINATTN_INLINE void products4(
    const uint8_t* w, int64_t row, const float* const* scales, const Rounded* x, int64_t count, float* totals, int64_t step) {
    Float total[R][V] = {};
    for_units<R>(w, row, count / 2, UNIT / 2, [&](const uint8_t* p, int64_t next, int64_t u) {
        for (int t = 0; t < TOTALS; t++) {
            Int sums[R][V];
            for (int r = 0; r < R; r++)
                for (int v = 0; v < V; v++) memcpy(&sums[r][v], x[v].eights + u * OFFSETS + t * LANES, sizeof(Int));
            for (int i = 0; i < UNIT / 2 / TOTALS; i += WORDS)
                for (int r = 0; r < R; r++) {
                    const Words c = widened(p + r * next + t * BLOCK32 / 2 + i), low = c & 15, high = c >> 4;
                    for (int v = 0; v < V; v++) {
                        const int16_t* words = x[v].turned + u * UNIT + t * BLOCK32 + i;
                        sums[r][v] = dots(low, load_words(words), sums[r][v]);
                        sums[r][v] = dots(high, load_words(words + UNIT / 2 / TOTALS), sums[r][v]);
                    }
                }
            for (int r = 0; r < R; r++)
                for (int v = 0; v < V; v++)
                    total[r][v] = fma(floats(sums[r][v]), lane_scales<FINE>(scales[r * V + v], u, t), total[r][v]);
        }
    });
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) store(totals + r * LANES + v * step, total[r][v]);
}
#endif

}  // namespace LINATTN_ISA
}  // namespace linattn

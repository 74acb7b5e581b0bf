// Vectors of float, as wide as those of the instruction set that the file is compiled for.
//
// A kernel is compiled once for each instruction set, in a namespace of its own, LINATTN_ISA. It uses no template of the standard library:
// the linker keeps one copy of such a template, which may be the one compiled for AVX-512.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

#define LINATTN_JOIN_(a, b) linattn_##a##_##b
#define LINATTN_JOIN(a, b) LINATTN_JOIN_(a, b)
// An entry of the library: LINATTN_ENTRY(scan)(...) {...} is called by library.kernel("scan") in Python.
#define LINATTN_ENTRY(name) extern "C" __attribute__((visibility("default"))) void LINATTN_JOIN(name, LINATTN_ISA)
#define LINATTN_INLINE inline __attribute__((always_inline))
#if defined(__clang__)
#define LINATTN_UNROLL _Pragma("unroll")
#else
#define LINATTN_UNROLL _Pragma("GCC unroll 32")
#endif

namespace linattn {
namespace LINATTN_ISA {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float Float __attribute__((vector_size(4 * LANES)));
typedef int32_t Int __attribute__((vector_size(4 * LANES)));
typedef uint32_t Word __attribute__((vector_size(4 * LANES)));
typedef uint16_t Half __attribute__((vector_size(2 * LANES)));

enum Dtype : int64_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };  // as library.py numbers them

// 16-bit numbers with distinct types.
struct bfloat16 {
    uint16_t bits;
};
struct float16 {
    uint16_t bits;
};

template <class To, class From>
LINATTN_INLINE To bits(From x) {
    static_assert(sizeof(To) == sizeof(From), "");
    To y;
    memcpy(&y, &x, sizeof y);
    return y;
}

LINATTN_INLINE Float splat(float x) { return x - Float{}; }
LINATTN_INLINE Float zero() { return Float{}; }

LINATTN_INLINE Float load(const float* p) {
    Float x;
    memcpy(&x, p, sizeof x);
    return x;
}
LINATTN_INLINE void store(float* p, Float x) { memcpy(p, &x, sizeof x); }

LINATTN_INLINE Half load_bits(const void* p) {
    Half x;
    memcpy(&x, p, sizeof x);
    return x;
}

// Written by hand where compilers emit twice the instructions.
LINATTN_INLINE Word widened(Half x) {
#if defined(__AVX512F__)
    return (Word)_mm512_cvtepu16_epi32((__m256i)x);
#elif defined(__AVX2__)
    return (Word)_mm256_cvtepu16_epi32((__m128i)x);
#else
    return __builtin_convertvector(x, Word);
#endif
}
LINATTN_INLINE Half narrowed(Word x) {
#if defined(__AVX512F__)
    return (Half)_mm512_cvtepi32_epi16((__m512i)x);
#else
    return __builtin_convertvector(x, Half);
#endif
}

LINATTN_INLINE Float load(const bfloat16* p) { return bits<Float>(widened(load_bits(p)) << 16); }

LINATTN_INLINE void store(bfloat16* p, Float x) {
#if defined(__AVX512BF16__)
    _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
    const Word w = bits<Word>(x);
    const Word rounded = (w + (0x7fff + ((w >> 16) & 1))) >> 16;  // to the nearest, ties to even
    const Half h = narrowed(bits<Word>(x == x ? bits<Int>(rounded) : bits<Int>((w >> 16) | 0x40)));
    memcpy(p, &h, sizeof h);
#endif
}

LINATTN_INLINE Float load(const float16* p) {
#if defined(__AVX512F__)
    return (Float)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
    return (Float)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
    const Word h = widened(load_bits(p)), body = h & 0x7fff, sign = (h & 0x8000) << 16;
    // A subnormal is an integer multiple of 2^-24; converted through integers, because subnormal floats may be flushed to 0.
    const Float small = __builtin_convertvector(bits<Int>(body), Float) * 0x1p-24f;
    const Word big = (body << 13) + (bits<Int>(body) >= 0x7c00 ? (Int{} + (224 << 23)) : (Int{} + (112 << 23)));
    return bits<Float>(bits<Word>(bits<Int>(body) < 0x400 ? bits<Int>(small) : bits<Int>(big)) | sign);
#endif
}

LINATTN_INLINE void store(float16* p, Float x) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__F16C__)
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
    const Word w = bits<Word>(x), sign = (w >> 16) & 0x8000, rest = w & 0x7fffffff;
    const Int body = bits<Int>(rest);
    // 0.5 has 2^-24 as its last digit, as subnormal numbers of 16 bits do.
    const Int small = bits<Int>(bits<Float>(body) + 0.5f) - 0x3f000000;
    const Int normal = bits<Int>((rest + (0xfff + ((rest >> 13) & 1)) - (112u << 23)) >> 13);
    Int h = body < 0x38800000 ? small : normal;
    h = body >= 0x477ff000 ? (Int{} + 0x7c00) : h;
    h = body > 0x7f800000 ? (Int{} + 0x7e00) : h;
    const Half out = narrowed(bits<Word>(h) | sign);
    memcpy(p, &out, sizeof out);
#endif
}

// Loads and stores of the first n lanes; other lanes load as 0 and are not stored.
template <class T>
LINATTN_INLINE Float load(const T* p, int n) {
    if (n >= LANES) return load(p);
    T whole[LANES] = {};
    for (int i = 0; i < n; i++) whole[i] = p[i];
    return load(whole);
}
template <class T>
LINATTN_INLINE void store(T* p, Float x, int n) {
    if (n >= LANES) return store(p, x);
    T whole[LANES];
    store(whole, x);
    for (int i = 0; i < n; i++) p[i] = whole[i];
}

LINATTN_INLINE Float load(const void* p, int64_t dtype, int64_t at, int n) {
    if (dtype == BFLOAT16) return load((const bfloat16*)p + at, n);
    if (dtype == FLOAT16) return load((const float16*)p + at, n);
    return load((const float*)p + at, n);
}
LINATTN_INLINE void store(void* p, int64_t dtype, int64_t at, Float x, int n) {
    if (dtype == BFLOAT16) return store((bfloat16*)p + at, x, n);
    if (dtype == FLOAT16) return store((float16*)p + at, x, n);
    return store((float*)p + at, x, n);
}

LINATTN_INLINE Float max(Float a, Float b) { return a > b ? a : b; }
LINATTN_INLINE Float fma(Float a, Float b, Float c) { return a * b + c; }  // compiled with -ffp-contract=fast

// Sum over all lanes, always in the same order.
LINATTN_INLINE float sum(Float x) {
    float lane[LANES];
    store(lane, x);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) lane[i] += lane[i + width];
    return lane[0];
}

// Sums of neighbouring lanes, first those of a, then those of b.
LINATTN_INLINE Float neighbours(Float a, Float b) {
#if !defined(__clang__)
    Int even, odd;
    for (int i = 0; i < LANES; i++) {
        even[i] = 2 * i;
        odd[i] = 2 * i + 1;
    }
    return __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, odd);
#elif defined(__AVX512F__)
    return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
           __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#elif defined(__AVX2__)
    return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14) + __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
#else
    return __builtin_shufflevector(a, b, 0, 2, 4, 6) + __builtin_shufflevector(a, b, 1, 3, 5, 7);
#endif
}

// Lane i of the result is the sum of all lanes of x[i].
LINATTN_INLINE Float sums(const float* x) {
    Float parts[LANES];
    LINATTN_UNROLL
    for (int i = 0; i < LANES; i++) parts[i] = load(x + i * LANES);
    LINATTN_UNROLL
    for (int width = LANES / 2; width > 0; width /= 2) {
        LINATTN_UNROLL
        for (int i = 0; i < width; i++) parts[i] = neighbours(parts[2 * i], parts[2 * i + 1]);
    }
    return parts[0];
}

// The integer nearest to x, and 2 to that power, for -126 <= x <= 127.
struct Power {
    Float whole, two;
};
LINATTN_INLINE Power power(Float x) {
    const Float magic = splat(0x1.8p23f + 127);  // the last digit of such a number is 1, and its bits end with the exponent
    const Float shifted = x + magic;
    return {shifted - magic, bits<Float>(bits<Word>(shifted) << 23)};
}

// exp(x) / 2^whole, where `whole` is the integer nearest to x / ln 2.
LINATTN_INLINE Float exp_rest(Float x, Float whole) {
    Float r = x - whole * 0.693359375f;  // ln 2 in two parts, of which the first has few digits
    r = r + whole * 2.12194440e-4f;
    Float p = splat(1.382144634e-03f);  // exp(r) on [-ln 2 / 2, ln 2 / 2], relative error 3e-9
    p = fma(p, r, splat(8.368661627e-03f));
    p = fma(p, r, splat(4.166825488e-02f));
    p = fma(p, r, splat(1.666652113e-01f));
    p = fma(p, r, splat(4.999999404e-01f));
    p = fma(p, r, splat(1.0f));
    return fma(p, r, splat(1.0f));
}

// exp(x) of x <= 0 within an ulp: exactly 1 for 0, exactly 0 from -87.3 down and for -inf, NaN for NaN.
LINATTN_INLINE Float exp_below(Float x) {
    const Power n = power(x * 1.44269504f);
    const Float p = exp_rest(x, n.whole) * n.two;
    return x < -87.3f ? zero() : p;
}

// The same for any x: inf on overflow.
LINATTN_INLINE Float exp_any(Float x) {
    const Float most = splat(89.0f), a = x > most ? most : x;
    const Power n = power(a * 1.44269504f);
    const Float p = exp_rest(a, n.whole), half = bits<Float>(bits<Word>(n.two) - (1u << 23));  // of 2^128, which no float is
    const Float y = a > zero() ? p * half * 2.0f : p * n.two;
    return x < -87.3f ? zero() : y;
}

LINATTN_INLINE Float sigmoid(Float x) {
    const Float small = exp_below(x < zero() ? x : -x), one = splat(1.0f);
    return (x < zero() ? small : one) / (one + small);
}

// log(1 + e^x), accurate for small results too: log(1 + t) = 2 artanh(t / (2 + t)).
LINATTN_INLINE Float softplus(Float x) {
    const Float t = exp_below(x < zero() ? x : -x), s = t / (t + 2.0f), q = s * s;
    Float p = splat(1.0f / 15);
    LINATTN_UNROLL
    for (int i = 13; i > 0; i -= 2) p = fma(p, q, splat(1.0f / float(i)));
    return max(x, zero()) + 2.0f * s * p;
}

LINATTN_INLINE Float tanh(Float x) {
    const Float size = x < zero() ? -x : x, e = exp_below(-2.0f * size), q = x * x;
    const Float far = (splat(1.0f) - e) / (splat(1.0f) + e);
    Float p = splat(62.0f / 2835);  // its series, where the difference would cancel
    p = fma(p, q, splat(-17.0f / 315));
    p = fma(p, q, splat(2.0f / 15));
    p = fma(p, q, splat(-1.0f / 3));
    p = fma(p * q, x, x);
    return size < 0.25f ? p : x < zero() ? -far : far;
}

// 2^x of x <= 0 with the same guarantees: exactly 0 below -126.
LINATTN_INLINE Float exp2_below(Float x) {
    const Power n = power(x);
    const Float r = x - n.whole;
    Float p = splat(1.532648312e-04f);
    p = fma(p, r, splat(1.339080976e-03f));
    p = fma(p, r, splat(9.618505836e-03f));
    p = fma(p, r, splat(5.550359935e-02f));
    p = fma(p, r, splat(2.402264774e-01f));
    p = fma(p, r, splat(6.931471825e-01f));
    p = fma(p, r, splat(1.0f)) * n.two;
    return x < -126.0f ? zero() : p;
}

// exp(x) of x <= 0 as two (1 + part), where `two` is a power of 2. Rounded to one number it would be off by up to 3e-8 of
// itself, to the same side for every token of a constant decay: after 10,000 of them 3e-4 of the state.
struct Fade {
    Float two, part;
};
LINATTN_INLINE Fade fade(Float x) {
    const Power n = power(x * 1.44269504f);
    Float r = x - n.whole * 0.693359375f;
    r = r + n.whole * 2.12194440e-4f;
    Float p = splat(1.382144634e-03f);
    p = fma(p, r, splat(8.368661627e-03f));
    p = fma(p, r, splat(4.166825488e-02f));
    p = fma(p, r, splat(1.666652113e-01f));
    p = fma(p, r, splat(4.999999404e-01f));
    p = fma(p, r, splat(1.0f)) * r;
    return {x < -87.3f ? zero() : n.two, x < -87.3f ? zero() : p};
}

// What is left of h, and x.
LINATTN_INLINE Float carried(Fade fade, Float h, Float x) {
    const Float whole = fade.two * h;
    return fma(fade.part, whole, x) + whole;
}

}  // namespace LINATTN_ISA
}  // namespace linattn

// What the selective scan and a step of it have in common.
#pragma once

#include "vector.h"

namespace linattn {
namespace LINATTN_ISA {

constexpr float LOG2E = 1.44269504f, LN2 = 0.693147181f;

// 2 to the power of dt a <= 0, within 1e-7 of it: exactly 1 for 0, exactly 0 below 2^-126.
LINATTN_INLINE Fade faded(Float dt, Float a) {
    const Float magic = splat(0x1.8p23f + 127);
    const Float shifted = fma(dt, a, magic), whole = shifted - magic, r = fma(dt, a, -whole);
    const Float two = bits<Float>(bits<Word>(shifted) << 23);
    Float p = splat(1.326925238e-03f);
    p = fma(p, r, splat(9.671296924e-03f));
    p = fma(p, r, splat(5.550711602e-02f));
    p = fma(p, r, splat(2.402224690e-01f));
    p = fma(p, r, splat(6.931470037e-01f)) * r;
    const auto nothing = shifted < magic - 126.0f;
    return {nothing ? zero() : two, nothing ? zero() : p};
}

// log(1 + e^x), to the last digits of small ones too: log(1 + t) = 2 artanh(t / (2 + t)).
LINATTN_INLINE Float softplus(Float x) {
    const Float t = exp_below(x < zero() ? x : -x), s = t / (t + 2.0f), q = s * s;
    Float p = splat(1.0f / 15);
    LINATTN_UNROLL
    for (int i = 13; i > 0; i -= 2) p = fma(p, q, splat(1.0f / float(i)));
    return max(x, zero()) + 2.0f * s * p;
}

}  // namespace LINATTN_ISA
}  // namespace linattn

// Shared by the selective scan and its single step.
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

}  // namespace LINATTN_ISA
}  // namespace linattn

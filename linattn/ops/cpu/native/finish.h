// Elementwise steps after a matrix product, or alone: FINISHES of linears.py.
#pragma once

#include "vector.h"

namespace linattn {
namespace LINATTN_ISA {

enum Finish : int64_t { LOG_SIGMOID, SOFTPLUS, SIGMOID, TANH, EXP, NEG, ADD, MUL, DIV };  // in the order of FINISHES

// One step. ADD, MUL and DIV have an operand per channel or one for all channels.
struct Step {
    int64_t what;
    const float* channels;
    double number;
};

// Applies `count` steps to `y`, the channels from `at` on.
LINATTN_INLINE Float finished(Float y, const Step* steps, int64_t count, int64_t at, int n) {
    for (int64_t i = 0; i < count; i++) {
        const Step& step = steps[i];
        const Float other = step.channels ? load(step.channels + at, n) : splat(float(step.number));
        switch (step.what) {
            case LOG_SIGMOID: y = -softplus(-y); break;
            case SOFTPLUS: y = softplus(y); break;
            case SIGMOID: y = sigmoid(y); break;
            case TANH: y = tanh(y); break;
            case EXP: y = exp_any(y); break;
            case NEG: y = -y; break;
            case ADD: y = y + other; break;
            case MUL: y = y * other; break;
            case DIV: y = y / other; break;
        }
    }
    return y;
}

}  // namespace LINATTN_ISA
}  // namespace linattn

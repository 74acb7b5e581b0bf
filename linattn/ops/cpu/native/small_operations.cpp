// Small operations of a decoding step, one after another on one thread: what other operations of torch cost to start takes longer.
#include <cmath>

#include "rows.h"

namespace linattn {
namespace LINATTN_ISA {
namespace {

// In the order of small_operations.py. The last three are over a row.
enum What : int64_t {
    COPY, ADD, SUB, MUL, DIV, CLAMP_MIN, NEG, EXP, LOG_SIGMOID, RELU, SIGMOID, SILU, SOFTPLUS, SQUARE, TANH, LERP, SUM, LENGTH, LAYER_NORM
};

// A matrix with strides of rows and columns, which are 0 where it is repeated; without data: `number` in every place.
struct Operand {
    void* data;
    int64_t dtype, row, column;
    double number;

    LINATTN_INLINE Float get(int64_t r, int64_t c, int n) const {
        if (!data) return splat(float(number));
        if (column) return load(data, dtype, r * row + c, n);
        float one[LANES];
        LINATTN_ISA::store(one, load(data, dtype, r * row, 1));
        return splat(one[0]);
    }
    LINATTN_INLINE void put(int64_t r, int64_t c, Float x, int n) const { store(data, dtype, r * row + c, x, n); }
};

struct Operation {
    int64_t what, rows, columns;
    double eps;
    Operand to, x, y, z;
};

struct Call {
    const Operation* operations;
    int64_t count;
};

template <class Body>
LINATTN_INLINE void every(const Operation& of, Body body) {
    for (int64_t r = 0; r < of.rows; r++)
        vectors(0, of.columns, [&](int64_t c, int n) {
            const Float x = of.x.get(r, c, n), y = of.y.get(r, c, n), z = of.z.get(r, c, n);
            of.to.put(r, c, body(x, y, z), n);
        });
}

// Sum over row `r` of body(x), whose lanes behind the row count as 0.
template <class Body>
LINATTN_INLINE float total(const Operation& of, int64_t r, Body body) {
    Float all = zero();
    vectors(0, of.columns, [&](int64_t c, int n) {
        alignas(64) float lanes[LANES];
        store(lanes, body(of.x.get(r, c, n)));
        all = all + load((const float*)lanes, n);
    });
    return sum(all);
}

void layer_norm(const Operation& of) {
    for (int64_t r = 0; r < of.rows; r++) {
        const float mean = total(of, r, [](Float x) { return x; }) / float(of.columns);
        const float squares = total(of, r, [&](Float x) { return (x - mean) * (x - mean); });
        const float factor = float(1.0 / std::sqrt(double(squares) / double(of.columns) + of.eps));
        vectors(0, of.columns, [&](int64_t c, int n) {
            of.to.put(r, c, fma((of.x.get(r, c, n) - mean) * factor, of.y.get(r, c, n), of.z.get(r, c, n)), n);
        });
    }
}

void run(const Operation& of) {
    switch (of.what) {
        case COPY: return every(of, [](Float x, Float, Float) { return x; });
        case ADD: return every(of, [](Float x, Float y, Float) { return x + y; });
        case SUB: return every(of, [](Float x, Float y, Float) { return x - y; });
        case MUL: return every(of, [](Float x, Float y, Float) { return x * y; });
        case DIV: return every(of, [](Float x, Float y, Float) { return x / y; });
        case CLAMP_MIN: return every(of, [](Float x, Float y, Float) { return x < y ? y : x; });
        case NEG: return every(of, [](Float x, Float, Float) { return -x; });
        case EXP: return every(of, [](Float x, Float, Float) { return exp_any(x); });
        case LOG_SIGMOID: return every(of, [](Float x, Float, Float) { return -softplus(-x); });
        case RELU: return every(of, [](Float x, Float, Float) { return x < zero() ? zero() : x; });
        case SIGMOID: return every(of, [](Float x, Float, Float) { return sigmoid(x); });
        case SILU: return every(of, [](Float x, Float, Float) { return x * sigmoid(x); });
        case SOFTPLUS: return every(of, [](Float x, Float, Float) { return softplus(x); });
        case SQUARE: return every(of, [](Float x, Float, Float) { return x * x; });
        case TANH: return every(of, [](Float x, Float, Float) { return tanh(x); });
        case LERP:
            return every(of, [](Float x, Float y, Float z) {
                const Float size = z < zero() ? -z : z;
                return size < 0.5f ? fma(z, y - x, x) : y - (y - x) * (splat(1.0f) - z);
            });
        case SUM:
            for (int64_t r = 0; r < of.rows; r++) of.to.put(r, 0, splat(total(of, r, [](Float x) { return x; })), 1);
            return;
        case LENGTH:
            for (int64_t r = 0; r < of.rows; r++) of.to.put(r, 0, splat(std::sqrt(total(of, r, [](Float x) { return x * x; }))), 1);
            return;
        case LAYER_NORM: return layer_norm(of);
    }
}

}  // namespace

LINATTN_ENTRY(small_operations)(const void* given, int64_t) {
    const Call& call = *(const Call*)given;
    parallel(1, 1, [&](int64_t) {
        for (int64_t i = 0; i < call.count; i++) run(call.operations[i]);
    });
}

}  // namespace LINATTN_ISA
}  // namespace linattn

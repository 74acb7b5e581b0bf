// A single token, as in a decoding step: the state is read and written where it lies, in order, at the speed of memory.
//
// Outputs and states have the bits of a block of which only the first token is there: the same terms are added in the same order. The sums of
// keys may differ in their last digit, since compilers fuse products with sums or not.
#pragma once

#include "linear_attention_slab.h"

namespace linattn {
namespace LINATTN_ISA {

template <int RANK, int RULE>
class Token {
    static constexpr bool TWICE = RULE == DELTA || RULE == ERASE;  // what is written depends on what is read
    static constexpr int AHEAD = 8192;                             // prefetch distance in bytes

    const Call& call;
    const Task& task;
    const Columns columns;
    const int64_t real;      // columns of v in this task
    const float* S;          // [K, V], of the task's columns
    float* to;
    // Of each key: q and k (or r) as they meet the state, what is written with v and again, and the decay as in OfRows.
    float *met, *met_too, *left, *left_too, *keep, *rest;
    float *sum, *sum_too, *value, *value_too;  // of each column
    float pair = 0, pair_too = 0;              // q k and q w
    float beta = 0;

public:
    static bool takes(const Call& call, const Task& task) {
        return task.at.last - task.at.first == 1 && !call.kept && call.initial && call.final && (!call.ones || (call.initial_z && call.final_z));
    }

    Token(const Call& call, const Task& task, Scratch& scratch)
        : call(call), task(task), columns(call, task.part), real(least(columns.last, call.values) - columns.first) {
        const int64_t rows = up(call.keys, LANES), lanes = up(columns.count(), 16), state = task.index(call) * call.keys * call.values;
        Pieces pieces{scratch.room(6 * up(rows, 16) + 4 * lanes)};
        float** const of_keys[] = {&met, &met_too, &left, &left_too, &keep, &rest};
        float** const of_columns[] = {&sum, &sum_too, &value, &value_too};
        for (float** of : of_keys) *of = pieces.take(rows);
        for (float** of : of_columns) *of = pieces.take(lanes);
        S = call.initial + state + columns.first;
        to = call.final + state + columns.first;
    }

    void run() {
        prepare();
        if (TWICE) {
            sweep<true, false>();
            each([&](int64_t c, int) { write(c); });
        }
        sweep<!TWICE, true>();
        const Row out{call, task, false};
        each([&](int64_t c, int) {
            Float o = fma(splat(pair), load(value + c), load(sum + c));
            if (RULE == ERASE) o = fma(splat(pair_too), load(value_too + c), o);
            out.store(task.at.first, columns.first + c, o);
        });
        if (call.ones && columns.first <= call.values && call.values < columns.last) count();
    }

private:
    LINATTN_INLINE Float of(const Strided& x, int64_t head, int64_t c, int m) const {
        return load(x.data, x.dtype, x.at(task.at.row, task.at.first, head) + c, m);
    }
    // Calls body(c, m) for vectors of m columns.
    template <class Body>
    LINATTN_INLINE void each(Body body) const {
        for (int64_t c = 0; c < real; c += LANES) body(c, least(real - c, LANES));
    }

    void prepare() {
        const Place& at = task.at;
        const int64_t shared = at.head / call.group;
        Float pairs[LANES] = {};
        Factors f;
        factors_of_head<RANK>(call, at, at.first, 1, f);
        for (int64_t c = 0; c < call.keys; c += LANES) {
            const int m = least(call.keys - c, LANES);
            const Float q = of(call.q, shared, c, m) * float(call.scale), k = of(call.k, shared, c, m);
            factors_of_channels<RANK>(call, at, at.first, 1, c, m, f);
            store(met + c, RANK == NONE || RULE == BONUS ? q : q * f.alpha[0]);
            store(left + c, k);
            if (RULE == DELTA) store(met_too + c, RANK == NONE ? k : k * f.alpha[0]);
            if (RANK != NONE) {
                store(keep + c, f.keep);
                store(rest + c, f.rest);
            }
            pairs[0] = fma(q, RULE == BONUS ? load(call.bonus + at.head * call.keys + c, m) * k : k, pairs[0]);
            if (RULE != ERASE) continue;
            const Float w = of(call.write, at.head, c, m);
            store(met_too + c, of(call.read, at.head, c, m));
            store(left_too + c, w);
            pairs[1] = fma(q, w, pairs[1]);
        }
        float lanes[LANES];
        store(lanes, sums(pairs));
        pair = lanes[0];
        pair_too = lanes[1];
        if (RULE == DELTA) {
            store(lanes, of(call.beta, at.head, 0, 1));
            beta = lanes[0];
        }
        each([&](int64_t c, int m) {
            store(value + c, of(call.v, at.head, columns.first + c, m));
            store(sum + c, zero());
            store(sum_too + c, zero());
        });
    }

    // What is written into a vector of columns, of rules for which this depends on the state.
    LINATTN_INLINE void write(int64_t c) const {
        if (RULE == DELTA) store(value + c, splat(beta) * (load(value + c) - load(sum_too + c)));
        else store(value_too + c, load(sum_too + c));
    }

    // Adds the rows to the sums, or writes the next state, or both.
    template <bool READS, bool WRITES>
    LINATTN_INLINE void sweep() const {
        int64_t r = 0;
        for (; r + 4 <= call.keys; r += 4) rows<4, READS, WRITES>(r);
        for (; r < call.keys; r++) rows<1, READS, WRITES>(r);
    }
    template <int R, bool READS, bool WRITES>
    LINATTN_INLINE void rows(int64_t r) const {
        const float* const from = S + r * call.values;
        float* const next = to + r * call.values;
        each([&](int64_t c, int m) {
            Float s[R];
            for (int i = 0; i < R; i++) {
                s[i] = load(from + i * call.values + c, m);
                if (READS) __builtin_prefetch((const char*)(from + i * call.values + c) + AHEAD, 0, 2);
            }
            if (READS) {
                Float total = load(sum + c);
                for (int i = 0; i < R; i++) total = fma(splat(met[r + i]), s[i], total);
                store(sum + c, total);
            }
            if (READS && TWICE) {
                Float total = load(sum_too + c);
                for (int i = 0; i < R; i++) total = fma(splat(met_too[r + i]), s[i], total);
                store(sum_too + c, total);
            }
            if (!WRITES) return;
            const Float v = load(value + c), x = RULE == ERASE ? load(value_too + c) : zero();
            for (int i = 0; i < R; i++) store(next + i * call.values + c, written(r + i, s[i], v, x), m);
        });
    }
    LINATTN_INLINE Float written(int64_t r, Float s, Float v, Float x) const {
        Float y = RANK == NONE ? s : splat(rest[r]) * s;
        y = fma(splat(left[r]), v, y);
        if (RULE == ERASE) y = fma(splat(left_too[r]), x, y);
        return RANK == NONE ? y : fma(splat(keep[r]), s, y);
    }

    // The column of ones, the same number in all lanes: the sum of keys z [K] and the denominator.
    void count() const {
        const float* z = call.initial_z + task.index(call) * call.keys;
        float* next = call.final_z + task.index(call) * call.keys;
        Float total = zero(), too = zero(), v = splat(1.0f);
        for (int64_t r = 0; r < call.keys; r++) {
            total = fma(splat(met[r]), splat(z[r]), total);
            if (TWICE) too = fma(splat(met_too[r]), splat(z[r]), too);
        }
        if (RULE == DELTA) v = splat(beta) * (v - too);
        for (int64_t r = 0; r < call.keys; r++) store(next + r, written(r, splat(z[r]), v, too), 1);
        total = fma(splat(pair), v, total);
        if (RULE == ERASE) total = fma(splat(pair_too), too, total);
        store(call.denominator + (task.at.row * call.tokens + task.at.first) * call.heads + task.at.head, total, 1);
    }
};

}  // namespace LINATTN_ISA
}  // namespace linattn

// Prepares a block: its panels of keys and of values, and the coefficients between its tokens.
#pragma once

#include "linear_attention.h"

namespace linattn {
namespace LINATTN_ISA {

// Position of a task: row of the batch, head, and the tokens of one sequence.
struct Place {
    int64_t row, head, first, last;
};

// exp(log) as `keep` (1 or 0) and `rest`, for log <= 0; `product` is the same exp(log) as a product of factors.
LINATTN_INLINE void factor(Float log, Float product, Float& keep, Float& rest) {
    Float series = splat(1.0f);
    for (int n = 8; n > 1; n--) series = fma(log * (1.0f / n), series, splat(1.0f));
    const Int near = log > -0.5f;
    keep = near ? splat(1.0f) : zero();
    rest = near ? log * series : product;
}

// Decays between the tokens of a block, for the lanes of one vector or, with a decay per head, for all.
struct Factors {
    Float alpha[TOKENS], keep, rest;
    LINATTN_INLINE Float until(int t) const {  // from the state before the block up to token t, inclusive
        Float p = alpha[0];
        for (int i = 1; i <= t; i++) p = p * alpha[i];
        return p;
    }
    LINATTN_INLINE Float since(int t) const {  // from the write of token t to the end of the block
        Float p = splat(1.0f);
        for (int i = TOKENS - 1; i > t; i--) p = p * alpha[i];
        return p;
    }
};

template <int RANK>
LINATTN_INLINE void factors_of_head(const Call& call, const Place& at, int64_t t, int count, Factors& f) {
    if constexpr (RANK == HEAD) {
        float log[LANES] = {}, alpha[LANES], total = 0;
        for (int i = 0; i < count; i++) {
            float one[LANES];
            store(one, load(call.decay.data, call.decay.dtype, call.decay.at(at.row, t + i, at.head), 1));
            total += log[i] = one[0];
        }
        store(alpha, exp_below(load(log)));
        for (int i = 0; i < TOKENS; i++) f.alpha[i] = splat(alpha[i]);
        factor(splat(total), f.until(TOKENS - 1), f.keep, f.rest);
    }
}

template <int RANK>
LINATTN_INLINE void factors_of_channels(const Call& call, const Place& at, int64_t t, int count, int64_t c, int m, Factors& f) {
    if constexpr (RANK == CHANNEL) {
        Float total = zero();
        for (int i = 0; i < TOKENS; i++) {
            const Float log = load(call.decay.data, call.decay.dtype, call.decay.at(at.row, t + i, at.head) + c, i < count ? m : 0);
            f.alpha[i] = exp_below(log);
            total = total + log;
        }
        factor(total, f.until(TOKENS - 1), f.keep, f.rest);
    }
}

// The same lanes of four tokens, of which `count` exist; `h` is the head's index in the tensor.
struct Four {
    Float x[TOKENS];
    LINATTN_INLINE Four(const Strided& of, const Place& at, int64_t h, int64_t t, int count, int64_t c, int m) {
        for (int i = 0; i < TOKENS; i++) x[i] = load(of.data, of.dtype, of.at(at.row, t + i, h) + c, i < count ? m : 0);
    }
    LINATTN_INLINE Float operator[](int i) const { return x[i]; }
};

// Sums over channels for each pair of tokens, kept as vectors until the end.
template <int N>
struct Sums {
    Float x[(N + LANES - 1) / LANES * LANES];
    LINATTN_INLINE Sums() {
        for (auto& one : x) one = zero();
    }
    LINATTN_INLINE void add(int matrix, int i, int j, Float a, Float b) {
        Float& to = x[(matrix * TOKENS + i) * TOKENS + j];
        to = fma(a, b, to);
    }
    LINATTN_INLINE void finish(float* to) const {
        for (int i = 0; i < N; i += LANES) store(to + i, sums((const Float(&)[LANES])x[i]));
    }
};

// The panels of keys of the block of `count` tokens from t on, and its pairs: the weight of token j's write in token i's read.
template <int RANK, int RULE>
void prepare_keys(
    const Call& call, const Place& at, int64_t t, int count, Panels<Family<RULE>::KEY_LINES> to, float* pairs, bool gradients) {
    using F = Family<RULE>;
    const int64_t shared = at.head / call.group;
    Sums<F::PAIRS> sum;
    Factors f;
    factors_of_head<RANK>(call, at, t, count, f);
    for (int64_t c = 0; c < call.keys; c += LANES) {
        const int m = least(call.keys - c, LANES);
        Four q(call.q, at, shared, t, count, c, m), k(call.k, at, shared, t, count, c, m);
        for (auto& x : q.x) x = x * float(call.scale);
        factors_of_channels<RANK>(call, at, t, count, c, m, f);
        auto faded = [&](Float x, int i) { return RANK == NONE ? x : x * f.alpha[i]; };
        auto met = [&](int line, Float x, int i) {  // read of the state before the block, decayed up to token i
            store(to.at(line, c), RANK == NONE || i < 0 ? x : x * f.until(i));
        };
        auto left = [&](int line, Float x, int i) { store(to.at(line, c), RANK == NONE ? x : x * f.since(i)); };
        for (int i = 0; i < TOKENS; i++) {
            met(F::Y + i, q[i], RULE == BONUS ? i - 1 : i);
            left(F::X + i, k[i], i);
            if (RULE == DELTA) met(F::Y + TOKENS + i, k[i], i);
            if (!gradients) continue;
            if (RANK != NONE) store(to.at(F::ALPHA + i, c), f.alpha[i]);
            store(to.at(F::CAME + i, c), q[i]);
            store(to.at(F::CAME + TOKENS + i, c), k[i]);
        }
        if (RANK != NONE) {
            store(to.at(F::KEEP, c), f.keep);
            store(to.at(F::REST, c), f.rest);
        }
        const Float u = RULE == BONUS ? load(call.bonus + at.head * call.keys + c, m) : zero();
        for (int j = 0; j < TOKENS; j++) {
            Float x = k[j];
            sum.add(0, j, j, q[j], RULE == BONUS ? u * x : x);
            for (int i = j + 1; i < TOKENS; i++) {
                if (RULE == BONUS) sum.add(0, i, j, q[i], x);
                x = faded(x, i);
                if (RULE != BONUS) sum.add(0, i, j, q[i], x);
                if (RULE == DELTA) sum.add(1, i, j, k[i], x);
            }
        }
        if constexpr (RULE == ERASE) {
            Four r(call.read, at, at.head, t, count, c, m), w(call.write, at, at.head, t, count, c, m);
            for (int j = 0; j < TOKENS; j++) {
                met(F::Y + TOKENS + j, r[j], j - 1);
                left(F::X + TOKENS + j, w[j], j);
                if (gradients) store(to.at(F::CAME + 2 * TOKENS + j, c), r[j]);
                if (gradients) store(to.at(F::CAME + 3 * TOKENS + j, c), w[j]);
                Float x = k[j], y = w[j];
                sum.add(2, j, j, q[j], y);
                for (int i = j + 1; i < TOKENS; i++) {
                    sum.add(1, i, j, r[i], x);
                    sum.add(3, i, j, r[i], y);
                    x = faded(x, i);
                    y = faded(y, i);
                    sum.add(2, i, j, q[i], y);
                }
            }
        }
    }
    sum.finish(pairs);
}

// A vector of a panel of values: columns from c on of token t; `last` is the column after those of v, if there is one.
LINATTN_INLINE void prepare_line(
    const Call& call, const Strided& of, const Place& at, int64_t t, bool there, float last, float* to, int64_t c) {
    const int64_t rest = call.values - c;
    const int m = !there || rest < 0 ? 0 : least(rest, LANES);
    store(to, load(of.data, of.dtype, of.at(at.row, t, at.head) + (m ? c : 0), m));
    if (there && call.ones && rest >= 0 && rest < LANES) to[rest] = last;
}

}  // namespace LINATTN_ISA
}  // namespace linattn

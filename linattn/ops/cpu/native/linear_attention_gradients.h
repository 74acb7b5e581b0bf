// Gradients of a block's keys, reads and decays.
#pragma once

#include "linear_attention_slab.h"

namespace linattn {
namespace LINATTN_ISA {

// Inner products of one block, with channels in the lanes: of the state before it with the gradients of the reads, of the gradient of the
// state after it with the writes, and of the two with each other; and for each pair of tokens of the gradient of one's read with the
// other's write.
template <int RULE>
struct Met {
    using F = Family<RULE>;
    const float *reads, *writes, *states;  // [READ, lanes], [WRITE, lanes], [lanes]
    const float* pairs;
    int64_t lanes;
};

// Gradients of the same lanes of four tokens; those of q and k are with respect to the scaled q and k.
template <int RULE>
struct Gradients {
    Float q[TOKENS], k[TOKENS], log[TOKENS], r[RULE == ERASE ? TOKENS : 1], w[RULE == ERASE ? TOKENS : 1], bonus[1];
    LINATTN_INLINE Gradients() {
        for (int i = 0; i < TOKENS; i++) q[i] = k[i] = log[i] = zero();
        for (int i = 0; i < (RULE == ERASE ? TOKENS : 1); i++) r[i] = w[i] = zero();
        bonus[0] = zero();
    }
};

template <int RANK, int RULE>
struct Combine {
    using F = Family<RULE>;
    static constexpr bool ERASES = RULE == ERASE;
    const Met<RULE>& met;
    const Float *q, *k, *r, *w;  // r: the vector of the second read
    const Factors& f;
    Float u;
    Gradients<RULE>& to;

    LINATTN_INLINE Float pair(int matrix, int i, int j) const { return splat(met.pairs[(matrix * TOKENS + i) * TOKENS + j]); }
    LINATTN_INLINE Float faded(Float x, Float by) const { return RANK == NONE ? x : x * by; }

    // Token i's reads of a source: `inside` after its own decay, `outside` before it. The gradients of the decays between the source and i
    // are summed in `sum`, the latest token first.
    LINATTN_INLINE void reads(int i, Float first, Float second, Float inside, Float outside, Float& sum) const {
        first = faded(first, RULE == BONUS ? outside : inside);
        to.q[i] = to.q[i] + first;
        if (RANK != NONE && RULE != BONUS) sum = fma(q[i], first, sum);
        if constexpr (F::READS == 2) {
            second = faded(second, ERASES ? outside : inside);
            Float& of = (ERASES ? to.r : to.k)[i];
            of = of + second;
            if (RANK != NONE && !ERASES) sum = fma(r[i], second, sum);
        }
        if (RANK == NONE) return;
        to.log[i] = to.log[i] + sum;
        if (RULE == BONUS) sum = fma(q[i], first, sum);
        if (ERASES) sum = fma(r[i], second, sum);
    }

    LINATTN_INLINE void state(int64_t c) const {  // the source is the state before the block
        Float sum = RANK == NONE ? zero() : f.until(TOKENS - 1) * load(met.states + c);
        for (int i = TOKENS - 1; i >= 0; i--) {
            const Float second = F::READS == 2 ? load(met.reads + (TOKENS + i) * met.lanes + c) : zero();
            reads(i, load(met.reads + i * met.lanes + c), second, f.until(i), i ? f.until(i - 1) : splat(1.0f), sum);
        }
    }

    LINATTN_INLINE void token(int j, int64_t c) const {  // the source is the write of token j
        Float written = faded(load(met.writes + j * met.lanes + c), f.since(j)), sum = k[j] * written;
        to.k[j] = to.k[j] + written;
        if constexpr (ERASES) {
            written = faded(load(met.writes + (TOKENS + j) * met.lanes + c), f.since(j));
            to.w[j] = to.w[j] + written;
            sum = fma(w[j], written, sum);
        }
        Float between[TOKENS + 1];  // decay from the source to token i, inclusive
        between[j] = splat(1.0f);
        for (int i = j + 1; i < TOKENS; i++) between[i] = RANK == NONE ? between[j] : between[i - 1] * f.alpha[i];
        for (int i = TOKENS - 1; i > j; i--) {
            const Float inside = between[i], outside = between[i - 1];
            const Float by_q = faded(q[i], RULE == BONUS ? outside : inside);
            Float first = pair(0, i, j) * k[j], second = zero(), of_k = pair(0, i, j) * by_q;
            if constexpr (F::READS == 2) {
                const Float by_r = faded(r[i], ERASES ? outside : inside);
                second = pair(1, i, j) * k[j];
                of_k = fma(pair(1, i, j), by_r, of_k);
                if constexpr (ERASES) {
                    first = fma(pair(2, i, j), w[j], first);
                    second = fma(pair(3, i, j), w[j], second);
                    to.w[j] = fma(pair(2, i, j), by_q, fma(pair(3, i, j), by_r, to.w[j]));
                }
            }
            to.k[j] = to.k[j] + of_k;
            reads(i, first, second, inside, outside, sum);
        }
        const Float own = RULE == BONUS ? pair(0, j, j) * u : pair(0, j, j);
        to.q[j] = fma(own, k[j], to.q[j]);
        to.k[j] = fma(own, q[j], to.k[j]);
        if (RULE == BONUS) to.bonus[0] = fma(pair(0, j, j) * q[j], k[j], to.bonus[0]);
        if constexpr (ERASES) {
            to.q[j] = fma(pair(2, j, j), w[j], to.q[j]);
            to.w[j] = fma(pair(2, j, j), q[j], to.w[j]);
        }
    }
};

// Inner products of the gradients of reads with the writes, for each pair of tokens.
template <int RULE>
void meet(const Block<RULE>& block, int64_t columns, float* pairs) {
    using F = Family<RULE>;
    Sums<F::PAIRS> sum;
    for (int64_t c = 0; c < columns; c += LANES)
        for (int j = 0; j < TOKENS; j++)
            for (int i = j; i < TOKENS; i++) {
                const Float o = load(block.values.at(F::GRADIENT + i, c)), v = load(block.values.at(F::VALUE + j, c));
                sum.add(0, i, j, o, v);
                if constexpr (F::READS == 2) {
                    const Float x = load(block.values.at(F::GRADIENT + TOKENS + i, c));
                    if (i > j) sum.add(1, i, j, x, v);
                    if constexpr (RULE == ERASE) {
                        const Float written = load(block.values.at(F::VALUE + TOKENS + j, c));
                        sum.add(2, i, j, o, written);
                        if (i > j) sum.add(3, i, j, x, written);
                    }
                }
            }
    sum.finish(pairs);
}

}  // namespace LINATTN_ISA
}  // namespace linattn

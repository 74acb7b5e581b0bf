// y = x r w silu(g) over the channels of a head, with r = 1 / sqrt(share * sum of x^2 + eps), and its gradients.
#include "rows.h"

namespace linattn {
namespace LINATTN_ISA {
namespace {

constexpr int64_t SPAN = 64;  // tokens of a task
constexpr int64_t WIDEST = 1024;  // channels of a head

// `w` is [own, size], one row for all heads or one for each, or null; without a gate its data are null.
struct Norm {
    Rows x, gate;
    const float* w;
    int64_t heads, size, own;
    float share, eps;

    // Of the head that begins at channel `first` of token t.
    LINATTN_INLINE float scale(int64_t row, int64_t t, int64_t first) const {
        Float total = zero();
        for (int64_t i = 0; i < size; i += LANES) {
            const Float own = x.load(row, t, first + i, lanes(i));
            total = fma(own, own, total);
        }
        return 1.0f / __builtin_sqrtf(sum(total) * share + eps);
    }
    LINATTN_INLINE int lanes(int64_t i) const { return int(min(LANES, size - i)); }
    LINATTN_INLINE Float weight(int64_t head, int64_t i) const {
        return w ? load(w + (own > 1 ? head : 0) * size + i, lanes(i)) : splat(1.0f);
    }
};

}  // namespace

LINATTN_ENTRY(norm_forward)
(LINATTN_ROWS(x), LINATTN_ROWS(gate), const float* w, LINATTN_ROWS(y), double share, double eps, int64_t batch, int64_t tokens,
 int64_t heads, int64_t size, int64_t own, int64_t threads) {
    LINATTN_THESE_ROWS(x);
    LINATTN_THESE_ROWS(gate);
    LINATTN_THESE_ROWS(y);
    const Norm norm{x, gate, w, heads, size, own, float(share), float(eps)};
    const int64_t spans = (tokens + SPAN - 1) / SPAN;
    parallel(batch * spans, threads, [&](int64_t task) {
        const int64_t row = task / spans, begin = task % spans * SPAN, end = min(tokens, begin + SPAN);
        for (int64_t t = begin; t < end; t++)
            for (int64_t head = 0; head < heads; head++) {
                const int64_t first = head * size;
                const Float r = splat(norm.scale(row, t, first));
                for (int64_t i = 0; i < size; i += LANES) {
                    const int n = norm.lanes(i);
                    Float to = x.load(row, t, first + i, n) * r * norm.weight(head, i);
                    if (gate.data) {
                        const Float g = gate.load(row, t, first + i, n);
                        to *= g * sigmoid(g);
                    }
                    y.store(row, t, first + i, to, n);
                }
            }
    });
}

// `parts` [batch * spans, own, size], with spans of 64 tokens, is what is added up to the gradient of w; null without w.
LINATTN_ENTRY(norm_backward)
(LINATTN_ROWS(x), LINATTN_ROWS(gate), const float* w, LINATTN_ROWS(dy), LINATTN_ROWS(dx), LINATTN_ROWS(dgate), float* parts, double share,
 double eps, int64_t batch, int64_t tokens, int64_t heads, int64_t size, int64_t own, int64_t threads) {
    LINATTN_THESE_ROWS(x);
    LINATTN_THESE_ROWS(gate);
    LINATTN_THESE_ROWS(dy);
    LINATTN_THESE_ROWS(dx);
    LINATTN_THESE_ROWS(dgate);
    const Norm norm{x, gate, w, heads, size, own, float(share), float(eps)};
    const int64_t spans = (tokens + SPAN - 1) / SPAN;
    parallel(batch * spans, threads, [&](int64_t task) {
        const int64_t row = task / spans, begin = task % spans * SPAN, end = min(tokens, begin + SPAN);
        float* total = parts ? parts + task * own * size : nullptr;
        for (int64_t i = 0; total && i < own * size; i++) total[i] = 0.0f;
        const Float one = splat(1.0f);
        for (int64_t t = begin; t < end; t++)
            for (int64_t head = 0; head < heads; head++) {
                const int64_t first = head * size;
                const float scale = norm.scale(row, t, first);
                const Float r = splat(scale);
                float direct[WIDEST];  // the gradient of what is normed
                Float along = zero();
                for (int64_t i = 0; i < size; i += LANES) {
                    const int n = norm.lanes(i);
                    const Float normed = x.load(row, t, first + i, n) * r, of = dy.load(row, t, first + i, n);
                    Float gated = of;
                    if (gate.data) {
                        const Float g = gate.load(row, t, first + i, n), s = sigmoid(g);
                        gated = of * g * s;
                        dgate.store(row, t, first + i, of * normed * norm.weight(head, i) * s * (one + g * (one - s)), n);
                    }
                    if (total) {
                        float* at = total + (own > 1 ? head : 0) * size + i;
                        store(at, fma(gated, normed, load(at, n)), n);
                    }
                    gated *= norm.weight(head, i);
                    store(direct + i, gated, n);
                    along = fma(gated, normed, along);
                }
                const Float back = splat(sum(along) * norm.share * scale);
                for (int64_t i = 0; i < size; i += LANES) {
                    const int n = norm.lanes(i);
                    dx.store(row, t, first + i, r * (load(direct + i, n) - x.load(row, t, first + i, n) * back), n);
                }
            }
    });
}

}  // namespace LINATTN_ISA
}  // namespace linattn

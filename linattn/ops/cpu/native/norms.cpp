// y = x r w silu(g) over the channels of a head, with r = 1 / sqrt(share * sum of x^2 + eps), and its gradients.
#include "lanes.h"
#include "rows.h"

namespace linattn {
namespace LINATTN_ISA {
namespace {

constexpr int64_t SPAN = 64;  // tokens of a task
constexpr int64_t WIDEST = 1024;  // channels of a head

struct Sizes {
    int64_t batch, tokens, heads, size, own;
    float share, eps;
};

// LANES heads, of a token and of the next ones, so that one number per head fills a vector.
struct Heads {
    int64_t row, count, token[LANES], head[LANES];
    LINATTN_INLINE int64_t at(const Rows& of, int i, int64_t size) const { return of.at(row, token[i]) + head[i] * size; }
};

// Calls body(heads) for tokens [begin, end).
template <class Body>
LINATTN_INLINE void by_heads(const Sizes& of, int64_t row, int64_t begin, int64_t end, Body body) {
    Heads heads{row, 0, {}, {}};
    for (int64_t t = begin; t < end; t++)
        for (int64_t head = 0; head < of.heads; head++) {
            heads.token[heads.count] = t;
            heads.head[heads.count] = head;
            if (++heads.count < LANES && (t + 1 < end || head + 1 < of.heads)) continue;
            body(heads);
            heads.count = 0;
        }
}

// `w` is [own, size], one row for all heads or one for each, or null; without a gate its data are null. T: the type of all numbers, or void.
template <class T>
struct Norm {
    RowsOf<T> x, gate;
    const float* w;
    Sizes of;

    // r of each head.
    LINATTN_INLINE void scales(const Heads& heads, float (&r)[LANES]) const {
        Float squares[LANES] = {};
        for (int i = 0; i < heads.count; i++) {
            const int64_t at = heads.at(x, i, of.size);
            vectors(0, of.size, [&](int64_t c, int n) {
                const Float own = x.get(at + c, n);
                squares[i] = fma(own, own, squares[i]);
            });
        }
        store(r, sums(squares));
        for (float& one : r) one = 1.0f / __builtin_sqrtf(one * of.share + of.eps);
    }
    LINATTN_INLINE int64_t weights(const Heads& heads, int i) const { return of.own > 1 ? heads.head[i] * of.size : 0; }
    LINATTN_INLINE Float weight(int64_t at, int n) const { return w ? load(w + at, n) : splat(1.0f); }

    void forward(const RowsOf<T>& y, const Heads& heads) const {
        float r[LANES];
        scales(heads, r);
        for (int i = 0; i < heads.count; i++) {
            const int64_t from = heads.at(x, i, of.size), to = heads.at(y, i, of.size), by = weights(heads, i);
            const int64_t gates = gate.data ? heads.at(gate, i, of.size) : 0;
            vectors(0, of.size, [&](int64_t c, int n) {
                Float normed = x.get(from + c, n) * r[i] * weight(by + c, n);
                if (gate.data) {
                    const Float g = gate.get(gates + c, n);
                    normed *= g * sigmoid(g);
                }
                y.put(to + c, normed, n);
            });
        }
    }

    // The gradient of w is added to `total` [own, size], unless null.
    void backward(const RowsOf<T>& dy, const RowsOf<T>& dx, const RowsOf<T>& dgate, float* total, const Heads& heads) const {
        const int64_t padded = (of.size + LANES - 1) / LANES * LANES;
        float r[LANES], back[LANES], direct[LANES * WIDEST];  // direct: the gradient of the normed values
        Float along[LANES] = {};
        const Float one = splat(1.0f);
        scales(heads, r);
        for (int i = 0; i < heads.count; i++) {
            const int64_t from = heads.at(x, i, of.size), given = heads.at(dy, i, of.size), by = weights(heads, i);
            const int64_t gates = gate.data ? heads.at(gate, i, of.size) : 0, to = gate.data ? heads.at(dgate, i, of.size) : 0;
            vectors(0, of.size, [&](int64_t c, int n) {
                const Float normed = x.get(from + c, n) * r[i], outer = dy.get(given + c, n);
                Float gated = outer;
                if (gate.data) {
                    const Float g = gate.get(gates + c, n), s = sigmoid(g);
                    gated = outer * g * s;
                    dgate.put(to + c, outer * normed * weight(by + c, n) * s * (one + g * (one - s)), n);
                }
                if (total) store(total + by + c, fma(gated, normed, load(total + by + c, n)), n);
                gated *= weight(by + c, n);
                store(direct + i * padded + c, gated);
                along[i] = fma(gated, normed, along[i]);
            });
        }
        store(back, sums(along));
        for (int i = 0; i < LANES; i++) back[i] *= of.share * r[i];
        for (int i = 0; i < heads.count; i++) {
            const int64_t from = heads.at(x, i, of.size), to = heads.at(dx, i, of.size);
            vectors(0, of.size, [&](int64_t c, int n) {
                dx.put(to + c, (load(direct + i * padded + c) - x.get(from + c, n) * back[i]) * r[i], n);
            });
        }
    }
};

// Calls body(number) with a null pointer of the common type of these tensors, or of void.
template <class Body>
LINATTN_INLINE void with_number(int64_t dtype, bool all, Body body) {
    if (all && dtype == FLOAT32) body((float*)nullptr);
    else if (all && dtype == BFLOAT16) body((bfloat16*)nullptr);
    else body((void*)nullptr);
}

// The T of a T*.
template <class P>
struct Pointer;
template <class T>
struct Pointer<T*> {
    using to = T;
};

// Calls body(task, row, begin, end) for spans of tokens.
template <class Body>
void by_spans(const Sizes& of, int64_t threads, Body body) {
    const int64_t spans = (of.tokens + SPAN - 1) / SPAN;
    parallel(of.batch * spans, threads, [&](int64_t task) {
        const int64_t begin = task % spans * SPAN;
        body(task, task / spans, begin, min(of.tokens, begin + SPAN));
    });
}

}  // namespace

LINATTN_ENTRY(norm_forward)
(LINATTN_ROWS(x), LINATTN_ROWS(gate), const float* w, LINATTN_ROWS(y), double share, double eps, int64_t batch, int64_t tokens,
 int64_t heads, int64_t size, int64_t own, int64_t threads) {
    LINATTN_THESE_ROWS(x);
    LINATTN_THESE_ROWS(gate);
    LINATTN_THESE_ROWS(y);
    const Sizes of{batch, tokens, heads, size, own, float(share), float(eps)};
    with_number(x.dtype, y.dtype == x.dtype && (!gate.data || gate.dtype == x.dtype), [&](auto number) {
        const Norm<typename Pointer<decltype(number)>::to> norm{{x}, {gate}, w, of};
        by_spans(of, threads, [&](int64_t, int64_t row, int64_t begin, int64_t end) {
            by_heads(of, row, begin, end, [&](const Heads& some) { norm.forward({y}, some); });
        });
    });
}

// `parts` [batch * spans, own, size], with spans of 64 tokens, are summed to the gradient of w; null without w.
LINATTN_ENTRY(norm_backward)
(LINATTN_ROWS(x), LINATTN_ROWS(gate), const float* w, LINATTN_ROWS(dy), LINATTN_ROWS(dx), LINATTN_ROWS(dgate), float* parts, double share,
 double eps, int64_t batch, int64_t tokens, int64_t heads, int64_t size, int64_t own, int64_t threads) {
    LINATTN_THESE_ROWS(x);
    LINATTN_THESE_ROWS(gate);
    LINATTN_THESE_ROWS(dy);
    LINATTN_THESE_ROWS(dx);
    LINATTN_THESE_ROWS(dgate);
    const Sizes of{batch, tokens, heads, size, own, float(share), float(eps)};
    with_number(x.dtype, dy.dtype == x.dtype && (!gate.data || gate.dtype == x.dtype), [&](auto number) {
        const Norm<typename Pointer<decltype(number)>::to> norm{{x}, {gate}, w, of};
        by_spans(of, threads, [&](int64_t task, int64_t row, int64_t begin, int64_t end) {
            float* total = parts ? parts + task * own * size : nullptr;
            if (total) memset(total, 0, own * size * sizeof(float));
            by_heads(of, row, begin, end, [&](const Heads& some) { norm.backward({dy}, {dx}, {dgate}, total, some); });
        });
    });
}

}  // namespace LINATTN_ISA
}  // namespace linattn

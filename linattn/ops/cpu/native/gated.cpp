// y = silu(g) x, or sigmoid(g) x without `swish`, elementwise, and its gradients.
#include "rows.h"

namespace linattn {
namespace LINATTN_ISA {
namespace {

constexpr int64_t SPAN = 8192;  // numbers of a task

// Calls body(first, n) for vectors of `count` numbers, with a pointer of their type.
template <class Body>
void by_spans(int64_t dtype, int64_t count, int64_t threads, Body body) {
    parallel((count + SPAN - 1) / SPAN, threads, [&](int64_t task) {
        const auto all = [&](auto* type) {
            vectors(task * SPAN, min(SPAN, count - task * SPAN), [&](int64_t i, int n) { body(type, i, n); });
        };
        if (dtype == BFLOAT16) all((bfloat16*)nullptr);
        else if (dtype == FLOAT16) all((float16*)nullptr);
        else all((float*)nullptr);
    });
}

}  // namespace

LINATTN_ENTRY(gated_forward)
(int64_t dtype, int64_t swish, const void* g, const void* x, void* y, int64_t count, int64_t threads) {
    by_spans(dtype, count, threads, [=](auto* type, int64_t i, int n) {
        using Numbers = decltype(type);
        const Float gate = load((Numbers)g + i, n), s = sigmoid(gate);
        store((Numbers)y + i, (swish ? gate * s : s) * load((Numbers)x + i, n), n);
    });
}

LINATTN_ENTRY(gated_backward)
(int64_t dtype, int64_t swish, const void* g, const void* x, const void* dy, void* dg, void* dx, int64_t count, int64_t threads) {
    by_spans(dtype, count, threads, [=](auto* type, int64_t i, int n) {
        using Numbers = decltype(type);
        const Float gate = load((Numbers)g + i, n), s = sigmoid(gate), of = load((Numbers)dy + i, n), one = splat(1.0f);
        store((Numbers)dx + i, of * (swish ? gate * s : s), n);
        const Float slope = swish ? s * (one + gate * (one - s)) : s * (one - s);
        store((Numbers)dg + i, of * load((Numbers)x + i, n) * slope, n);
    });
}

}  // namespace LINATTN_ISA
}  // namespace linattn

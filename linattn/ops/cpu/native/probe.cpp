// Entry points for the tests of vector.h and of the pool.
#include "pool.h"
#include "vector.h"

namespace linattn {
namespace LINATTN_ISA {

LINATTN_ENTRY(lanes)(int64_t* lanes, int64_t) { *lanes = LANES; }

// y[i] = x[i] with a conversion of dtype.
LINATTN_ENTRY(convert)(const void* x, int64_t from, void* y, int64_t to, int64_t count, int64_t threads) {
    parallel((count + LANES - 1) / LANES, threads, [=](int64_t i) {
        const int n = count - i * LANES < LANES ? int(count - i * LANES) : LANES;
        store(y, to, i * LANES, load(x, from, i * LANES, n), n);
    });
}

// y[i] = exp(x[i]) or 2^x[i], for x[i] <= 0.
LINATTN_ENTRY(exp_below)(const float* x, float* y, int64_t base_two, int64_t count, int64_t threads) {
    parallel((count + LANES - 1) / LANES, threads, [=](int64_t i) {
        const int n = count - i * LANES < LANES ? int(count - i * LANES) : LANES;
        const Float at = load(x + i * LANES, n);
        store(y + i * LANES, base_two ? exp2_below(at) : exp_below(at), n);
    });
}

}  // namespace LINATTN_ISA
}  // namespace linattn

// Steps of finish.h without a preceding product.
#include "finish.h"
#include "rows.h"

namespace linattn {
namespace LINATTN_ISA {
namespace {

constexpr int64_t SPAN = 4096;  // numbers of a task
constexpr int64_t EACH = 16;    // cost of the steps of one number, in products

}  // namespace

// Computes y, the steps applied to x [rows, size].
LINATTN_ENTRY(finish)
(const void* x, int64_t dtype, float* y, int64_t rows, int64_t size, const void* steps, int64_t count, int64_t threads) {
    const int64_t some = SPAN > size ? SPAN / size : 1;  // rows of a task
    const int64_t enough = threads < 0 ? threads : worth(rows * size * EACH, threads);
    parallel((rows + some - 1) / some, enough, [=](int64_t task) {
        for (int64_t row = task * some; row < min(rows, (task + 1) * some); row++)
            vectors(0, size, [&](int64_t at, int n) {
                const Float own = load(x, dtype, row * size + at, n);
                store(y + row * size + at, finished(own, (const Step*)steps, count, at, n), n);
            });
    });
}

}  // namespace LINATTN_ISA
}  // namespace linattn

// The product of a matrix and a vector: as fast as the matrix can be read.
#include "pool.h"
#include "rows.h"

namespace linattn {
namespace LINATTN_ISA {
namespace {

constexpr int BLOCK = 64;     // rows of a task
constexpr int SPAN = 4096;    // numbers of the vector that are widened at a time
constexpr int AHEAD = 4096;   // bytes of the matrix that are asked for before they are needed

// w[i] x[i], i < count, summed into lanes; x has zeros behind.
template <class T>
LINATTN_INLINE Float products(const T* w, const float* x, int count) {
    Float one = zero(), other = zero();
    int i = 0;
    for (; i + 2 * LANES <= count; i += 2 * LANES) {
        __builtin_prefetch((const char*)(w + i) + AHEAD, 0, 2);
        one = fma(load(w + i), load(x + i), one);
        other = fma(load(w + i + LANES), load(x + i + LANES), other);
    }
    for (; i < count; i += LANES) one = fma(load(w + i, count - i), load(x + i), one);
    return one + other;
}

template <class T>
void matvec(const T* w, const T* x, T* y, int64_t outputs, int64_t inputs, int64_t row, int64_t threads) {
    parallel((outputs + BLOCK - 1) / BLOCK, threads, [=](int64_t block) {
        const int64_t first = block * BLOCK;
        const int count = int(min(BLOCK, outputs - first));
        alignas(64) float wide[SPAN + LANES], totals[BLOCK * LANES] = {};
        for (int64_t start = 0; start < inputs; start += SPAN) {
            const int span = int(min(SPAN, inputs - start));
            for (int i = 0; i < span; i += LANES) store(wide + i, load(x + start + i, span - i));
            for (int r = 0; r < count; r++) {
                float* total = totals + r * LANES;
                store(total, load(total) + products(w + (first + r) * row + start, wide, span));
            }
        }
        for (int r = 0; r < count; r += LANES) store(y + first + r, sums(totals + r * LANES), count - r);
    });
}

}  // namespace

// y [outputs] from w [outputs, inputs], whose rows are `row` numbers apart, and x [inputs], all of one dtype.
LINATTN_ENTRY(matvec)
(const void* w, const void* x, void* y, int64_t dtype, int64_t outputs, int64_t inputs, int64_t row, int64_t threads) {
    if (dtype == BFLOAT16) return matvec((const bfloat16*)w, (const bfloat16*)x, (bfloat16*)y, outputs, inputs, row, threads);
    if (dtype == FLOAT16) return matvec((const float16*)w, (const float16*)x, (float16*)y, outputs, inputs, row, threads);
    matvec((const float*)w, (const float*)x, (float*)y, outputs, inputs, row, threads);
}

}  // namespace LINATTN_ISA
}  // namespace linattn

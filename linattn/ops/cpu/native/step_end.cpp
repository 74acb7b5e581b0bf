// What ends a decoding step: places of the largest numbers, which are the likeliest tokens, and counters that grow by one.
#include "rows.h"

namespace linattn {
namespace LINATTN_ISA {
namespace {

struct Largest {
    const void* x;
    int64_t dtype, rows, columns;
    int64_t* to;
};

struct Counter {
    int64_t* numbers;
    int64_t count;
};

// Place of the first NaN, else of the first of the largest numbers.
template <class T>
int64_t place(const T* x, int64_t columns) {
    Float best = splat(-__builtin_inff());
    Int block{}, strange{};  // of each lane: the number of the vector that has its largest number, and all bits set after a NaN
    int64_t c = 0;
    for (; c + LANES <= columns; c += LANES) {
        const Float now = load(x + c);
        const Int larger = now > best;
        best = larger ? now : best;
        block = larger ? Int{} + int32_t(c / LANES) : block;
        strange |= now != now;
    }
    float lane[LANES], largest = -__builtin_inff();
    store(lane, best);
    int64_t found = 0;
    bool odd = false;
    for (int i = 0; i < LANES && c; i++) {
        const int64_t at = int64_t(block[i]) * LANES + i;
        odd = odd || strange[i];
        if (lane[i] > largest || (lane[i] == largest && at < found)) {
            largest = lane[i];
            found = at;
        }
    }
    for (int64_t i = odd ? 0 : c; i < columns; i++) {
        store(lane, load(x + i, 1));
        if (lane[0] != lane[0]) return i;
        if (lane[0] > largest) {
            largest = lane[0];
            found = i;
        }
    }
    return found;
}

}  // namespace

LINATTN_ENTRY(argmax)(const void* given, int64_t threads) {
    const Largest& of = *(const Largest*)given;
    parallel(of.rows, worth(of.rows * of.columns, threads), [&](int64_t r) {
        const int64_t at = r * of.columns;
        of.to[r] = of.dtype == BFLOAT16  ? place((const bfloat16*)of.x + at, of.columns)
                   : of.dtype == FLOAT16 ? place((const float16*)of.x + at, of.columns)
                                         : place((const float*)of.x + at, of.columns);
    });
}

LINATTN_ENTRY(increase)(const void* given, int64_t) {
    const int64_t count = *(const int64_t*)given;
    const Counter* counters = (const Counter*)((const int64_t*)given + 1);
    for (int64_t c = 0; c < count; c++)
        for (int64_t i = 0; i < counters[c].count; i++) counters[c].numbers[i]++;
}

}  // namespace LINATTN_ISA
}  // namespace linattn

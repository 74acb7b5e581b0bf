// The pool under a sanitizer of threads: THREADS, and anything behind it for a race that has to be found.
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "pool.h"

namespace {

// Plain memory, which is handed to the threads and back: whatever the pool leaves unordered is a race.
bool filled(int64_t count, int64_t threads, bool nested) {
    std::vector<int64_t> from(count), to(count);
    for (int64_t i = 0; i < count; i++) from[i] = i;
    linattn::parallel(count, threads, [&](int64_t i) {
        to[i] = from[i] + 1;
        if (nested) linattn::parallel(4, threads, [&](int64_t j) { to[i] += j; });
    });
    for (int64_t i = 0; i < count; i++)
        if (to[i] != i + (nested ? 7 : 1)) return false;
    return true;
}

bool all_filled(int64_t threads) {
    bool right = true;
    for (int round = 0; round < 100; round++)
        for (int64_t count : {0, 1, 2, 3, 40, 2, 7, 300, 2, 5, 64}) right &= filled(count, round % 3 ? threads : -threads, round % 5 == 0);
    return right;
}

}  // namespace

int main(int count, char** arguments) {
    const int64_t threads = atoi(arguments[1]);
    if (count > 2) {
        int64_t sum = 0;
        for (int round = 0; round < 100; round++) linattn::parallel(1000, threads, [&](int64_t i) { sum += i; });
        return printf("%ld\n", long(sum)) < 0;
    }
    bool right[3];
    std::thread others[2];  // who ask at a time
    for (int i = 0; i < 2; i++) others[i] = std::thread([&, i] { right[i] = all_filled(threads); });
    right[2] = all_filled(threads);
    for (auto& other : others) other.join();
    printf("%s\n", right[0] && right[1] && right[2] ? "right" : "wrong");
}

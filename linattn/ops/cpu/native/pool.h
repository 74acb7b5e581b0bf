// Own threads for short jobs and torch's OpenMP threads for long ones, so that no second OpenMP runtime is loaded.
//
// Torch's threads spin for milliseconds after each of its operations, so a long job on other threads would compete with them for the cores.
// But a job on torch's threads ends only when every thread has run: beside a busy process a short job would wait for the scheduler.
#pragma once

#include <atomic>
#include <cstdint>

namespace linattn {

// Calls body(context, i) for every i in [0, count) on at most `threads` threads, the caller included; if `threads` is negative, on -threads
// of torch's threads. Returns when all calls have ended.
// The order and the threads are unspecified: a body may only write what belongs to its i. Subnormal numbers are flushed to 0 during the
// calls. Within a body, or while another thread runs a job, everything runs on the caller's thread.
void run(int64_t count, int64_t threads, void (*body)(void* context, int64_t i), void* context);

constexpr int64_t FEW = 1 << 15;  // products: one core finishes them before a second thread has started

// Returns `threads`, or 1 for few `products`: beside a busy process another thread may be descheduled in the middle of its part.
inline int64_t worth(int64_t products, int64_t threads) { return products < FEW ? 1 : threads; }

template <class Body>
void parallel(int64_t count, int64_t threads, Body&& body) {
    run(count, threads, [](void* context, int64_t i) { (*static_cast<Body*>(context))(i); }, &body);
}

// The same with consecutive i on one thread, as far as the threads are equally fast: where body(i + 1) reads the memory behind that of
// body(i), what is prefetched reaches the core that reads it.
template <class Body>
void parallel_in_ranges(int64_t count, int64_t threads, Body&& body) {
    constexpr int64_t MOST = 64;
    struct alignas(64) {
        std::atomic<int64_t> i;
    } next[MOST];
    int64_t ranges = threads < 0 ? -threads : threads;
    ranges = ranges < 1 ? 1 : ranges < MOST ? ranges : MOST;
    for (int64_t r = 0; r < ranges; r++) next[r].i.store(count * r / ranges, std::memory_order_relaxed);
    parallel(ranges, threads, [&](int64_t own) {
        for (int64_t k = 0; k < ranges; k++) {  // what is left of other ranges after the own
            const int64_t r = (own + k) % ranges, end = count * (r + 1) / ranges;
            for (int64_t i; (i = next[r].i.fetch_add(1, std::memory_order_relaxed)) < end;) body(i);
        }
    });
}

}  // namespace linattn

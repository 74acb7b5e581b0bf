// Own threads for short jobs and torch's OpenMP threads for long ones, so that no second OpenMP runtime is loaded.
//
// Torch's threads spin for milliseconds after each of its operations, so a long job on other threads would compete with them for the cores.
// But a job on torch's threads ends only when every thread has run: beside a busy process a short job would wait for the scheduler.
#pragma once

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

}  // namespace linattn

// Threads of our own for what is short, and torch's for what is long: no second runtime stands beside the one that torch brings.
//
// Torch's threads spin for milliseconds after each of its operations, and a long job of others would share their cores with that. But
// every one of them has to come before a job of theirs can end: beside a busy process a short one would wait for turns of the scheduler.
#pragma once

#include <cstdint>

namespace linattn {

// body(context, i) for every i in [0, count), on at most `threads` threads, the caller among them; on torch's, if it is negative, as many
// as its absolute. Returns when all are done.
// Which thread runs which i is left open, so that a body writes what belongs to its i and nothing else. Subnormal numbers
// count as 0 meanwhile. Called from within a body, or while another thread is at it, it runs all on the caller's thread.
void run(int64_t count, int64_t threads, void (*body)(void* context, int64_t i), void* context);

constexpr int64_t FEW = 1 << 15;  // products: a core has done them before another one has come

// `threads` for so many `products`, or 1: beside a busy process who has come may have to wait for its next turn with what it has begun.
inline int64_t worth(int64_t products, int64_t threads) { return products < FEW ? 1 : threads; }

template <class Body>
void parallel(int64_t count, int64_t threads, Body&& body) {
    run(count, threads, [](void* context, int64_t i) { (*static_cast<Body*>(context))(i); }, &body);
}

}  // namespace linattn

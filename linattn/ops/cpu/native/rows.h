// Tensors [batch, tokens, channels] of any dtype, and their sequences: rows of a batch, or packed end to end.
#pragma once

#include "pool.h"
#include "vector.h"

namespace linattn {
namespace LINATTN_ISA {

LINATTN_INLINE int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }

// Channels are contiguous; strides are in elements.
struct Rows {
    void* data;
    int64_t dtype, batch, token;

    LINATTN_INLINE int64_t at(int64_t row, int64_t t) const { return row * batch + t * token; }
    LINATTN_INLINE Float load(int64_t row, int64_t t, int64_t channel, int n) const {
        return LINATTN_ISA::load(data, dtype, at(row, t) + channel, n);
    }
    LINATTN_INLINE void store(int64_t row, int64_t t, int64_t channel, Float x, int n) const {
        LINATTN_ISA::store(data, dtype, at(row, t) + channel, x, n);
    }
};

// The same with an element type known at compile time; void: not known.
template <class T>
struct RowsOf : Rows {
    LINATTN_INLINE Float get(int64_t at, int n) const { return LINATTN_ISA::load((const T*)data + at, n); }
    LINATTN_INLINE void put(int64_t at, Float x, int n) const { LINATTN_ISA::store((T*)data + at, x, n); }
};
template <>
struct RowsOf<void> : Rows {
    LINATTN_INLINE Float get(int64_t at, int n) const { return LINATTN_ISA::load(data, dtype, at, n); }
    LINATTN_INLINE void put(int64_t at, Float x, int n) const { LINATTN_ISA::store(data, dtype, at, x, n); }
};

// Calls body(channel, n) for vectors of `count` channels.
template <class Body>
LINATTN_INLINE void vectors(int64_t first, int64_t count, Body body) {
    int64_t c = 0;
    for (; c + LANES <= count; c += LANES) body(first + c, LANES);
    if (c < count) body(first + c, int(count - c));
}

#define LINATTN_ROWS(name) void *name##_data, int64_t name##_dtype, int64_t name##_batch, int64_t name##_token
#define LINATTN_THESE_ROWS(name) \
    const Rows name { name##_data, name##_dtype, name##_batch, name##_token }

constexpr int CHUNK = 64;  // tokens between two saved states

// A sequence is the tokens [begin, end) of a row of the batch; its saved states begin at `slot`.
struct Sequence {
    int64_t row, begin, end, slot;
};
LINATTN_INLINE Sequence sequence(int64_t n, int64_t tokens, const int64_t* ends) {
    if (!ends) return {n, 0, tokens, n * ((tokens + CHUNK - 1) / CHUNK)};
    return {0, ends[n], ends[n + 1], ends[n] / CHUNK + n};
}

constexpr int SLAB = 64, BLOCKS = SLAB / LANES;  // channels of a task

// Channels [first, first + count) of all.
struct Slab {
    int64_t first, count;
    LINATTN_INLINE int lanes(int block) const { return int(min(LANES, count - block * LANES)); }
    LINATTN_INLINE int blocks() const { return int((count + LANES - 1) / LANES); }
};
LINATTN_INLINE Slab slab(int64_t index, int64_t width) { return {index * SLAB, min(SLAB, width - index * SLAB)}; }

// to[i] = sum of x[p, i] over the parts p, in order.
inline void sum_parts(const float* x, int64_t parts, int64_t count, void* to, int64_t dtype, int64_t threads) {
    constexpr int64_t BLOCK = 4096;
    parallel((count + BLOCK - 1) / BLOCK, threads, [=](int64_t block) {
        const int64_t end = min(count, (block + 1) * BLOCK);
        for (int64_t i = block * BLOCK; i < end; i += LANES) {
            const int n = int(min(LANES, end - i));
            Float total = zero();
            for (int64_t p = 0; p < parts; p++) total += load(x + p * count + i, n);
            store(to, dtype, i, total, n);
        }
    });
}

}  // namespace LINATTN_ISA
}  // namespace linattn

// One token of the selective scan and of the short convolution, updating their states in place.
//
// Tensors have arbitrary strides of batch, heads and channels, 0 where one number is shared by all.
#include "pool.h"
#include "rows.h"
#include "selective.h"

namespace linattn {
namespace LINATTN_ISA {
namespace {

constexpr int64_t MOST = 256;  // numbers of a channel's state

template <class T>
LINATTN_INLINE Float gathered(const T* p, int64_t stride, int n) {
    if (stride == 1) return load(p, n);
    T whole[LANES] = {};
    for (int i = 0; i < n; i++) whole[i] = p[i * stride];
    return load(whole);
}
template <class T>
LINATTN_INLINE void scattered(T* p, int64_t stride, Float x, int n) {
    if (stride == 1) return store(p, x, n);
    T whole[LANES];
    store(whole, x);
    for (int i = 0; i < n; i++) p[i * stride] = whole[i];
}

struct Strided {
    const void* data;
    int64_t dtype, row, head, channel;

    // Of n channels from `first` on.
    LINATTN_INLINE Float at(int64_t r, int64_t h, int64_t first, int n) const {
        const int64_t place = r * row + h * head + first * channel;
        if (dtype == BFLOAT16) return gathered((const bfloat16*)data + place, channel, n);
        if (dtype == FLOAT16) return gathered((const float16*)data + place, channel, n);
        return gathered((const float*)data + place, channel, n);
    }
};
#define LINATTN_STRIDED(name) const void *name##_data, int64_t name##_dtype, int64_t name##_row, int64_t name##_head, int64_t name##_channel
#define LINATTN_THIS_STRIDED(name) \
    const Strided name { name##_data, name##_dtype, name##_row, name##_head, name##_channel }

// The state of one head and row, and the constants of the head.
struct Head {
    float* state;
    int64_t channel, number;  // its strides
    const float* a;
    int64_t a_channel, a_number;
    const float *b, *c;
    int64_t size;
};

// With lanes over the channels, whose states are contiguous.
LINATTN_INLINE Float along_channels(const Head& x, int64_t first, int n, Float dt, Float written) {
    Float y = zero();
    Fade left = {};
    for (int64_t i = 0; i < x.size; i++) {
        if (i == 0 || x.a_number) left = faded(dt, gathered(x.a + first * x.a_channel + i * x.a_number, x.a_channel, n) * LOG2E);
        float* place = x.state + first + i * x.number;
        const Float h = carried(left, load(place, n), written * x.b[i]);
        store(place, h, n);
        y = fma(h, splat(x.c[i]), y);
    }
    return y;
}

// With lanes over the numbers of a channel.
LINATTN_INLINE Float along_numbers(const Head& x, int64_t first, int n, Float dt, Float written) {
    alignas(64) float dts[LANES], writtens[LANES], parts[LANES * LANES] = {};
    store(dts, dt);
    store(writtens, written);
    for (int lane = 0; lane < n; lane++) {
        Float y = zero();
        for (int64_t i = 0; i < x.size; i += LANES) {
            const int count = int(min(LANES, x.size - i));
            const Float a = gathered(x.a + (first + lane) * x.a_channel + i * x.a_number, x.a_number, count) * LOG2E;
            float* place = x.state + (first + lane) * x.channel + i;
            const Float h = carried(faded(splat(dts[lane]), a), load(place, count), writtens[lane] * load(x.b + i));
            store(place, h, count);
            y = fma(h, load(x.c + i), y);
        }
        store(parts + lane * LANES, y);
    }
    return sums(parts);
}

// A step of the short convolution: state [batch, slots, width] and x [batch, width] in one dtype; w, whose rows are taps, of which the last
// meets x; y contiguous.
struct Convolution {
    Strided x;
    void* state;
    int64_t row, slot, channel, slots;  // strides of the state, and their number
    Strided w, bias;
    void* y;
    int64_t batch, width, taps, activation;
};

template <class T>
void convolve(const Convolution& of, int64_t r, int64_t first, int n) {
    const Float now = of.x.at(r, 0, first, n);
    Float z = of.bias.data ? of.bias.at(0, 0, first, n) : zero();
    T* place = (T*)of.state + r * of.row + first * of.channel;
    for (int64_t i = 0; i < of.slots; i++) {
        const Float past = gathered(place + i * of.slot, of.channel, n);
        const int64_t tap = i - of.slots + of.taps - 1;
        if (tap >= 0) z = fma(of.w.at(tap, 0, first, n), past, z);
        if (i > 0) scattered(place + (i - 1) * of.slot, of.channel, past, n);
    }
    if (of.slots > 0) scattered(place + (of.slots - 1) * of.slot, of.channel, now, n);
    z = fma(of.w.at(of.taps - 1, 0, first, n), now, z);
    store((T*)of.y + r * of.width + first, of.activation ? z * sigmoid(z) : z, n);
}

}  // namespace

// state [batch, heads, width, size] with channels or numbers contiguous; a [heads, width, size]; b and c [batch, heads / group, size],
// whose numbers are contiguous (their `channel` is not read); y [batch, heads, width], contiguous, in x's dtype.
LINATTN_ENTRY(selective_step)
(float* state, int64_t state_row, int64_t state_head, int64_t state_channel, int64_t state_number, const float* a, int64_t a_head,
 int64_t a_channel, int64_t a_number, LINATTN_STRIDED(x), LINATTN_STRIDED(dt), LINATTN_STRIDED(b), LINATTN_STRIDED(c), LINATTN_STRIDED(skip),
 LINATTN_STRIDED(bias), LINATTN_STRIDED(z), void* y, int64_t batch, int64_t heads, int64_t width, int64_t size, int64_t group,
 int64_t positive, double low, double high, int64_t threads) {
    LINATTN_THIS_STRIDED(x);
    LINATTN_THIS_STRIDED(dt);
    LINATTN_THIS_STRIDED(b);
    LINATTN_THIS_STRIDED(c);
    LINATTN_THIS_STRIDED(skip);
    LINATTN_THIS_STRIDED(bias);
    LINATTN_THIS_STRIDED(z);
    const int64_t slabs = (width + SLAB - 1) / SLAB;
    parallel(batch * heads * slabs, worth(batch * heads * width * size, threads), [&](int64_t task) {
        const int64_t r = task / slabs / heads, h = task / slabs % heads;
        const Slab part = slab(task % slabs, width);
        alignas(64) float own_b[MOST + LANES] = {}, own_c[MOST + LANES] = {};
        for (int64_t i = 0; i < size; i += LANES) {
            const int count = int(min(LANES, size - i));
            store(own_b + i, load(b.data, b.dtype, r * b.row + h / group * b.head + i, count));
            store(own_c + i, load(c.data, c.dtype, r * c.row + h / group * c.head + i, count));
        }
        const Head head = {
            state + r * state_row + h * state_head, state_channel, state_number, a + h * a_head, a_channel, a_number, own_b, own_c, size};
        for (int block = 0; block < part.blocks(); block++) {
            const int n = part.lanes(block);
            const int64_t first = part.first + block * LANES;
            Float step = dt.at(r, h, first, n);
            if (bias.data) step = step + bias.at(0, h, first, n);
            if (positive) step = softplus(step);
            step = step < float(low) ? splat(float(low)) : step > float(high) ? splat(float(high)) : step;
            const Float own_x = x.at(r, h, first, n);
            Float out = state_channel == 1 ? along_channels(head, first, n, step, step * own_x) : along_numbers(head, first, n, step, step * own_x);
            if (skip.data) out = fma(own_x, skip.at(0, h, first, n), out);
            if (z.data) {
                const Float gate = z.at(r, h, first, n);
                out = out * gate * sigmoid(gate);
            }
            store(y, x.dtype, (r * heads + h) * width + first, out, n);
        }
    });
}

LINATTN_ENTRY(convolution_step)(const void* given, int64_t threads) {
    const Convolution& of = *(const Convolution*)given;
    const int64_t slabs = (of.width + SLAB - 1) / SLAB;
    parallel(of.batch * slabs, of.width < 1024 ? 1 : threads, [&](int64_t task) {
        const int64_t r = task / slabs;
        const Slab part = slab(task % slabs, of.width);
        for (int block = 0; block < part.blocks(); block++) {
            const int n = part.lanes(block);
            const int64_t first = part.first + block * LANES;
            if (of.x.dtype == BFLOAT16) convolve<bfloat16>(of, r, first, n);
            else if (of.x.dtype == FLOAT16) convolve<float16>(of, r, first, n);
            else convolve<float>(of, r, first, n);
        }
    });
}

}  // namespace LINATTN_ISA
}  // namespace linattn

// The short convolution along time, y_t = silu(b + sum over i < W of w_i x_{t - (W - 1) + i}), with lanes over the channels.
#include "rows.h"

namespace linattn {
namespace LINATTN_ISA {
namespace {

constexpr int64_t SPAN = 256;   // tokens of a task
constexpr int64_t STRIP = 512;  // channels of a task: tokens are far apart in memory, and long runs suit the prefetcher
constexpr int TILE = 4;         // tokens at a time

template <int N>
struct Count {
    static constexpr int value = N;
};

// One call; tokens t < 0 are the last of `before` [batch, W - 1, width], or zeros without it. `w` is [W, width], `b` [width] or null.
template <class T, int W>
struct Convolution {
    const Rows &x, &y;  // y: also its gradient
    T* before;
    const float *w, *b;
    bool activation;
    int64_t tokens, width;

    // Position of token t in x, or null for zeros.
    LINATTN_INLINE T* input(int64_t row, int64_t t, T* past) const {
        if (t >= tokens) return nullptr;
        if (t >= 0) return (T*)x.data + x.at(row, t);
        return past ? past + (row * (W - 1) + t + W - 1) * width : nullptr;
    }
    LINATTN_INLINE T* output(int64_t row, int64_t t) const { return t < tokens ? (T*)y.data + y.at(row, t) : nullptr; }
};

template <class T>
LINATTN_INLINE Float load_or_zero(const T* p, int64_t channel, int n) {
    return p ? load(p + channel, n) : zero();
}

// The taps, and the inputs of N tokens and of the W - 1 before.
template <class T, int W, int N>
struct Seen {
    Float tap[W], x[N + W - 1], bias;
    LINATTN_INLINE Seen(const Convolution<T, W>& of, T* const (&from)[N + W - 1], int64_t channel, int n) {
        for (int i = 0; i < W; i++) tap[i] = load(of.w + i * of.width + channel, n);
        for (int i = 0; i < N + W - 1; i++) x[i] = load_or_zero(from[i], channel, n);
        bias = of.b ? load(of.b + channel, n) : zero();
    }
    LINATTN_INLINE Float at(int token) const {  // input of the activation
        Float z = bias;
        LINATTN_UNROLL
        for (int i = 0; i < W; i++) z = fma(tap[i], x[token + i], z);
        return z;
    }
};

// Tokens [t, t + N) of a strip.
template <int N, class T, int W>
void forward(const Convolution<T, W>& of, int64_t row, int64_t t, int64_t first, int64_t count) {
    T *from[N + W - 1], *to[N];
    for (int i = 0; i < N + W - 1; i++) from[i] = of.input(row, t + i - (W - 1), of.before);
    for (int i = 0; i < N; i++) to[i] = of.output(row, t + i);
    vectors(first, count, [&](int64_t channel, int n) {
        const Seen<T, W, N> seen(of, from, channel, n);
        LINATTN_UNROLL
        for (int i = 0; i < N; i++) {
            const Float z = seen.at(i);
            store(to[i] + channel, of.activation ? z * sigmoid(z) : z, n);
        }
    });
}

// Gradients of the inputs [t - (W - 1), t + N - (W - 1)) that exist, and of w and b, added to `parts` [W + 1, width] if given. `last` has
// the gradients before the activation of the last tokens, which the next ones need.
template <int N, class T, int W>
void backward(
    const Convolution<T, W>& of, T* const (&to)[N], float* parts, float (*last)[STRIP], int64_t row, int64_t t, int64_t first, int64_t count) {
    T *from[N + W - 1], *by[N];
    for (int i = 0; i < N + W - 1; i++) from[i] = of.input(row, t + i - (W - 1), of.before);
    for (int i = 0; i < N; i++) by[i] = of.output(row, t + i);
    vectors(first, count, [&](int64_t channel, int n) {
        const Seen<T, W, N> seen(of, from, channel, n);
        const Float one = splat(1.0f);
        Float dz[N + W - 1];
        for (int i = 0; i < W - 1; i++) dz[i] = load(last[i] + channel - first);
        LINATTN_UNROLL
        for (int i = 0; i < N; i++) {
            Float own = load_or_zero(by[i], channel, n);
            if (of.activation) {
                const Float z = seen.at(i), s = sigmoid(z);
                own *= s * (one + z * (one - s));
            }
            dz[i + W - 1] = own;
        }
        for (int i = 0; i < W - 1; i++) store(last[i] + channel - first, dz[i + N]);
        LINATTN_UNROLL
        for (int i = 0; i < N; i++) {
            Float sum = zero();
            LINATTN_UNROLL
            for (int k = 0; k < W; k++) sum = fma(seen.tap[k], dz[i + W - 1 - k], sum);
            if (to[i]) store(to[i] + channel, sum, n);
        }
        if (!parts) return;
        LINATTN_UNROLL
        for (int k = 0; k <= W; k++) {
            float* at = parts + k * of.width + channel;
            Float total = load(at, n);
            LINATTN_UNROLL
            for (int i = 0; i < N; i++) total = k < W ? fma(dz[i + W - 1], seen.x[i + k], total) : total + dz[i + W - 1];
            store(at, total, n);
        }
    });
}

// Tokens [begin, end) of a row and a strip of channels. The W - 1 tokens after `end` also depend on these inputs and are recomputed.
template <class T, int W>
void backward_of_span(
    const Convolution<T, W>& of, const Rows& dx, T* dbefore, float* parts, int64_t row, int64_t begin, int64_t end, int64_t first, int64_t count) {
    alignas(64) float last[W][STRIP] = {};
    for (int k = 0; k <= W; k++) memset(parts + k * of.width + first, 0, count * sizeof(float));
    const Convolution<T, W> gradient{dx, dx, nullptr, nullptr, nullptr, false, of.tokens, of.width};
    const auto some = [&](auto tokens, int64_t t, float* parts) {
        constexpr int N = decltype(tokens)::value;
        T* to[N];
        for (int i = 0; i < N; i++) {
            const int64_t s = t + i - (W - 1);
            to[i] = s >= begin || begin == 0 ? gradient.input(row, s, dbefore) : nullptr;
        }
        backward<N>(of, to, parts, last, row, t, first, count);
    };
    int64_t t = begin;
    for (; t + TILE <= end; t += TILE) some(Count<TILE>{}, t, parts);
    for (; t < end; t++) some(Count<1>{}, t, parts);
    for (; t < end + W - 1; t++) some(Count<1>{}, t, nullptr);
}

// Calls body with a number of the type and the number of taps, 1 to 4.
template <class T, class Body>
LINATTN_INLINE void with_taps(int64_t taps, Body&& body) {
    if (taps == 1) body(T{}, Count<1>{});
    else if (taps == 2) body(T{}, Count<2>{});
    else if (taps == 3) body(T{}, Count<3>{});
    else body(T{}, Count<4>{});
}
template <class Body>
LINATTN_INLINE void with_kind(int64_t dtype, int64_t taps, Body&& body) {
    if (dtype == BFLOAT16) with_taps<bfloat16>(taps, body);
    else if (dtype == FLOAT16) with_taps<float16>(taps, body);
    else with_taps<float>(taps, body);
}

// Calls body(convolution, row, begin, end, first channel, number of channels) for each task.
template <class Body>
void spans(
    int64_t activation, const Rows& x, const void* before, const float* w, const float* b, const Rows& y, int64_t batch, int64_t tokens,
    int64_t width, int64_t taps, int64_t threads, Body body) {
    const int64_t spans = (tokens + SPAN - 1) / SPAN, strips = (width + STRIP - 1) / STRIP;
    parallel(batch * spans * strips, threads, [&](int64_t task) {
        const int64_t first = task % strips * STRIP, span = task / strips % spans, row = task / strips / spans;
        with_kind(x.dtype, taps, [&](auto number, auto count) {
            using T = decltype(number);
            const Convolution<T, decltype(count)::value> of{x, y, (T*)before, w, b, activation != 0, tokens, width};
            body(of, row, span * SPAN, min(tokens, (span + 1) * SPAN), first, min(STRIP, width - first));
        });
    });
}

}  // namespace

LINATTN_ENTRY(short_convolution_forward)
(int64_t activation, LINATTN_ROWS(x), const void* before, const float* w, const float* b, LINATTN_ROWS(y), int64_t batch, int64_t tokens,
 int64_t width, int64_t taps, int64_t threads) {
    LINATTN_THESE_ROWS(x);
    LINATTN_THESE_ROWS(y);
    spans(activation, x, before, w, b, y, batch, tokens, width, taps, threads,
          [&](const auto& of, int64_t row, int64_t t, int64_t end, int64_t first, int64_t count) {
              for (; t + TILE <= end; t += TILE) forward<TILE>(of, row, t, first, count);
              for (; t < end; t++) forward<1>(of, row, t, first, count);
          });
}

// `parts` is [batch * spans, taps + 1, width] with spans of 256 tokens: they are summed to the gradients of w and b.
LINATTN_ENTRY(short_convolution_backward)
(int64_t activation, LINATTN_ROWS(x), const void* before, const float* w, const float* b, LINATTN_ROWS(dy), LINATTN_ROWS(dx), void* dbefore,
 float* parts, int64_t batch, int64_t tokens, int64_t width, int64_t taps, int64_t threads) {
    LINATTN_THESE_ROWS(x);
    LINATTN_THESE_ROWS(dy);
    LINATTN_THESE_ROWS(dx);
    spans(activation, x, before, w, b, dy, batch, tokens, width, taps, threads,
          [&](const auto& of, int64_t row, int64_t begin, int64_t end, int64_t first, int64_t count) {
              float* own = parts + (row * ((tokens + SPAN - 1) / SPAN) + begin / SPAN) * (taps + 1) * width;
              backward_of_span(of, dx, (decltype(of.before))dbefore, own, row, begin, end, first, count);
          });
}

}  // namespace LINATTN_ISA
}  // namespace linattn

// Products of matrices with few vectors, limited by reading the matrices. Norms, gates and elementwise steps are fused into them.
#include <cmath>
#include <cstdlib>

#include "byte_dots.h"
#include "finish.h"
#include "pool.h"
#include "rounded.h"
#include "rows.h"

namespace linattn {
namespace LINATTN_ISA {
namespace {

constexpr int MOST = 8;      // matrices of a call
constexpr int BLOCK = 32;    // rows of a task
constexpr int AHEAD = 4096;  // prefetch distance in bytes of a matrix

// Arguments of a call, filled by linears.py. Vectors are contiguous. All tensors have one dtype, except a y with steps, which is float, and
// quantised matrices: `bits` 8, int8 with a float scale for each row; 4, two numbers a byte (rounded.h) with a float16 scale for each `group`.
struct Call {
    int64_t dtype, vectors, inputs, maps, gated;
    int64_t size, weights;  // of the norm: numbers per group (0: no norm), and number of weights
    double eps, share;      // added to `share` times the sum of squares
    const void *x, *norm, *gate, *residual;
    struct Map {
        const void *matrix, *bias;
        void* y;
        int64_t outputs, row;  // row: stride of rows
        const Step* steps;
        int64_t finishes;  // number of steps
        int64_t bits;      // 0: of the dtype of x
        const void* scales;
        int64_t group;
    } map[MOST];
};

thread_local struct Scratch {
    float* data = nullptr;
    int64_t size = 0;
    float* room(int64_t floats) {
        if (floats > size) {
            free(data);
            size = (floats + 1023) / 1024 * 1024;
            data = static_cast<float*>(aligned_alloc(64, size * sizeof(float)));
        }
        return data;
    }
    ~Scratch() { free(data); }
} scratch, own;  // of the call; of a thread, for a row of scales

LINATTN_INLINE Float silu(Float x) {
    const Float e = exp_below(x < zero() ? x : -x);  // of -|x|
    return x * ((x < zero() ? e : splat(1.0f)) / (splat(1.0f) + e));
}

// Vector `v` of the call as floats, normed and gated, padded with zeros to the length of `to`.
template <class T>
void prepare(const Call& call, int64_t v, float* to, int64_t row) {
    const T* x = (const T*)call.x + v * call.inputs;
    const T* gate = call.gate ? (const T*)call.gate + v * call.inputs : nullptr;
    for (int64_t i = 0; i < row; i += LANES) store(to + i, load(x + i, int(call.inputs - i < 0 ? 0 : min(LANES, call.inputs - i))));
    if (call.size == 0) return;
    for (int64_t first = 0; first < call.inputs; first += call.size) {
        Float squares = zero();
        for (int64_t i = 0; i < call.size; i += LANES) {
            const Float a = load(to + first + i, int(min(LANES, call.size - i)));
            squares = fma(a, a, squares);
        }
        const Float factor = splat(float(1.0 / std::sqrt(double(sum(squares)) * call.share + call.eps)));
        for (int64_t i = 0; i < call.size; i += LANES) {
            const int n = int(min(LANES, call.size - i));
            Float a = load(to + first + i, n) * factor;
            if (call.norm) a = a * load((const T*)call.norm + first % call.weights + i, n);
            if (gate) a = a * silu(load(gate + first + i, n));
            store(to + first + i, a, n);
        }
    }
}

// w · x[v] for V vectors with stride `row`, summed into lanes; x is padded with zeros.
template <int V, class T>
LINATTN_INLINE void products(const T* w, const float* x, int64_t row, int64_t count, float* totals, int64_t step) {
    Float one[V] = {}, other[V] = {};
    int64_t i = 0;
    for (; i + 2 * LANES <= count; i += 2 * LANES) {
        __builtin_prefetch((const char*)(w + i) + AHEAD, 0, 2);
        const Float a = load(w + i), b = load(w + i + LANES);
        for (int v = 0; v < V; v++) {
            one[v] = fma(a, load(x + v * row + i), one[v]);
            other[v] = fma(b, load(x + v * row + i + LANES), other[v]);
        }
    }
    for (; i < count; i += LANES) {
        const Float a = load(w + i, int(count - i < LANES ? count - i : LANES));
        for (int v = 0; v < V; v++) one[v] = fma(a, load(x + v * row + i), one[v]);
    }
    for (int v = 0; v < V; v++) store(totals + v * step, one[v] + other[v]);
}

constexpr int VECTORS = 8;

// Vectors of a call: as floats with stride `row`, and rounded if there are quantised matrices.
struct Vectors {
    const float* x;
    int64_t row;
    const Rounded* rounded;
    int64_t joined() const { return (2 * (row / UNIT) + 2 * LANES + 15) / 16 * 16; }  // room for scales of a row of a matrix and of a vector
};

// Scales of some rows of a 4-bit matrix times those of some vectors, all of them before any product: what was just stored is slow to load.
struct Scales {
    int64_t first, row, vectors;
    const float* joined;
    const float* at(int64_t r, int64_t v) const { return joined + ((r - first) * vectors + v) * row; }
};
LINATTN_INLINE Scales scales_of(
    const Call& call, const Call::Map& map, const Vectors& in, int64_t v, int64_t vectors, int64_t first, int64_t rows) {
    if (map.bits != 4) return {};
    const int64_t groups = call.inputs / map.group, all_groups = map.outputs * groups;
    float* to = own.room(rows * vectors * in.joined());
    const Scales all{first, in.joined(), vectors, to};
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < vectors; i++, to += all.row)
            join_scales((const float16*)map.scales, (first + r) * groups, all_groups, groups, map.group, in.rounded[v + i], to);
    return all;
}

// R rows of a matrix from r on with V vectors from v on, summed into lanes.
template <int R, int V, class T>
LINATTN_INLINE void rows_products(
    const Call& call, const Call::Map& map, const Vectors& in, int64_t v, int64_t r, const Scales& all, float* totals, int64_t step) {
    if (map.bits == 0) {
        for (int i = 0; i < R; i++)
            products<V>((const T*)map.matrix + (r + i) * map.row, in.x + v * in.row, in.row, call.inputs, totals + i * LANES, step);
        return;
    }
    if (map.bits == 8)
        return products8<R, V>((const int8_t*)map.matrix + r * map.row, map.row, in.rounded + v, call.inputs, totals, step);
    const float* scales[R * V];
    for (int i = 0; i < R * V; i++) scales[i] = all.at(r + i / V, i % V);
    const uint8_t* codes = (const uint8_t*)map.matrix + r * map.row;
    if (map.group == BLOCK32) products4<R, V, true>(codes, map.row, scales, in.rounded + v, call.inputs, totals, step);
    else products4<R, V, false>(codes, map.row, scales, in.rounded + v, call.inputs, totals, step);
}

// `count` rows of a matrix with V vectors from v on: some rows together, the rest one by one.
template <int R, int V, class T>
void rows_by(const Call& call, const Call::Map& map, const Vectors& in, int64_t v, int64_t first, int count, const Scales& scales, float* totals) {
    constexpr int STEP = BLOCK * LANES;
    int r = 0;
    for (; r + R <= count; r += R) rows_products<R, V, T>(call, map, in, v, first + r, scales, totals + r * LANES, STEP);
    for (; r < count; r++) rows_products<1, V, T>(call, map, in, v, first + r, scales, totals + r * LANES, STEP);
}
template <int V, class T>
void rows_of(const Call& call, const Call::Map& map, const Vectors& in, int64_t v, int64_t first, int count, const Scales& scales, float* totals) {
    constexpr int FEW = LANES == 16 ? 4 / V : V == 1 ? 2 : 1;  // with 4 bits, as many as there are registers for
    if (map.bits == 4) return rows_by<FEW, V, T>(call, map, in, v, first, count, scales, totals);
    rows_by<4 / V, V, T>(call, map, in, v, first, count, scales, totals);
}

// Rows [first, first + count) of a matrix with all vectors: results[v][r].
template <class T>
void multiply(const Call& call, const Call::Map& map, const Vectors& in, int64_t first, int count, float (*results)[BLOCK]) {
    alignas(64) float totals[4][BLOCK * LANES];
    for (int64_t v = 0; v < call.vectors;) {
        const int64_t left = call.vectors - v;
        const int some = left >= 4 ? 4 : left >= 2 ? 2 : 1;
        const Scales scales = scales_of(call, map, in, v, some, first, count);
        for (int k = 0; k < some; k++)
            for (int r = count; r % LANES != 0; r++) store(totals[k] + r * LANES, zero());
        if (some == 4) rows_of<4, T>(call, map, in, v, first, count, scales, totals[0]);
        else if (some == 2) rows_of<2, T>(call, map, in, v, first, count, scales, totals[0]);
        else rows_of<1, T>(call, map, in, v, first, count, scales, totals[0]);
        for (int k = 0; k < some; k++)
            for (int r = 0; r < count; r += LANES) {
                Float y = sums(totals[k] + r * LANES);
                const int n = int(min(LANES, count - r));
                if (map.bits == 8) y = y * load((const float*)map.scales + first + r, n);
                if (map.bias) y = y + load((const T*)map.bias + first + r, n);
                store(results[v + k] + r, y);
            }
        v += some;
    }
}

// The vectors of a call, prepared, in `scratch`; `rounded` has room for them.
template <class T>
Vectors vectors_of(const Call& call, Rounded* rounded) {
    bool quantised = false;
    for (int64_t m = 0; m < call.maps; m++) quantised = quantised || call.map[m].bits != 0;
    const int64_t row = quantised ? (call.inputs + 2 * UNIT - 1) / (2 * UNIT) * (2 * UNIT) : (call.inputs + 2 * LANES - 1) / LANES * LANES;
    const int64_t units = row / UNIT, whole = row + (quantised ? Rounded::floats(units) : 0);
    float* x = scratch.room(whole * call.vectors);
    for (int64_t v = 0; v < call.vectors; v++) {
        prepare<T>(call, v, x + v * row, row);
        if (!quantised) continue;
        rounded[v] = Rounded(x + call.vectors * row + v * (whole - row), units);
        for (int64_t u = 0; u < units; u++) round_unit(x + v * row + u * UNIT, u, rounded[v]);
    }
    return {x, row, rounded};
}

template <class T>
void linears(const Call& call, int64_t threads) {
    Rounded rounded[VECTORS];
    const Vectors in = vectors_of<T>(call, rounded);
    int64_t blocks[MOST + 1] = {0};
    const int64_t maps = call.gated ? 1 : call.maps;
    for (int64_t m = 0; m < maps; m++) blocks[m + 1] = blocks[m] + (call.map[m].outputs + BLOCK - 1) / BLOCK;
    const int64_t rows = blocks[maps] * BLOCK * (call.gated ? 2 : 1);
    parallel_in_ranges(blocks[maps], worth(rows * call.inputs * call.vectors, threads), [&](int64_t block) {
        int64_t m = 0;
        while (block >= blocks[m + 1]) m++;
        const Call::Map& map = call.map[m];
        const int64_t first = (block - blocks[m]) * BLOCK;
        const int count = int(min(BLOCK, map.outputs - first));
        float results[VECTORS][BLOCK], others[VECTORS][BLOCK];
        multiply<T>(call, map, in, first, count, results);
        if (call.gated) multiply<T>(call, call.map[1], in, first, count, others);
        for (int64_t v = 0; v < call.vectors; v++)
            for (int r = 0; r < count; r += LANES) {
                const int n = int(min(LANES, count - r));
                const int64_t at = v * map.outputs + first + r;
                Float y = load(results[v] + r);
                if (call.gated) y = silu(y) * load(others[v] + r);
                if (call.residual) y = y + load((const T*)call.residual + at, n);
                if (map.finishes) store((float*)map.y + at, finished(y, map.steps, map.finishes, first + r, n), n);
                else store((T*)map.y + at, y, n);
            }
    });
}

template <class T>
void normed(const Call& call) {
    const int64_t row = (call.inputs + 2 * LANES - 1) / LANES * LANES;
    float* x = scratch.room(row);
    for (int64_t v = 0; v < call.vectors; v++) {
        prepare<T>(call, v, x, row);
        for (int64_t i = 0; i < call.inputs; i += LANES)
            store((T*)call.map[0].y + v * call.inputs + i, load(x + i), int(min(LANES, call.inputs - i)));
    }
}

}  // namespace

// y = n(x) Wᵀ + b for each map, after its steps; one y = silu(..) ⊙ .. of the two if `gated`; without maps y = n(x).
LINATTN_ENTRY(linears)(const void* given, int64_t threads) {
    Call call;
    memcpy(&call, given, sizeof call);
    if (call.dtype == BFLOAT16) return call.maps ? linears<bfloat16>(call, threads) : normed<bfloat16>(call);
    if (call.dtype == FLOAT16) return call.maps ? linears<float16>(call, threads) : normed<float16>(call);
    return call.maps ? linears<float>(call, threads) : normed<float>(call);
}

}  // namespace LINATTN_ISA
}  // namespace linattn

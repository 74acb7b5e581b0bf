// Processes a block on one slab of a state's columns: forwards in time on S, backwards on its gradient.
#pragma once

#include "linear_attention_prepare.h"

namespace linattn {
namespace LINATTN_ISA {

struct Scratch {  // of a thread
    float* data = nullptr;
    int64_t size = 0;
    float* room(int64_t floats) {
        if (floats > size) {
            free(data);
            size = up(floats, 1 << 12);
            data = static_cast<float*>(aligned_alloc(64, size * sizeof(float)));
        }
        return data;
    }
    ~Scratch() { free(data); }
};

// Allocates consecutive pieces of scratch; without memory it only adds up their sizes.
struct Pieces {
    float* data;
    int64_t used = 0;
    float* take(int64_t floats) {
        float* piece = data + used;
        used += up(floats, 16);
        return data ? piece : nullptr;
    }
};

// The columns of a state in a task: values, and one more if keys are summed. Slabs are stored one after the other, each with rows of its own
// width in vectors.
struct Columns {
    int64_t first, last, there;  // there: end of the columns that are not padding
    Columns(const Call& call, int64_t part) {
        there = call.values + call.ones;
        const int64_t vectors = (there + LANES - 1) / LANES;
        first = vectors * part / call.parts * LANES;
        last = vectors * (part + 1) / call.parts * LANES;
        if (last < there) there = last;
    }
    int64_t count() const { return last - first; }
    int64_t real() const { return there - first; }
};

template <int W>
struct Width {
    static constexpr int value = W;
};

// body(Width<W>(), c) for slabs of at most WIDTH vectors that start at lane c.
template <int WIDTH, class Body>
LINATTN_INLINE void slabs(int64_t lanes, Body body) {
    int64_t c = 0;
    for (; c + WIDTH * LANES <= lanes; c += WIDTH * LANES) body(Width<WIDTH>(), c);
    for (; c < lanes; c += LANES) body(Width<1>(), c);
}

template <int RULE>
struct Block {
    using F = Family<RULE>;
    Panels<F::KEY_LINES> keys;
    Panels<F::VALUE_LINES> values;
    float *pairs, *beta;

    LINATTN_INLINE Float pair(int matrix, int i, int j) const { return splat(pairs[(matrix * TOKENS + i) * TOKENS + j]); }
    static constexpr int64_t extra() { return up(F::PAIRS, LANES) + up(TOKENS, LANES); }
    static int64_t size(const Call& call, const Columns& columns) {
        return Panels<F::KEY_LINES>::size(call.keys) + Panels<F::VALUE_LINES>::size(columns.count()) + extra();
    }
    Block(const Call& call, const Columns& columns, float* data) : keys{data}, values{data + Panels<F::KEY_LINES>::size(call.keys)} {
        pairs = values.data + Panels<F::VALUE_LINES>::size(columns.count());
        beta = pairs + up(F::PAIRS, LANES);
    }
};

template <int RULE, int W>
struct Slab {
    using F = Family<RULE>;
    const Block<RULE>& block;
    int64_t column;  // of its first lane

    LINATTN_INLINE float* line(int i, int w) const { return block.values.at(i, column + w * LANES); }

    // Calls out(t, column, o) for each token and computes the state after them.
    template <class Decay, class Out>
    LINATTN_INLINE void forward(float* S, int64_t rows, Decay decay, bool keep, Out out) const {
        Float sum[F::READ][W] = {}, value[F::WRITE][W];
        read(S, rows, block.keys, F::Y, sum);
        for (int t = 0; t < TOKENS; t++)
            for (int w = 0; w < W; w++) value[t][w] = load(line(F::VALUE + t, w));
        if constexpr (RULE == DELTA) overwrite(sum, value, keep);
        if constexpr (RULE == ERASE) erase(sum, value, keep);
        for (int t = 0; t < TOKENS; t++)
            for (int w = 0; w < W; w++) {
                Float o = sum[t][w];
                for (int j = 0; j <= t; j++) {
                    o = fma(block.pair(0, t, j), value[j][w], o);
                    if constexpr (RULE == ERASE) o = fma(block.pair(2, t, j), value[TOKENS + j][w], o);
                }
                out(t, column + w * LANES, o);
            }
        write(S, S, rows, block.keys, F::X, value, decay);
    }

    // v becomes β (v − k D), by forward substitution.
    LINATTN_INLINE void overwrite(const Float (&sum)[F::READ][W], Float (&value)[F::WRITE][W], bool keep) const {
        for (int t = 0; t < TOKENS; t++)
            for (int w = 0; w < W; w++) {
                Float missed = value[t][w] - sum[TOKENS + t][w];
                for (int j = 0; j < t; j++) missed = missed - block.pair(1, t, j) * value[j][w];
                value[t][w] = splat(block.beta[t]) * missed;
                if (!keep) continue;
                store(line(F::VALUE + t, w), value[t][w]);
                store(line(F::MISSED + t, w), missed);
            }
    }

    // Reads of the erase rule from the state before each token, which are written again.
    LINATTN_INLINE void erase(const Float (&sum)[F::READ][W], Float (&value)[F::WRITE][W], bool keep) const {
        for (int t = 0; t < TOKENS; t++)
            for (int w = 0; w < W; w++) {
                Float x = sum[TOKENS + t][w];
                for (int j = 0; j < t; j++) x = fma(block.pair(1, t, j), value[j][w], fma(block.pair(3, t, j), value[TOKENS + j][w], x));
                value[TOKENS + t][w] = x;
                if (keep) store(line(F::VALUE + TOKENS + t, w), x);
            }
    }

    // The same backwards, with reads and writes exchanged. `dS` is the gradient of the state after the block and becomes that of the state
    // before it; calls out(t, column, dv, dβ). Saves the gradients of the reads: of o, and of k D or the x of erase.
    template <class Decay, class Out>
    LINATTN_INLINE void backward(float* dS, int64_t rows, Decay decay, Out out) const {
        Float sum[F::WRITE][W] = {}, gradient[F::READ][W];
        read(dS, rows, block.keys, F::X, sum);
        for (int t = 0; t < TOKENS; t++)
            for (int w = 0; w < W; w++) gradient[t][w] = load(line(F::GRADIENT + t, w));
        for (int t = TOKENS - 1; t >= 0; t--)
            for (int w = 0; w < W; w++) {
                if constexpr (RULE == ERASE) {
                    const Float dx = written<2>(sum[TOKENS + t][w], gradient, t, w);
                    store(line(F::GRADIENT + TOKENS + t, w), gradient[TOKENS + t][w] = dx);
                }
                Float dv = written<0>(sum[t][w], gradient, t, w), dbeta = zero();
                if constexpr (RULE == DELTA) {
                    dbeta = dv * load(line(F::MISSED + t, w));
                    dv = splat(block.beta[t]) * dv;
                    store(line(F::GRADIENT + TOKENS + t, w), gradient[TOKENS + t][w] = -dv);
                }
                out(t, column + w * LANES, dv, dbeta);
            }
        write(dS, dS, rows, block.keys, F::Y, gradient, decay);
    }

    // The gradient of token t's write, from the reads of the tokens from t on. MATRIX: that of its pairs with q; those with r or k follow.
    template <int MATRIX>
    LINATTN_INLINE Float written(Float sum, const Float (&gradient)[F::READ][W], int t, int w) const {
        for (int i = t; i < TOKENS; i++) {
            sum = fma(block.pair(MATRIX, i, t), gradient[i][w], sum);
            if constexpr (F::READS == 2)
                if (i > t) sum = fma(block.pair(MATRIX + 1, i, t), gradient[TOKENS + i][w], sum);
        }
        return sum;
    }
};

template <int RANK, int LINES>
LINATTN_INLINE auto decay_of_rows(Panels<LINES> panels, int keep) {
    if constexpr (RANK == NONE) return Everything();
    else return OfRows<LINES>{panels, keep, nullptr};
}

// Calls body(slab, lane in it, row, m numbers of S from `at` on, lane of z or -1) for every vector of a state's columns.
template <int WIDTH, class Body>
LINATTN_INLINE void vectors(const Call& call, const Columns& columns, float* slab_of, Body body) {
    const int64_t rows = up(call.keys, LANES);
    slabs<WIDTH>(columns.count(), [&](auto width, int64_t c) {
        constexpr int W = decltype(width)::value;
        for (int64_t r = 0; r < call.keys; r++)
            for (int w = 0; w < W; w++) {
                const int64_t column = columns.first + c + w * LANES, rest = call.values - column;
                const int m = rest > 0 ? least(rest, LANES) : 0;
                const int z = call.ones && rest >= 0 && rest < LANES ? int(rest) : -1;
                body(slab_of + c * rows + (r * W + w) * LANES, r, m ? r * call.values + column : 0, m, z);
            }
    });
}

// Copies the state [K, V] and its z [K], zeros if absent, to slabs of columns, and back.
template <int WIDTH>
void load_state(const Call& call, const Columns& columns, int64_t index, const float* S, const float* z, float* to) {
    memset(to, 0, columns.count() * up(call.keys, LANES) * sizeof(float));
    if (S) S += index * call.keys * call.values;
    if (z) z += index * call.keys;
    if (!S && !z) return;
    vectors<WIDTH>(call, columns, to, [=](float* lanes, int64_t r, int64_t at, int m, int lane) {
        if (S) store(lanes, load(S + at, m));
        if (z && lane >= 0) lanes[lane] = z[r];
    });
}
template <int WIDTH>
void store_state(const Call& call, const Columns& columns, int64_t index, float* from, float* S, float* z) {
    if (S) S += index * call.keys * call.values;
    if (z) z += index * call.keys;
    vectors<WIDTH>(call, columns, from, [=](float* lanes, int64_t r, int64_t at, int m, int lane) {
        if (S && m) store(S + at, load(lanes), m);
        if (z && lane >= 0) z[r] = lanes[lane];
    });
}

// A task of a call: one sequence, one head, one part of the columns.
struct Task {
    Place at;
    int64_t sequence, part, slot;  // slot: index of its first chunk's saved state
    Task(const Call& call, int64_t i) {
        part = i % call.parts;
        at.head = i / call.parts % call.heads;
        sequence = i / call.parts / call.heads;
        at.row = call.ends ? 0 : sequence;
        at.first = call.ends ? call.ends[sequence] : 0;
        at.last = call.ends ? call.ends[sequence + 1] : call.tokens;
        slot = call.ends ? at.first / call.chunk() + sequence : sequence * ((call.tokens + call.chunk() - 1) / call.chunk());
    }
    int64_t index(const Call& call) const { return sequence * call.heads + at.head; }
    // Position of token t in outputs with one part for each share of the columns.
    int64_t token(const Call& call, int64_t t) const { return ((part * call.batch + at.row) * call.tokens + t) * call.heads + at.head; }
    // The saved state before chunk `n`.
    float* kept(const Call& call, const Columns& columns, int64_t n) const {
        const int64_t lanes = up(call.values + call.ones, LANES), rows = up(call.keys, LANES);
        return call.kept + (((slot + n) * call.heads + at.head) * lanes + columns.first) * rows;
    }
};

LINATTN_INLINE int64_t tasks(const Call& call) { return call.sequences * call.heads * call.parts; }

// Gradients of q and k. If a group's heads are one task, each is the sum over the heads, accumulated in `sums` up to the last head.
struct PerKey {
    const Call& call;
    const Task& task;
    const int64_t lanes = up(call.keys, LANES), member = call.together ? task.at.head % call.group : 0;
    const bool streamed = large(call, call.dq, call.keys), last = !call.together || member == call.group - 1;
    float* sums = nullptr;  // [2, tokens, lanes]

    void take(Pieces& pieces) {
        if (call.together) sums = pieces.take(2 * (task.at.last - task.at.first) * lanes);
    }
    // `which`: 0 for q, 1 for k. m numbers from channel c on of token t.
    LINATTN_INLINE void put(int which, int64_t t, int64_t c, int m, Float x) const {
        if (call.together) {
            float* sum = sums + (which * (task.at.last - task.at.first) + t - task.at.first) * lanes + c;
            if (member > 0) x = load(sum) + x;
            if (!last) return LINATTN_ISA::store(sum, x);
        }
        const int64_t token = task.token(call, t), at = call.together ? token / call.group : token;
        (which ? call.dk : call.dq).put(at * call.keys + c, m, x, streamed);
    }
};

// Calls body(i) for the tasks of the backward pass; tasks that sum their gradients run one after the other on one thread.
template <class Body>
void parallel_groups(const Call& call, Body body) {
    const int64_t members = call.together ? call.group : 1;  // heads of a group, which then has one part
    parallel(tasks(call) / members, call.threads, [&](int64_t i) {
        for (int64_t n = 0; n < members; n++) body(i * members + n);
    });
}

// Stores a row of an output: columns of v, and the column after them into the denominator.
struct Row {
    const Call& call;
    const Task& task;
    const bool streamed;
    LINATTN_INLINE void store(int64_t t, int64_t column, Float x) const {
        const int64_t rest = call.values - column;
        const int64_t at = call.o.at(task.at.row, t, task.at.head) + column;
        if (rest > 0) call.o.put(at, least(rest, LANES), x, streamed);
        if (call.ones && rest >= 0 && rest < LANES) {
            float lane[LANES];
            LINATTN_ISA::store(lane, x);
            call.denominator[(task.at.row * call.tokens + t) * call.heads + task.at.head] = lane[rest];
        }
    }
};

// Prepares the block of `count` tokens from t on: keys, and values, with the gradients of outputs if requested.
template <int RANK, int RULE>
void prepare(const Call& call, const Task& task, const Columns& columns, int64_t t, int count, Block<RULE> block, bool gradients) {
    using F = Family<RULE>;
    const Place& at = task.at;
    prepare_keys<RANK, RULE>(call, at, t, count, block.keys, block.pairs, gradients);
    for (int i = 0; i < TOKENS; i++) {
        const bool there = i < count;
        const float last = there && gradients && call.ones ? call.d_denominator[(at.row * call.tokens + t + i) * call.heads + at.head] : 0;
        for (int64_t c = 0; c < columns.count(); c += LANES) {
            prepare_line(call, call.v, at, t + i, there, 1.0f, block.values.at(F::VALUE + i, c), columns.first + c);
            if (gradients) prepare_line(call, call.d_o, at, t + i, there, last, block.values.at(F::GRADIENT + i, c), columns.first + c);
        }
        if (RULE != DELTA) continue;
        float beta[LANES];
        store(beta, load(call.beta.data, call.beta.dtype, there ? call.beta.at(at.row, t + i, at.head) : 0, there));
        block.beta[i] = beta[0];
    }
}

// Prefetches rows of a later block, a few in every sweep (lanes from c on, of all `lanes`), because too many prefetches at once would stall.
struct Expect {
    const Task& task;
    int64_t t, c, width, lanes;
    LINATTN_INLINE void operator()(const Strided& of, int64_t head, int64_t numbers) const {
        const int64_t last = least(task.at.last, t + TOKENS * (c + width) / lanes);
        for (int64_t ahead = t + TOKENS * c / lanes; ahead < last; ahead++) of.expect(task.at.row, ahead, head, numbers);
    }
};

// Calls body<RANK, RULE>(call) with the rank and the rule of the call.
#define LINATTN_BY_FAMILY(body, call)                                                                              \
    switch ((call).rank * 4 + (call).rule) {                                                                       \
        case NONE * 4 + PLAIN: return body<NONE, PLAIN>(call);                                                     \
        case NONE * 4 + BONUS: return body<NONE, BONUS>(call);                                                     \
        case NONE * 4 + DELTA: return body<NONE, DELTA>(call);                                                     \
        case NONE * 4 + ERASE: return body<NONE, ERASE>(call);                                                     \
        case HEAD * 4 + PLAIN: return body<HEAD, PLAIN>(call);                                                     \
        case HEAD * 4 + BONUS: return body<HEAD, BONUS>(call);                                                     \
        case HEAD * 4 + DELTA: return body<HEAD, DELTA>(call);                                                     \
        case HEAD * 4 + ERASE: return body<HEAD, ERASE>(call);                                                     \
        case CHANNEL * 4 + PLAIN: return body<CHANNEL, PLAIN>(call);                                               \
        case CHANNEL * 4 + BONUS: return body<CHANNEL, BONUS>(call);                                               \
        case CHANNEL * 4 + DELTA: return body<CHANNEL, DELTA>(call);                                               \
        case CHANNEL * 4 + ERASE: return body<CHANNEL, ERASE>(call);                                               \
    }

}  // namespace LINATTN_ISA
}  // namespace linattn

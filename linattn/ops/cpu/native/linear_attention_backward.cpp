// The backward pass of the recurrence: chunk by chunk from the last to the first, each from the state saved before it.
//
// With values in the lanes: the reads of the erasing rules are recomputed forwards, and the gradients of values computed backwards. With keys
// in the lanes: the states are recomputed forwards, with their products with the gradients of reads, and the gradients of states backwards,
// with their products with the writes.
#include "linear_attention_gradients.h"

namespace linattn {
namespace LINATTN_ISA {
namespace {

thread_local Scratch scratch;

template <int RANK, int RULE>
class Backward {
    using F = Family<RULE>;
    static constexpr int WIDE = F::WIDTH;
    const Call& call;
    const Task task;
    const Columns columns;
    const int64_t step, rows, lanes, state, block_size;  // rows: keys in whole vectors, as are lanes
    PerKey per_key;
    float *S, *dS, *dS_turned, *states, *blocks, *reads, *writes, *products, *pairs, *dbeta, *dbonus;

    // The states before the blocks of a chunk are saved if the gradient of the decay needs them.
    static constexpr int KEPT = RANK == NONE ? 1 : BLOCKS + 1;

public:
    int64_t used;

    Backward(const Call& call, int64_t i, float* data)
        : call(call), task(call, i), columns(call, task.part), step(call.step()), rows(up(call.keys, LANES)), lanes(rows),
          state(rows * columns.count()), block_size(up(Block<RULE>::size(call, columns), 16)), per_key{call, task} {
        Pieces pieces{data};
        per_key.take(pieces);
        S = pieces.take(state);
        dS = pieces.take(state);
        dS_turned = pieces.take(state);
        states = pieces.take(state * KEPT);
        blocks = pieces.take(block_size * BLOCKS);
        reads = pieces.take(lanes * F::READ * BLOCKS);
        writes = pieces.take(lanes * F::WRITE * BLOCKS);
        products = pieces.take(lanes * BLOCKS);
        pairs = pieces.take(up(F::PAIRS, LANES));
        dbeta = pieces.take(CHUNK * LANES);
        dbonus = pieces.take(lanes);
        used = pieces.used;
    }

    void run() {
        load_state<WIDE>(call, columns, task.index(call), call.d_final, call.d_final_z, dS);
        turn(dS, dS_turned);
        memset(dbonus, 0, lanes * sizeof(float));
        const int64_t tokens = task.at.last - task.at.first;
        for (int64_t n = (tokens + call.chunk() - 1) / call.chunk() - 1; n >= 0; n--) chunk(n);
        settle();
        if (call.dinitial) store_state<WIDE>(call, columns, task.index(call), dS, call.dinitial, call.dinitial_z);
        if (RULE == BONUS)
            for (int64_t c = 0; c < call.keys; c += LANES)
                store(call.dbonus + (task.index(call) * call.parts + task.part) * call.keys + c, load(dbonus + c), least(call.keys - c, LANES));
    }

private:
    Block<RULE> block(int b) const { return Block<RULE>(call, columns, blocks + b * block_size); }

    void chunk(int64_t n) {
        const int64_t first = task.at.first + n * call.chunk();
        const int count = least(task.at.last - first, call.chunk()), last = (count + step - 1) / step;
        for (int b = 0; b < last; b++)
            prepare<RANK, RULE>(call, task, columns, first + b * step, least(count - b * step, step), block(b), true);
        memcpy(S, task.kept(call, columns, n), state * sizeof(float));
        turn(S, states);
        if (F::READS == 2) repeat(last);
        values(first, count, last);
        meet_states(first, last);
        meet_gradients(first, last);
        for (int b = 0; b < last; b++) gradients(b, first + b * step, least(count - b * step, step));
    }

    // Transposes slabs of columns with rows of keys to slabs of keys with rows of columns.
    void turn(const float* from, float* to) const {
        slabs<WIDE>(columns.count(), [&](auto from_width, int64_t c) {
            constexpr int A = decltype(from_width)::value;
            slabs<WIDE>(lanes, [&](auto to_width, int64_t k) {
                constexpr int B = decltype(to_width)::value;
                for (int a = 0; a < A; a++)
                    for (int b = 0; b < B; b++)
                        transpose(from + c * rows + ((k + b * LANES) * A + a) * LANES, A * LANES,
                                  to + k * columns.count() + ((c + a * LANES) * B + b) * LANES, B * LANES);
            });
        });
    }

    // The rule's reads of the states, and its writes.
    void repeat(int last) const {
        slabs<WIDE>(columns.count(), [&](auto width, int64_t c) {
            for (int b = 0; b < last; b++) {
                const Block<RULE> own = block(b);
                Slab<RULE, decltype(width)::value>{own, c}.forward(
                    S + c * rows, call.keys, decay_of_rows<RANK>(own.keys, F::KEEP), true, [](int, int64_t, Float) {});
            }
        });
    }

    // Gradients of values, of beta and of the results of reads.
    void values(int64_t first, int count, int last) const {
        const bool streamed = large(call, call.dv, call.values);
        memset(dbeta, 0, CHUNK * LANES * sizeof(float));
        slabs<WIDE>(columns.count(), [&](auto width, int64_t c) {
            for (int b = last - 1; b >= 0; b--) {
                const Block<RULE> own = block(b);
                const auto out = [&](int i, int64_t column, Float dv, Float of_beta) {
                    if (i >= step) return;
                    const int64_t t = b * step + i, at = call.dv.at(task.at.row, first + t, task.at.head) + columns.first + column;
                    const int64_t rest = call.values - columns.first - column;
                    if (t < count && rest > 0) call.dv.put(at, least(rest, LANES), dv, streamed);
                    if (RULE == DELTA) store(dbeta + t * LANES, load(dbeta + t * LANES) + of_beta);
                };
                const Expect expect{task, first - call.chunk() + b * step, c, decltype(width)::value * LANES, columns.count()};
                if (first > task.at.first) expect(call.q, task.at.head / call.group, call.keys);
                Slab<RULE, decltype(width)::value>{own, c}.backward(dS + c * rows, call.keys, decay_of_rows<RANK>(own.keys, F::KEEP), out);
            }
        });
        if (RULE == DELTA)
            for (int t = 0; t < count; t++) call.dbeta[task.token(call, first + t)] = sum(load(dbeta + t * LANES));
    }

    // The decay of the lanes.
    template <int W>
    static LINATTN_INLINE auto fading(const Block<RULE>& block, int64_t k) {
        if constexpr (RANK == NONE) return Everything();
        else {
            OfLanes<W> decay;
            for (int w = 0; w < W; w++) {
                decay.keeps[w] = load(block.keys.at(F::KEEP, k + w * LANES));
                decay.rests[w] = load(block.keys.at(F::REST, k + w * LANES));
            }
            return decay;
        }
    }

    // Forwards over the states: their products with the gradients of reads.
    void meet_states(int64_t first, int last) const {
        slabs<WIDE>(lanes, [&](auto width, int64_t k) {
            constexpr int W = decltype(width)::value;
            float* own = states + k * columns.count();
            for (int b = 0; b < last; b++) {
                const Block<RULE> by = block(b);
                Float sum[F::READ][W] = {}, key[F::WRITE][W];
                if (first > task.at.first) {
                    const Expect expect{task, first - call.chunk() + b * step, k, W * LANES, lanes};
                    expect(call.k, task.at.head / call.group, call.keys);
                    if (RANK == CHANNEL) expect(call.decay, task.at.head, call.keys);
                }
                read(own, columns.real(), by.values, F::GRADIENT, sum);
                for (int i = 0; i < F::READ; i++)
                    for (int w = 0; w < W; w++) store(reads + (b * F::READ + i) * lanes + k + w * LANES, sum[i][w]);
                if (b == last - 1) break;
                for (int i = 0; i < F::WRITE; i++)
                    for (int w = 0; w < W; w++) key[i][w] = load(by.keys.at(F::X + i, k + w * LANES));
                float* next = RANK == NONE ? own : own + state;
                write(own, next, columns.real(), by.values, F::VALUE, key, fading<W>(by, k));
                own = next;
            }
        });
    }

    // Backwards over their gradients: their products with the writes and with the states.
    void meet_gradients(int64_t first, int last) const {
        slabs<WIDE>(lanes, [&](auto width, int64_t k) {
            constexpr int W = decltype(width)::value;
            float* own = dS_turned + k * columns.count();
            for (int b = last - 1; b >= 0; b--) {
                const Block<RULE> by = block(b);
                Float sum[F::WRITE][W] = {}, key[F::READ][W], product[W] = {};
                if (first > task.at.first) {
                    const Expect expect{task, first - call.chunk() + b * step, k, W * LANES, lanes};
                    expect(call.v, task.at.head, call.values);
                    expect(call.d_o, task.at.head, call.values);
                }
                read(own, columns.real(), by.values, F::VALUE, sum);
                for (int i = 0; i < F::WRITE; i++)
                    for (int w = 0; w < W; w++) store(writes + (b * F::WRITE + i) * lanes + k + w * LANES, sum[i][w]);
                if (RANK != NONE) multiply(own, states + b * state + k * columns.count(), product);
                for (int w = 0; w < W; w++) store(products + b * lanes + k + w * LANES, product[w]);
                for (int i = 0; i < F::READ; i++)
                    for (int w = 0; w < W; w++) key[i][w] = load(by.keys.at(F::Y + i, k + w * LANES));
                write(own, own, columns.real(), by.values, F::GRADIENT, key, fading<W>(by, k));
            }
        });
    }

    template <int W>
    LINATTN_INLINE void multiply(const float* a, const float* b, Float (&sum)[W]) const {
        Float more[3][W] = {};
        int64_t r = 0;
        for (; r + 4 <= columns.real(); r += 4, a += 4 * W * LANES, b += 4 * W * LANES)
            for (int w = 0; w < W; w++) {
                sum[w] = fma(load(a + w * LANES), load(b + w * LANES), sum[w]);
                for (int i = 0; i < 3; i++)
                    more[i][w] = fma(load(a + ((i + 1) * W + w) * LANES), load(b + ((i + 1) * W + w) * LANES), more[i][w]);
            }
        for (; r < columns.real(); r++, a += W * LANES, b += W * LANES)
            for (int w = 0; w < W; w++) sum[w] = fma(load(a + w * LANES), load(b + w * LANES), sum[w]);
        for (int w = 0; w < W; w++) sum[w] = sum[w] + more[0][w] + (more[1][w] + more[2][w]);
    }

    // Gradients of q, k, read, write, decay and bonus of one block.
    void gradients(int b, int64_t t, int count) const {
        const Block<RULE> own = block(b);
        meet(own, columns.count(), pairs);
        const Met<RULE> met{reads + b * F::READ * lanes, writes + b * F::WRITE * lanes, products + b * lanes, pairs, lanes};
        Float log[TOKENS] = {};
        for (int64_t c = 0; c < call.keys; c += LANES) {
            const int m = least(call.keys - c, LANES);
            Float q[TOKENS], k[TOKENS], r[TOKENS], w[TOKENS];
            Factors f;
            for (int i = 0; i < TOKENS; i++) {
                q[i] = load(own.keys.at(F::CAME + i, c));
                k[i] = r[i] = w[i] = load(own.keys.at(F::CAME + TOKENS + i, c));
                if (RULE == ERASE) r[i] = load(own.keys.at(F::CAME + 2 * TOKENS + i, c));
                if (RULE == ERASE) w[i] = load(own.keys.at(F::CAME + 3 * TOKENS + i, c));
                f.alpha[i] = RANK == NONE ? splat(1.0f) : load(own.keys.at(F::ALPHA + i, c));
            }
            Gradients<RULE> to;
            const Float u = RULE == BONUS ? load(call.bonus + task.at.head * call.keys + c, m) : zero();
            const Combine<RANK, RULE> combine{met, q, k, r, w, f, u, to};
            combine.state(c);
            for (int j = 0; j < TOKENS; j++) combine.token(j, c);
            if (RULE == BONUS) store(dbonus + c, load(dbonus + c) + to.bonus[0]);
            for (int i = 0; i < TOKENS; i++) log[i] = log[i] + to.log[i];
            for (int i = 0; i < count; i++) put(t + i, c, m, i, to);
        }
        if (RANK == HEAD && call.ddecay)
            for (int i = 0; i < count; i++) call.ddecay[task.token(call, t + i)] = sum(log[i]);
    }

    LINATTN_INLINE void put(int64_t t, int64_t c, int m, int i, const Gradients<RULE>& of) const {
        const int64_t at = task.token(call, t) * call.keys + c;
        const bool streamed = per_key.streamed;
        per_key.put(0, t, c, m, of.q[i] * float(call.scale));
        per_key.put(1, t, c, m, of.k[i]);
        if (RANK == CHANNEL && call.ddecay) Strided{(char*)call.ddecay, FLOAT32, 0, 0, 0}.put(at, m, of.log[i], streamed);
        if (RULE != ERASE) return;
        call.dread.put(at, m, of.r[i], streamed);
        call.dwrite.put(at, m, of.w[i], streamed);
    }
};

template <int RANK, int RULE>
void all(const Call& call) {
    parallel_groups(call, [&](int64_t i) {
        Backward<RANK, RULE> none(call, i, nullptr);
        Backward<RANK, RULE>(call, i, scratch.room(none.used)).run();
    });
}

}  // namespace

LINATTN_ENTRY(linear_attention_backward)(const void* call, int64_t threads) {
    Call own;
    memcpy(&own, call, sizeof own);
    own.threads = threads;
    LINATTN_BY_FAMILY(all, own)
}

}  // namespace LINATTN_ISA
}  // namespace linattn

// The forward pass of the recurrence on tiles, with vectors where tiles are not faster.
#include "linear_attention_tiles.h"

namespace linattn {
namespace LINATTN_ISA {
namespace {

thread_local Scratch scratch;

template <int RANK, int RULE>
class Forward {
    const Call& call;
    const Sizes of;
    float *S, *beta;
    Halves q, k, v, k_turned, k_transposed, pairs, v_woven, S_woven, S_low, written, written_low;
    Floats scores, sums;

public:
    int64_t used;

    Forward(const Call& call, int64_t i, float* data) : call(call), of(call, i) {
        Pieces pieces{data};
        S = pieces.take(of.state);
        beta = pieces.take(CHUNK);
        q = take_halves(pieces, CHUNK, of.keys);
        k = take_halves(pieces, CHUNK, of.keys);
        v = take_halves(pieces, CHUNK, of.width);
        k_turned = take_halves(pieces, of.keys / 2, 2 * CHUNK);
        k_transposed = take_halves(pieces, of.keys, CHUNK);
        pairs = take_halves(pieces, CHUNK, CHUNK);
        v_woven = take_halves(pieces, CHUNK / 2, 2 * of.width);
        S_woven = take_halves(pieces, of.keys / 2, 2 * of.width);
        scores = take_floats(pieces, CHUNK, CHUNK);
        sums = take_floats(pieces, CHUNK, of.width);
        if (RULE == DELTA) {
            S_low = take_halves(pieces, of.keys / 2, 2 * of.width);
            written = take_halves(pieces, CHUNK / 2, 2 * of.width);
            written_low = take_halves(pieces, CHUNK / 2, 2 * of.width);
        }
        used = pieces.used;
    }

    void run() {
        const Place& at = of.task.at;
        load_state<WIDE>(call, of.columns, of.task.index(call), call.initial, call.initial_z, S);
        for (int64_t t = at.first; t < at.last; t += CHUNK) {
            if (call.kept) memcpy(of.task.kept(call, of.columns, (t - at.first) / CHUNK), S, of.state * sizeof(float));
            chunk(t, least(at.last - t, CHUNK));
        }
        settle();
        if (call.final) store_state<WIDE>(call, of.columns, of.task.index(call), S, call.final, call.final_z);
    }

private:
    void chunk(int64_t t, int count) {
        const Place& at = of.task.at;
        const int64_t shared = at.head / call.group, next = t + CHUNK;
        gather(call.q, at, shared, t, count, 0, call.keys, q);
        gather(call.k, at, shared, t, count, 0, call.keys, k);
        gather(call.v, at, at.head, t, count, of.columns.first, of.columns.real(), v);
        const Fading<RANK> fading(call, at, t, count);
        turn(k, k_turned, CHUNK, of.keys);
        weave_and_fade<RULE == DELTA>(S, of, fading, S_woven, S_low);
        if (RULE == DELTA) overwrite(fading, t, count);
        else weave(v, v_woven, CHUNK, of.width);
        expect(call.q, at, shared, next, call.keys);
        triangle_of_product<false>(q, k_turned, scores, CHUNK, of.keys);
        remembered<RANK>(fading.alpha, [&](int i, int c, Float f) { store(pairs.at(i, c * LANES), load(scores.at(i, c * LANES)) * f); });
        expect(call.k, at, shared, next, call.keys);
        unweave<RANK == HEAD && RULE == PLAIN>(k_turned, fading.since, k_transposed, of.rows, CHUNK);
        product<false>(q, S_woven, sums, CHUNK, of.lanes, of.keys);
        if (RANK == HEAD)
            for (int i = 0; i < count; i++)
                for (int64_t c = 0; c < of.lanes; c += LANES) store(sums.at(i, c), load(sums.at(i, c)) * fading.until[i]);
        expect(call.v, at, at.head, next, call.values);
        product_of_triangle<false>(pairs, v_woven, sums, CHUNK, of.lanes);
        add_to_state(k_transposed, RULE == DELTA ? written : v_woven, S, of);
        if (RULE == DELTA) add_to_state(k_transposed, written_low, S, of);
        const Row out{call, of.task, large(call, call.o, call.values)};
        for (int i = 0; i < count; i++)
            for (int64_t c = 0; c < of.lanes; c += LANES) out.store(t + i, of.columns.first + c, load(sums.at(i, c)) * float(call.scale));
    }

    // The writes of the delta rule: one part for the reads of the chunk's own tokens, two parts for the state.
    void overwrite(const Fading<RANK>& fading, int64_t t, int count) {
        gather_numbers(call.beta, of.task.at, t, count, beta);
        triangle_of_product<false>(k, k_turned, scores, CHUNK, of.keys);
        remembered<RANK>(fading.alpha, [&](int i, int c, Float f) { store(scores.at(i, c * LANES), load(scores.at(i, c * LANES)) * f); });
        miss(k, v, S_woven, S_low, scores, fading, beta, of, sums);
        for (int i = 0; i < CHUNK; i += 2)
            for (int64_t c = 0; c < of.lanes; c += LANES) {
                Float a = load(sums.at(i, c)) * beta[i], b = load(sums.at(i + 1, c)) * beta[i + 1];
                store_woven(v_woven.woven(i, c), a, b);
                if (RANK == HEAD) a = a * fading.since[i], b = b * fading.since[i + 1];
                store_woven(written.woven(i, c), a, b);
                store_woven(written_low.woven(i, c), left_over(a), left_over(b));
            }
    }
};

template <int RANK, int RULE>
void all(const Call& call) {
    // A dot product replaces two vector operations, but each product with the state, in two parts here, is needed twice: nothing is gained.
    if constexpr (DOTS && RULE == DELTA) return LINATTN_JOIN(linear_attention, LINATTN_VECTORS)(&call, call.threads);
    parallel(tasks(call), call.threads, [&](int64_t i) {
        Forward<RANK, RULE> task(call, i, scratch.room(Forward<RANK, RULE>(call, i, nullptr).used));
        with_tiles([&] { task.run(); });
    });
}

}  // namespace

LINATTN_ENTRY(linear_attention)(const void* call, int64_t threads) {
    Call own;
    memcpy(&own, call, sizeof own);
    own.threads = threads;
    if (!on_tiles(own)) return LINATTN_JOIN(linear_attention, LINATTN_VECTORS)(call, threads);
    LINATTN_ON_TILES(all, own)
}

}  // namespace LINATTN_ISA
}  // namespace linattn

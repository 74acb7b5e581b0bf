// The forward pass of the recurrence on tiles, and on vectors what they have nothing to gain from.
#include "linear_attention_tiles.h"

extern "C" void linattn_linear_attention_avx512(const void* call, int64_t threads);

namespace linattn {
namespace LINATTN_ISA {
namespace {

thread_local Scratch scratch;

template <int RANK>
class Forward {
    const Call& call;
    const Sizes of;
    float* S;
    Halves q, k, v, k_turned, k_transposed, pairs, v_woven, S_woven;
    Floats scores, sums;

public:
    int64_t used;

    Forward(const Call& call, int64_t i, float* data) : call(call), of(call, i) {
        Pieces pieces{data};
        S = pieces.take(of.state);
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
        weave(v, v_woven, CHUNK, of.width);
        expect(call.q, at, shared, next, call.keys);
        triangle_of_product<false>(q, k_turned, scores, CHUNK, of.keys);
        remembered<RANK>(fading.alpha, [&](int i, int c, Float f) { store(pairs.at(i, c * LANES), load(scores.at(i, c * LANES)) * f); });
        expect(call.k, at, shared, next, call.keys);
        unweave<RANK == HEAD>(k_turned, fading.since, k_transposed, of.rows, CHUNK);
        weave_state<RANK>(S, of, fading, S_woven);
        product<false>(q, S_woven, sums, CHUNK, of.lanes, of.keys);
        if (RANK == HEAD)
            for (int i = 0; i < count; i++)
                for (int64_t c = 0; c < of.lanes; c += LANES) store(sums.at(i, c), load(sums.at(i, c)) * fading.until[i]);
        expect(call.v, at, at.head, next, call.values);
        product_of_triangle<false>(pairs, v_woven, sums, CHUNK, of.lanes);
        add_to_state(k_transposed, v_woven, S, of);
        const Row out{call, of.task, large(call, call.o, call.values)};
        for (int i = 0; i < count; i++)
            for (int64_t c = 0; c < of.lanes; c += LANES) out.store(t + i, of.columns.first + c, load(sums.at(i, c)) * float(call.scale));
    }
};

template <int RANK>
void all(const Call& call) {
    parallel(tasks(call), call.threads, [&](int64_t i) {
        Forward<RANK> task(call, i, scratch.room(Forward<RANK>(call, i, nullptr).used));
        with_tiles([&] { task.run(); });
    });
}

}  // namespace

LINATTN_ENTRY(linear_attention)(const void* call, int64_t threads) {
    Call own;
    memcpy(&own, call, sizeof own);
    own.threads = threads;
    if (!on_tiles(own)) return linattn_linear_attention_avx512(call, threads);
    own.rank == HEAD ? all<HEAD>(own) : all<NONE>(own);
}

}  // namespace LINATTN_ISA
}  // namespace linattn

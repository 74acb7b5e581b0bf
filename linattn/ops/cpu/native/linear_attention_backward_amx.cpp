// The backward pass of the recurrence on tiles, and on vectors what they have nothing to gain from.
//
// With S the state before a chunk and dS the gradient of the one after it, q scaled, and F what a token remembers of an earlier one:
// P = F ∘ q kᵀ, G = F ∘ do vᵀ;  dq = until ∘ do Sᵀ + G k,  dk = since ∘ v dSᵀ + Gᵀ q,  dv = since ∘ k dS + Pᵀ do,
// and the gradient of a token's decay is all that passes it: from earlier tokens or from S, to later ones or to dS.
#include "linear_attention_tiles.h"

extern "C" void linattn_linear_attention_backward_avx512(const void* call, int64_t threads);

namespace linattn {
namespace LINATTN_ISA {
namespace {

thread_local Scratch scratch;

template <int RANK>
class Backward {
    const Call& call;
    const Sizes of;
    const float scale;
    PerKey per_key;
    float *dS, *to_later, *from_earlier, *passing;  // sums for each token of a chunk
    Halves q, k, v, d_o, q_turned, v_turned, do_turned, q_woven, k_woven, do_woven, q_transposed;
    Halves pairs, by_pair, by_pair_transposed;  // Pᵀ, G and Gᵀ
    Halves rounded, S_turned, dS_woven;
    Floats scores, by_scores, sums;

public:
    int64_t used;

    Backward(const Call& call, int64_t i, float* data) : call(call), of(call, i), scale(float(call.scale)), per_key{call, of.task} {
        Pieces pieces{data};
        per_key.take(pieces);
        dS = pieces.take(of.state);
        to_later = pieces.take(CHUNK);
        from_earlier = pieces.take(CHUNK);
        passing = pieces.take(CHUNK + LANES);
        q = take_halves(pieces, CHUNK, of.keys);
        k = take_halves(pieces, CHUNK, of.keys);
        v = take_halves(pieces, CHUNK, of.width);
        d_o = take_halves(pieces, CHUNK, of.width);
        q_turned = take_halves(pieces, of.keys / 2, 2 * CHUNK);
        v_turned = take_halves(pieces, of.width / 2, 2 * CHUNK);
        do_turned = take_halves(pieces, of.width / 2, 2 * CHUNK);
        q_woven = take_halves(pieces, CHUNK / 2, 2 * of.keys);
        k_woven = take_halves(pieces, CHUNK / 2, 2 * of.keys);
        do_woven = take_halves(pieces, CHUNK / 2, 2 * of.width);
        q_transposed = take_halves(pieces, of.keys, CHUNK);
        pairs = take_halves(pieces, CHUNK, CHUNK);
        by_pair = take_halves(pieces, CHUNK, CHUNK);
        by_pair_transposed = take_halves(pieces, CHUNK, CHUNK);
        rounded = take_halves(pieces, of.keys, of.width);
        S_turned = take_halves(pieces, of.width / 2, 2 * of.keys);
        dS_woven = take_halves(pieces, of.keys / 2, 2 * of.width);
        scores = take_floats(pieces, CHUNK, CHUNK);
        by_scores = take_floats(pieces, CHUNK, CHUNK);
        sums = take_floats(pieces, CHUNK, of.keys > of.width ? of.keys : of.width);
        used = pieces.used;
    }

    void run() {
        const Place& at = of.task.at;
        load_state<WIDE>(call, of.columns, of.task.index(call), call.d_final, nullptr, dS);
        for (int64_t n = (at.last - at.first + CHUNK - 1) / CHUNK - 1; n >= 0; n--) {
            const int64_t t = at.first + n * CHUNK;
            chunk(t, least(at.last - t, CHUNK), of.task.kept(call, of.columns, n));
        }
        settle();
        if (call.dinitial) store_state<WIDE>(call, of.columns, of.task.index(call), dS, call.dinitial, nullptr);
    }

private:
    void chunk(int64_t t, int count, const float* S) {
        const Place& at = of.task.at;
        const int64_t shared = at.head / call.group, before = t - CHUNK;
        const Fading<RANK> fading(call, at, t, count);
        rows(t, count);
        const auto ask = [&](const Strided& x, int64_t head, int64_t numbers) {
            if (before >= at.first) expect(x, at, head, before, numbers);
        };
        pairs_of_tokens(fading.alpha);
        ask(call.q, shared, call.keys);
        const float across = RANK == HEAD && call.ddecay ? fading.until[CHUNK - 1] * inner(S, dS) : 0.0f;

        turn_state(S);
        product_with_state(d_o, S_turned, [&](int i) { return RANK == HEAD ? scale * fading.until[i] : scale; }, q, to_later);
        product_of_triangle<false>(by_pair, k_woven, sums, CHUNK, of.rows);
        put_keys(0, t, count);
        ask(call.k, shared, call.keys);

        turn_state(dS);
        product_with_state(v, S_turned, [&](int j) { return RANK == HEAD ? fading.since[j] : 1.0f; }, k, from_earlier);
        product_of_triangle<true>(by_pair_transposed, q_woven, sums, CHUNK, of.rows);
        put_keys(1, t, count);
        ask(call.v, at.head, call.values);

        weave_state<RANK>(dS, of, fading, dS_woven);
        product<false>(k, dS_woven, sums, CHUNK, of.lanes, of.keys);
        if (RANK == HEAD)
            for (int j = 0; j < count; j++)
                for (int64_t c = 0; c < of.lanes; c += LANES) store(sums.at(j, c), load(sums.at(j, c)) * fading.since[j]);
        product_of_triangle<true>(pairs, do_woven, sums, CHUNK, of.lanes);
        put_values(t, count);
        ask(call.d_o, at.head, call.values);

        float reading[CHUNK];
        for (int i = 0; i < CHUNK; i++) reading[i] = RANK == HEAD ? scale * fading.until[i] : scale;
        unweave<true>(q_turned, reading, q_transposed, of.rows, CHUNK);
        add_to_state(q_transposed, do_woven, dS, of);
        if (RANK == HEAD && call.ddecay) put_decays(t, count, across);
    }

    // The chunk's arguments, in the layouts that products take.
    void rows(int64_t t, int count) {
        const Place& at = of.task.at;
        const int64_t shared = at.head / call.group;
        gather(call.q, at, shared, t, count, 0, call.keys, q);
        gather(call.k, at, shared, t, count, 0, call.keys, k);
        gather(call.v, at, at.head, t, count, of.columns.first, of.columns.real(), v);
        gather(call.d_o, at, at.head, t, count, of.columns.first, of.columns.real(), d_o);
        turn(q, q_turned, CHUNK, of.keys);
        turn(v, v_turned, CHUNK, of.width);
        turn(d_o, do_turned, CHUNK, of.width);
        weave(q, q_woven, CHUNK, of.keys);
        weave(k, k_woven, CHUNK, of.keys);
        weave(d_o, do_woven, CHUNK, of.width);
    }

    // Pᵀ, G and Gᵀ, and what passes each token on its way between two of the chunk.
    void pairs_of_tokens(const float* alpha) {
        triangle_of_product<false>(d_o, v_turned, scores, CHUNK, of.width);
        remembered<RANK>(
            alpha, [&](int i, int c, Float f) { store(by_pair.at(i, c * LANES), load(scores.at(i, c * LANES)) * (f * scale)); });
        triangle_of_product<true>(k, q_turned, scores, CHUNK, of.keys);
        triangle_of_product<true>(v, do_turned, by_scores, CHUNK, of.width);
        remembering<RANK>(alpha, [&](int j, int c, Float f) {
            const Float pair = load(scores.at(j, c * LANES)) * (f * scale), by = load(by_scores.at(j, c * LANES));
            store(pairs.at(j, c * LANES), pair);
            store(by_pair_transposed.at(j, c * LANES), by * (f * scale));
            store(scores.at(j, c * LANES), pair * by);
        });
        if (RANK == HEAD && call.ddecay) pass();
    }

    // passing[t]: the sum over all pairs of a token before t with one from t on.
    void pass() {
        constexpr int N = CHUNK / LANES;
        Float written[N] = {};
        passing[0] = 0;
        LINATTN_UNROLL
        for (int own = 0; own < N; own++) {
            Float sum[LANES];
            for (int lane = 0; lane < LANES; lane++) {
                for (int c = own; c < N; c++) written[c] = written[c] + load(scores.at(own * LANES + lane, c * LANES));
                sum[lane] = (Float)_mm512_maskz_mov_ps(__mmask16(0xfffeu << lane), (__m512)written[own]);
                for (int c = own + 1; c < N; c++) sum[lane] = sum[lane] + written[c];
            }
            store(passing + own * LANES + 1, LINATTN_ISA::sums(sum));
        }
    }

    float inner(const float* a, const float* b) const {
        Float sum[4] = {};
        for (int64_t i = 0; i < of.state; i += LANES) sum[i / LANES % 4] = fma(load(a + i), load(b + i), sum[i / LANES % 4]);
        return LINATTN_ISA::sum((sum[0] + sum[1]) + (sum[2] + sum[3]));
    }

    // A state for products that sum over its columns.
    void turn_state(const float* S) {
        slabs<WIDE>(of.lanes, [&](auto width, int64_t c) {
            constexpr int W = decltype(width)::value;
            const float* s = S + c * of.rows;
            for (int64_t r = 0; r < of.rows; r++, s += W * LANES)
                for (int w = 0; w < W; w++) store(rounded.at(r, c + w * LANES), load(s + w * LANES));
        });
        turn(rounded, S_turned, of.rows, of.width);
    }

    // sums = factor ∘ x Sᵀ, and their inner products with the rows of `by`.
    template <class Factor>
    LINATTN_INLINE void product_with_state(Halves x, Halves state, Factor factor, Halves by, float* inner) {
        product<false>(x, state, sums, CHUNK, of.rows, of.width);
        for (int i = 0; i < CHUNK; i += LANES) {
            Float sum[LANES];
            for (int lane = 0; lane < LANES; lane++) {
                sum[lane] = zero();
                for (int64_t c = 0; c < of.rows; c += LANES) {
                    const Float y = load(sums.at(i + lane, c)) * factor(i + lane);
                    store(sums.at(i + lane, c), y);
                    if (RANK == HEAD) sum[lane] = fma(y, load(by.at(i + lane, c)), sum[lane]);
                }
            }
            if (RANK == HEAD) store(inner + i, LINATTN_ISA::sums(sum));
        }
    }

    void put_keys(int which, int64_t t, int count) const {
        for (int i = 0; i < count; i++)
            for (int64_t c = 0; c < call.keys; c += LANES) per_key.put(which, t + i, c, least(call.keys - c, LANES), load(sums.at(i, c)));
    }

    void put_values(int64_t t, int count) const {
        const bool streamed = large(call, call.dv, call.values);
        for (int i = 0; i < count; i++)
            for (int64_t c = 0; c < of.columns.real(); c += LANES)
                call.dv.put(call.dv.at(of.task.at.row, t + i, of.task.at.head) + of.columns.first + c, least(of.columns.real() - c, LANES),
                            load(sums.at(i, c)), streamed);
    }

    void put_decays(int64_t t, int count, float across) const {
        float later = 0, earlier = across;
        for (int j = 0; j < count; j++) {
            call.ddecay[of.task.token(call, t + j)] = passing[j] + earlier;
            earlier += from_earlier[j];
        }
        for (int i = count - 1; i >= 0; i--) call.ddecay[of.task.token(call, t + i)] += later += to_later[i];
    }
};

template <int RANK>
void all(const Call& call) {
    parallel_groups(call, [&](int64_t i) {
        Backward<RANK> task(call, i, scratch.room(Backward<RANK>(call, i, nullptr).used));
        with_tiles([&] { task.run(); });
    });
}

}  // namespace

LINATTN_ENTRY(linear_attention_backward)(const void* call, int64_t threads) {
    Call own;
    memcpy(&own, call, sizeof own);
    own.threads = threads;
    if (!on_tiles(own)) return linattn_linear_attention_backward_avx512(call, threads);
    own.rank == HEAD ? all<HEAD>(own) : all<NONE>(own);
}

}  // namespace LINATTN_ISA
}  // namespace linattn

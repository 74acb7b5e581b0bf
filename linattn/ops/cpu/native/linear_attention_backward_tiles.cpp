// The backward pass of the recurrence on tiles, with vectors where tiles are not faster.
//
// With S the state before a chunk, dS the gradient of the state after it, q scaled, and F the decay from an earlier token to a later one:
// P = F ∘ q kᵀ, G = F ∘ do vᵀ;  dq = until ∘ do Sᵀ + G k,  dk = since ∘ v dSᵀ + Gᵀ q,  dv = since ∘ k dS + Pᵀ do,
// and the gradient of a token's decay is the sum of all terms across that token: from earlier tokens or from S, to later ones or to dS.
// The delta rule has u = β m in place of v, and x = −β dm in place of dv, which solves the transposed equations of m. The keys' reads get
// gradients from x as q does from do: with X = F ∘ x uᵀ off its diagonal, dk += until ∘ x Sᵀ + (X + Xᵀ) k;  dv = −x,  dβ = m dm.
#include "linear_attention_tiles.h"

namespace linattn {
namespace LINATTN_ISA {
namespace {

thread_local Scratch scratch;

template <int RANK, int RULE>
class Backward {
    const Call& call;
    const Sizes of;
    const float scale;
    PerKey per_key;
    float *dS, *beta, *to_later, *read_later, *from_earlier, *passing;  // one number per token of a chunk
    Halves q, k, v, d_o, q_turned, v_turned, do_turned, q_woven, k_woven, do_woven, q_transposed;
    Halves pairs, by_pair, by_pair_transposed;  // Pᵀ, G and Gᵀ
    Halves rounded, S_turned, dS_turned, woven;
    Floats scores, by_scores, sums;
    // Of the delta rule: x, its pairs and those of keys, and the layouts for products.
    Halves x, x_turned, x_woven, x_low, k_turned, k_transposed, by_key, low;
    Floats of_keys, missed, read;

public:
    int64_t used;

    Backward(const Call& call, int64_t i, float* data) : call(call), of(call, i), scale(float(call.scale)), per_key{call, of.task} {
        Pieces pieces{data};
        per_key.take(pieces);
        dS = pieces.take(of.state);
        beta = pieces.take(CHUNK);
        to_later = pieces.take(CHUNK);
        read_later = pieces.take(CHUNK);
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
        dS_turned = take_halves(pieces, of.width / 2, 2 * of.keys);
        woven = take_halves(pieces, of.keys / 2, 2 * of.width);
        scores = take_floats(pieces, CHUNK, CHUNK);
        by_scores = take_floats(pieces, CHUNK, CHUNK);
        sums = take_floats(pieces, CHUNK, of.keys > of.width ? of.keys : of.width);
        if (RULE == DELTA) take_more(pieces);
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
    void take_more(Pieces& pieces) {
        x = take_halves(pieces, CHUNK, of.width);
        x_turned = take_halves(pieces, of.width / 2, 2 * CHUNK);
        x_woven = take_halves(pieces, CHUNK / 2, 2 * of.width);
        x_low = take_halves(pieces, CHUNK / 2, 2 * of.width);
        k_turned = take_halves(pieces, of.keys / 2, 2 * CHUNK);
        k_transposed = take_halves(pieces, of.keys, CHUNK);
        low = take_halves(pieces, of.keys / 2, 2 * of.width);
        by_key = take_halves(pieces, CHUNK, CHUNK);
        of_keys = take_floats(pieces, CHUNK, CHUNK);
        missed = take_floats(pieces, CHUNK, of.width);
        read = take_floats(pieces, CHUNK, of.keys);
    }

    void chunk(int64_t t, int count, const float* S) {
        const Place& at = of.task.at;
        const int64_t shared = at.head / call.group, before = t - CHUNK;
        const Fading<RANK> fading(call, at, t, count);
        rows(t, count);
        if (RULE == DELTA) repeat(S, fading, t, count);
        turn(v, v_turned, CHUNK, of.width);
        const auto ask = [&](const Strided& x, int64_t head, int64_t numbers) {
            if (before >= at.first) expect(x, at, head, before, numbers);
        };
        pairs_of_tokens(fading.alpha);
        ask(call.q, shared, call.keys);
        const float across = RANK == HEAD && call.ddecay ? fading.until[CHUNK - 1] * inner(S, dS) : 0.0f;
        turn_state(S, S_turned);
        turn_state(dS, dS_turned);

        weave_and_fade<RULE == DELTA>(dS, of, fading, woven, low);
        product<false>(k, woven, sums, CHUNK, of.lanes, of.keys);
        if (RULE == DELTA) product<true>(k, low, sums, CHUNK, of.lanes, of.keys);
        if (RANK == HEAD)
            for (int j = 0; j < count; j++)
                for (int64_t c = 0; c < of.lanes; c += LANES) store(sums.at(j, c), load(sums.at(j, c)) * fading.since[j]);
        product_of_triangle<true>(pairs, do_woven, sums, CHUNK, of.lanes);
        if (RULE == DELTA) solve(fading, t, count);
        put_values(t, count);
        ask(call.k, shared, call.keys);
        if (RULE == DELTA) pairs_of_keys(fading.alpha);
        if (RANK == HEAD && call.ddecay) pass();

        product_with_state(d_o, S_turned, [&](int i) { return RANK == HEAD ? scale * fading.until[i] : scale; }, q, to_later, sums);
        product_of_triangle<false>(by_pair, k_woven, sums, CHUNK, of.rows);
        put_keys(0, t, count);
        ask(call.v, at.head, call.values);

        product_with_state(v, dS_turned, [&](int j) { return RANK == HEAD ? fading.since[j] : 1.0f; }, k, from_earlier, sums);
        product_of_triangle<true>(by_pair_transposed, q_woven, sums, CHUNK, of.rows);
        if (RULE == DELTA) {
            product_with_state(x, S_turned, [&](int i) { return RANK == HEAD ? fading.until[i] : 1.0f; }, k, read_later, read);
            product<true>(by_key, k_woven, sums, CHUNK, of.rows, CHUNK);
            for (int i = 0; i < count; i++)
                for (int64_t c = 0; c < of.rows; c += LANES) store(sums.at(i, c), load(sums.at(i, c)) + load(read.at(i, c)));
        }
        put_keys(1, t, count);
        ask(call.d_o, at.head, call.values);

        float reading[CHUNK];
        for (int i = 0; i < CHUNK; i++) reading[i] = RANK == HEAD ? scale * fading.until[i] : scale;
        unweave<true>(q_turned, reading, q_transposed, of.rows, CHUNK);
        add_to_state(q_transposed, do_woven, dS, of);
        if (RULE == DELTA) {
            unweave<false>(k_turned, nullptr, k_transposed, of.rows, CHUNK);
            add_to_state(k_transposed, x_woven, dS, of);
            add_to_state(k_transposed, x_low, dS, of);
        }
        if (RANK == HEAD && call.ddecay) put_decays(t, count, across);
    }

    // The chunk's arguments, in the layouts of the products.
    void rows(int64_t t, int count) {
        const Place& at = of.task.at;
        const int64_t shared = at.head / call.group;
        gather(call.q, at, shared, t, count, 0, call.keys, q);
        gather(call.k, at, shared, t, count, 0, call.keys, k);
        gather(call.v, at, at.head, t, count, of.columns.first, of.columns.real(), v);
        gather(call.d_o, at, at.head, t, count, of.columns.first, of.columns.real(), d_o);
        turn(q, q_turned, CHUNK, of.keys);
        turn(d_o, do_turned, CHUNK, of.width);
        weave(q, q_woven, CHUNK, of.keys);
        weave(k, k_woven, CHUNK, of.keys);
        weave(d_o, do_woven, CHUNK, of.width);
    }

    // Recomputes the residual and the writes of the delta rule, and A with its transpose.
    void repeat(const float* S, const Fading<RANK>& fading, int64_t t, int count) {
        gather_numbers(call.beta, of.task.at, t, count, beta);
        turn(k, k_turned, CHUNK, of.keys);
        product<false>(k, k_turned, scores, CHUNK, CHUNK, of.keys);
        remembered<RANK>(fading.alpha, [&](int i, int c, Float f) { store(of_keys.at(i, c * LANES), load(scores.at(i, c * LANES)) * f); });
        remembering<RANK>(fading.alpha, [&](int j, int c, Float f) {
            const Float above = load(scores.at(j, c * LANES)) * f;
            store(of_keys.at(j, c * LANES), c == j / LANES ? above + load(of_keys.at(j, c * LANES)) : above);
        });
        weave_state<true>(S, of, woven, low, [](const float*, Float) {});
        miss(k, v, woven, low, of_keys, fading, beta, of, missed);
        for (int i = 0; i < CHUNK; i++)
            for (int64_t c = 0; c < of.lanes; c += LANES) store(v.at(i, c), load(missed.at(i, c)) * beta[i]);
    }

    // From the gradients of the writes to those of v, β and x.
    void solve(const Fading<RANK>& fading, int64_t t, int count) {
        substitute<true>(of_keys, beta, sums, of.lanes);
        for (int i = 0; i < CHUNK; i += LANES) {
            Float sum[LANES], dbeta[1];
            for (int lane = 0; lane < LANES; lane++) {
                sum[lane] = zero();
                for (int64_t c = 0; c < of.lanes; c += LANES) {
                    const Float dm = load(sums.at(i + lane, c));
                    sum[lane] = fma(dm, load(missed.at(i + lane, c)), sum[lane]);
                    store(sums.at(i + lane, c), dm * beta[i + lane]);
                    store(x.at(i + lane, c), dm * -beta[i + lane]);
                }
            }
            dbeta[0] = LINATTN_ISA::sums(sum);
            for (int lane = 0; lane < least(count - i, LANES); lane++) call.dbeta[of.task.token(call, t + i + lane)] = dbeta[0][lane];
        }
        turn(x, x_turned, CHUNK, of.width);
        for (int i = 0; i < CHUNK; i += 2)
            for (int64_t c = 0; c < of.lanes; c += LANES) {
                Float a = -load(sums.at(i, c)), b = -load(sums.at(i + 1, c));
                if (RANK == HEAD) a = a * fading.until[i], b = b * fading.until[i + 1];
                store_woven(x_woven.woven(i, c), a, b);
                store_woven(x_low.woven(i, c), left_over(a), left_over(b));
            }
    }

    // X + Xᵀ, and the sums across each token of the pairs of keys.
    void pairs_of_keys(const float* alpha) {
        triangle_of_product<false>(x, v_turned, by_scores, CHUNK, of.width);
        remembered<RANK>(alpha, [&](int i, int c, Float f) { store(by_key.at(i, c * LANES), load(by_scores.at(i, c * LANES)) * f); });
        triangle_of_product<true>(v, x_turned, by_scores, CHUNK, of.width);
        remembering<RANK>(alpha, [&](int j, int c, Float f) {
            const Float by = load(by_scores.at(j, c * LANES)), above = by * f;
            store(by_key.at(j, c * LANES), c == j / LANES ? above + load(by_key.at(j, c * LANES)) : above);
            store(scores.at(j, c * LANES), fma(load(of_keys.at(j, c * LANES)), by, load(scores.at(j, c * LANES))));
        });
        for (int i = 0; i < CHUNK; i++) *by_key.at(i, i) = {0};
    }

    // Pᵀ, G and Gᵀ, and the sums across each token of the pairs of the chunk.
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
                sum[lane] = behind(written[own], lane);
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

    // The layout of a state for products that sum over its columns.
    void turn_state(const float* S, Halves to) {
        slabs<WIDE>(of.lanes, [&](auto width, int64_t c) {
            constexpr int W = decltype(width)::value;
            const float* s = S + c * of.rows;
            for (int64_t r = 0; r < of.rows; r++, s += W * LANES)
                for (int w = 0; w < W; w++) store(rounded.at(r, c + w * LANES), load(s + w * LANES));
        });
        turn(rounded, to, of.rows, of.width);
    }

    // sums = factor ∘ x Sᵀ, and their inner products with the rows of `by`.
    template <class Factor>
    LINATTN_INLINE void product_with_state(Halves x, Halves state, Factor factor, Halves by, float* inner, Floats sums) {
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
        for (int i = count - 1; i >= 0; i--) {
            later += RULE == DELTA ? to_later[i] + read_later[i] : to_later[i];
            call.ddecay[of.task.token(call, t + i)] += later;
        }
    }
};

// The gradient of a constant decay is the sum over tokens; under the delta rule more of it cancels than rounded numbers can resolve.
bool sums_of_decays(const Call& call) {
    return call.rule == DELTA && call.ddecay && call.constant;
}

template <int RANK, int RULE>
void all(const Call& call) {
    parallel_groups(call, [&](int64_t i) {
        Backward<RANK, RULE> task(call, i, scratch.room(Backward<RANK, RULE>(call, i, nullptr).used));
        with_tiles([&] { task.run(); });
    });
}

}  // namespace

LINATTN_ENTRY(linear_attention_backward)(const void* call, int64_t threads) {
    Call own;
    memcpy(&own, call, sizeof own);
    own.threads = threads;
    if (!on_tiles(own) || sums_of_decays(own)) return LINATTN_JOIN(linear_attention_backward, LINATTN_VECTORS)(call, threads);
    LINATTN_ON_TILES(all, own)
}

}  // namespace LINATTN_ISA
}  // namespace linattn

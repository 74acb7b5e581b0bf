// The forward pass of the recurrence, and single steps.
#include "linear_attention_token.h"

namespace linattn {
namespace LINATTN_ISA {
namespace {

constexpr int STAGED = 4;  // blocks prepared at a time, so that their panels stay in the L1 cache
thread_local Scratch scratch;

template <int RANK, int RULE>
void run(const Call& call, int64_t i) {
    using F = Family<RULE>;
    const Task task(call, i);
    if (Token<RANK, RULE>::takes(call, task)) return Token<RANK, RULE>(call, task, scratch).run();
    const Columns columns(call, task.part);
    const int64_t rows = up(call.keys, LANES), state = rows * columns.count(), size = Block<RULE>::size(call, columns), step = call.step();
    Pieces pieces{scratch.room(state + up(size, 16) * STAGED)};
    float *S = pieces.take(state), *blocks = pieces.take(size * STAGED);
    const Row out{call, task, large(call, call.o, call.values)};
    load_state<F::WIDTH>(call, columns, task.index(call), call.initial, call.initial_z, S);
    for (int64_t t = task.at.first; t < task.at.last; t += STAGED * step) {
        const int64_t n = t - task.at.first;
        if (call.kept && n % call.chunk() == 0) memcpy(task.kept(call, columns, n / call.chunk()), S, state * sizeof(float));
        const int count = least(task.at.last - t, STAGED * step);
        for (int b = 0; b * step < count; b++)
            prepare<RANK, RULE>(
                call, task, columns, t + b * step, least(count - b * step, step), Block<RULE>(call, columns, blocks + b * size), false);
        slabs<F::WIDTH>(columns.count(), [&](auto width, int64_t c) {
            for (int b = 0; b * step < count; b++) {
                const Expect expect{task, t + (STAGED + b) * step, c, decltype(width)::value * LANES, columns.count()};
                expect(call.q, task.at.head / call.group, call.keys);
                expect(call.k, task.at.head / call.group, call.keys);
                expect(call.v, task.at.head, call.values);
                if (RANK == CHANNEL) expect(call.decay, task.at.head, call.keys);
                const Block<RULE> block(call, columns, blocks + b * size);
                const Slab<RULE, decltype(width)::value> slab{block, c};
                const int64_t first = t + b * step;
                const auto put = [&](int at, int64_t column, Float o) {
                    if (at < step && first + at < task.at.last) out.store(first + at, columns.first + column, o);
                };
                slab.forward(S + c * rows, call.keys, decay_of_rows<RANK>(block.keys, F::KEEP), false, put);
            }
        });
    }
    settle();
    if (call.final) store_state<F::WIDTH>(call, columns, task.index(call), S, call.final, call.final_z);
}

template <int RANK, int RULE>
void all(const Call& call) {
    parallel_in_ranges(tasks(call), call.threads, [&](int64_t i) { run<RANK, RULE>(call, i); });
}

}  // namespace

LINATTN_ENTRY(linear_attention)(const void* call, int64_t threads) {
    Call own;
    memcpy(&own, call, sizeof own);
    own.threads = worth(own.batch * own.tokens * own.heads * own.keys * own.values, threads);
    LINATTN_BY_FAMILY(all, own)
}

}  // namespace LINATTN_ISA
}  // namespace linattn

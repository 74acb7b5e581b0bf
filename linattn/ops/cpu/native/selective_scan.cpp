// The selective scan: h = exp(dt a) h + (dt x) b and y = sum_n h c + skip x, with lanes over the channels. Without gradients
// the kernel also applies the bias and softplus of dt and the gate silu(z) of y.
//
// A task processes SLAB channels of a sequence, a chunk of tokens at a time. The states of LANES channels stay in registers during a chunk,
// TILE of their N numbers at a time. All numbers are float32. The backward pass recomputes a chunk's states from the state saved before it.
#include "lanes.h"
#include "pool.h"
#include "rows.h"
#include "selective.h"

namespace linattn {
namespace LINATTN_ISA {
namespace {

constexpr int MOST = 128;  // of N
constexpr int STRIP = CHUNK * LANES;  // one number for each token and lane of a chunk
#if defined(__AVX512F__)
constexpr int FORWARD_TILE = 16, BACKWARD_TILE = 4;
#else
constexpr int FORWARD_TILE = 4, BACKWARD_TILE = 2;
#endif

// x [D, N], from channel `first` on, as [N, SLAB], padded with zeros.
void transpose_in(const float* x, Slab at, int64_t size, float factor, float* to) {
    for (int64_t n = 0; n < size; n++)
        for (int64_t i = 0; i < SLAB; i++) to[n * SLAB + i] = x && i < at.count ? x[(at.first + i) * size + n] * factor : 0.0f;
}
void transpose_out(const float* x, Slab at, int64_t size, float* to) {
    for (int64_t n = 0; n < size; n++)
        for (int64_t i = 0; i < at.count; i++) to[(at.first + i) * size + n] = x[n * SLAB + i];
}

// The tokens of a chunk of b or c as floats [tokens, N].
void stage(const Rows& x, int64_t row, int64_t start, int tokens, int64_t size, float* to) {
    for (int t = 0; t < tokens; t++)
        for (int64_t n = 0; n < size; n += LANES) {
            const int lanes = int(min(LANES, size - n));
            store(to + t * size + n, x.load(row, start + t, n, lanes), lanes);
        }
}

// The tokens of a chunk of x and LANES of its channels, of which `lanes` exist, as floats [tokens, LANES]. If channels are not contiguous
// (`apart` is their stride), tokens are.
void strip(const Rows& x, int64_t apart, int64_t row, int64_t start, int tokens, int64_t channel, int lanes, float* to) {
    if (apart == 1) {
        for (int t = 0; t < tokens; t++) store(to + t * LANES, x.load(row, start + t, channel, lanes));
        return;
    }
    alignas(64) float turned[STRIP];
    for (int lane = 0; lane < LANES; lane++)
        for (int t = 0; t < tokens; t += LANES) {
            const int64_t at = row * x.batch + (channel + lane) * apart + start + t;
            store(turned + lane * CHUNK + t, lane < lanes ? load(x.data, x.dtype, at, int(min(LANES, tokens - t))) : zero());
        }
    for (int t = 0; t < tokens; t += LANES) transpose(turned + t, CHUNK, to + t * LANES, LANES);
}

// Shared by the passes over a chunk's tokens with TILE numbers of the state. Strips are [tokens, LANES].
struct Chunk {
    int tokens;
    int64_t size;                     // N
    const float *a, *b, *c;           // a log2(e) [N, SLAB], b and c [tokens, N], all from their first number of the tile on
    const float *dt, *written, *dy;   // strips: dt, dt x and the gradient of y
    float *h, *dh, *da;               // [N, SLAB]
    float *states, *twos, *parts;     // [tokens, TILE] vectors: the state before each token, and the two parts of its decay
    float *y, *dwritten, *ddt;        // strips
    float *db, *dc;                   // [tokens, TILE] vectors
};

template <int TILE>
void forward(const Chunk& x) {
    Float h[TILE];
    for (int i = 0; i < TILE; i++) h[i] = load(x.h + i * SLAB);
    for (int t = 0; t < x.tokens; t++) {
        const Float dt = load(x.dt + t * LANES), written = load(x.written + t * LANES);
        Float y = load(x.y + t * LANES), other = zero();
        const float *b = x.b + t * x.size, *c = x.c + t * x.size;
        LINATTN_UNROLL
        for (int i = 0; i < TILE; i++) {
            h[i] = carried(faded(dt, load(x.a + i * SLAB)), h[i], written * b[i]);
            (i % 2 ? other : y) = fma(h[i], splat(c[i]), i % 2 ? other : y);
        }
        store(x.y + t * LANES, y + other);
    }
    for (int i = 0; i < TILE; i++) store(x.h + i * SLAB, h[i]);
}

// The state before each token, and its decay.
template <int TILE>
void again(const Chunk& x) {
    Float h[TILE];
    for (int i = 0; i < TILE; i++) h[i] = load(x.h + i * SLAB);
    for (int t = 0; t < x.tokens; t++) {
        const Float dt = load(x.dt + t * LANES), written = load(x.written + t * LANES);
        const float* b = x.b + t * x.size;
        LINATTN_UNROLL
        for (int i = 0; i < TILE; i++) {
            const Fade left = faded(dt, load(x.a + i * SLAB));
            store(x.twos + (t * TILE + i) * LANES, left.two);
            store(x.parts + (t * TILE + i) * LANES, left.part);
            store(x.states + (t * TILE + i) * LANES, h[i]);
            h[i] = carried(left, h[i], written * b[i]);
        }
    }
    for (int i = 0; i < TILE; i++) store(x.states + (x.tokens * TILE + i) * LANES, h[i]);
}

template <int TILE>
void backward(const Chunk& x) {
    Float dh[TILE], da[TILE];
    for (int i = 0; i < TILE; i++) {
        dh[i] = load(x.dh + i * SLAB);
        da[i] = zero();
    }
    for (int t = x.tokens - 1; t >= 0; t--) {
        const Float dt = load(x.dt + t * LANES), written = load(x.written + t * LANES), dy = load(x.dy + t * LANES);
        Float dwritten = load(x.dwritten + t * LANES), ddt = load(x.ddt + t * LANES);
        const float *b = x.b + t * x.size, *c = x.c + t * x.size;
        const float *before = x.states + t * TILE * LANES, *after = before + TILE * LANES;
        const float *twos = x.twos + t * TILE * LANES, *parts = x.parts + t * TILE * LANES;
        float *db = x.db + t * TILE * LANES, *dc = x.dc + t * TILE * LANES;
        LINATTN_UNROLL
        for (int i = 0; i < TILE; i++) {
            store(dc + i * LANES, fma(dy, load(after + i * LANES), load(dc + i * LANES)));
            dh[i] = fma(dy, splat(c[i]), dh[i]);
            dwritten = fma(dh[i], splat(b[i]), dwritten);
            store(db + i * LANES, fma(dh[i], written, load(db + i * LANES)));
            dh[i] = carried({load(twos + i * LANES), load(parts + i * LANES)}, dh[i], zero());
            const Float dlog = dh[i] * load(before + i * LANES);  // of dt a
            ddt = fma(dlog, load(x.a + i * SLAB), ddt);
            da[i] = fma(dlog, dt, da[i]);
        }
        store(x.dwritten + t * LANES, dwritten);
        store(x.ddt + t * LANES, ddt);
    }
    for (int i = 0; i < TILE; i++) {
        store(x.dh + i * SLAB, dh[i]);
        store(x.da + i * SLAB, load(x.da + i * SLAB) + da[i]);
    }
}

template <int WIDTH>
struct Width {
    static constexpr int value = WIDTH;
};

// Calls body(Width<w>(), n) for tiles [n, n + w) of `size` numbers, wide ones first.
template <int WIDTH, class Body>
LINATTN_INLINE void tiles(int64_t n, int64_t size, const Body& body) {
    for (; n + WIDTH <= size; n += WIDTH) body(Width<WIDTH>(), n);
    if constexpr (WIDTH > 1) tiles<WIDTH / 2>(n, size, body);
}

// The sums over the lanes of vectors [tokens, width], as numbers of rows that are `size` long.
void sum_lanes(const float* x, int tokens, int width, int64_t size, float* to) {
    alignas(64) float all[CHUNK * BACKWARD_TILE];
    for (int i = 0; i < tokens * width; i += LANES) store(all + i, sums(x + i * LANES));
    for (int t = 0; t < tokens; t++)
        for (int i = 0; i < width; i++) to[t * size + i] = all[t * width + i];
}

}  // namespace

LINATTN_ENTRY(selective_scan_forward)
(LINATTN_ROWS(x), LINATTN_ROWS(dt), LINATTN_ROWS(b), LINATTN_ROWS(c), LINATTN_ROWS(y), LINATTN_ROWS(z), int64_t dt_apart, const float* bias,
 int64_t positive, const float* a, const float* skip, const float* initial, const int64_t* ends, float* final, float* kept, int64_t rows, int64_t tokens, int64_t width, int64_t size,
 int64_t threads) {
    LINATTN_THESE_ROWS(x);
    LINATTN_THESE_ROWS(dt);
    LINATTN_THESE_ROWS(b);
    LINATTN_THESE_ROWS(c);
    LINATTN_THESE_ROWS(y);
    LINATTN_THESE_ROWS(z);
    const int64_t slabs = (width + SLAB - 1) / SLAB;
    parallel(rows * slabs, threads, [&](int64_t task) {
        const int64_t n = task / slabs;
        const Sequence at = sequence(n, tokens, ends);
        const Slab part = slab(task % slabs, width);
        alignas(64) float own_a[MOST * SLAB], h[MOST * SLAB], own_b[CHUNK * MOST], own_c[CHUNK * MOST];
        alignas(64) float own_dt[STRIP], written[STRIP], own_y[STRIP];
        transpose_in(a, part, size, LOG2E, own_a);
        transpose_in(initial ? initial + n * width * size : nullptr, part, size, 1.0f, h);
        int64_t slot = at.slot;
        for (int64_t start = at.begin; start < at.end; start += CHUNK, slot++) {
            const int count = int(min(CHUNK, at.end - start));
            stage(b, at.row, start, count, size, own_b);
            stage(c, at.row, start, count, size, own_c);
            for (int block = 0; block < part.blocks(); block++) {
                const int lanes = part.lanes(block), offset = block * LANES;
                const int64_t channel = part.first + offset;
                for (int64_t i = 0; kept && i < size; i++)
                    store(kept + (slot * size + i) * width + channel, load(h + i * SLAB + offset), lanes);
                strip(dt, dt_apart, at.row, start, count, channel, lanes, own_dt);
                const Float added = bias ? load(bias + channel, lanes) : zero();
                for (int t = 0; t < count; t++) {
                    Float step = load(own_dt + t * LANES) + added;
                    if (positive) step = softplus(step);
                    store(own_dt + t * LANES, step);
                    store(written + t * LANES, step * x.load(at.row, start + t, channel, lanes));
                    store(own_y + t * LANES, zero());
                }
                Chunk chunk = {};
                chunk.tokens = count, chunk.size = size, chunk.dt = own_dt, chunk.written = written, chunk.y = own_y;
                tiles<FORWARD_TILE>(0, size, [&](auto tile, int64_t i) {
                    chunk.a = own_a + i * SLAB + offset, chunk.h = h + i * SLAB + offset;
                    chunk.b = own_b + i, chunk.c = own_c + i;
                    forward<decltype(tile)::value>(chunk);
                });
                const Float by = skip ? load(skip + channel, lanes) : zero();
                for (int t = 0; t < count; t++) {
                    Float out = load(own_y + t * LANES);
                    if (skip) out = fma(x.load(at.row, start + t, channel, lanes), by, out);
                    if (z.data) {
                        const Float gate = z.load(at.row, start + t, channel, lanes);
                        out = out * gate * sigmoid(gate);
                    }
                    y.store(at.row, start + t, channel, out, lanes);
                }
            }
        }
        transpose_out(h, part, size, final + n * width * size);
    });
}

// Gradients of b and c are partial sums per slab, those of a and skip per group of sequences (`groups`); the parts are then summed.
LINATTN_ENTRY(selective_scan_backward)
(LINATTN_ROWS(x), LINATTN_ROWS(dt), LINATTN_ROWS(b), LINATTN_ROWS(c), LINATTN_ROWS(dy), LINATTN_ROWS(dx), LINATTN_ROWS(ddt),
 const float* a, const float* skip, const int64_t* ends, const float* dfinal, const float* kept, float* dinitial, void* db, void* dc,
 float* da, float* dskip, float* parts_b, float* parts_c, float* parts_a, float* parts_skip, int64_t rows, int64_t groups,
 int64_t batch, int64_t tokens, int64_t width, int64_t size, int64_t threads) {
    LINATTN_THESE_ROWS(x);
    LINATTN_THESE_ROWS(dt);
    LINATTN_THESE_ROWS(b);
    LINATTN_THESE_ROWS(c);
    LINATTN_THESE_ROWS(dy);
    LINATTN_THESE_ROWS(dx);
    LINATTN_THESE_ROWS(ddt);
    const int64_t slabs = (width + SLAB - 1) / SLAB;
    parallel(groups * slabs, threads, [&](int64_t task) {
        const int64_t group = task / slabs;
        const Slab part = slab(task % slabs, width);
        alignas(64) float own_a[MOST * SLAB], h[MOST * SLAB], dh[MOST * SLAB], own_da[MOST * SLAB], own_dskip[SLAB] = {};
        alignas(64) float own_b[CHUNK * MOST], own_c[CHUNK * MOST];
        alignas(64) float own_dt[BLOCKS * STRIP], written[BLOCKS * STRIP], own_dy[BLOCKS * STRIP];
        alignas(64) float dwritten[BLOCKS * STRIP], own_ddt[BLOCKS * STRIP];
        alignas(64) float states[(CHUNK + 1) * BACKWARD_TILE * LANES], twos[CHUNK * BACKWARD_TILE * LANES], parts[CHUNK * BACKWARD_TILE * LANES];
        alignas(64) float own_db[CHUNK * BACKWARD_TILE * LANES], own_dc[CHUNK * BACKWARD_TILE * LANES];
        transpose_in(a, part, size, LOG2E, own_a);
        memset(own_da, 0, sizeof(float) * size * SLAB);
        for (int64_t n = group * rows / groups; n < (group + 1) * rows / groups; n++) {
            const Sequence at = sequence(n, tokens, ends);
            transpose_in(dfinal ? dfinal + n * width * size : nullptr, part, size, 1.0f, dh);
            for (int64_t index = (at.end - at.begin + CHUNK - 1) / CHUNK - 1; index >= 0; index--) {
                const int64_t start = at.begin + index * CHUNK;
                const int count = int(min(CHUNK, at.end - start));
                stage(b, at.row, start, count, size, own_b);
                stage(c, at.row, start, count, size, own_c);
                for (int block = 0; block < part.blocks(); block++) {
                    const int lanes = part.lanes(block), strip = block * STRIP;
                    const int64_t channel = part.first + block * LANES;
                    for (int64_t i = 0; i < size; i++)
                        store(h + i * SLAB + block * LANES, load(kept + ((at.slot + index) * size + i) * width + channel, lanes));
                    for (int t = 0; t < count; t++) {
                        const Float step = dt.load(at.row, start + t, channel, lanes);
                        store(own_dt + strip + t * LANES, step);
                        store(written + strip + t * LANES, step * x.load(at.row, start + t, channel, lanes));
                        store(own_dy + strip + t * LANES, dy.load(at.row, start + t, channel, lanes));
                        store(dwritten + strip + t * LANES, zero());
                        store(own_ddt + strip + t * LANES, zero());
                    }
                }
                Chunk chunk = {};
                chunk.tokens = count, chunk.size = size, chunk.states = states, chunk.twos = twos, chunk.parts = parts, chunk.db = own_db, chunk.dc = own_dc;
                tiles<BACKWARD_TILE>(0, size, [&](auto tile, int64_t i) {
                    constexpr int TILE = decltype(tile)::value;
                    memset(own_db, 0, sizeof own_db);
                    memset(own_dc, 0, sizeof own_dc);
                    chunk.b = own_b + i, chunk.c = own_c + i;
                    for (int block = 0; block < part.blocks(); block++) {
                        const int64_t own = i * SLAB + block * LANES;
                        const int strip = block * STRIP;
                        chunk.a = own_a + own, chunk.h = h + own, chunk.dh = dh + own, chunk.da = own_da + own;
                        chunk.dt = own_dt + strip, chunk.written = written + strip, chunk.dy = own_dy + strip;
                        chunk.dwritten = dwritten + strip, chunk.ddt = own_ddt + strip;
                        again<TILE>(chunk);
                        backward<TILE>(chunk);
                    }
                    const int64_t to = ((task % slabs * batch + at.row) * tokens + start) * size + i;
                    sum_lanes(own_db, count, TILE, size, parts_b + to);
                    sum_lanes(own_dc, count, TILE, size, parts_c + to);
                });
                for (int block = 0; block < part.blocks(); block++) {
                    const int lanes = part.lanes(block), strip = block * STRIP, offset = block * LANES;
                    const int64_t channel = part.first + offset;
                    const Float by = skip ? load(skip + channel, lanes) : zero();
                    Float total = zero();
                    for (int t = 0; t < count; t++) {
                        const Float own_x = x.load(at.row, start + t, channel, lanes), out = load(own_dy + strip + t * LANES);
                        const Float of_written = load(dwritten + strip + t * LANES);
                        Float of_x = of_written * load(own_dt + strip + t * LANES);
                        if (skip) of_x = fma(out, by, of_x);
                        dx.store(at.row, start + t, channel, of_x, lanes);
                        ddt.store(at.row, start + t, channel, fma(of_written, own_x, load(own_ddt + strip + t * LANES) * LN2), lanes);
                        total = fma(out, own_x, total);
                    }
                    store(own_dskip + offset, load(own_dskip + offset) + total);
                }
            }
            transpose_out(dh, part, size, dinitial + n * width * size);
        }
        transpose_out(own_da, part, size, parts_a + group * width * size);
        if (skip)
            for (int64_t i = 0; i < part.count; i++) parts_skip[group * width + part.first + i] = own_dskip[i];
    });
    sum_parts(parts_b, slabs, batch * tokens * size, db, b.dtype, threads);
    sum_parts(parts_c, slabs, batch * tokens * size, dc, c.dtype, threads);
    sum_parts(parts_a, groups, width * size, da, FLOAT32, threads);
    if (skip) sum_parts(parts_skip, groups, width, dskip, FLOAT32, threads);
}

}  // namespace LINATTN_ISA
}  // namespace linattn

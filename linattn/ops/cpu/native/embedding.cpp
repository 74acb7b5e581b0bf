// Rows of a matrix, plain or quantised, as floats: the lookup of an embedding.
#include "vector.h"

namespace linattn {
namespace LINATTN_ISA {
namespace {

// One row of codes of 8 bits, or of 4 (rounded.h), times its scales.
void row8(const int8_t* codes, float scale, int64_t columns, void* to, int64_t dtype, int64_t at) {
    float x[LANES];
    for (int64_t i = 0; i < columns; i += LANES) {
        const int n = int(columns - i < LANES ? columns - i : LANES);
        for (int j = 0; j < n; j++) x[j] = float(codes[i + j]);
        store(to, dtype, at + i, load(x, n) * scale, n);
    }
}

void row4(const uint8_t* codes, const float16* scales, int64_t group, int64_t columns, void* to, int64_t dtype, int64_t at) {
    constexpr int BLOCK = 32;
    for (int64_t first = 0; first < columns; first += BLOCK) {
        float x[BLOCK];
        const uint8_t* p = codes + first / 2;
        for (int j = 0; j < BLOCK / 2; j++) {
            x[j] = float(int(p[j] & 15) - 8);
            x[j + BLOCK / 2] = float(int(p[j] >> 4) - 8);
        }
        float lane[LANES];
        store(lane, load(scales + first / group, 1));
        for (int i = 0; i < BLOCK; i += LANES) store(to, dtype, at + first + i, load(x + i) * lane[0], LANES);
    }
}

struct Call {
    const void *codes, *scales;
    int64_t group, rows, columns;
    const int64_t* ids;
    int64_t count;
    void* to;
    int64_t dtype;
};

}  // namespace

// to[i] = row ids[i]; without scales the rows are copied; `group` 0: codes of 8 bits, with a float scale for each row. Ids out of range are
// skipped.
LINATTN_ENTRY(embedding)(const void* given, int64_t) {
    const Call& of = *(const Call*)given;
    for (int64_t i = 0; i < of.count; i++) {
        const int64_t row = of.ids[i], at = i * of.columns;
        if (row < 0 || row >= of.rows) continue;
        if (!of.scales) {
            const int64_t bytes = of.columns * (of.dtype == FLOAT32 ? 4 : 2);
            memcpy((char*)of.to + i * bytes, (const char*)of.codes + row * bytes, bytes);
        } else if (of.group == 0) row8((const int8_t*)of.codes + row * of.columns, ((const float*)of.scales)[row], of.columns, of.to, of.dtype, at);
        else
            row4((const uint8_t*)of.codes + row * of.columns / 2, (const float16*)of.scales + row * (of.columns / of.group), of.group,
                 of.columns, of.to, of.dtype, at);
    }
}

}  // namespace LINATTN_ISA
}  // namespace linattn

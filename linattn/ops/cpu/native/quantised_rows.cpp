// Rows of a quantised matrix as floats: the lookup of an embedding.
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

}  // namespace

// to[i] = row ids[i]; `group` 0: codes of 8 bits, with a float scale for each row. Ids out of range are skipped.
LINATTN_ENTRY(quantised_rows)
(const void* codes, const void* scales, int64_t group, int64_t rows, int64_t columns, const int64_t* ids, int64_t count, void* to, int64_t dtype,
 int64_t) {
    for (int64_t i = 0; i < count; i++) {
        const int64_t row = ids[i];
        if (row < 0 || row >= rows) continue;
        if (group == 0) row8((const int8_t*)codes + row * columns, ((const float*)scales)[row], columns, to, dtype, i * columns);
        else
            row4((const uint8_t*)codes + row * columns / 2, (const float16*)scales + row * (columns / group), group, columns, to, dtype,
                 i * columns);
    }
}

}  // namespace LINATTN_ISA
}  // namespace linattn

// Calls of kernels one after another, as in a decoding step: without Python between them.
#include <cstdint>

namespace {

struct Bound {
    void (*kernel)(const void* arguments, int64_t threads);
    const void* arguments;
};

}  // namespace

extern "C" __attribute__((visibility("default"))) void linattn_sequence(const void* calls, int64_t count, int64_t threads) {
    for (int64_t i = 0; i < count; i++) {
        const Bound& call = static_cast<const Bound*>(calls)[i];
        call.kernel(call.arguments, threads);
    }
}

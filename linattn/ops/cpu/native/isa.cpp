// Detects the instruction sets of this machine. Compiled for the baseline of all machines.
#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace {

#if defined(__x86_64__) && defined(__linux__)
// True if there are tiles and the system permits this process and its threads to use them.
bool has_amx() {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    const unsigned bf16 = 1u << 22, tile = 1u << 24;
    if ((d & (bf16 | tile)) != (bf16 | tile)) return false;
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}
#elif defined(__x86_64__)
bool has_amx() { return false; }
#endif

#if defined(__aarch64__) && defined(__linux__)
bool has_bf16() { return getauxval(AT_HWCAP2) & 1ul << 14; }  // HWCAP2_BF16, missing in older headers
#elif defined(__aarch64__) && defined(__APPLE__)
bool has_bf16() {
    int there = 0;
    size_t size = sizeof there;
    return sysctlbyname("hw.optional.arm.FEAT_BF16", &there, &size, nullptr, 0) == 0 && there;
}
#elif defined(__aarch64__)
bool has_bf16() { return false; }
#endif

}  // namespace

// Index of the best instruction set in build.py's list for this architecture: 0 portable; 1 AVX2, 2 AVX-512, 3 AVX512-BF16, 4 AMX; on
// ARM 1 BF16.
extern "C" __attribute__((visibility("default"))) int64_t linattn_isa() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (!avx2) return 0;
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512vl");
    if (!avx512) return 1;
    if (!__builtin_cpu_supports("avx512bf16") || !__builtin_cpu_supports("avx512vnni")) return 2;
    return has_amx() ? 4 : 3;
#elif defined(__aarch64__)
    return has_bf16() ? 1 : 0;
#else
    return 0;
#endif
}

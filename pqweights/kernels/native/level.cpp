// Whether this processor has what this library was compiled for. Compiled for the oldest processor of its kind, and
// without any header of ours, so that asking is safe.
#if defined(__x86_64__)
#include <cpuid.h>

namespace {

struct Registers {
    unsigned a, b, c, d;
};

Registers asked(unsigned leaf) {
    Registers r{};
    if (leaf <= __get_cpuid_max(leaf & 0x80000000, nullptr)) __cpuid_count(leaf, 0, r.a, r.b, r.c, r.d);
    return r;
}

// The registers that the system saves when it changes between processes.
unsigned saved_registers() {
    unsigned low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

constexpr bool all(unsigned found, unsigned wanted) { return (found & wanted) == wanted; }

// 2, 3 or 4 for x86-64-v2, -v3 or -v4, as the x86-64 psABI defines them; 1 for less, and 5 for x86-64-v4 with what Ice
// Lake and Zen 4 added.
int own_level() {
    const Registers one = asked(1), seven = asked(7), extended = asked(0x80000001);
    // SSE3, SSSE3, CMPXCHG16B, SSE4.1, SSE4.2, POPCNT; LAHF
    if (!all(one.c, 1u << 0 | 1u << 9 | 1u << 13 | 1u << 19 | 1u << 20 | 1u << 23) || !all(extended.c, 1u << 0))
        return 1;
    // FMA, MOVBE, OSXSAVE, AVX, F16C; BMI1, AVX2, BMI2; LZCNT; XMM and YMM
    if (!all(one.c, 1u << 12 | 1u << 22 | 1u << 27 | 1u << 28 | 1u << 29) ||
        !all(seven.b, 1u << 3 | 1u << 5 | 1u << 8) || !all(extended.c, 1u << 5) || !all(saved_registers(), 0x06))
        return 2;
    // AVX512F, DQ, CD, BW, VL; the mask registers and all of ZMM
    if (!all(seven.b, 1u << 16 | 1u << 17 | 1u << 28 | 1u << 30 | 1u << 31) || !all(saved_registers(), 0xE6)) return 3;
    // AVX512_VBMI, AVX512_VBMI2, AVX512_VNNI
    return all(seven.c, 1u << 1 | 1u << 6 | 1u << 11) ? 5 : 4;
}

}  // namespace

extern "C" [[gnu::visibility("default")]] int pqweights_runs_here() { return own_level() >= PQWEIGHTS_LEVEL; }
#else
extern "C" [[gnu::visibility("default")]] int pqweights_runs_here() { return 1; }
#endif

// The features that an x86 CPU has and its operating system saves, from CPUID and XGETBV. __builtin_cpu_supports is not
// used: Clang 14 rejects "f16c", and in a program linked by Zig it returns false for every feature.
#pragma once

#include <cpuid.h>

#include <initializer_list>

namespace headscope {

struct CpuFeatures {
    bool avx2 = false;         // with FMA, F16C, BMI and BMI2
    bool avx512 = false;       // F, BW, DQ and VL, and all of the above
    bool avx512_bf16 = false;  // and products of pairs of bf16
};

inline CpuFeatures cpu_features() {
    const auto has_bits = [](unsigned word, std::initializer_list<int> bits) {
        for (int bit : bits)
            if (!(word >> bit & 1)) return false;
        return true;
    };
    unsigned eax, ebx, ecx, edx, eax_of_1, ebx_of_7, saved_low, saved_high;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !has_bits(ecx, {12, 27, 28, 29}))
        return {};  // FMA, OSXSAVE, AVX, F16C
    if (!__get_cpuid_count(7, 0, &eax, &ebx_of_7, &ecx, &edx)) return {};
    asm volatile("xgetbv" : "=a"(saved_low), "=d"(saved_high) : "c"(0));  // the registers saved at a context switch
    CpuFeatures features;
    features.avx2 = has_bits(saved_low, {1, 2}) && has_bits(ebx_of_7, {3, 5, 8});  // XMM, YMM; BMI, AVX2, BMI2
#if defined(__APPLE__)
    const bool saves_zmm = true;  // macOS saves them from their first use on, and XCR0 does not show that before
#else
    const bool saves_zmm = has_bits(saved_low, {5, 6, 7});
#endif
    features.avx512 = features.avx2 && saves_zmm && has_bits(ebx_of_7, {16, 17, 30, 31});  // F, DQ, BW, VL
    if (__get_cpuid_count(7, 1, &eax_of_1, &ebx, &ecx, &edx))
        features.avx512_bf16 = features.avx512 && has_bits(eax_of_1, {5});
    return features;
}

}  // namespace headscope

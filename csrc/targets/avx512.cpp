#include "region.h"

// AVX-512 F, BW, DQ, VL: 32 registers of 16 floats.
#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi,bmi2,prefer-vector-width=512")
#define VECTOR_BYTES 64
#define REGISTER_TILE 24
#define QUERY_VECTORS 3

namespace headscope::avx512 {
namespace {
#include "../kernels/kernels-inl.h"
}  // namespace
}  // namespace headscope::avx512
#pragma GCC pop_options

namespace headscope::avx512 {
namespace {
// __builtin_cpu_supports also asks XGETBV whether the operating system saves the registers.
bool runs_here() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
}
}  // namespace
extern const Target target;
const Target target{"avx512", OFFERS};
}  // namespace headscope::avx512
#endif

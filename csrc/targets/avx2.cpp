#include "region.h"

// AVX2 and FMA: 16 registers of 8 floats.
#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,bmi,bmi2")
#define VECTOR_BYTES 32
#define REGISTER_TILE 12
#define QUERY_VECTORS 3

namespace headscope::avx2 {
namespace {
#include "../kernels/kernels-inl.h"
}  // namespace
}  // namespace headscope::avx2
#pragma GCC pop_options

namespace headscope::avx2 {
namespace {
// __builtin_cpu_supports also asks XGETBV whether the operating system saves the registers.
bool runs_here() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
           __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
}
}  // namespace
extern const Target target;
const Target target{"avx2", OFFERS};
}  // namespace headscope::avx2
#endif

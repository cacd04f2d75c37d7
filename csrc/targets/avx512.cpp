#include "region.h"

// AVX-512 F, BW, DQ, VL: 32 registers of 16 floats.
#if defined(__x86_64__)
BEGIN_TARGET("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi,bmi2")
#define VECTOR_BYTES 64
#define REGISTER_TILE 24
#define QUERY_VECTORS 3

namespace headscope::avx512 {
namespace {
#include "../kernels/all_kernels-inl.h"
}  // namespace
}  // namespace headscope::avx512
END_TARGET

namespace headscope::avx512 {
namespace {
bool runs_here() { return cpu_features().avx512; }
}  // namespace
extern const Target target;
const Target target{"avx512", TARGET_FUNCTIONS};
}  // namespace headscope::avx512
#endif

#include "region.h"

// AVX2 and FMA: 16 registers of 8 floats.
#if defined(__x86_64__)
BEGIN_TARGET("avx2,fma,f16c,bmi,bmi2")
#define VECTOR_BYTES 32
#define REGISTER_TILE 12
#define QUERY_VECTORS 3

namespace headscope::avx2 {
namespace {
#include "../kernels/all_kernels-inl.h"
}  // namespace
}  // namespace headscope::avx2
END_TARGET

namespace headscope::avx2 {
namespace {
bool runs_here() { return cpu_features().avx2; }
}  // namespace
extern const Target target;
const Target target{"avx2", TARGET_FUNCTIONS};
}  // namespace headscope::avx2
#endif

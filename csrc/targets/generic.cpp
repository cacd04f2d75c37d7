#include "region.h"

// The compiler's baseline: SSE2 on x86-64, NEON on AArch64.
#define VECTOR_BYTES 16
#define REGISTER_TILE 12
#define QUERY_VECTORS 3

namespace headscope::generic {
namespace {
#include "../kernels/all_kernels-inl.h"
bool runs_here() { return true; }
}  // namespace
extern const Target target;
const Target target{"generic", TARGET_FUNCTIONS};
}  // namespace headscope::generic

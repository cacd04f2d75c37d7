#include "region.h"

// AArch64: every CPU has 32 registers of 4 floats. `generic` uses the same instructions with smaller tiles.
#if defined(__aarch64__)
#define VECTOR_BYTES 16
#define REGISTER_TILE 24
#define QUERY_VECTORS 3

namespace headscope::neon {
namespace {
#include "../kernels/all_kernels-inl.h"
bool runs_here() { return true; }
}  // namespace
extern const Target target;
const Target target{"neon", TARGET_FUNCTIONS};
}  // namespace headscope::neon
#endif

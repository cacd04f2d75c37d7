#include "region.h"

// AVX-512 with products of pairs of bf16.
#if defined(__x86_64__)
#if defined(HEADSCOPE_EMULATE_BF16)
// For tests on a CPU without the instruction: the same sums from plain ones.
BEGIN_TARGET("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi,bmi2")
#define BF16_DOT(sum, x, y) \
    ((sum) + (V<float>)((y) << 16) * (V<float>)((x) << 16) + (V<float>)((y) & -65536) * (V<float>)((x) & -65536))
#define BF16_PAIR(x, y) emulated_pair((__m512i)(x), (__m512i)(y))
#else
BEGIN_TARGET("avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi,bmi2")
#define BF16_DOT(sum, x, y) (V<float>)_mm512_dpbf16_ps((__m512)(sum), (__m512bh)(x), (__m512bh)(y))
#define BF16_PAIR(x, y) (__m512i) _mm512_cvtne2ps_pbh((__m512)(y), (__m512)(x))
#define BF16_NARROW(x) (__m256i) _mm512_cvtneps_pbh((__m512)(x))
#endif
#define VECTOR_BYTES 64
#define REGISTER_TILE 24
#define QUERY_VECTORS 3

namespace headscope::avx512_bf16 {
namespace {
#if defined(HEADSCOPE_EMULATE_BF16)
inline __m512i rounded_words(__m512i x) {  // to nearest, ties to even
    return _mm512_srli_epi32(
        _mm512_add_epi32(x, _mm512_add_epi32(_mm512_set1_epi32(0x7fff),
                                             _mm512_and_epi32(_mm512_srli_epi32(x, 16), _mm512_set1_epi32(1)))),
        16);
}
inline __m512i emulated_pair(__m512i x, __m512i y) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(rounded_words(x))),
                              _mm512_cvtepi32_epi16(rounded_words(y)), 1);
}
#endif
#include "../kernels/all_kernels-inl.h"
}  // namespace
}  // namespace headscope::avx512_bf16
END_TARGET

namespace headscope::avx512_bf16 {
namespace {
#if defined(HEADSCOPE_EMULATE_BF16)
bool runs_here() { return cpu_features().avx512; }
#else
bool runs_here() { return cpu_features().avx512_bf16; }
#endif
}  // namespace
extern const Target target;
const Target target{"avx512_bf16", TARGET_FUNCTIONS};
}  // namespace headscope::avx512_bf16
#endif

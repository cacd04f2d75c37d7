/* What this machine's cores and memory can do at best: multiply-adds in registers, and reading. */
#include <stddef.h>
#include <stdint.h>

#if defined(__AVX512F__)
#define WIDTH 64
#elif defined(__AVX__)
#define WIDTH 32
#else
#define WIDTH 16
#endif

typedef float vec __attribute__((vector_size(WIDTH)));
typedef uint64_t words __attribute__((vector_size(WIDTH)));

/* Twelve independent sums hide the latency of two units of up to six cycles and fit sixteen registers. */
#define TWELVE(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11)

/* Returns the floating-point operations done. */
double fma_fp32(long rounds, float seed, float *sink) {
  vec x = {0}, y = {0};
  x += 0.999f;
  y += seed;
#define START(n) vec a##n = y + (float)n;
#define STEP(n) a##n = a##n * x + y;
#define SUM(n) a0 += a##n;
  TWELVE(START)
  for (long i = 0; i < rounds; i++) {
    TWELVE(STEP)
  }
  TWELVE(SUM)
  *sink = a0[0];
  return 2.0 * 12 * (WIDTH / 4) * (double)rounds;
}

#if defined(__AVX512BF16__)
#include <immintrin.h>
double fma_bf16(long rounds, float seed, float *sink) {
  __m512bh x = (__m512bh)_mm512_set1_epi16(0x3f7f), y = (__m512bh)_mm512_set1_epi16(0x3a80);
#define BEGIN(n) __m512 b##n = _mm512_set1_ps(seed + n);
#define DOT(n) b##n = _mm512_dpbf16_ps(b##n, x, y);
#define ADD(n) b0 = _mm512_add_ps(b0, b##n);
  TWELVE(BEGIN)
  for (long i = 0; i < rounds; i++) {
    TWELVE(DOT)
  }
  TWELVE(ADD)
  *sink = _mm512_cvtss_f32(b0);
  return 2.0 * 2 * 12 * 16 * (double)rounds;
}
#else
double fma_bf16(long rounds, float seed, float *sink) {
  (void)rounds;
  *sink = seed;
  return 0;
}
#endif

/* Reads a buffer so many times; returns something that depends on all of it. */
uint64_t read_all(const void *buffer, size_t bytes, long times) {
  const words *at = buffer;
  words sum[8] = {{0}};
  for (; times > 0; times--) {
    for (size_t i = 0; i + 8 <= bytes / WIDTH; i += 8)
      for (int j = 0; j < 8; j++) sum[j] += at[i + j];
    __asm__ volatile("" ::: "memory"); /* else once would do */
  }
  for (int j = 1; j < 8; j++) sum[0] += sum[j];
  return sum[0][0];
}

// Elementary functions of vectors: exp2, tanh and its derivative, log1p.

// Replaces N vectors t by 2**t, for t up to about 120. Results below the smallest normal number are 0; NaN stays NaN.
// The polynomials are minimax, of relative error 8.2e-8 (64-byte vectors) or 9.1e-8, and exactly 1 at 0. With 32
// registers, each step is computed for all vectors before the next: one vector is a chain of 7 dependent instructions
// of about 4 cycles, too long for the out-of-order window to overlap several of them.
#if VECTOR_BYTES == 64
template <int N>
INLINE void exp2_in_place(V<float>* t) {
    V<float> f[N], p[N];
    UNROLL_FOR(n, N) f[n] = _mm512_reduce_ps(t[n], _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // t - floor(t)
    UNROLL_FOR(n, N) p[n] = 1.86713017e-3f * f[n] + 9.01702978e-3f;
    UNROLL_FOR(n, N) p[n] = p[n] * f[n] + 5.57999127e-2f;
    UNROLL_FOR(n, N) p[n] = p[n] * f[n] + 2.40164444e-1f;
    UNROLL_FOR(n, N) p[n] = p[n] * f[n] + 6.93151295e-1f;
    UNROLL_FOR(n, N) p[n] = p[n] * f[n] + 1.f;
    UNROLL_FOR(n, N)
        t[n] = _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(t[n], splat(-126.f), _CMP_NLT_UQ), p[n],
                                      t[n]);  // p * 2**floor(t)
}
#else
template <int N>
INLINE void exp2_in_place(V<float>* t) {  // one vector after the other: there are 16 registers
    UNROLL_FOR(n, N) {
        V<float> x = maximum<float>(splat(-127.f), t[n]);
        const V<float> magic =
            splat(12583039.f);  // 1.5 * 2**23 + 127: adding it rounds to an integer, biased as the exponent of a float
        V<float> z = x + magic;
        V<float> f = x - (z - magic);
        V<float> p = splat(1.32646524e-3f);
        p = p * f + 9.67151132e-3f;
        p = p * f + 5.55073396e-2f;
        p = p * f + 2.40222421e-1f;
        p = p * f + 6.93146978e-1f;
        p = p * f + 1.f;  // exactly 1 at t = -127, for which the exponent below is 0: 2**t becomes 0
        t[n] = p * (V<float>)((I<float>)z << 23);  // multiplied, not added to the bits of p, so that any NaN stays NaN
    }
}
#endif
INLINE V<float> exp2(V<float> t) {
    exp2_in_place<1>(&t);
    return t;
}

// float64 serves as a reference: these are not optimized.
NOINLINE V<double> exp2(V<double> t) {
    for (int lane = 0; lane < LANES<double>; lane++) t[lane] = std::exp2(t[lane]);
    return t;
}
template <int N>
INLINE void exp2_in_place(V<double>* t) {
    for (int n = 0; n < N; n++) t[n] = exp2(t[n]);
}
// Loads an argument of exp2_in_place into a register. With a memory operand, vreduceps on Zen 4 depends on the previous
// content of its destination register.
template <class T>
INLINE V<T> load_exponent(const T* at) {
    V<T> t = load(at);
#if VECTOR_BYTES == 64 && !defined(__clang__)  // Clang rejects the operand unless the whole file targets AVX-512
    asm("" : "+v"(t));
#endif
    return t;
}
// Clamps t, -infinity included, to where 2**t is 0.
INLINE V<float> clamp_exponent(V<float> t) { return maximum<float>(splat(-127.f), t); }
INLINE V<double> clamp_exponent(V<double> t) { return maximum<double>(splat(-2000.), t); }

INLINE V<float> tanh(V<float> x) {
    const V<float> size = x < 0 ? -x : x;
    const V<float> e = exp2(size * -2.88539008178f);  // exp(-2 |x|)
    const V<float> large = (1 - e) / (1 + e);
    const V<float> y = x * x;
    // tanh(x) / x on |x| < 0.625, minimax in x * x, relative error 3.9e-9
    V<float> p = splat(-0.005660017044f);
    p = p * y + 0.02059101899f;
    p = p * y + -0.05372108021f;
    p = p * y + 0.1333112775f;
    p = p * y + -0.3333326054f;
    p = p * y + 0.9999999961f;
    return size < 0.625f ? x * p : x < 0 ? -large : large;
}
NOINLINE V<double> tanh(V<double> x) {
    for (int lane = 0; lane < LANES<double>; lane++) x[lane] = std::tanh(x[lane]);
    return x;
}

// The derivative of tanh at x, given y = tanh(x). For large |x| it avoids 1 - y * y, which would cancel.
INLINE V<float> tanh_derivative(V<float> x, V<float> y) {
    const V<float> size = x < 0 ? -x : x;
    const V<float> e = exp2(size * -2.88539008178f);
    return size < 0.625f ? 1 - y * y : 4 * e / ((1 + e) * (1 + e));
}
NOINLINE V<double> tanh_derivative(V<double> x, V<double>) {
    for (int lane = 0; lane < LANES<double>; lane++) {
        const double c = std::cosh(x[lane]);
        x[lane] = 1 / (c * c);
    }
    return x;
}

// log(1 + x) for x >= 0.
INLINE V<float> log1p(V<float> x) {
    const V<float> u = 1 + x;
    const I<float> exponent = ((I<float>)u - 0x3f3504f3) >> 23;  // u = m 2**exponent with m from sqrt(1/2) to sqrt(2)
    const V<float> f = (V<float>)((I<float>)u - (exponent << 23)) - 1;
    const V<float> r = f / (2 + f), z = r * r;
    // log(m) = 2 artanh(r), minimax in z, relative error 8.1e-10
    V<float> p = splat(0.29871735f);
    p = p * z + 0.399775413f;
    p = p * z + 0.666667764f;
    p = p * z + 2.f;
    return __builtin_convertvector(exponent, V<float>) * 0.693147181f +
           (r * p + (x - (u - 1)) / u);  // the last term corrects the rounding of u
}
NOINLINE V<double> log1p(V<double> x) {
    for (int lane = 0; lane < LANES<double>; lane++) x[lane] = std::log1p(x[lane]);
    return x;
}

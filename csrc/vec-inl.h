// A small vector of T over the compiler's own vector type. VECTOR_BYTES comes from the target. Included once inside each
// target's namespace and region, so that no vector code can leak into functions that targets share.

template <class T> struct VecTypes;
template <> struct VecTypes<float> {
    typedef float V __attribute__((vector_size(VECTOR_BYTES), may_alias));
    typedef float U __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));  // anywhere in memory
    typedef std::int32_t I __attribute__((vector_size(VECTOR_BYTES), may_alias));
};
template <> struct VecTypes<double> {
    typedef double V __attribute__((vector_size(VECTOR_BYTES), may_alias));
    typedef double U __attribute__((vector_size(VECTOR_BYTES), aligned(8), may_alias));
    typedef std::int64_t I __attribute__((vector_size(VECTOR_BYTES), may_alias));
};

template <class T> using V = typename VecTypes<T>::V;
template <class T> using I = typename VecTypes<T>::I;
template <class T> using Int = std::remove_reference_t<decltype(std::declval<I<T>&>()[0])>;
template <class T> constexpr int LANES = VECTOR_BYTES / int(sizeof(T));

template <class T> INLINE V<T> load(const T* at) { return *reinterpret_cast<const V<T>*>(at); }
template <class T> INLINE I<T> load_int(const Int<T>* at) { return *reinterpret_cast<const I<T>*>(at); }
template <class T> INLINE V<T> load_anywhere(const T* at) { return *reinterpret_cast<const typename VecTypes<T>::U*>(at); }
template <class T> INLINE void store(T* at, V<T> x) { *reinterpret_cast<V<T>*>(at) = x; }
template <class T> INLINE void store_anywhere(T* at, V<T> x) { *reinterpret_cast<typename VecTypes<T>::U*>(at) = x; }
template <class T> INLINE V<T> splat(T x) { return x - V<T>{}; }
template <class T> INLINE V<T> greater(V<T> a, V<T> b) { return a > b ? a : b; }  // b where a is NaN

template <class T> INLINE bool any(I<T> mask) {
    std::int64_t words[VECTOR_BYTES / 8], all = 0;
    __builtin_memcpy(words, &mask, VECTOR_BYTES);
    for (std::int64_t word : words) all |= word;
    return all != 0;
}

// 2**t for t up to about 120; 0 where the result would be below the smallest normal number. NaN stays NaN.
INLINE V<float> exp2(V<float> t) {
    const V<float> lowest = splat(-126.f);
    V<float> x = t < lowest ? lowest : t;
    const V<float> magic = splat(12582912.f);  // 1.5 * 2**23: adding it rounds to a whole number
    V<float> z = x + magic;
    V<float> f = x - (z - magic);
    // minimax on [-1/2, 1/2], relative error 7.5e-8
    V<float> p = splat(1.3276471736e-3f);
    p = p * f + 9.6755415402e-3f;
    p = p * f + 5.5507132761e-2f;
    p = p * f + 2.4022119720e-1f;
    p = p * f + 6.9314696706e-1f;
    p = p * f + 1.0000000717f;
    I<float> bits = (I<float>)p + ((I<float>)z << 23);
    return t < lowest ? V<float>{} : (V<float>)bits;
}

// For checking, not for speed.
INLINE V<double> exp2(V<double> t) {
    for (int lane = 0; lane < LANES<double>; lane++) t[lane] = std::exp2(t[lane]);
    return t;
}

INLINE V<float> tanh(V<float> x) {
    const V<float> size = x < 0 ? -x : x;
    const V<float> e = exp2(size * -2.88539008178f);  // exp(-2 |x|)
    const V<float> far = (1 - e) / (1 + e);
    const V<float> y = x * x;
    // tanh(x) / x on |x| < 0.625, minimax in x * x, relative error 3.9e-9
    V<float> p = splat(-0.005660017044f);
    p = p * y + 0.02059101899f;
    p = p * y + -0.05372108021f;
    p = p * y + 0.1333112775f;
    p = p * y + -0.3333326054f;
    p = p * y + 0.9999999961f;
    return size < 0.625f ? x * p : x < 0 ? -far : far;
}
INLINE V<double> tanh(V<double> x) {
    for (int lane = 0; lane < LANES<double>; lane++) x[lane] = std::tanh(x[lane]);
    return x;
}

// LANES x LANES transpose in registers: log2(LANES) rounds of interleaving.
template <class T, int... N> INLINE void interleave(V<T> a, V<T> b, V<T>& low, V<T>& high, std::integer_sequence<int, N...>) {
    constexpr int L = LANES<T>;
    low = __builtin_shufflevector(a, b, (N % 2 * L + N / 2)...);
    high = __builtin_shufflevector(a, b, (N % 2 * L + N / 2 + L / 2)...);
}
template <class T> INLINE void transpose(V<T>* x) {
    constexpr int L = LANES<T>;
    V<T> y[L];
    UNROLL for (int round = 1; round < L; round *= 2) {
        UNROLL for (int n = 0; n < L / 2; n++)
            interleave<T>(x[n], x[n + L / 2], y[2 * n], y[2 * n + 1], std::make_integer_sequence<int, L>{});
        UNROLL for (int n = 0; n < L; n++) x[n] = y[n];
    }
}

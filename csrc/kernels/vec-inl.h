// A vector of T over the compiler's vector extension; the target defines VECTOR_BYTES. Included once inside each
// target's namespace and region, so that no function of one instruction set can be linked into another's.

template <class T>
struct VecTypes;
template <>
struct VecTypes<float> {
    typedef float V __attribute__((vector_size(VECTOR_BYTES), may_alias));
    typedef float U
        __attribute__((vector_size(VECTOR_BYTES), aligned(2), may_alias));  // as unaligned as words of two bf16
    typedef std::int32_t I __attribute__((vector_size(VECTOR_BYTES), may_alias));
};
template <>
struct VecTypes<double> {
    typedef double V __attribute__((vector_size(VECTOR_BYTES), may_alias));
    typedef double U __attribute__((vector_size(VECTOR_BYTES), aligned(8), may_alias));
    typedef std::int64_t I __attribute__((vector_size(VECTOR_BYTES), may_alias));
};

template <class T>
using V = typename VecTypes<T>::V;
template <class T>
using I = typename VecTypes<T>::I;
template <class T>
using Int = std::remove_reference_t<decltype(std::declval<I<T>&>()[0])>;
template <class T>
constexpr int LANES = VECTOR_BYTES / int(sizeof(T));

template <class T>
INLINE V<T> load(const T* at) {
    return *reinterpret_cast<const V<T>*>(at);
}
template <class T>
INLINE I<T> load_int(const Int<T>* at) {
    return *reinterpret_cast<const I<T>*>(at);
}
template <class T>
INLINE V<T> load_unaligned(const T* at) {
    return *reinterpret_cast<const typename VecTypes<T>::U*>(at);
}
template <class T>
INLINE void store(T* at, V<T> x) {
    *reinterpret_cast<V<T>*>(at) = x;
}
template <class T>
INLINE void store_int(Int<T>* at, I<T> x) {
    *reinterpret_cast<I<T>*>(at) = x;
}
template <class T>
INLINE void store_unaligned(T* at, V<T> x) {
    *reinterpret_cast<typename VecTypes<T>::U*>(at) = x;
}
template <class T>
INLINE V<T> load_widened(const T* at) {
    return load_unaligned(at);
}
template <class T, int... N>
INLINE V<T> load_half(const T* at, std::integer_sequence<int, N...>) {
    typedef T Half __attribute__((vector_size(VECTOR_BYTES / 2), aligned(2), may_alias));
    return (V<T>)__builtin_shufflevector(*reinterpret_cast<const Half*>(at), Half{}, N...);
}
// LANES / 2 numbers, then zeros.
template <class T>
INLINE V<T> load_half(const T* at) {
    return load_half(at, std::make_integer_sequence<int, LANES<T>>{});
}
// Interleaves LANES 16-bit numbers of each row into words (low, high).
template <int... N>
INLINE V<float> interleave_halves(const std::uint16_t* low, const std::uint16_t* high,
                                  std::integer_sequence<int, N...>) {
    typedef std::uint16_t Halves __attribute__((vector_size(VECTOR_BYTES / 2), aligned(2), may_alias));
    constexpr int L = LANES<float>;
    return (V<float>)__builtin_shufflevector(*reinterpret_cast<const Halves*>(low),
                                             *reinterpret_cast<const Halves*>(high), (N / 2 + N % 2 * L)...);
}
INLINE V<float> interleave_halves(const std::uint16_t* low, const std::uint16_t* high) {
    return interleave_halves(low, high, std::make_integer_sequence<int, 2 * LANES<float>>{});
}
#if defined(BF16_DOT)
// Rounds two vectors to bf16, to nearest even. The result holds x in its lower and y in its upper half; store_halves
// stores the halves separately, store_interleaved as words (x, y).
INLINE __m512i round_to_bf16(V<float> x, V<float> y) { return BF16_PAIR(x, y); }
INLINE void store_halves(std::uint16_t* x_at, std::uint16_t* y_at, __m512i both) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(x_at), _mm512_castsi512_si256(both));
    _mm256_store_si256(reinterpret_cast<__m256i*>(y_at), _mm512_extracti64x4_epi64(both, 1));
}
template <int... N>
INLINE __m512i interleave_halves(__m512i both, std::integer_sequence<int, N...>) {
    typedef std::int16_t Halves __attribute__((vector_size(64), may_alias));
    return (__m512i)__builtin_shufflevector((Halves)both, (Halves)both, (N / 2 + N % 2 * 16)...);
}
INLINE void store_interleaved(std::uint32_t* at, __m512i both) {
    _mm512_store_si512(at, interleave_halves(both, std::make_integer_sequence<int, 32>{}));
}
#endif

#if !HAS_HALF
// float16 conversions in integer arithmetic. F and U are float and std::uint32_t, or vectors of them.
typedef std::uint32_t UInt __attribute__((vector_size(VECTOR_BYTES), may_alias));
template <class F, class U>
INLINE F half_to_float(U half) {
    const U size = half & 0x7fffu, sign = (half & 0x8000u) << 16;
    const F scaled =
        __builtin_bit_cast(F, size << 13) * 0x1p112f;  // the exponents' biases are 112 apart; exact below 2^-14, too
    const U bits = size >= 0x7c00u ? size << 13 | 0x7f800000u : __builtin_bit_cast(U, scaled);  // infinity, NaN
    return __builtin_bit_cast(F, bits | sign);
}
template <class U, class F>
INLINE U float_to_half(F x) {  // to nearest, ties to even
    const U all = __builtin_bit_cast(U, x), size = all & 0x7fffffffu, sign = all >> 16 & 0x8000u;
    const U normal = (size - 0x38000000u + 0xfffu + (size >> 13 & 1u)) >> 13;
    const U small =
        __builtin_bit_cast(U, __builtin_bit_cast(F, size) + 0.5f) - 0x3f000000u;  // 0.5: its last bit is 2^-24
    const U large = size > 0x7f800000u ? size - size + 0x7e00u : size - size + 0x7c00u;
    return (size >= 0x47800000u ? large : size < 0x38800000u ? small : normal) | sign;
}
#endif

// Loads half types widened to T. Compilers split the generic conversion, so x86 uses intrinsics.
#if VECTOR_BYTES == 64
template <class T>
INLINE V<T> load_widened(const BFloat16* at) {
    return (V<T>)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at))), 16);
}
template <class T>
INLINE V<T> load_widened(const Float16* at) {
    return (V<T>)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
}
#elif VECTOR_BYTES == 32
template <class T>
INLINE V<T> load_widened(const BFloat16* at) {
    return (V<T>)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))), 16);
}
template <class T>
INLINE V<T> load_widened(const Float16* at) {
    return (V<T>)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
}
#else
template <class T>
INLINE V<T> load_widened(const BFloat16* at) {
    typedef std::uint16_t Halves __attribute__((vector_size(VECTOR_BYTES / 2), aligned(2), may_alias));
    return (V<T>)(__builtin_convertvector(*reinterpret_cast<const Halves*>(at), I<T>) << 16);
}
template <class T>
INLINE V<T> load_widened(const Float16* at) {
#if HAS_HALF
    typedef Half Halves __attribute__((vector_size(VECTOR_BYTES / 2), aligned(2), may_alias));
    return __builtin_convertvector(*reinterpret_cast<const Halves*>(at), V<T>);
#else
    typedef std::uint16_t Halves __attribute__((vector_size(VECTOR_BYTES / 2), aligned(2), may_alias));
    return half_to_float<V<T>>(__builtin_convertvector(*reinterpret_cast<const Halves*>(at), UInt));
#endif
}
#endif
// Stores rounded to half types, to nearest even; NaN stays NaN.
INLINE void store_low_halves(std::uint16_t* at, I<float> words) {  // the lower half of each
#if VECTOR_BYTES == 64
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), _mm512_cvtepi32_epi16((__m512i)words));
#else
    typedef std::uint16_t Words __attribute__((vector_size(VECTOR_BYTES / 2), aligned(2), may_alias));
    *reinterpret_cast<Words*>(at) = __builtin_convertvector(words, Words);
#endif
}
INLINE void store_bf16(std::uint16_t* at, V<float> x) {
#if defined(BF16_NARROW)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), BF16_NARROW(x));
#else
    typedef std::uint32_t Bits __attribute__((vector_size(VECTOR_BYTES)));
    const Bits bits = (Bits)x;
    store_low_halves(at, (I<float>)(x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : bits >> 16 | 64));
#endif
}
INLINE void store_f16(std::uint16_t* at, V<float> x) {
#if VECTOR_BYTES == 64
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#elif VECTOR_BYTES == 32
    _mm_storeu_si128(reinterpret_cast<__m128i*>(at), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#else
#if HAS_HALF
    typedef Half Halves __attribute__((vector_size(VECTOR_BYTES / 2), aligned(2), may_alias));
    *reinterpret_cast<Halves*>(at) = __builtin_convertvector(x, Halves);
#else
    store_low_halves(at, (I<float>)float_to_half<UInt>(x));
#endif
#endif
}

INLINE float widen(std::uint16_t x, Dtype dtype) {
    if (dtype == Dtype::bf16) return __builtin_bit_cast(float, std::uint32_t(x) << 16);
#if HAS_HALF
    return float(__builtin_bit_cast(Half, x));
#else
    return half_to_float<float>(std::uint32_t(x));
#endif
}
INLINE std::uint16_t round_to_half(float x, Dtype dtype) {
#if HAS_HALF
    if (dtype == Dtype::f16) return __builtin_bit_cast(std::uint16_t, Half(x));
#else
    if (dtype == Dtype::f16) return std::uint16_t(float_to_half<std::uint32_t>(x));
#endif
    std::uint32_t bits = __builtin_bit_cast(std::uint32_t, x);
    if (x != x) return std::uint16_t(bits >> 16 | 64);               // stays NaN
    return std::uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);  // to nearest, ties to even
}

// Store into column c of a row of some dtype: one number; and a vector, up to `width` columns.
template <class T>
INLINE void store_element(char* row, std::int64_t c, T x, Dtype dtype) {
    if (sizeof(T) == 8 || dtype == Dtype::f32)
        reinterpret_cast<T*>(row)[c] = x;
    else
        reinterpret_cast<std::uint16_t*>(row)[c] = round_to_half(float(x), dtype);
}
template <class T>
INLINE void store_elements(char* row, std::int64_t c, V<T> x, std::int64_t width, Dtype dtype) {
    if (c + LANES<T> > width)
        for (int n = 0; c + n < width; n++) store_element<T>(row, c + n, x[n], dtype);
    else if (sizeof(T) == 8 || dtype == Dtype::f32)
        store_unaligned(reinterpret_cast<T*>(row) + c, x);
    else if constexpr (sizeof(T) == 4) {
        if (dtype == Dtype::bf16)
            store_bf16(reinterpret_cast<std::uint16_t*>(row) + c, x);
        else
            store_f16(reinterpret_cast<std::uint16_t*>(row) + c, x);
    }
}

// Adds x to a stored sum, or replaces it if `fresh`.
template <class T>
INLINE void accumulate(T* sum, V<T> x, bool fresh) {
    store(sum, fresh ? x : load(sum) + x);
}
template <class T>
INLINE V<T> splat(T x) {
    return x - V<T>{};
}
// The maximum; b if either is NaN. The intrinsic is one instruction even where one operand is a constant.
template <class T>
INLINE V<T> maximum(V<T> a, V<T> b) {
#if VECTOR_BYTES == 64
    if constexpr (sizeof(T) == 4) return _mm512_max_ps(a, b);
#elif VECTOR_BYTES == 32
    if constexpr (sizeof(T) == 4) return _mm256_max_ps(a, b);
#endif
    return a > b ? a : b;
}

// A bit for each lane whose mask is set.
template <class T>
INLINE unsigned lane_bits(I<T> mask) {
#if VECTOR_BYTES == 64
    if constexpr (sizeof(T) == 4) return _mm512_movepi32_mask((__m512i)mask);
#elif VECTOR_BYTES == 32
    if constexpr (sizeof(T) == 4) return unsigned(_mm256_movemask_ps((__m256)mask));
#endif
    unsigned lanes = 0;
    UNROLL_FOR(lane, LANES<T>) lanes |= unsigned(mask[lane] != 0) << lane;
    return lanes;
}
template <class T>
INLINE bool any(I<T> mask) {
    if constexpr (sizeof(T) == 4 && VECTOR_BYTES >= 32) return lane_bits<T>(mask) != 0;
    std::int64_t words[VECTOR_BYTES / 8], all = 0;
    __builtin_memcpy(words, &mask, VECTOR_BYTES);
    for (std::int64_t word : words) all |= word;
    return all != 0;
}
// The first lane that is set; LANES if none is.
template <class T>
INLINE int first_set_lane(I<T> mask) {
    return __builtin_ctz(lane_bits<T>(mask) | 1u << LANES<T>);
}
// A LANES x LANES transpose in registers: log2(LANES) rounds of interleaving.
template <class T, int... N>
INLINE void interleave(V<T> a, V<T> b, V<T>& low, V<T>& high, std::integer_sequence<int, N...>) {
    constexpr int L = LANES<T>;
    low = __builtin_shufflevector(a, b, (N % 2 * L + N / 2)...);
    high = __builtin_shufflevector(a, b, (N % 2 * L + N / 2 + L / 2)...);
}
template <class T>
INLINE void transpose(V<T>* x) {
    constexpr int L = LANES<T>;
    V<T> y[L];
    UNROLL
    for (int round = 1; round < L; round *= 2) {
        UNROLL_FOR(n, L / 2)
            interleave<T>(x[n], x[n + L / 2], y[2 * n], y[2 * n + 1], std::make_integer_sequence<int, L>{});
        UNROLL_FOR(n, L) x[n] = y[n];
    }
}

// Reduces LANES vectors to one: lane n is the reduction, by `combine`, of the lanes of vector n. The first two rounds
// shuffle within 128-bit groups of four lanes, which has the least latency; the others move whole groups.
constexpr int reduction_source_lane(int lanes, int round, int lane, bool high) {
    const int w = lane % 4, four = lane / 4;
    if (round == 0) return w % 2 * lanes + four * 4 + w / 2 + 2 * high;
    if (round == 1) return w / 2 * lanes + four * 4 + w % 2 + 2 * high;
    if (lanes == 8) return four * lanes + 4 * high + w;
    return four / 2 * lanes + (round == 2 ? four % 2 + 2 * high : four % 2 * 2 + high) * 4 + w;
}
template <class T, int ROUND, class Combine, int... N>
INLINE V<T> combine_lanes(V<T> a, V<T> b, const Combine& combine, std::integer_sequence<int, N...>) {
    return combine(__builtin_shufflevector(a, b, reduction_source_lane(LANES<T>, ROUND, N, false)...),
                   __builtin_shufflevector(a, b, reduction_source_lane(LANES<T>, ROUND, N, true)...));
}
template <class T, int ROUND = 0, class Combine>
INLINE V<T> reduce_lanes(V<T>* x, const Combine& combine) {
    constexpr int L = LANES<T>, LEFT = L >> (ROUND + 1);
    if constexpr (LEFT == 0)
        return x[0];
    else {
        UNROLL_FOR(n, LEFT) {
            if constexpr (L >= 4)
                x[n] = combine_lanes<T, ROUND>(x[2 * n], x[2 * n + 1], combine, std::make_integer_sequence<int, L>{});
            else {
                V<T> low, high;
                interleave<T>(x[n], x[n + LEFT], low, high, std::make_integer_sequence<int, L>{});
                x[n] = combine(low, high);
            }
        }
        return reduce_lanes<T, ROUND + 1>(x, combine);
    }
}
template <class T>
INLINE V<T> reduce_sums(V<T>* x) {
    return reduce_lanes<T>(x, [](V<T> a, V<T> b) __attribute__((always_inline)) { return a + b; });
}
// Reduces the maxima of vectors whose bits are integers.
template <class T>
INLINE I<T> reduce_maxima(V<T>* x) {
    return (I<T>)reduce_lanes<T>(
        x, [](V<T> a, V<T> b) __attribute__((always_inline)) { return (I<T>)a > (I<T>)b ? a : b; });
}

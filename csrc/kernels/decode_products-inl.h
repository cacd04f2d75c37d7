// The products of a decoding step, which has at most MAX_DECODE_ROWS rows. With rows in the lanes most lanes would be
// empty, so here the columns of a head lie in the lanes, and G rows share each key and value that is loaded. Half types
// are widened as they are loaded.

template <class T>
constexpr int MAX_DECODE_ROWS = LANES<T> < 8 ? LANES<T> : 8;

// Prefetches rows of keys while values are multiplied, and the reverse.
template <class E>
struct Prefetcher {
    const E* row;
    std::int64_t stride;
    int width;
    INLINE void prefetch(int j) const {
        // into L2: a block of keys and values fills the L1 cache
        for (int c = 0; c < width; c += 64 / int(sizeof(E))) __builtin_prefetch(row + j * stride + c, 0, 2);
    }
};

// COUNT lanes from lane FROM on, then zeros.
template <class T, int COUNT, int FROM, int... LANE>
INLINE V<T> first_lanes(V<T> x, std::integer_sequence<int, LANE...>) {
    return __builtin_shufflevector(x, V<T>{}, (LANE < COUNT ? FROM + LANE : LANES<T>)...);
}
// Stores the sums of L / G keys, G of each, in the first lanes of their rows of s [keys][L]; zeros beyond.
template <class T, int G, int... N>
INLINE void store_dots(V<T> sums, T* s, std::integer_sequence<int, N...>) {
    constexpr int L = LANES<T>;
    (store(s + N * L, first_lanes<T, G, N * G>(sums, std::make_integer_sequence<int, L>{})), ...);
}
template <class T, int G>
INLINE void store_dots(V<T> sums, T* s) {
    store_dots<T, G>(sums, s, std::make_integer_sequence<int, LANES<T> / G>{});
}

// A packed vector holds the G rows of L / G keys. Repeats the first G lanes for each key.
template <class T, int G, int... N>
INLINE V<T> repeat_rows(V<T> x, std::integer_sequence<int, N...>) {
    return __builtin_shufflevector(x, x, (N % G)...);
}
// Reduces over the keys of a packed vector by `combine`; the result is repeated for each key.
template <class T, int STEP, class Combine, int... N>
INLINE V<T> reduce_keys(V<T> x, const Combine& combine, std::integer_sequence<int, N...> lanes) {
    if constexpr (STEP < LANES<T>)
        return reduce_keys<T, 2 * STEP>(combine(x, __builtin_shufflevector(x, x, ((N + STEP) % LANES<T>)...)), combine,
                                        lanes);
    else
        return x;
}
// Rearranges two packed vectors: x gets the even keys, y the odd ones.
template <class T, int G, int... N>
INLINE void deinterleave_keys(V<T>& x, V<T>& y, std::integer_sequence<int, N...>) {
    const V<T> a = x, b = y;
    x = __builtin_shufflevector(a, b, (N / G * 2 * G + N % G)...);
    y = __builtin_shufflevector(a, b, (N / G * 2 * G + N % G + G)...);
}

// The loop over keys of Products::dots. L / G keys at a time fill a vector with sums, to which `scale` applies.
template <class Products, class T, int G, class Q, class E, class Scale>
INLINE void compute_dots(const Q* q, int q_width, const E* k, std::int64_t k_stride, int keys, int depth, T* s,
                         bool packed, const Prefetcher<E>& prefetcher, const Scale& scale) {
    constexpr int L = LANES<T>, N = Products::N, KEYS_AT_ONCE = Products::KEYS_AT_ONCE;
    for (int j = 0; j < keys; j += N) {
        V<T> a[L];
        UNROLL_RANGE(n, 0, N, KEYS_AT_ONCE) {
            for (int m = n; m < n + KEYS_AT_ONCE; m++) prefetcher.prefetch(j + m);
            const E* key[KEYS_AT_ONCE];
            UNROLL_FOR(m, KEYS_AT_ONCE) key[m] = k + (j + n + m < keys ? j + n + m : keys - 1) * k_stride;
            Products::dot_keys(q, q_width, key, depth, a + n * G);
        }
        const V<T> sums = scale(reduce_sums<T>(a));
        if (packed)
            store(s + j * G, sums);
        else
            store_dots<T, G>(sums, s + j * L);
    }
}

template <class T, int G>
struct DecodeRows {
    static constexpr int L = LANES<T>;
    static constexpr int N = L / G;                     // keys whose sums fill a vector
    static constexpr int KEYS_AT_ONCE = N < 2 ? N : 2;  // the hardware prefetcher follows two streams best
    static constexpr int STEP = L;                      // columns of one multiply-add
    INLINE static void restore_order(V<T>*) {}

    // s[j][g] = k[j] · q[g]; s is [keys][L], or [keys][G] if packed; q is [G][q_width] with zeros beyond `depth`.
    template <class E>
    static void dots(const T* q, int q_width, const E* k, std::int64_t k_stride, int keys, int depth, T* s, bool packed,
                     Prefetcher<E> prefetcher) {
        compute_dots<DecodeRows, T, G>(q, q_width, k, k_stride, keys, depth, s, packed, prefetcher,
                                       [](V<T> sums) __attribute__((always_inline)) { return sums; });
    }
    template <class E>
    INLINE static void dot_keys(const T* q, int q_width, const E* const* key, int depth, V<T>* to) {
        V<T> a[KEYS_AT_ONCE * G];
        UNROLL_FOR(n, KEYS_AT_ONCE * G) a[n] = V<T>{};
        const auto add = [&](const V<T>* x, int d) __attribute__((always_inline)) {
            UNROLL_FOR(g, G) {
                const V<T> y = load(q + g * q_width + d);
                UNROLL_FOR(n, KEYS_AT_ONCE) a[n * G + g] += x[n] * y;
            }
        };
        V<T> x[KEYS_AT_ONCE];
        int d = 0;
        for (; d + L <= depth; d += L) {
            UNROLL_FOR(n, KEYS_AT_ONCE) x[n] = load_widened<T>(key[n] + d);
            add(x, d);
        }
        if (d < depth) {
            UNROLL_FOR(n, KEYS_AT_ONCE) {
                E padded[L]{};
                for (int c = 0; d + c < depth; c++) padded[c] = key[n][d + c];
                x[n] = load_widened<T>(padded);
            }
            add(x, d);
        }
        UNROLL_FOR(n, KEYS_AT_ONCE * G) to[n] = a[n];
    }

    // o[g] (+)= Σ_j p[j][g] v[j]; p is [keys][p_width], o is [G][o_width].
    template <class E>
    static void accumulate_values(const T* p, int p_width, const E* v, std::int64_t v_stride, int keys, int width, T* o,
                                  int o_width, bool fresh, Prefetcher<E> prefetcher) {
        constexpr int C = REGISTER_TILE * 2 / 3 / G > 1 ? REGISTER_TILE * 2 / 3 / G : 1;
        int c = 0;
        for (; c + C * L <= width; c += C * L) {
            accumulate_tile<C>(p, p_width, v + c, v_stride, keys, o + c, o_width, fresh, prefetcher);
            prefetcher.width = 0;  // the first tile has prefetched all rows
        }
        if constexpr (C > 1)
            for (; c + L <= width; c += L) {
                accumulate_tile<1>(p, p_width, v + c, v_stride, keys, o + c, o_width, fresh, prefetcher);
                prefetcher.width = 0;
            }
        if (c == width) return;
        V<T> a[G]{};
        for (int j = 0; j < keys; j++) {
            E padded[L]{};
            for (int n = 0; c + n < width; n++) padded[n] = v[j * v_stride + c + n];
            const V<T> x = load_widened<T>(padded);
            for (int g = 0; g < G; g++) a[g] += x * p[j * p_width + g];
        }
        for (int g = 0; g < G; g++) accumulate<T>(o + g * o_width + c, a[g], fresh);
    }
    template <int C, class E>
    static void accumulate_tile(const T* p, int p_width, const E* v, std::int64_t v_stride, int keys, T* o, int o_width,
                                bool fresh, Prefetcher<E> prefetcher) {
        V<T> a[G][C];
        UNROLL_TILE(g, G, c, C) a[g][c] = V<T>{};
        for (int j = 0; j < keys; j++, v += v_stride, p += p_width) {
            prefetcher.prefetch(j);
            V<T> x[C];
            UNROLL_FOR(c, C) x[c] = load_widened<T>(v + c * L);
            UNROLL_FOR(g, G) {
                const V<T> w = splat(p[g]);
                UNROLL_FOR(c, C) a[g][c] += w * x[c];
            }
        }
        UNROLL_TILE(g, G, c, C) accumulate<T>(o + g * o_width + c * L, a[g][c], fresh);
    }
};

#if defined(BF16_DOT)
// The same with pairs of bf16: along D for q and k, along the keys for weights and v. Two rows of v are interleaved
// within each 16 bytes, which permutes the columns of o; restore_order undoes that.
template <int G>
struct DecodePairs {
    static constexpr int L = 16, N = L / G, KEYS_AT_ONCE = N < 2 ? N : 2, STEP = 32;
    using Word = std::uint32_t;
    using Words = I<float>;
    INLINE static void restore_order(V<float>* x) {  // STEP columns
        const V<float> low = x[0], high = x[1];
        x[0] = __builtin_shufflevector(low, high, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        x[1] = __builtin_shufflevector(low, high, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    }

    INLINE static Words load_words(const BFloat16* at) { return (Words)_mm512_loadu_si512(at); }
    // `width` numbers, then zeros; only zeros if `at` is null.
    INLINE static Words load_words(const BFloat16* at, int width) {
        BFloat16 padded[STEP]{};
        for (int c = 0; at && c < width; c++) padded[c] = at[c];
        return load_words(padded);
    }

    // s[j][g] = factor k[j] · q[g], likewise.
    static void dots(const Word* q, int q_width, const BFloat16* k, std::int64_t k_stride, int keys, int depth,
                     float factor, float* s, bool packed, Prefetcher<BFloat16> prefetcher) {
        compute_dots<DecodePairs, float, G>(q, q_width, k, k_stride, keys, depth, s, packed, prefetcher,
                                            [=](V<float> sums)
                                                __attribute__((always_inline)) { return sums * factor; });
    }
    INLINE static void dot_keys(const Word* q, int q_width, const BFloat16* const* key, int depth, V<float>* to) {
        V<float> a[KEYS_AT_ONCE * G];
        UNROLL_FOR(n, KEYS_AT_ONCE * G) a[n] = V<float>{};
        const auto add = [&](const Words* x, int d) __attribute__((always_inline)) {
            UNROLL_FOR(g, G) {
                const Words y = load_int<float>(reinterpret_cast<const Int<float>*>(q + g * q_width + d / 2));
                UNROLL_FOR(n, KEYS_AT_ONCE) a[n * G + g] = BF16_DOT(a[n * G + g], x[n], y);
            }
        };
        Words x[KEYS_AT_ONCE];
        int d = 0;
        for (; d + STEP <= depth; d += STEP) {
            UNROLL_FOR(n, KEYS_AT_ONCE) x[n] = load_words(key[n] + d);
            add(x, d);
        }
        if (d < depth) {
            UNROLL_FOR(n, KEYS_AT_ONCE) x[n] = load_words(key[n] + d, depth - d);
            add(x, d);
        }
        UNROLL_FOR(n, KEYS_AT_ONCE * G) to[n] = a[n];
    }

    // p is [(keys + 1) / 2][p_width], o is [G][o_width] with o_width a multiple of 32.
    static void accumulate_values(const Word* p, int p_width, const BFloat16* v, std::int64_t v_stride, int keys,
                                  int width, float* o, int o_width, bool fresh, Prefetcher<BFloat16> prefetcher) {
        constexpr int C = 8 / G > 1 ? 8 / G : 1;  // times 32 columns
        int c = 0;
        for (; c + C * STEP <= width; c += C * STEP) {
            accumulate_tile<C>(p, p_width, v + c, v_stride, keys, STEP, o + c, o_width, fresh, prefetcher);
            prefetcher.width = 0;  // the first tile has prefetched all rows
        }
        for (; c < width; c += STEP) {
            const int columns = width - c < STEP ? width - c : STEP;
            accumulate_tile<1>(p, p_width, v + c, v_stride, keys, columns, o + c, o_width, fresh, prefetcher);
            prefetcher.width = 0;
        }
    }
    template <int C>
    static void accumulate_tile(const Word* p, int p_width, const BFloat16* v, std::int64_t v_stride, int keys,
                                int width, float* o, int o_width, bool fresh, Prefetcher<BFloat16> prefetcher) {
        V<float> a[G][2 * C];
        UNROLL_TILE(g, G, c, 2 * C) a[g][c] = V<float>{};
        for (int j = 0; j < keys; j += 2, v += 2 * v_stride, p += p_width) {
            prefetcher.prefetch(j);
            prefetcher.prefetch(j + 1);
            const bool is_full = width == STEP && j + 1 < keys;
            Words x[2 * C];
            UNROLL_FOR(c, C) {
                const BFloat16 *low = v + c * STEP, *high = low + v_stride;
                const Words even = is_full ? load_words(low) : load_words(low, width);
                const Words odd = is_full ? load_words(high) : load_words(j + 1 < keys ? high : nullptr, width);
                x[2 * c] = (Words)_mm512_unpacklo_epi16((__m512i)even, (__m512i)odd);
                x[2 * c + 1] = (Words)_mm512_unpackhi_epi16((__m512i)even, (__m512i)odd);
            }
            UNROLL_FOR(g, G) {
                const Words w = Words{} + Int<float>(p[g]);
                UNROLL_FOR(c, 2 * C) a[g][c] = BF16_DOT(a[g][c], x[c], w);
            }
        }
        UNROLL_TILE(g, G, c, 2 * C) accumulate<float>(o + g * o_width + c * L, a[g][c], fresh);
    }
};
#endif

template <class T, int G, class Op>
struct DecodeProducts {
    using Type = DecodeRows<T, G>;
};
#if defined(BF16_DOT)
template <int G>
struct DecodeProducts<float, G, Bf16Dot> {
    using Type = DecodePairs<G>;
};
#endif

// The inner products where there are few rows, at most eight and no more than lanes: a step of decoding. Rows in the
// lanes would leave most lanes empty, so here the width of a head lies in the lanes, and G rows share each key and
// value that is read. Keys and values are widened as they are loaded.

template <class T>
constexpr int MOST_FEW = LANES<T> < 8 ? LANES<T> : 8;  // rows that Few takes

// Rows that will be read soon, asked for while the other tensor is computed with.
template <class E>
struct Ahead {
    const E* line;
    std::int64_t stride;
    int width;
    INLINE void expect(int j) const {
        // as far as the second cache: the first is as small as a block
        for (int c = 0; c < width; c += 64 / int(sizeof(E))) __builtin_prefetch(line + j * stride + c, 0, 2);
    }
};

// COUNT lanes from lane FROM on, then zeros.
template <class T, int COUNT, int FROM, int... LANE>
INLINE V<T> first_lanes(V<T> x, std::integer_sequence<int, LANE...>) {
    return __builtin_shufflevector(x, V<T>{}, (LANE < COUNT ? FROM + LANE : LANES<T>)...);
}
// Sums of L / G keys, G of each, to the first lanes of their lines; zeros beyond.
template <class T, int G, int... N>
INLINE void put_dots(V<T> sums, T* s, std::integer_sequence<int, N...>) {
    constexpr int L = LANES<T>;
    (store(s + N * L, first_lanes<T, G, N * G>(sums, std::make_integer_sequence<int, L>{})), ...);
}
template <class T, int G>
INLINE void put_dots(V<T> sums, T* s) {
    put_dots<T, G>(sums, s, std::make_integer_sequence<int, LANES<T> / G>{});
}

// A vector may hold the G rows of L / G keys. The first G lanes, for each of these keys:
template <class T, int G, int... N>
INLINE V<T> repeated(V<T> x, std::integer_sequence<int, N...>) {
    return __builtin_shufflevector(x, x, (N % G)...);
}
// What `join` makes of all of these keys, for each of them:
template <class T, int STEP, class Join, int... N>
INLINE V<T> over_keys(V<T> x, const Join& join, std::integer_sequence<int, N...> lanes) {
    if constexpr (STEP < LANES<T>)
        return over_keys<T, 2 * STEP>(join(x, __builtin_shufflevector(x, x, ((N + STEP) % LANES<T>)...)), join, lanes);
    else
        return x;
}
// Two such vectors by pairs of keys: the even ones, and the odd ones.
template <class T, int G, int... N>
INLINE void paired_keys(V<T>& x, V<T>& y, std::integer_sequence<int, N...>) {
    const V<T> a = x, b = y;
    x = __builtin_shufflevector(a, b, (N / G * 2 * G + N % G)...);
    y = __builtin_shufflevector(a, b, (N / G * 2 * G + N % G + G)...);
}

template <class T, int G>
struct Few {
    static constexpr int L = LANES<T>;
    static constexpr int N = L / G;  // keys at a time: they make L sums
    static constexpr int READ =
        N < 2 ? N : 2;  // of these: few, since what fetches ahead of the reader follows few lines best

    static constexpr int STEP = L;  // numbers that are multiplied at once
    INLINE static void in_order(V<T>*) {}

    // s[j][g] = k[j] · q[g]; s is [keys][L], or [keys][G] if packed; q is [G][q_width] with zeros beyond `depth`.
    template <class E>
    static void dots(const T* q, int q_width, const E* k, std::int64_t k_stride, int keys, int depth, T* s, bool packed,
                     Ahead<E> ahead) {
        for (int j = 0; j < keys; j += N) {
            V<T> a[L];
            UNROLL_RANGE(n, 0, N, READ) {
                for (int m = n; m < n + READ; m++) ahead.expect(j + m);
                const E* key[READ];
                UNROLL_FOR(m, READ) key[m] = k + (j + n + m < keys ? j + n + m : keys - 1) * k_stride;
                dots_of(q, q_width, key, depth, a + n * G);
            }
            if (packed)
                store(s + j * G, sums<T>(a));
            else
                put_dots<T, G>(sums<T>(a), s + j * L);
        }
    }
    template <class E>
    INLINE static void dots_of(const T* q, int q_width, const E* const* key, int depth, V<T>* to) {
        V<T> a[READ * G];
        UNROLL_FOR(n, READ * G) a[n] = V<T>{};
        const auto add = [&](const V<T>* x, int d) __attribute__((always_inline)) {
            UNROLL_FOR(g, G) {
                const V<T> y = load(q + g * q_width + d);
                UNROLL_FOR(n, READ) a[n * G + g] += x[n] * y;
            }
        };
        V<T> x[READ];
        int d = 0;
        for (; d + L <= depth; d += L) {
            UNROLL_FOR(n, READ) x[n] = load_wide<T>(key[n] + d);
            add(x, d);
        }
        if (d < depth) {
            UNROLL_FOR(n, READ) {
                E rest[L]{};
                for (int c = 0; d + c < depth; c++) rest[c] = key[n][d + c];
                x[n] = load_wide<T>(rest);
            }
            add(x, d);
        }
        UNROLL_FOR(n, READ * G) to[n] = a[n];
    }

    // o[g] (+)= Σ_j p[j][g] v[j]; p is [keys][p_width], o is [G][o_width].
    template <class E>
    static void mixes(const T* p, int p_width, const E* v, std::int64_t v_stride, int keys, int width, T* o,
                      int o_width, bool fresh, Ahead<E> ahead) {
        constexpr int C = REGISTER_TILE * 2 / 3 / G > 1 ? REGISTER_TILE * 2 / 3 / G : 1;
        int c = 0;
        for (; c + C * L <= width; c += C * L, ahead.width = 0)
            mix<C>(p, p_width, v + c, v_stride, keys, o + c, o_width, fresh, ahead);
        if constexpr (C > 1)
            for (; c + L <= width; c += L, ahead.width = 0)
                mix<1>(p, p_width, v + c, v_stride, keys, o + c, o_width, fresh, ahead);
        if (c == width) return;
        V<T> a[G]{};
        for (int j = 0; j < keys; j++) {
            E rest[L]{};
            for (int n = 0; c + n < width; n++) rest[n] = v[j * v_stride + c + n];
            const V<T> x = load_wide<T>(rest);
            for (int g = 0; g < G; g++) a[g] += x * p[j * p_width + g];
        }
        for (int g = 0; g < G; g++) add_to<T>(o + g * o_width + c, a[g], fresh);
    }
    template <int C, class E>
    static void mix(const T* p, int p_width, const E* v, std::int64_t v_stride, int keys, T* o, int o_width, bool fresh,
                    Ahead<E> ahead) {
        V<T> a[G][C];
        UNROLL_TILE(g, G, c, C) a[g][c] = V<T>{};
        for (int j = 0; j < keys; j++, v += v_stride, p += p_width) {
            ahead.expect(j);
            V<T> x[C];
            UNROLL_FOR(c, C) x[c] = load_wide<T>(v + c * L);
            UNROLL_FOR(g, G) {
                const V<T> w = splat(p[g]);
                UNROLL_FOR(c, C) a[g][c] += w * x[c];
            }
        }
        UNROLL_TILE(g, G, c, C) add_to<T>(o + g * o_width + c * L, a[g][c], fresh);
    }
};

#if defined(BF16_DOT)
// The same with products of pairs of bf16: of q and k as they lie, of weights and v with two keys to a word. Two rows
// of v are interleaved in pieces of 16 bytes, so columns of o lie in another order, until `in_order`.
template <int G>
struct FewPairs {
    static constexpr int L = 16, N = L / G, READ = N < 2 ? N : 2, STEP = 32;
    using Word = std::uint32_t;
    using Words = I<float>;
    INLINE static void in_order(V<float>* x) {  // of STEP columns
        const V<float> low = x[0], high = x[1];
        x[0] = __builtin_shufflevector(low, high, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        x[1] = __builtin_shufflevector(low, high, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    }

    INLINE static Words load_words(const BFloat16* at) { return (Words)_mm512_loadu_si512(at); }
    // `width` numbers from a line, then zeros; none at all from no line
    INLINE static Words load_words(const BFloat16* at, int width) {
        BFloat16 rest[STEP]{};
        for (int c = 0; at && c < width; c++) rest[c] = at[c];
        return load_words(rest);
    }

    static void dots(const Word* q, int q_width, const BFloat16* k, std::int64_t k_stride, int keys, int depth,
                     float factor, float* s, bool packed, Ahead<BFloat16> ahead) {
        for (int j = 0; j < keys; j += N) {
            V<float> a[L];
            UNROLL_RANGE(n, 0, N, READ) {
                for (int m = n; m < n + READ; m++) ahead.expect(j + m);
                const BFloat16* key[READ];
                UNROLL_FOR(m, READ) key[m] = k + (j + n + m < keys ? j + n + m : keys - 1) * k_stride;
                dots_of(q, q_width, key, depth, a + n * G);
            }
            if (packed)
                store(s + j * G, sums<float>(a) * factor);
            else
                put_dots<float, G>(sums<float>(a) * factor, s + j * L);
        }
    }
    INLINE static void dots_of(const Word* q, int q_width, const BFloat16* const* key, int depth, V<float>* to) {
        V<float> a[READ * G];
        UNROLL_FOR(n, READ * G) a[n] = V<float>{};
        const auto add = [&](const Words* x, int d) __attribute__((always_inline)) {
            UNROLL_FOR(g, G) {
                const Words y = load_int<float>(reinterpret_cast<const Int<float>*>(q + g * q_width + d / 2));
                UNROLL_FOR(n, READ) a[n * G + g] = BF16_DOT(a[n * G + g], x[n], y);
            }
        };
        Words x[READ];
        int d = 0;
        for (; d + STEP <= depth; d += STEP) {
            UNROLL_FOR(n, READ) x[n] = load_words(key[n] + d);
            add(x, d);
        }
        if (d < depth) {
            UNROLL_FOR(n, READ) x[n] = load_words(key[n] + d, depth - d);
            add(x, d);
        }
        UNROLL_FOR(n, READ * G) to[n] = a[n];
    }

    // p is [(keys + 1) / 2][p_width], o is [G][o_width] with o_width a multiple of 32.
    static void mixes(const Word* p, int p_width, const BFloat16* v, std::int64_t v_stride, int keys, int width,
                      float* o, int o_width, bool fresh, Ahead<BFloat16> ahead) {
        constexpr int C = 8 / G > 1 ? 8 / G : 1;  // pieces of 32 columns
        int c = 0;
        for (; c + C * STEP <= width; c += C * STEP, ahead.width = 0)
            mix<C>(p, p_width, v + c, v_stride, keys, STEP, o + c, o_width, fresh, ahead);
        for (; c < width; c += STEP, ahead.width = 0)
            mix<1>(p, p_width, v + c, v_stride, keys, width - c < STEP ? width - c : STEP, o + c, o_width, fresh,
                   ahead);
    }
    template <int C>
    static void mix(const Word* p, int p_width, const BFloat16* v, std::int64_t v_stride, int keys, int width, float* o,
                    int o_width, bool fresh, Ahead<BFloat16> ahead) {
        V<float> a[G][2 * C];
        UNROLL_TILE(g, G, c, 2 * C) a[g][c] = V<float>{};
        for (int j = 0; j < keys; j += 2, v += 2 * v_stride, p += p_width) {
            ahead.expect(j);
            ahead.expect(j + 1);
            const bool whole = width == STEP && j + 1 < keys;
            Words x[2 * C];
            UNROLL_FOR(c, C) {
                const BFloat16 *low = v + c * STEP, *high = low + v_stride;
                const Words even = whole ? load_words(low) : load_words(low, width);
                const Words odd = whole ? load_words(high) : load_words(j + 1 < keys ? high : nullptr, width);
                x[2 * c] = (Words)_mm512_unpacklo_epi16((__m512i)even, (__m512i)odd);
                x[2 * c + 1] = (Words)_mm512_unpackhi_epi16((__m512i)even, (__m512i)odd);
            }
            UNROLL_FOR(g, G) {
                const Words w = Words{} + Int<float>(p[g]);
                UNROLL_FOR(c, 2 * C) a[g][c] = BF16_DOT(a[g][c], x[c], w);
            }
        }
        UNROLL_TILE(g, G, c, 2 * C) add_to<float>(o + g * o_width + c * L, a[g][c], fresh);
    }
};
#endif

template <class T, int G, class Op>
struct FewOf {
    using Type = Few<T, G>;
};
#if defined(BF16_DOT)
template <int G>
struct FewOf<float, G, Pairs> {
    using Type = FewPairs<G>;
};
#endif

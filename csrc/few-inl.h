// The inner products where there are at most eight rows: a step of decoding. Rows in the lanes would leave most lanes empty,
// so here the width of a head lies in the lanes, and G rows share each key and value that is read. Keys and values are
// widened as they are loaded.

template <class T, int G> struct Few {
    static constexpr int L = LANES<T>;
    static constexpr int N = L / G;  // keys at a time: they make L sums

    // Asks for a line of memory that will be read soon: while one tensor is computed with, the other one comes.
    template <class E> struct Ahead {
        const E* line;
        std::int64_t stride;
        int width;
        INLINE void expect(int j) const {
            if constexpr (G == 1 && sizeof(E) >= 4) return;  // too little is computed with a line to ask for another beside it
            for (int c = 0; c < width; c += 64 / int(sizeof(E))) __builtin_prefetch(line + j * stride + c);
        }
    };

    // s[j][g] = k[j] · q[g]; s is [keys][L], q is [G][q_width] with zeros beyond `depth`.
    template <class E> static void dots(const T* q, int q_width, const E* k, std::int64_t k_stride, int keys, int depth, T* s,
                                         Ahead<E> ahead) {
        for (int j = 0; j < keys; j += N) {
            for (int n = 0; n < N; n++) ahead.expect(j + n);
            V<T> a[L];
            UNROLL for (int n = 0; n < L; n++) a[n] = V<T>{};
            const E* key[N];
            UNROLL for (int n = 0; n < N; n++) key[n] = k + (j + n < keys ? j + n : keys - 1) * k_stride;
            int d = 0;
            for (; d + L <= depth; d += L) {
                V<T> x[N];
                UNROLL for (int n = 0; n < N; n++) x[n] = load_wide<T>(key[n] + d);
                add(a, x, q + d, q_width);
            }
            if (d < depth) {
                V<T> x[N];
                UNROLL for (int n = 0; n < N; n++) {
                    E rest[L]{};
                    for (int c = 0; d + c < depth; c++) rest[c] = key[n][d + c];
                    x[n] = load_wide<T>(rest);
                }
                add(a, x, q + d, q_width);
            }
            const V<T> sum = sums<T>(a);
            UNROLL for (int n = 0; n < N; n++) UNROLL for (int g = 0; g < G; g++) s[(j + n) * L + g] = sum[n * G + g];
        }
    }
    INLINE static void add(V<T>* a, const V<T>* x, const T* q, int q_width) {
        UNROLL for (int g = 0; g < G; g++) {
            const V<T> y = load(q + g * q_width);
            UNROLL for (int n = 0; n < N; n++) a[n * G + g] += x[n] * y;
        }
    }

    // o[g] (+)= Σ_j p[j][g] v[j]; o is [G][o_width].
    template <class E> static void mixes(const T* p, const E* v, std::int64_t v_stride, int keys, int width, T* o, int o_width, bool fresh,
                                          Ahead<E> ahead) {
        constexpr int C = REGISTER_TILE * 2 / 3 / G > 1 ? REGISTER_TILE * 2 / 3 / G : 1;
        int c = 0;
        for (; c + C * L <= width; c += C * L, ahead.width = 0) mix<C>(p, v + c, v_stride, keys, o + c, o_width, fresh, ahead);
        if constexpr (C > 1)
            for (; c + L <= width; c += L, ahead.width = 0) mix<1>(p, v + c, v_stride, keys, o + c, o_width, fresh, ahead);
        if (c == width) return;
        for (int g = 0; fresh && g < G; g++) store(o + g * o_width + c, V<T>{});
        for (int j = 0; j < keys; j++) {
            E rest[L]{};
            for (int n = 0; c + n < width; n++) rest[n] = v[j * v_stride + c + n];
            const V<T> x = load_wide<T>(rest);
            for (int g = 0; g < G; g++) store(o + g * o_width + c, load(o + g * o_width + c) + x * p[j * L + g]);
        }
    }
    template <int C, class E> static void mix(const T* p, const E* v, std::int64_t v_stride, int keys, T* o, int o_width, bool fresh,
                                              Ahead<E> ahead) {
        V<T> a[G][C];
        UNROLL for (int g = 0; g < G; g++) UNROLL for (int c = 0; c < C; c++)
            a[g][c] = fresh ? V<T>{} : load(o + g * o_width + c * L);
        for (int j = 0; j < keys; j++, v += v_stride) {
            ahead.expect(j);
            V<T> x[C];
            UNROLL for (int c = 0; c < C; c++) x[c] = load_wide<T>(v + c * L);
            UNROLL for (int g = 0; g < G; g++) {
                const V<T> w = splat(p[j * L + g]);
                UNROLL for (int c = 0; c < C; c++) a[g][c] += w * x[c];
            }
        }
        UNROLL for (int g = 0; g < G; g++) UNROLL for (int c = 0; c < C; c++) store(o + g * o_width + c * L, a[g][c]);
    }
};

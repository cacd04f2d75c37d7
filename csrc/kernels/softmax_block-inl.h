// The online softmax of a block of rows: the weights of a block of keys relative to the running maximum, and their sum.
// If the maximum rises, the sum and the output accumulated so far are rescaled.

template <class T, int QV, int G, class Op, class Observer>
struct SoftmaxBlock : LogitsBlock<T, QV, Op> {
    using Base = LogitsBlock<T, QV, Op>;
    using Base::f, Base::p, Base::count, Base::L, Base::ROWS, Base::KEYS, Base::PAIRS, Base::SUM_CHAIN;
    using typename Base::Word;
    static constexpr bool DECODES = G > 0 && G <= MAX_DECODE_ROWS<T>;
    using Products = typename DecodeProducts<T, DECODES ? G : MAX_DECODE_ROWS<T>, Op>::Type;

    int k_width, v_width;  // D and Dv, rounded up to multiples of Products::STEP
    T* o;                  // [Dv][ROWS]; with G: [G][v_width]
    T* dropout_factors;    // [KEYS][ROWS], with dropout
    Word* weights;         // [KEYS / PER_WORD][ROWS]; the same buffer as p unless in pairs
    Word* decode_q;        // [G][k_width / PER_WORD]
    V<T> top[QV], sum[QV];
    V<T> new_top[QV];        // the maximum of top and of the logits of this block
    V<T> rescaling[QV];      // exp2(old top - new top), if top_moved
    bool top_moved = false;  // the last block of keys raised the maximum of some row
    bool packed = false;     // the logits of this block are [keys][G], not [keys][ROWS]: they are scaled products
    Observer observer;
    static int padded_width(std::int64_t n) { return int((n + Products::STEP - 1) / Products::STEP * Products::STEP); }
    SoftmaxBlock(const Forward& call, std::int64_t batch, std::int64_t head, Arena& memory)
        : Base(call, batch, head, memory), k_width(padded_width(f.head_dim)), v_width(padded_width(f.v_head_dim)) {
        o = memory.allocate<T>(output_size());
        dropout_factors = memory.allocate<T>(f.dropout > 0 ? KEYS * ROWS : 0);
        if constexpr (PAIRS)
            weights = memory.allocate<Word>(KEYS / 2 * ROWS);
        else
            weights = p;
        decode_q = memory.allocate<Word>(DECODES ? G * k_width / Op::PER_WORD : 0);
        observer.allocate(f, memory);
    }
    std::int64_t output_size() const { return G ? G * v_width : f.v_head_dim * ROWS; }
    // Replaces logits by weights relative to the running maximum: p = exp2(s - top).
    void compute_weights(std::int64_t j0, int keys, bool fresh) {
        if constexpr (DECODES)
            if (packed) return compute_packed_weights(keys, fresh);
        if (DECODES || !this->only_products()) find_maxima(keys);
        V<T> m[QV];
        UNROLL_FOR(v, QV) m[v] = new_top[v];
        I<T> up{};
        UNROLL_FOR(v, QV) up |= m[v] > top[v];
        top_moved = any<T>(up);
        if (top_moved) {
            UNROLL_FOR(v, QV) {
                rescaling[v] = exp2(top[v] - m[v]);
                sum[v] *= rescaling[v];
            }
            observer.rescale(top, m, rescaling);
            UNROLL_FOR(v, QV) top[v] = m[v];
            if (G > 0 && !fresh) rescale_output(rescaling);
        }
        if constexpr (Observer::OBSERVES) {  // there is no dropout
            if (this->all_visible && keys % Op::PER_WORD == 0)
                exponentiate<false, false>(j0, keys, m);
            else
                exponentiate<false, true>(j0, keys, m);
        } else {
            if (f.dropout > 0)
                exponentiate<true, false>(j0, keys, m);
            else
                exponentiate<false, false>(j0, keys, m);
        }
    }
    void find_maxima(int keys) {
        constexpr int CHAINS = QV > 2 ? 2 : 4;  // independent chains hide the latency of the maximum
        V<T> maxima[CHAINS][QV];
        UNROLL_TILE(n, CHAINS, v, QV) maxima[n][v] = new_top[v];
        int j = 0;
        for (; j + CHAINS <= keys; j += CHAINS)
            UNROLL_TILE(n, CHAINS, v, QV) maxima[n][v] = maximum<T>(load(p + (j + n) * ROWS + v * L), maxima[n][v]);
        for (; j < keys; j++)
            UNROLL_FOR(v, QV) maxima[0][v] = maximum<T>(load(p + j * ROWS + v * L), maxima[0][v]);
        UNROLL_FOR(v, QV) {
            new_top[v] = maxima[0][v];
            UNROLL_RANGE(n, 1, CHAINS, 1) new_top[v] = maximum<T>(maxima[n][v], new_top[v]);
        }
    }
    // The same for packed logits, with L / G keys in a vector.
    void compute_packed_weights(int keys, bool fresh) {
        constexpr int AT_ONCE = L / G * Op::PER_WORD, CHAINS = 4;  // keys; maxima
        constexpr auto LANE = std::make_integer_sequence<int, L>{};
        const int end = (keys + AT_ONCE - 1) / AT_ONCE * AT_ONCE * G;
        for (int n = keys * G; n < end; n++) p[n] = -std::numeric_limits<T>::infinity();
        top[0] = repeat_rows<T, G>(top[0], LANE);
        V<T> maxima[CHAINS], total{};
        UNROLL_FOR(n, CHAINS) maxima[n] = top[0];
        int at = 0;
        for (; at + CHAINS * L <= end; at += CHAINS * L)
            UNROLL_FOR(n, CHAINS) maxima[n] = maximum<T>(load(p + at + n * L), maxima[n]);
        for (; at < end; at += L) maxima[0] = maximum<T>(load(p + at), maxima[0]);
        const V<T> lane_maxima = maximum<T>(maximum<T>(maxima[0], maxima[1]), maximum<T>(maxima[2], maxima[3]));
        const V<T> m = reduce_keys<T, G>(
            lane_maxima, [](V<T> a, V<T> b) __attribute__((always_inline)) { return maximum<T>(a, b); }, LANE);
        top_moved = any<T>(m > top[0]);
        if (top_moved) {
            rescaling[0] = exp2(top[0] - m);
            sum[0] *= rescaling[0];
            top[0] = m;
            if (!fresh) rescale_output(rescaling);
        }
        if constexpr (PAIRS) {
            for (int n = 0; n < end; n += 2 * L) {
                V<T> x = exp2(load(p + n) - m), y = exp2(load(p + n + L) - m);
                total += x + y;
                deinterleave_keys<T, G>(x, y, LANE);
                store_interleaved(weights + n / 2, round_to_bf16(x, y));
            }
        } else {
            for (int n = 0; n < end; n += L) {
                const V<T> x = exp2(load(p + n) - m);
                total += x;
                store(p + n, x);
            }
        }
        sum[0] += reduce_keys<T, G>(total, [](V<T> a, V<T> b) __attribute__((always_inline)) { return a + b; }, LANE);
    }
    // MAY_BE_MASKED: some logits may be -infinity, and the observer's sums multiply them by weights of 0: they are
    // clamped.
    template <bool DROPS, bool MAY_BE_MASKED>
    void exponentiate(std::int64_t j0, int keys, const V<T>* m) {
        // Local copies stay in registers: members would be reloaded after each store, which may alias them.
        T *const p = this->p, *const dropout_factors = this->dropout_factors;
        V<T> total[QV], chain[QV];  // of this block, and of a few keys: see SUM_CHAIN
        UNROLL_FOR(v, QV) total[v] = V<T>{};
        typename Observer::Sums sums(observer);
        constexpr int AT_ONCE = Observer::OBSERVES ? 1 : QV;  // vectors of rows: an observer's sums need registers, too
        constexpr int N = AT_ONCE * Op::PER_WORD;             // weights of a word of keys
        const auto weights_of = [&](int j, int u, V<T>* x) __attribute__((always_inline)) {
            V<T> gap[N];
            UNROLL_FOR(n, N) {
                const V<T> below =
                    load(p + (j + n % Op::PER_WORD) * ROWS + (u + n / Op::PER_WORD) * L) - m[u + n / Op::PER_WORD];
                x[n] = gap[n] = MAY_BE_MASKED ? clamp_exponent(below) : below;
            }
            exp2_in_place<N>(x);
            UNROLL_FOR(n, N) {
                const int v = u + n / Op::PER_WORD, key = j + n % Op::PER_WORD, at = key * ROWS + v * L;
                chain[v] += x[n];
                sums.add(key, v, gap[n], x[n]);
                if constexpr (Observer::OBSERVES && PAIRS) store(p + at, x[n]);
                if (DROPS) x[n] *= load(dropout_factors + at);
            }
        };
        if (PAIRS && keys % 2)
            UNROLL_FOR(v, QV) {
                store(p + keys * ROWS + v * L, splat(-std::numeric_limits<T>::infinity()));
                if (DROPS) store(dropout_factors + keys * ROWS + v * L, V<T>{});
            }
        UNROLL_RANGE(u, 0, QV, AT_ONCE)
            for (int from = 0; from < keys; from += SUM_CHAIN) {
                const int to = from + SUM_CHAIN < keys ? from + SUM_CHAIN : keys;
                UNROLL_FOR(v, AT_ONCE) chain[u + v] = V<T>{};
                for (int j = from; j < to; j += Op::PER_WORD) {
                    V<T> x[N];
                    weights_of(j, u, x);
                    UNROLL_FOR(v, AT_ONCE) {
                        if constexpr (PAIRS)
                            store_interleaved(weights + j / 2 * ROWS + (u + v) * L,
                                              round_to_bf16(x[2 * v], x[2 * v + 1]));
                        else
                            store(p + j * ROWS + (u + v) * L, x[v]);
                    }
                }
                UNROLL_FOR(v, AT_ONCE) total[u + v] += chain[u + v];
            }
        UNROLL_FOR(v, QV) sum[v] += total[v];
        observer.add_sums(*this, j0, keys, total, sums);
    }

    void clear_output() {
        for (int n = 0; n < output_size(); n += L) store(o + n, V<T>{});
    }
    void rescale_output(const V<T>* factor) {
        for (int g = 0; g < count; g++)
            for (int c = 0; c < v_width; c += L) store(o + g * v_width + c, load(o + g * v_width + c) * factor[0][g]);
    }
};

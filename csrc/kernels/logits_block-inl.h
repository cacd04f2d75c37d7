// The logits of a block of rows against a block of keys: products, softcap, bias and mask.

template <class T, int QV, class Op = Fma<T>>
struct LogitsBlock : MaskedRowBlock<T, QV, Op> {
    using Base = MaskedRowBlock<T, QV, Op>;
    using Base::f, Base::b, Base::p, Base::q, Base::count, Base::group, Base::all_visible, Base::converted_k, Base::L,
        Base::ROWS, Base::KEYS, Base::PAIRS, Base::head, Base::query, Base::query_index, Base::flat_row;
    using Base::MaskedRowBlock;
    using typename Base::Word;

    // Computes the logits of keys j .. j + keys into p; false if all are masked in all rows. With a softcap, its
    // derivative goes into softcap_slope. `maxima` is raised to the largest logit of each row if they are
    // `only_products`; `subtrahend`, which excludes a softcap, is subtracted from them.
    bool compute_logits(std::int64_t j, int keys, T* softcap_slope = nullptr, V<T>* maxima = nullptr,
                        V<T>* subtrahend = nullptr) {
        bool fully_visible;
        if (!this->evaluate_mask(j, keys, fully_visible)) return false;
        all_visible = fully_visible && !this->masked_by_rules && !f.bias.data;
        const int depth = int(f.head_dim);
        const StridedRows k = this->qk_operand(f.k, j, keys, depth, converted_k);
        const Epilogue epilogue = subtrahend                  ? Epilogue::subtract
                                  : maxima && only_products() ? Epilogue::row_maxima
                                                              : Epilogue::none;
        V<T>* const row_values = subtrahend ? subtrahend : maxima;
        this->for_each_key_range(
            j, keys, [&](auto from_vector, auto vectors, int from, int count) __attribute__((always_inline)) {
                constexpr int v = decltype(from_vector)::value;
                QkTile<T, decltype(vectors)::value, Op, ROWS>::multiply(
                    q + v * L, {k.data + from * k.stride, k.stride}, count, depth / Op::PER_WORD, query_factor(),
                    p + from * ROWS + v * L, sum_block_depth(depth), epilogue,
                    row_values ? row_values + v : row_values);
            });
        finish_logits(j, keys, fully_visible, softcap_slope);
        return true;
    }
    // Whether products over D or Dv (the width) are summed in short blocks. torch's matrix product sums up to three
    // queries, or up to eleven keys, in blocks of a few products, and the error of float results may be at most twice
    // torch's.
    bool sums_in_short_blocks(std::int64_t width) const {
        return !PAIRS && (f.uniform || f.queries <= 3 || this->key_range <= 8 || (this->key_range <= 11 && width > 64));
    }
    // The number of products in a block of a blocked sum over D or Dv (the width); 0: one chain of all products. Two
    // chains of 32 meet the bound of twice torch's error for nine to eleven keys. A longer sum takes chains of 64, as
    // torch's matrix product does. Half types need none: their own rounding is
    // the larger error.
    int sum_block_depth(std::int64_t width) const {
        if (sums_in_short_blocks(width)) return SHORT_SUM_BLOCK;
        if (is_half(f)) return 0;
        if (this->key_range <= 11 && width > 32) return 32;
        return width > 128 ? 64 : 0;
    }
    static constexpr int SHORT_SUM_BLOCK = 16;
    // So many weights are summed one after the other, and then added to the sum of the block. Additions of equal
    // weights all round the same way: in one chain of 64 the errors added up to seven times those of torch's sum.
    static constexpr int SUM_CHAIN = 16;
    // Whether the logits of the last block are scaled products: no mask, bias or softcap applies.
    bool only_products() const { return all_visible && !(f.softcap > 0); }
    // Turns scaled products into logits: softcap, bias, spans, rules.
    void finish_logits(std::int64_t j, int keys, bool fully_visible, T* softcap_slope = nullptr) {
        if (f.softcap > 0) apply_softcap(keys, softcap_slope);
        if (f.bias.data) add_bias(j, keys);
        if (!fully_visible) this->mask_by_spans(j, keys);
        if (this->masked_by_rules) this->mask_by_rules(keys);
    }

    // Initializes the running maximum and sum of each row: with its sink, if there is one.
    void initialize_sums(V<T>* top, V<T>* sum, bool with_sinks) const {
        UNROLL_FOR(v, QV) {
            top[v] = splat(-std::numeric_limits<T>::max());
            sum[v] = V<T>{};
        }
        if (!f.sinks || !with_sinks) return;
        for (int r = 0; r < ROWS; r++) {
            const Sink sink = sink_of(r);
            if (sink.logit == -std::numeric_limits<T>::infinity()) continue;
            top[r / L][r % L] = sink.logit;
            // a sink of NaN or +inf makes the row NaN
            sum[r / L][r % L] =
                sink.logit <= std::numeric_limits<T>::max() ? sink.factor : std::numeric_limits<T>::quiet_NaN();
        }
    }
    // The weight of a sink is exp2(logit - top) * factor, before it is normalized. The factor is for the rounding of
    // the logit, log2(e) times the sink: at -60 it would be the largest error of a row with few keys.
    struct Sink {
        T logit, factor;
    };
    Sink sink_of(int r) const {
        constexpr T MAX_CORRECTED = 1 << 12;
        const T sink = static_cast<const T*>(f.sinks)[head(r < count ? r : count - 1)];
        const bool clamps = sink < lowest_offset() && sink != -std::numeric_limits<T>::infinity();
        const T logit = (clamps ? lowest_offset() : sink) * T(LOG2E);
        if (!(logit > -MAX_CORRECTED && logit < MAX_CORRECTED)) return {logit, T(1)};
        const double error = std::fma(double(sink), LOG2E, -double(logit)) + double(sink) * LOG2E_ERROR;
        return {logit, T(1 + error * LN2)};
    }

    // The lowest bias or sink whose product with log2(e) does not overflow to -infinity, which masks a key.
    static constexpr T lowest_offset() {
        return -std::numeric_limits<T>::max() * T(LN2 * (1 - 4 * double(std::numeric_limits<T>::epsilon())));
    }

    // The factor that turns a product of query and key into a logit times log2(e), or into the argument of tanh.
    T query_factor() const { return T(f.softcap > 0 ? f.scale / f.softcap : f.scale * LOG2E); }
    void load_queries() { this->load_transposed(f.q, int(f.head_dim), query_factor(), q); }

    void apply_softcap(int keys, T* softcap_slope) {
        const T factor = T(f.softcap * LOG2E);
        for (int n = 0; n < keys * QV; n++) {
            const V<T> x = load(p + n * L), y = tanh(x);
            if (softcap_slope) store(softcap_slope + n * L, tanh_derivative(x, y));
            store(p + n * L, y * factor);
        }
    }

    // Adds bias[b, h, i, j]. A key is masked if and only if its bias is -infinity.
    void add_bias(std::int64_t j0, int keys) {
        const auto& s = f.bias.stride;
        if (s[2] == 0 && (s[1] == 0 || group == 1)) {  // broadcast over all rows
            const T* from = reinterpret_cast<const T*>(element_address(f.bias, b, head(0), 0, sizeof(T))) + j0 * s[3];
            for (int j = 0; j < keys; j++)
                UNROLL_FOR(v, QV) add_bias_vector(p + j * ROWS + v * L, splat(from[j * s[3]]));
            return;
        }
        for (int v0 = 0; v0 < ROWS; v0 += L) {
            const T* row[L];
            for (int r = 0; r < L; r++) {
                const int source = v0 + r < count ? v0 + r : count - 1;
                row[r] =
                    reinterpret_cast<const T*>(element_address(f.bias, b, head(source), query(source), sizeof(T))) +
                    j0 * s[3];
            }
            for (int j = 0; j < keys; j++) {
                V<T> x;
                UNROLL_FOR(r, L) x[r] = row[r][j * s[3]];
                add_bias_vector(p + j * ROWS + v0, x);
            }
        }
    }
    INLINE static void add_bias_vector(T* s, V<T> bias) {
        const V<T> minus_infinity = splat(-std::numeric_limits<T>::infinity());
        const V<T> sum = load(s) + maximum<T>(splat(lowest_offset()), bias) * T(LOG2E);  // rounded once, if fused
        store(s, bias == minus_infinity ? minus_infinity : sum);
    }

    // The factor of each weight, 0 or 1 / (1 - dropout), from a hash of (seed, b, h, i, j): forward and backward drop
    // the same weights, whatever the size of their blocks.
    NOINLINE void compute_dropout_factors(std::int64_t j0, int keys, T* factor) const {
        const std::uint32_t limit = std::uint32_t(f.dropout * 4294967296.0);
        const T inverse_rate = T(1 / (1 - f.dropout));
        const std::int64_t first_key = f.dropout_place.first_key;
        for (int r = 0; r < ROWS; r++) {
            const std::uint64_t start =
                f.seed + 0x9e3779b97f4a7c15u * std::uint64_t(dropout_row(r < count ? r : count - 1) + 1);
            for (int j = 0; j < keys; j++) {
                std::uint64_t x = start ^ (std::uint64_t(first_key + j0 + j) * 0xbf58476d1ce4e5b9u);
                x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
                x = (x ^ x >> 27) * 0x94d049bb133111ebu;
                factor[j * ROWS + r] = std::uint32_t((x ^ x >> 31) >> 32) >= limit ? inverse_rate : T(0);
            }
        }
    }

    // The number of a row among those of the call whose weights are dropped.
    std::int64_t dropout_row(int r) const {
        const DropoutPlace& place = f.dropout_place;
        if (!place.heads) return flat_row(r);
        return (b * place.heads + place.first_head + head(r)) * place.queries + place.first_query + query_index(r);
    }
};

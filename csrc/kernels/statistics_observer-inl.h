// The row statistics of docs/concepts/statistics.md, from the sums of row_sums-inl.h.

// The observer of a forward pass that computes statistics.
template <class T, int QV>
struct StatisticsObserver : RowSumsObserver<T, QV> {
    using Base = RowSumsObserver<T, QV>;
    using Base::L, Base::ROWS, Base::s, Base::sum, Base::key_logits, Base::max_logit, Base::second_max, Base::top,
        Base::value_norms, Base::token_ids, Base::visible_count, Base::has_duplicate, Base::has_induction,
        Base::counts_single_pairs, Base::may_count, Base::radius_of, Base::distance_from;
    static constexpr bool OBSERVES = true;

    // The number of keys visible to row r.
    template <class Block>
    std::int64_t count_visible(const Block& block, int r) const {
        if (counts_single_pairs) return visible_count[r];
        if (!block.f.mask.spans.data) return block.f.keys;
        const auto& span = block.span;
        const Int<T> first_span = span[1][r] - span[0][r], second_span = span[3][r] - span[2][r];
        return (first_span > 0 ? first_span : 0) + (second_span > 0 ? second_span : 0);
    }
    struct RowResults {
        std::int64_t at[ROWS];  // the row's index in [B, H, Q]
        bool contiguous;        // these indices are consecutive
        int count;
        T top[ROWS] __attribute__((aligned(64)));
        T norm[ROWS] __attribute__((aligned(64)));           // lse - top, in nats
        T scale[ROWS] __attribute__((aligned(64)));          // normalizes a weight relative to top; 0: not counted
        T visible_count[ROWS] __attribute__((aligned(64)));  // visible keys
        Int<T> counted[ROWS] __attribute__((aligned(64)));   // -1: counted
    };
    template <class Block>
    void finish(const Block& block) {
        RowResults rows;
        rows.count = block.count;
        rows.contiguous = block.group == 1;
        UNROLL_FOR(v, QV) {
            store(rows.top + v * L, block.top[v]);
            for (int n = 0; n < KEY_FIRST + s->first_count; n++)
                store(key_logits + n * ROWS + v * L, weight_of(load(key_logits + n * ROWS + v * L), block.top[v]));
            if (!block.f.sinks) store(max_logit + v * L, block.top[v]);
        }
        find_normalization(block, rows);
        select_counted(block, rows);
        store_quantities(block, rows);
        if (s->top_k)
            for (int r = 0; r < block.count; r++) store_top_k(rows, r);
        if (s->has_column_statistics()) Base::accumulate_columns(block, rows.scale);
    }
    // exp2(logit - top), or -1 for a masked key.
    INLINE static V<T> weight_of(V<T> logit, V<T> top) {
        return logit == -std::numeric_limits<T>::infinity() ? splat(T(-1)) : exp2(logit - top);
    }
    static constexpr double MAX_BELOW = 0.01;  // BELOW of src/headscope/_observe/block_weights.py
    // Computes `norm` and `scale` of each row.
    template <class Block>
    void find_normalization(const Block& block, RowResults& rows) const {
        T sink_logits[ROWS] __attribute__((aligned(64))), sink_factors[ROWS] __attribute__((aligned(64)));
        for (int r = 0; r < ROWS; r++) {
            const auto sink =
                block.f.sinks ? block.sink_of(r) : decltype(block.sink_of(r)){-std::numeric_limits<T>::infinity(), 1};
            sink_logits[r] = sink.logit;
            sink_factors[r] = sink.factor;
        }
        UNROLL_FOR(v, QV) {
            const V<T> ones = load(sum + SUM_ONES * ROWS + v * L);
            // the row's sum minus 1: in 1 + rest, the small weights of a peaked row would be rounded away
            V<T> rest = load(sum + SUM_REST * ROWS + v * L);
            const V<T> of_sink = exp2(load(sink_logits + v * L) - block.top[v]) * load(sink_factors + v * L);
            rest += ones > 0 ? ones - 1 + of_sink : of_sink > 0 ? of_sink - 1 : V<T>{};  // 0: nothing is visible
            store(rows.norm + v * L, log1p(rest));
            store(rows.scale + v * L, 1 / (1 + rest));
        }
        if (!s->external_lse) return;
        for (int r = 0; r < rows.count; r++) {
            const double external_norm =
                double(static_cast<const T*>(s->external_lse)[block.flat_row(r)]) - double(rows.top[r]) * LN2;
            const double magnitude = std::abs(double(rows.norm[r]) + double(rows.top[r]) * LN2),
                         difference = std::abs(external_norm - double(rows.norm[r]));
            if (difference <= s->lse_tolerance * (magnitude > 1 ? magnitude : 1)) continue;
            // an lse below the largest logit is rounding, or else an error that the caller words
            const bool is_below = external_norm < 0 && std::isfinite(external_norm);  // not of a row without keys
            if (is_below && external_norm < -MAX_BELOW) s->nonfinite->store(true, std::memory_order_relaxed);
            const double norm = is_below ? 0 : external_norm;
            rows.norm[r] = T(norm);
            // at least the smallest normal number, since a scale of 0 marks a row that is not counted
            rows.scale[r] = std::max(T(std::exp(-norm)), std::numeric_limits<T>::min());
        }
    }
    // Decides which rows are counted: those that have a visible key, are finite and may count.
    template <class Block>
    void select_counted(const Block& block, RowResults& rows) const {
        Int<T> finite[ROWS] __attribute__((aligned(64)));
        UNROLL_FOR(v, QV) {
            const V<T> logit = load(max_logit + v * L);  // top may be that of a sink
            const V<T> all = load(rows.norm + v * L) + load(rows.scale + v * L) + load(sum + SUM_GAP * ROWS + v * L) +
                             load(sum + SUM_VALUE_NORM * ROWS + v * L) + logit + block.top[v];
            store_int<T>(finite + v * L, (all * T(0) == 0) & (logit > -std::numeric_limits<T>::max()));
        }
        for (int r = 0; r < rows.count; r++) {
            const std::int64_t n = count_visible(block, r);
            const bool counted = n > 0 && finite[r] && may_count(block, r);
            if (n > 0 && !finite[r]) s->nonfinite->store(true, std::memory_order_relaxed);
            rows.at[r] = block.flat_row(r);
            rows.visible_count[r] = T(n);
            rows.counted[r] = counted ? -1 : 0;
            s->counted[rows.at[r]] = counted;
            if (!counted)
                rows.scale[r] = 0;
            else if (s->has_column_statistics() && !counts_single_pairs)
                Base::count_pairs_of_spans(block, r);
        }
        for (int r = rows.count; r < ROWS; r++) {
            rows.visible_count[r] = 1;
            rows.scale[r] = rows.counted[r] = 0;
        }
    }
    // Stores the quantity that body(v) returns for a vector of rows; NaN for rows that are not counted.
    template <class Body>
    INLINE void store_quantity(const RowResults& rows, void* to, const Body& body) const {
        if (!to) return;
        T x[ROWS] __attribute__((aligned(64)));
        UNROLL_FOR(v, QV)
            store(x + v * L,
                  load_int<T>(rows.counted + v * L) != 0 ? body(v) : splat(std::numeric_limits<T>::quiet_NaN()));
        T* const all = static_cast<T*>(to);
        if (rows.contiguous)
            for (int r = 0; r < rows.count; r++) all[rows.at[0] + r] = x[r];
        else
            for (int r = 0; r < rows.count; r++) all[rows.at[r]] = x[r];
    }
    INLINE V<T> load_sum(int n, int v) const { return load(sum + n * ROWS + v * L); }
    // The normalized weight of a single key, 0 if it is masked.
    INLINE V<T> single_weight(const RowResults& rows, int n, int v) const {
        return maximum<T>(load(key_logits + n * ROWS + v * L), V<T>{}) * load(rows.scale + v * L);
    }
    template <class Block>
    void store_quantities(const Block& block, const RowResults& rows) const {
        const V<T> nan = splat(std::numeric_limits<T>::quiet_NaN());
        const auto scale = [&](int v) __attribute__((always_inline)) { return load(rows.scale + v * L); };
        const auto norm = [&](int v) __attribute__((always_inline)) { return load(rows.norm + v * L); };
        const auto mass = [&](int v) __attribute__((always_inline)) {
            return (load_sum(SUM_ONES, v) + load_sum(SUM_REST, v)) * scale(v);
        };
        const auto entropy = [&](int v) __attribute__((always_inline)) {
            return maximum<T>(mass(v) * norm(v) + load_sum(SUM_GAP, v) * T(LN2) * scale(v), V<T>{});
        };
        const auto visible = [&](int v) __attribute__((always_inline)) { return load(rows.visible_count + v * L); };
        store_quantity(rows, s->value[LSE], [&](int v) { return load(rows.top + v * L) * T(LN2) + norm(v); });
        store_quantity(rows, s->value[MAX_LOGIT], [&](int v) { return load(max_logit + v * L) * T(LN2); });
        store_quantity(rows, s->value[ENTROPY], entropy);
        store_quantity(rows, s->value[NORMALIZED_ENTROPY],
                       [&](int v) { return visible(v) >= 2 ? entropy(v) / log1p(visible(v) - 1) : nan; });
        store_quantity(rows, s->value[MAX_WEIGHT],
                       [&](int v) { return exp2(load(max_logit + v * L) - load(rows.top + v * L)) * scale(v); });
        store_quantity(rows, s->value[SECOND_WEIGHT], [&](int v) {
            return maximum<T>(weight_of(load(second_max + v * L), load(rows.top + v * L)), V<T>{}) * scale(v);
        });
        store_quantity(rows, s->value[EFFECTIVE_KEYS], [&](int v) {
            const V<T> squares = load_sum(SUM_SQUARES, v) * scale(v) * scale(v);
            return squares >= std::numeric_limits<T>::min() ? 1 / squares : nan;  // 1 / a subnormal may overflow
        });
        store_quantity(rows, s->value[MASS], mass);
        store_quantity(rows, s->value[CHANCE], [&](int v) { return 1 / visible(v); });
        store_quantity(rows, s->value[FIRST], [&](int v) {
            V<T> x{};
            for (int n = 0; n < s->first_count; n++) x += single_weight(rows, KEY_FIRST + n, v);
            return x;
        });
        if (value_norms)
            store_quantity(rows, s->value[VALUE_NORM], [&](int v) { return load_sum(SUM_VALUE_NORM, v) * scale(v); });
        if (s->position) store_position_quantities(block, rows);
        if (s->position && token_ids) store_token_quantities(rows);
    }
    // The quantities that need positions.
    template <class Block>
    void store_position_quantities(const Block& block, const RowResults& rows) const {
        const V<T> nan = splat(std::numeric_limits<T>::quiet_NaN());
        const auto scale = [&](int v) __attribute__((always_inline)) { return load(rows.scale + v * L); };
        store_quantity(rows, s->value[DISTANCE], [&](int v) { return load_sum(SUM_DISTANCE, v) * scale(v); });
        for (int n = 0; n < 3; n++)
            store_quantity(rows, s->value[SELF + n], [&](int v) {
                const V<T> x = load(key_logits + n * ROWS + v * L);
                return x >= 0 ? x * scale(v) : nan;
            });
        for (int k = 0; k < s->window_count; k++) {
            store_quantity(rows, s->window[k], [&](int v) { return load_sum(SUM_WINDOW + k, v) * scale(v); });
            store_quantity(rows, s->streaming[k], [&](int v) {
                V<T> x = load_sum(SUM_WINDOW + k, v) * scale(v);
                for (int n = 0; n < s->first_count; n++) {  // the first keys outside the window
                    const V<T> gap = distance_from(s->first_keys[block.b * s->first_stride + n], v);
                    x += maximum<T>(gap, -gap) > radius_of(k) ? single_weight(rows, KEY_FIRST + n, v) : V<T>{};
                }
                return x;
            });
        }
    }
    // The quantities that need the tokens of the keys.
    void store_token_quantities(const RowResults& rows) const {
        const V<T> nan = splat(std::numeric_limits<T>::quiet_NaN());
        const auto scale = [&](int v) __attribute__((always_inline)) { return load(rows.scale + v * L); };
        store_quantity(rows, s->value[DUPLICATE], [&](int v) {
            return load_int<T>(has_duplicate + v * L) != 0 ? load_sum(SUM_DUPLICATE, v) * scale(v) : nan;
        });
        store_quantity(rows, s->value[INDUCTION], [&](int v) {
            return load_int<T>(has_induction + v * L) != 0 ? load_sum(SUM_INDUCTION, v) * scale(v) : nan;
        });
    }
    void store_top_k(const RowResults& rows, int r) {
        top.sort(r);
        for (int k = 0; k < s->top_k; k++) {
            const bool is_found = rows.counted[r] && top.key[k * ROWS + r] >= 0;
            const T weight = std::exp2(top.value[k * ROWS + r] - rows.top[r]) * rows.scale[r];
            static_cast<T*>(s->top_weight)[rows.at[r] * s->top_k + k] =
                is_found ? weight : std::numeric_limits<T>::quiet_NaN();
            s->top_key[rows.at[r] * s->top_k + k] = is_found ? top.key[k * ROWS + r] : -1;
        }
    }
};

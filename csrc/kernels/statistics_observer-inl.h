// The row statistics of docs/concepts/statistics.md, from the sums of row_sums-inl.h.

// The observer of a forward pass that computes statistics.
template <class T, int QV>
struct StatisticsObserver : RowSumsObserver<T, QV> {
    using Base = RowSumsObserver<T, QV>;
    using Base::L, Base::ROWS, Base::s, Base::sum, Base::key_logits, Base::max_logit, Base::second_max, Base::top,
        Base::value_norms, Base::token_ids, Base::visible_count, Base::has_duplicate, Base::has_induction,
        Base::counts_single_pairs, Base::may_count, Base::radius_of, Base::distance_from;
    static constexpr bool OBSERVES = true;

    // The numbers of keys visible to a vector of rows.
    template <class Block>
    INLINE I<T> visible_counts(const Block& block, int v) const {
        if (counts_single_pairs) return load_int<T>(visible_count + v * L);
        if (!block.f.mask.spans.data) return I<T>{} + Int<T>(block.f.keys);
        const auto bound = [&](int n) __attribute__((always_inline)) { return load_int<T>(block.span[n] + v * L); };
        const I<T> first_span = bound(1) - bound(0), second_span = bound(3) - bound(2);
        return (first_span > 0 ? first_span : I<T>{}) + (second_span > 0 ? second_span : I<T>{});
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
        if (block.f.sinks)
            for (int r = 0; r < ROWS; r++) {
                const auto sink = block.sink_of(r);
                sink_logits[r] = sink.logit;
                sink_factors[r] = sink.factor;
            }
        UNROLL_FOR(v, QV) {
            const V<T> ones = load(sum + SUM_ONES * ROWS + v * L);
            // the row's sum minus 1: in 1 + rest, the small weights of a peaked row would be rounded away
            V<T> rest = load(sum + SUM_REST * ROWS + v * L), of_sink{};
            if (block.f.sinks) of_sink = exp2(load(sink_logits + v * L) - block.top[v]) * load(sink_factors + v * L);
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
        Int<T> inside[ROWS] __attribute__((aligned(64))), eligible[ROWS] __attribute__((aligned(64)));  // -1: yes
        for (int r = 0; r < ROWS; r++) inside[r] = eligible[r] = r < rows.count ? -1 : 0;
        if (s->may_count)
            for (int r = 0; r < rows.count; r++) eligible[r] = may_count(block, r) ? -1 : 0;
        I<T> broken{};
        UNROLL_FOR(v, QV) {
            const V<T> logit = load(max_logit + v * L);  // top may be that of a sink
            const V<T> all = load(rows.norm + v * L) + load(rows.scale + v * L) + load(sum + SUM_GAP * ROWS + v * L) +
                             load(sum + SUM_VALUE_NORM * ROWS + v * L) + logit + block.top[v];
            const I<T> finite = (all * T(0) == 0) & (logit > -std::numeric_limits<T>::max());
            const I<T> visible = visible_counts(block, v), in_block = load_int<T>(inside + v * L);
            const I<T> counted = (visible > 0) & finite & load_int<T>(eligible + v * L);
            broken |= (visible > 0) & ~finite & in_block;
            store_int<T>(rows.counted + v * L, counted);
            store(rows.visible_count + v * L, in_block != 0 ? __builtin_convertvector(visible, V<T>) : splat(T(1)));
            store(rows.scale + v * L, counted != 0 ? load(rows.scale + v * L) : V<T>{});
        }
        if (any<T>(broken)) s->nonfinite->store(true, std::memory_order_relaxed);
        if (rows.contiguous)
            for (std::int64_t r = 0, first = block.flat_row(0); r < rows.count; r++) rows.at[r] = first + r;
        else
            for (int r = 0; r < rows.count; r++) rows.at[r] = block.flat_row(r);
        for (int r = 0; r < rows.count; r++) s->counted[rows.at[r]] = rows.counted[r] != 0;
        if (s->has_column_statistics() && !counts_single_pairs)
            for (int r = 0; r < rows.count; r++)
                if (rows.counted[r]) Base::count_pairs_of_spans(block, r);
    }
    // Stores the quantity that body(v) returns for a vector of rows; NaN for rows that are not counted.
    template <class Body>
    INLINE void store_quantity(const RowResults& rows, void* to, const Body& body) const {
        if (!to) return;
        T* const all = static_cast<T*>(to);
        UNROLL_FOR(v, QV) {
            const V<T> x =
                load_int<T>(rows.counted + v * L) != 0 ? body(v) : splat(std::numeric_limits<T>::quiet_NaN());
            if (rows.contiguous && (v + 1) * L <= rows.count) {
                store_unaligned(all + rows.at[0] + v * L, x);
                continue;
            }
            T lanes[L] __attribute__((aligned(64)));
            store(lanes, x);
            for (int r = v * L; r < (v + 1) * L && r < rows.count; r++) all[rows.at[r]] = lanes[r - v * L];
        }
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

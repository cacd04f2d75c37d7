// The mask of a block of rows: spans and rules.

template <class T, int QV, class Op = Fma<T>>
struct MaskedRowBlock : RowBlock<T, QV, Op> {
    using Base = RowBlock<T, QV, Op>;
    using Base::f, Base::b, Base::p, Base::count, Base::group, Base::L, Base::ROWS, Base::KEYS, Base::head, Base::query;
    using Base::RowBlock;

    Int<T> span[4][ROWS] __attribute__((aligned(64)));  // low0, high0, low1, high1
    std::int64_t vector_end[QV];    // keys from there on are masked in the rows of this vector and of those before
    std::int64_t vector_begin[QV];  // keys before are masked in the rows of this vector and of those after
    static constexpr int WORDS = KEYS / 64;
    Int<T> rule_bits[2 * WORDS][ROWS] __attribute__((aligned(64)));
    bool masked_by_rules = false;  // the rules hide some key of the last block from some row
    struct KeyBits {
        std::uint64_t word[WORDS];
    };
    std::int64_t key_range = 0;  // the number of keys from the first one that is visible to any row to the last

    // Divides keys j .. j + keys, at multiples of eight, into ranges for which the vectors of rows with visible keys
    // are the same, and calls body(first vector, number of vectors, first key, number of keys). The first vectors drop
    // out along the diagonal of a causal mask; the last ones join where the next document begins.
    template <class Body>
    INLINE void for_each_key_range(std::int64_t j, int keys, const Body& body) const {
        const auto end_of = [&](int v) { return (vector_end[v] - j + 7) / 8 * 8; };
        const auto begin_of = [&](int v) { return vector_begin[v] <= j ? 0 : (vector_begin[v] - j) / 8 * 8; };
        for (int from = 0, to; from < keys; from = to) {
            int first = 0, last = QV - 1;
            std::int64_t change = keys;
            if (!f.uniform) {  // a sum that is cut where other rows drop out would depend on these
                while (first < last && end_of(first) <= from) first++;
                while (last > first && begin_of(last) > from) last--;
                if (first < QV - 1 && end_of(first) > from && end_of(first) < change) change = end_of(first);
                if (last < QV - 1 && begin_of(last + 1) > from && begin_of(last + 1) < change)
                    change = begin_of(last + 1);
            }
            to = int(change);
            with_vector_range(first, last, [&](auto v, auto vectors) { body(v, vectors, from, to - from); });
        }
    }
    // Whether the first range of `for_each_key_range` from key j on has all vectors of rows.
    bool all_vectors_begin_at(std::int64_t j) const { return vector_end[0] > j && vector_begin[QV - 1] < j + 8; }
    template <class Body>
    INLINE static void with_vector_range(int first, int last, const Body& body) {
        const auto run = [&]<int V, int N>() {
            body(std::integral_constant<int, V>{}, std::integral_constant<int, N>{});
        };
        static_assert(QV <= 3);
        if (last - first == QV - 1) return run.template operator()<0, QV>();
        if constexpr (QV == 3) {
            if (first == 0 && last == 1) return run.template operator()<0, 2>();
            if (first == 1 && last == 2) return run.template operator()<1, 2>();
            if (first == 2) return run.template operator()<2, 1>();
        }
        if constexpr (QV > 1) {
            if (first == 0) return run.template operator()<0, 1>();
            return run.template operator()<1, 1>();
        }
    }
    void load_spans() {
        UNROLL_FOR(v, QV) {
            vector_begin[v] = 0;
            vector_end[v] = f.keys;
        }
        if (!f.mask.spans.data) return;
        for (int r = 0; r < ROWS; r++) {
            const int source = r < count ? r : count - 1;
            const std::int32_t* from =
                f.mask.spans.data + b * f.mask.spans.batch_stride + query(source) * f.mask.spans.query_stride;
            span[0][r] = from[0];
            span[1][r] = from[1];
            span[2][r] = f.mask.spans.count > 1 ? from[2] : Int<T>(f.keys);
            span[3][r] = f.mask.spans.count > 1 ? from[3] : Int<T>(f.keys);
        }
        if (f.softcap > 0) return;  // tanh and its derivative are computed for all keys, visible or not
        for (int v = 0; v < QV; v++) {
            if (v &&
                v * L >= count) {  // it has no rows: the ranges of keys must not depend on the number of such vectors
                vector_begin[v] = vector_begin[v - 1];
                vector_end[v] = vector_end[v - 1];
                continue;
            }
            vector_begin[v] = f.keys;
            vector_end[v] = 0;
            for (int r = v * L; r < (v + 1) * L; r++)
                for (int n = 0; n < 4; n += 2) {
                    if (span[n][r] >= span[n + 1][r]) continue;
                    if (span[n][r] < vector_begin[v]) vector_begin[v] = span[n][r];
                    if (span[n + 1][r] > vector_end[v]) vector_end[v] = span[n + 1][r];
                }
        }
        for (int v = 1; v < QV; v++)
            if (vector_end[v - 1] > vector_end[v]) vector_end[v] = vector_end[v - 1];
        for (int v = QV - 1; v > 0; v--)
            if (vector_begin[v] < vector_begin[v - 1]) vector_begin[v - 1] = vector_begin[v];
    }
    // The first key visible to any row, and the last + 1. Blocks of keys begin at the first one, so that padding on
    // either side changes no result, and is not multiplied.
    void find_key_range(std::int64_t& begin, std::int64_t& end) {
        begin = 0;
        end = f.keys;
        if (f.mask.spans.data) find_range_of_spans(begin, end);
        if (f.mask.rule_count) trim_range_by_rules(begin, end);
        // Vectors of rows whose keys begin beyond the end do not join there, whatever number of keys follows.
        UNROLL_FOR(v, QV)
            if (vector_begin[v] >= end) vector_begin[v] = end + KEYS;
        if (f.uniform && begin < end) {  // other rows must not move the blocks
            const std::int64_t origin = first_visible_of_head();
            begin = origin + (begin - origin) / KEYS * KEYS;
        }
        if (begin > end) begin = end;
        key_range = end - begin;
    }
    void find_range_of_spans(std::int64_t& begin, std::int64_t& end) const {
        begin = f.keys;
        end = 0;
        for (int r = 0; r < count; r++)
            for (int n = 0; n < 4; n += 2)
                if (span[n][r] < span[n + 1][r]) {
                    if (span[n][r] < begin) begin = span[n][r];
                    if (span[n + 1][r] > end) end = span[n + 1][r];
                }
    }
    void trim_range_by_rules(std::int64_t& begin, std::int64_t& end) const {
        int first = -1, last = -1;
        for (; begin < end && first < 0; begin += first < 0 ? KEYS : first)
            find_visible_by_rules(begin, this->keys_of_block(begin, end), first, last);
        while (begin < end) {
            const int keys = this->keys_of_block(begin, end);
            find_visible_by_rules(end - keys, keys, first, last);
            end -= last < 0 ? keys : keys - 1 - last;
            if (last >= 0) return;
        }
    }
    // The first key that is visible to any row of this batch entry and key/value head. Usually that is key 0 of the
    // first row, which is tested first.
    std::int64_t first_visible_of_head() {
        const std::int64_t rows = f.queries * group, first_row = this->first;
        std::int64_t found = f.keys;
        for (std::int64_t j = 0; j < found; j += KEYS)
            for (std::int64_t r = 0; r < rows && j < found; r++) {
                this->first = r;  // row 0 of a block that begins there
                const int keys = this->keys_of_block(j, f.keys);
                KeyBits visible = visible_by_spans(j);
                if (f.mask.rule_count) {
                    const KeyBits by_rules = evaluate_rules_of_row(0, j, keys);
                    for (int w = 0; w < WORDS; w++) visible.word[w] &= by_rules.word[w];
                }
                for (int w = 0; w < WORDS; w++) {
                    const std::uint64_t bits = visible.word[w] & bits_below(keys - 64 * w);
                    if (bits && j + 64 * w + __builtin_ctzll(bits) < found) found = j + 64 * w + __builtin_ctzll(bits);
                }
            }
        this->first = first_row;
        return found;
    }
    // Which keys from j0 on the spans show to row 0.
    KeyBits visible_by_spans(std::int64_t j0) const {
        KeyBits visible{};
        const Spans& spans = f.mask.spans;
        const std::int32_t* bounds =
            spans.data ? spans.data + b * spans.batch_stride + query(0) * spans.query_stride : nullptr;
        for (int n = 0; n < (bounds ? 2 * spans.count : 2); n += 2)
            for (int w = 0; w < WORDS; w++) {
                const std::int64_t start = j0 + 64 * w, low = bounds ? bounds[n] : 0,
                                   high = bounds ? bounds[n + 1] : f.keys;
                visible.word[w] |= bits_below(high - start) & ~bits_below(low - start);
            }
        return visible;
    }
    // The first and the last of keys j0 .. j0 + keys that the rules show to any row, counted from j0, or -1.
    void find_visible_by_rules(std::int64_t j0, int keys, int& first, int& last) const {
        KeyBits shown{};
        for (int r = 0; r < count; r++) {
            const KeyBits visible = evaluate_rules_of_row(r, j0, keys);
            for (int w = 0; w < WORDS; w++) shown.word[w] |= visible.word[w] & bits_below(keys - 64 * w);
        }
        first = last = -1;
        for (int w = 0; w < WORDS; w++) {
            if (!shown.word[w]) continue;
            if (first < 0) first = 64 * w + __builtin_ctzll(shown.word[w]);
            last = 64 * w + 63 - __builtin_clzll(shown.word[w]);
        }
    }
    // Returns whether any of these keys is visible to any row; fully_visible: whether spans make all visible to all.
    bool evaluate_mask(std::int64_t j, int keys, bool& fully_visible) {
        fully_visible = true;
        if (f.mask.spans.data && !evaluate_spans(j, keys, fully_visible)) return false;
        return !f.mask.rule_count || evaluate_rules(j, keys);
    }
    bool evaluate_spans(std::int64_t j, int keys, bool& fully_visible) const {
        const Int<T> low = Int<T>(j), high = Int<T>(j + keys);
        I<T> overlaps{}, incomplete{};
        UNROLL_FOR(v, QV) {
            I<T> a = load_int<T>(span[0] + v * L), z = load_int<T>(span[1] + v * L);
            I<T> c = load_int<T>(span[2] + v * L), y = load_int<T>(span[3] + v * L);
            overlaps |= ((a < high) & (z > low)) | ((c < high) & (y > low));
            incomplete |= ~(((a <= low) & (z >= high)) | ((c <= low) & (y >= high)));
        }
        fully_visible = !any<T>(incomplete);
        return any<T>(overlaps);
    }

    void mask_by_spans(std::int64_t j0, int keys) {
        const V<T> minus_infinity = splat(-std::numeric_limits<T>::infinity());
        UNROLL_FOR(v, QV) {
            const I<T> a = load_int<T>(span[0] + v * L), z = load_int<T>(span[1] + v * L);
            const I<T> c = load_int<T>(span[2] + v * L), y = load_int<T>(span[3] + v * L);
            if (!any<T>((a > Int<T>(j0)) | (z < Int<T>(j0 + keys)))) continue;  // all visible
            for (int j = 0; j < keys; j++) {
                const Int<T> key = Int<T>(j0 + j);
                const I<T> visible = ((a <= key) & (z > key)) | ((c <= key) & (y > key));
                T* s = p + j * ROWS + v * L;
                store(s, visible ? load(s) : minus_infinity);
            }
        }
    }
    // Evaluates the rules for keys j0 .. j0 + keys into rule_bits: a bit for each key, in words of 32, with rows in the
    // lanes; and into masked_by_rules. Returns whether any key is visible to any row.
    bool evaluate_rules(std::int64_t j0, int keys) {
        std::uint64_t any_visible = 0, any_masked = 0;
        for (int r = 0; r < ROWS; r++) {
            const KeyBits visible = r < count ? evaluate_rules_of_row(r, j0, keys) : KeyBits{};
            for (int w = 0; w < WORDS; w++) {
                const std::uint64_t bits = visible.word[w];
                any_visible |= bits;
                if (r < count) any_masked |= ~bits & bits_below(keys - 64 * w);
                rule_bits[2 * w][r] = Int<T>(std::uint32_t(bits));
                rule_bits[2 * w + 1][r] = Int<T>(std::uint32_t(bits >> 32));
            }
        }
        masked_by_rules = any_masked != 0;
        return any_visible != 0;
    }
    void mask_by_rules(int keys) {
        const V<T> minus_infinity = splat(-std::numeric_limits<T>::infinity());
        for (int j = 0; j < keys; j++)
            UNROLL_FOR(v, QV) {
                T* s = p + j * ROWS + v * L;
                store(s, (load_int<T>(rule_bits[j / 32] + v * L) >> j % 32 & 1) != 0 ? load(s) : minus_infinity);
            }
    }
    KeyBits evaluate_rules_of_row(int r, std::int64_t j0, int keys) const {
        KeyBits visible[MAX_RULES];
        int depth = 0;
        for (int n = 0; n < f.mask.rule_count; n++) {
            const Rule& rule = f.mask.rules[n];
            if (rule.kind < Rule::both) {
                visible[depth++] = evaluate_rule(rule, r, j0, keys);
                continue;
            }
            depth--;
            for (int w = 0; w < WORDS; w++)
                visible[depth - 1].word[w] = rule.kind == Rule::both
                                                 ? visible[depth - 1].word[w] & visible[depth].word[w]
                                                 : visible[depth - 1].word[w] | visible[depth].word[w];
        }
        return visible[0];
    }
    // Whether any key is visible to row r; requires load_spans. Called only for rows whose sum is 0.
    NOINLINE bool has_visible_key(int r) const {
        for (int n = 0; n < (f.mask.spans.data ? 4 : 2); n += 2) {
            const std::int64_t begin = f.mask.spans.data ? span[n][r] : 0,
                               end = f.mask.spans.data ? span[n + 1][r] : f.keys;
            if (begin < end && !f.mask.rule_count && !f.bias.data) return true;
            for (std::int64_t j0 = begin; j0 < end; j0 += KEYS) {
                const int keys = this->keys_of_block(j0, end);
                const KeyBits visible = f.mask.rule_count ? evaluate_rules_of_row(r, j0, keys) : KeyBits{};
                for (int w = 0; w < WORDS; w++) {
                    std::uint64_t bits =
                        bits_below(keys - 64 * w) & (f.mask.rule_count ? visible.word[w] : ~std::uint64_t(0));
                    for (; bits; bits &= bits - 1)
                        if (!is_masked_by_bias(r, j0 + 64 * w + __builtin_ctzll(bits))) return true;
                }
            }
        }
        return false;
    }
    bool is_masked_by_bias(int r, std::int64_t j) const {
        if (!f.bias.data) return false;
        const T* row = reinterpret_cast<const T*>(element_address(f.bias, b, head(r), query(r), sizeof(T)));
        return row[j * f.bias.stride[3]] == -std::numeric_limits<T>::infinity();
    }
    KeyBits evaluate_rule(const Rule& rule, int r, std::int64_t j0, int keys) const {
        KeyBits visible{};
        if (rule.kind == Rule::bytes) {
            const auto* row = reinterpret_cast<const std::uint8_t*>(element_address(rule.q, b, head(r), query(r), 1)) +
                              j0 * rule.q.stride[3];
            int j = 0;
            if (rule.q.stride[3] == 1)
                for (; j + 8 <= keys; j += 8) visible.word[j / 64] |= bytes_to_bits(row + j) << j % 64;
            for (; j < keys; j++) visible.word[j / 64] |= std::uint64_t(row[j * rule.q.stride[3]] != 0) << j % 64;
        } else if (rule.kind == Rule::same_id) {
            const std::int64_t id =
                static_cast<const std::int64_t*>(rule.q.data)[b * rule.q.stride[0] + query(r) * rule.q.stride[1]];
            const auto* ids =
                static_cast<const std::int64_t*>(rule.k.data) + b * rule.k.stride[0] + j0 * rule.k.stride[1];
            for (int j = 0; j < keys; j++)
                visible.word[j / 64] |= std::uint64_t(ids[j * rule.k.stride[1]] == id) << j % 64;
        } else {
            const std::int32_t* bounds =
                rule.key_spans.data + b * rule.key_spans.batch_stride + query(r) * rule.key_spans.query_stride;
            for (int n = 0; n < 2 * rule.key_spans.count; n += 2)
                for (int w = 0; w < WORDS; w++) {
                    const std::int64_t start = j0 + 64 * w;
                    visible.word[w] |= bits_below(bounds[n + 1] - start) & ~bits_below(bounds[n] - start);
                }
        }
        return visible;
    }
    static std::uint64_t bits_below(std::int64_t n) {
        return n <= 0 ? 0 : n >= 64 ? ~std::uint64_t(0) : (std::uint64_t(1) << n) - 1;
    }
    // Eight bytes to eight bits: 1 for a byte other than 0.
    static std::uint64_t bytes_to_bits(const std::uint8_t* at) {
        std::uint64_t x;
        __builtin_memcpy(&x, at, 8);
        constexpr std::uint64_t low = 0x7f7f7f7f7f7f7f7f;
        x = (((x & low) + low) | x) >> 7 & 0x0101010101010101;
        return x * 0x0102040810204080 >> 56;
    }
};

// Which keys the rows of a block may see: by their spans, and by the rules.

template <class T, int QV, class Op = Plain<T>>
struct MaskedRowBlock : RowBlock<T, QV, Op> {
    using Base = RowBlock<T, QV, Op>;
    using Base::f, Base::b, Base::p, Base::count, Base::group, Base::L, Base::ROWS, Base::KEYS, Base::head, Base::query;
    using Base::RowBlock;

    Int<T> span[4][ROWS] __attribute__((aligned(64)));  // low0, high0, low1, high1
    std::int64_t ends[QV];    // no row of these vectors, or of those before, may see keys from there on
    std::int64_t begins[QV];  // no row of these vectors, or of those after, may see keys before
    static constexpr int WORDS = KEYS / 64;
    Int<T> judged[2 * WORDS][ROWS] __attribute__((aligned(64)));

    // Cuts keys j .. j + keys where the first vectors of rows see no further, as on the diagonal of a causal mask, and
    // where the last ones begin to see, as in the next document; eight keys at a time. body(first vector, number of
    // vectors, first key, number of keys)
    template <class Body>
    INLINE void in_steps(std::int64_t j, int keys, const Body& body) const {
        const auto end_of = [&](int v) { return (ends[v] - j + 7) / 8 * 8; };
        const auto begin_of = [&](int v) { return begins[v] <= j ? 0 : (begins[v] - j) / 8 * 8; };
        for (int from = 0, to; from < keys; from = to) {
            int first = 0, last = QV - 1;
            while (first < last && end_of(first) <= from) first++;
            while (last > first && begin_of(last) > from) last--;
            std::int64_t change = keys;
            if (first < QV - 1 && end_of(first) > from && end_of(first) < change) change = end_of(first);
            if (last < QV - 1 && begin_of(last + 1) > from && begin_of(last + 1) < change) change = begin_of(last + 1);
            to = int(change);
            with_vectors(first, last, [&](auto v, auto vectors) { body(v, vectors, from, to - from); });
        }
    }
    // Whether all vectors of rows are there when `in_steps` begins at key j.
    bool all_begin(std::int64_t j) const { return ends[0] > j && begins[QV - 1] < j + 8; }
    template <class Body>
    INLINE static void with_vectors(int first, int last, const Body& body) {
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
            begins[v] = 0;
            ends[v] = f.keys;
        }
        if (!f.visible.spans.data) return;
        for (int r = 0; r < ROWS; r++) {
            const int real = r < count ? r : count - 1;
            const std::int32_t* from =
                f.visible.spans.data + b * f.visible.spans.batch_stride + query(real) * f.visible.spans.query_stride;
            span[0][r] = from[0];
            span[1][r] = from[1];
            span[2][r] = f.visible.spans.count > 1 ? from[2] : Int<T>(f.keys);
            span[3][r] = f.visible.spans.count > 1 ? from[3] : Int<T>(f.keys);
        }
        if (f.softcap > 0) return;  // of what is capped the derivative is taken too, seen or not
        for (int v = 0; v < QV; v++) {
            if (v && v * L >= count) {  // of no row: where keys are cut must not depend on how many of these there are
                begins[v] = begins[v - 1];
                ends[v] = ends[v - 1];
                continue;
            }
            begins[v] = f.keys;
            ends[v] = 0;
            for (int r = v * L; r < (v + 1) * L; r++)
                for (int n = 0; n < 4; n += 2) {
                    if (span[n][r] >= span[n + 1][r]) continue;
                    if (span[n][r] < begins[v]) begins[v] = span[n][r];
                    if (span[n + 1][r] > ends[v]) ends[v] = span[n + 1][r];
                }
        }
        for (int v = 1; v < QV; v++)
            if (ends[v - 1] > ends[v]) ends[v] = ends[v - 1];
        for (int v = QV - 1; v > 0; v--)
            if (begins[v] < begins[v - 1]) begins[v - 1] = begins[v];
    }
    // The first and the last key + 1 that any row may see.
    void reach(std::int64_t& begin, std::int64_t& end) const {
        begin = 0;
        end = f.keys;
        if (!f.visible.spans.data) return;
        begin = f.keys;
        end = 0;
        for (int r = 0; r < count; r++)
            for (int n = 0; n < 4; n += 2)
                if (span[n][r] < span[n + 1][r]) {
                    if (span[n][r] < begin) begin = span[n][r];
                    if (span[n + 1][r] > end) end = span[n + 1][r];
                }
    }
    // Whether any row may see any of these keys; and whether every row may see all of them.
    bool visible(std::int64_t j, int keys, bool& whole) {
        whole = true;
        if (f.visible.spans.data && !overlap(j, keys, whole)) return false;
        return !f.visible.count || judge(j, keys);
    }
    bool overlap(std::int64_t j, int keys, bool& whole) const {
        const Int<T> low = Int<T>(j), high = Int<T>(j + keys);
        I<T> some{}, part{};
        UNROLL_FOR(v, QV) {
            I<T> a = load_int<T>(span[0] + v * L), z = load_int<T>(span[1] + v * L);
            I<T> c = load_int<T>(span[2] + v * L), y = load_int<T>(span[3] + v * L);
            some |= ((a < high) & (z > low)) | ((c < high) & (y > low));
            part |= ~(((a <= low) & (z >= high)) | ((c <= low) & (y >= high)));
        }
        whole = !any<T>(part);
        return any<T>(some);
    }

    void hide(std::int64_t j0, int keys) {
        const V<T> never = splat(-std::numeric_limits<T>::infinity());
        UNROLL_FOR(v, QV) {
            const I<T> a = load_int<T>(span[0] + v * L), z = load_int<T>(span[1] + v * L);
            const I<T> c = load_int<T>(span[2] + v * L), y = load_int<T>(span[3] + v * L);
            if (!any<T>((a > Int<T>(j0)) | (z < Int<T>(j0 + keys)))) continue;  // these rows may see all of them
            for (int j = 0; j < keys; j++) {
                const Int<T> key = Int<T>(j0 + j);
                const I<T> seen = ((a <= key) & (z > key)) | ((c <= key) & (y > key));
                T* s = p + j * ROWS + v * L;
                store(s, seen ? load(s) : never);
            }
        }
    }
    // What the rules say of keys j0 .. j0 + keys, a bit for each, in words of 32 with rows in the lanes; false if no
    // row may see any of them.
    bool judge(std::int64_t j0, int keys) {
        std::uint64_t any_seen = 0;
        for (int r = 0; r < ROWS; r++) {
            const Bits seen = r < count ? judge_row(r, j0, keys) : Bits{};
            for (int w = 0; w < WORDS; w++) {
                const std::uint64_t bits = seen.word[w];
                any_seen |= bits;
                judged[2 * w][r] = Int<T>(std::uint32_t(bits));
                judged[2 * w + 1][r] = Int<T>(std::uint32_t(bits >> 32));
            }
        }
        return any_seen != 0;
    }
    void hide_judged(int keys) {
        const V<T> never = splat(-std::numeric_limits<T>::infinity());
        for (int j = 0; j < keys; j++)
            UNROLL_FOR(v, QV) {
                T* s = p + j * ROWS + v * L;
                store(s, (load_int<T>(judged[j / 32] + v * L) >> j % 32 & 1) != 0 ? load(s) : never);
            }
    }
    struct Bits {
        std::uint64_t word[WORDS];
    };
    Bits judge_row(int r, std::int64_t j0, int keys) const {
        Bits seen[MOST_RULES];
        int depth = 0;
        for (int n = 0; n < f.visible.count; n++) {
            const Rule& rule = f.visible.rules[n];
            if (rule.kind < Rule::both) {
                seen[depth++] = answer(rule, r, j0, keys);
                continue;
            }
            depth--;
            for (int w = 0; w < WORDS; w++)
                seen[depth - 1].word[w] = rule.kind == Rule::both ? seen[depth - 1].word[w] & seen[depth].word[w]
                                                                  : seen[depth - 1].word[w] | seen[depth].word[w];
        }
        return seen[0];
    }
    // Whether row r sees any key. For rows whose sum is 0: after `load_spans`.
    APART bool sees_any(int r) const {
        for (int n = 0; n < (f.visible.spans.data ? 4 : 2); n += 2) {
            const std::int64_t begin = f.visible.spans.data ? span[n][r] : 0,
                               end = f.visible.spans.data ? span[n + 1][r] : f.keys;
            if (begin < end && !f.visible.count && !f.bias.data) return true;
            for (std::int64_t j0 = begin; j0 < end; j0 += KEYS) {
                const int keys = int(end - j0 < KEYS ? end - j0 : KEYS);
                const Bits seen = f.visible.count ? judge_row(r, j0, keys) : Bits{};
                for (int w = 0; w < WORDS; w++) {
                    std::uint64_t bits =
                        bits_below(keys - 64 * w) & (f.visible.count ? seen.word[w] : ~std::uint64_t(0));
                    for (; bits; bits &= bits - 1)
                        if (!hidden_by_bias(r, j0 + 64 * w + __builtin_ctzll(bits))) return true;
                }
            }
        }
        return false;
    }
    bool hidden_by_bias(int r, std::int64_t j) const {
        if (!f.bias.data) return false;
        const T* row = reinterpret_cast<const T*>(at(f.bias, b, head(r), query(r), sizeof(T)));
        return row[j * f.bias.stride[3]] == -std::numeric_limits<T>::infinity();
    }
    Bits answer(const Rule& rule, int r, std::int64_t j0, int keys) const {
        Bits seen{};
        if (rule.kind == Rule::bytes) {
            const auto* row =
                reinterpret_cast<const std::uint8_t*>(at(rule.q, b, head(r), query(r), 1)) + j0 * rule.q.stride[3];
            int j = 0;
            if (rule.q.stride[3] == 1)
                for (; j + 8 <= keys; j += 8) seen.word[j / 64] |= bits_of_bytes(row + j) << j % 64;
            for (; j < keys; j++) seen.word[j / 64] |= std::uint64_t(row[j * rule.q.stride[3]] != 0) << j % 64;
        } else if (rule.kind == Rule::same_id) {
            const std::int64_t id =
                static_cast<const std::int64_t*>(rule.q.data)[b * rule.q.stride[0] + query(r) * rule.q.stride[1]];
            const auto* ids =
                static_cast<const std::int64_t*>(rule.k.data) + b * rule.k.stride[0] + j0 * rule.k.stride[1];
            for (int j = 0; j < keys; j++)
                seen.word[j / 64] |= std::uint64_t(ids[j * rule.k.stride[1]] == id) << j % 64;
        } else {
            const std::int32_t* ends =
                rule.reach.data + b * rule.reach.batch_stride + query(r) * rule.reach.query_stride;
            for (int n = 0; n < 2 * rule.reach.count; n += 2)
                for (int w = 0; w < WORDS; w++) {
                    const std::int64_t start = j0 + 64 * w;
                    seen.word[w] |= bits_below(ends[n + 1] - start) & ~bits_below(ends[n] - start);
                }
        }
        return seen;
    }
    static std::uint64_t bits_below(std::int64_t n) {
        return n <= 0 ? 0 : n >= 64 ? ~std::uint64_t(0) : (std::uint64_t(1) << n) - 1;
    }
    // Eight bytes to eight bits: 1 where a byte is not 0.
    static std::uint64_t bits_of_bytes(const std::uint8_t* at) {
        std::uint64_t x;
        __builtin_memcpy(&x, at, 8);
        constexpr std::uint64_t low = 0x7f7f7f7f7f7f7f7f;
        x = (((x & low) + low) | x) >> 7 & 0x0101010101010101;
        return x * 0x0102040810204080 >> 56;
    }
};

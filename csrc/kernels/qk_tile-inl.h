// The logits of a block of rows against a block of keys, once for every target and every pass. They are computed
// transposed, S = K Qᵀ, with query rows in the lanes: K is broadcast from where it lies, and a softmax needs no sum
// across lanes.
//
// A block holds up to QV * LANES rows: the pairs (i, g) of the queries and of the query heads that share one key/value
// head, g running fastest. Its buffers are transposed: [depth][row].
//
// Logits live in the domain of exp2: they carry a factor log2(e).

inline bool is_half(const Forward& f) { return f.q.dtype == Dtype::bf16 || f.q.dtype == Dtype::f16; }
inline bool stops(const Forward& f) { return f.watch && f.watch->stops(f.watch); }

constexpr double LOG2E = 1.4426950408889634, LN2 = 0.6931471805599453;

INLINE const char* at(const Tensor4& x, std::int64_t a, std::int64_t b, std::int64_t c, int size) {
    return static_cast<const char*>(x.data) + (a * x.stride[0] + b * x.stride[1] + c * x.stride[2]) * size;
}

// What the products multiply. A Word of a key is broadcast and multiplied with the words of a vector of rows.
template <class T>
struct Plain {
    using Word = T;
    static constexpr int PER_WORD = 1;  // numbers in a word
    static constexpr int KEYS = 64;     // keys in one softmax block
    typedef T Anywhere __attribute__((may_alias));
    INLINE static V<T> add(V<T> sum, Word x, const Word* y) { return sum + splat(x) * load(y); }
};
#if defined(BF16_DOT)
// Two neighbouring numbers of bf16: their products are added by one instruction. Sums are float.
struct Pairs {
    using Word = std::uint32_t;
    static constexpr int PER_WORD = 2;
    static constexpr int KEYS = 128;
    typedef std::uint32_t Anywhere __attribute__((aligned(2), may_alias));
    INLINE static V<float> add(V<float> sum, Word x, const Word* y) {
        return BF16_DOT(sum, (I<float>{} + Int<float>(x)), load_int<float>(reinterpret_cast<const Int<float>*>(y)));
    }
};
#endif

// Rows of words that lie `stride` bytes apart.
struct Lines {
    const char* data;
    std::int64_t stride;
};

// What an inner product does beside, with a number for each row.
enum class Also { nothing, most, less };

// The inner products, for QV vectors of rows out of ROWS.
template <class T, int QV, class Op = Plain<T>, int ROWS = QV * LANES<T>>
struct Tile {
    using Word = typename Op::Word;
    static constexpr int L = LANES<T>;
    static constexpr int R = REGISTER_TILE / QV < 16 ? REGISTER_TILE / QV : 16;  // keys, or value columns, at a time

    INLINE static Word word(const char* line, std::int64_t n) {
        return reinterpret_cast<const typename Op::Anywhere*>(line)[n];
    }

    // a[r][row] += k[r] · q[row], over the words from `begin` to `end`.
    template <int N>
    INLINE static void add_products(const Word* q, const char* const* key, int begin, int end, V<T> (*a)[QV]) {
        for (int d = begin; d < end; d++)
            UNROLL_FOR(r, N) {
                const Word x = word(key[r], d);
                UNROLL_FOR(v, QV) a[r][v] = Op::add(a[r][v], x, q + d * ROWS + v * L);
            }
    }

    // s[r][row] = factor k[r] · q[row], for N keys of which the first `keys` are real; q is [depth][ROWS]. What is done
    // with them on the way costs less than to read them once more. most: of[row] = max(of[row], s[..][row]); less:
    // of[row] is taken away.
    template <int N, bool SCALES, Also ALSO>
    static void dot(const Word* q, Lines k, int keys, int depth, T factor, T* s, V<T>* of) {
        V<T> a[N][QV];
        const char* key[N];
        UNROLL_FOR(r, N) {
            key[r] = k.data + (r < keys ? r : keys - 1) * k.stride;
            UNROLL_FOR(v, QV) a[r][v] = V<T>{};
        }
        add_products<N>(q, key, 0, depth, a);
        if (SCALES && ALSO == Also::less)
            UNROLL_TILE(r, N, v, QV) a[r][v] = a[r][v] * factor - of[v];
        else if (SCALES)
            UNROLL_TILE(r, N, v, QV) a[r][v] *= factor;
        else if (ALSO == Also::less)
            UNROLL_TILE(r, N, v, QV) a[r][v] -= of[v];
        UNROLL_TILE(r, N, v, QV) store(s + r * ROWS + v * L, a[r][v]);
        if (ALSO == Also::most)
            UNROLL_TILE(r, N, v, QV) of[v] = greater<T>(a[r][v], of[v]);
    }

    // The same, unscaled, in sums of PIECE products: one chain of 64 or 128 roundings errs two to three times as much.
    static constexpr int PIECE = 16;
    template <int N>
    static void dot_in_pieces(const Word* q, Lines k, int keys, int depth, T* s, Also also, V<T>* of) {
        V<T> a[N][QV];
        const char* key[N];
        UNROLL_FOR(r, N) {
            key[r] = k.data + (r < keys ? r : keys - 1) * k.stride;
            UNROLL_FOR(v, QV) a[r][v] = V<T>{};
        }
        for (int d = 0; d < depth; d += PIECE) {
            V<T> piece[N][QV];
            UNROLL_TILE(r, N, v, QV) piece[r][v] = V<T>{};
            add_products<N>(q, key, d, d + PIECE < depth ? d + PIECE : depth, piece);
            UNROLL_TILE(r, N, v, QV) a[r][v] += piece[r][v];
        }
        if (also == Also::less)
            UNROLL_TILE(r, N, v, QV) a[r][v] -= of[v];
        UNROLL_TILE(r, N, v, QV) store(s + r * ROWS + v * L, a[r][v]);
        if (also == Also::most)
            UNROLL_TILE(r, N, v, QV) of[v] = greater<T>(a[r][v], of[v]);
    }

    // o[c][row] = (o[c][row] factor[row], or 0 if it is fresh) + Σ_j p[j][row] value[j][c], for N columns; no factor: 1
    template <int N>
    static void mix(const Word* p, Lines value, int keys, T* o, bool fresh, const V<T>* factor) {
        V<T> a[N][QV];  // of these keys, to be added as a whole: one chain over a long row loses a bit or two
        UNROLL_TILE(c, N, v, QV) a[c][v] = V<T>{};
        for (int j = 0; j < keys; j++, value.data += value.stride)
            UNROLL_FOR(c, N) {
                const Word x = word(value.data, c);
                UNROLL_FOR(v, QV) a[c][v] = Op::add(a[c][v], x, p + j * ROWS + v * L);
            }
        if (factor && !fresh)
            UNROLL_TILE(c, N, v, QV) a[c][v] += load(o + c * ROWS + v * L) * factor[v];
        else if (!fresh)
            UNROLL_TILE(c, N, v, QV) a[c][v] += load(o + c * ROWS + v * L);
        UNROLL_TILE(c, N, v, QV) store(o + c * ROWS + v * L, a[c][v]);
    }

    // Keys left over share one tile with copies of the last of them; no tile ends beyond KEYS. `depth` and, in mixes,
    // `keys` count words. The factor is for pairs alone: plain queries bring it with them.
    static void dots(const Word* q, Lines k, int keys, int depth, T factor, T* s, bool in_pieces, Also also,
                     V<T>* of = nullptr) {
        constexpr bool MAY_SCALE = Op::PER_WORD > 1;
        if constexpr (!MAY_SCALE)
            if (in_pieces) return dots_in_pieces(q, k, keys, depth, s, also, of);
        const bool scales = MAY_SCALE && factor != 1;
        if (also == Also::most)
            dots_of<MAY_SCALE, Also::most>(q, k, keys, depth, factor, s, of);
        else if (also == Also::less && scales)
            dots_of<MAY_SCALE, Also::less>(q, k, keys, depth, factor, s, of);
        else if (also == Also::less)
            dots_of<false, Also::less>(q, k, keys, depth, factor, s, of);
        else if (scales)
            dots_of<MAY_SCALE, Also::nothing>(q, k, keys, depth, factor, s, of);
        else
            dots_of<false, Also::nothing>(q, k, keys, depth, factor, s, of);
    }
    template <bool SCALES, Also ALSO>
    static void dots_of(const Word* q, Lines k, int keys, int depth, T factor, T* s, V<T>* of) {
        for (; keys >= R; keys -= R, k.data += R * k.stride, s += R * ROWS)
            dot<R, SCALES, ALSO>(q, k, R, depth, factor, s, of);
        if (keys > 12)
            dot<R, SCALES, ALSO>(q, k, keys, depth, factor, s, of);
        else if (keys > 8)
            dot<(R < 12 ? R : 12), SCALES, ALSO>(q, k, keys, depth, factor, s, of);
        else if (keys > 4)
            dot<(R < 8 ? R : 8), SCALES, ALSO>(q, k, keys, depth, factor, s, of);
        else if (keys > 2)
            dot<(R < 4 ? R : 4), SCALES, ALSO>(q, k, keys, depth, factor, s, of);
        else if (keys > 1)
            dot<2, SCALES, ALSO>(q, k, keys, depth, factor, s, of);
        else if (keys > 0)
            dot<1, SCALES, ALSO>(q, k, keys, depth, factor, s, of);
    }
    static void dots_in_pieces(const Word* q, Lines k, int keys, int depth, T* s, Also also, V<T>* of) {
        for (; keys >= R; keys -= R, k.data += R * k.stride, s += R * ROWS)
            dot_in_pieces<R>(q, k, R, depth, s, also, of);
        if (keys > 8)
            dot_in_pieces<R>(q, k, keys, depth, s, also, of);
        else if (keys > 4)
            dot_in_pieces<(R < 8 ? R : 8)>(q, k, keys, depth, s, also, of);
        else if (keys > 0)
            dot_in_pieces<(R < 4 ? R : 4)>(q, k, keys, depth, s, also, of);
    }
    static void mixes(const Word* p, Lines v, int keys, int width, T* o, bool fresh, const V<T>* factor = nullptr) {
        int c = 0;
        for (; c + R <= width; c += R) mix<R>(p, at_column(v, c), keys, o + c * ROWS, fresh, factor);
        if constexpr (R > 4)
            for (; c + 4 <= width; c += 4) mix<4>(p, at_column(v, c), keys, o + c * ROWS, fresh, factor);
        for (; c + 2 <= width; c += 2) mix<2>(p, at_column(v, c), keys, o + c * ROWS, fresh, factor);
        for (; c < width; c++) mix<1>(p, at_column(v, c), keys, o + c * ROWS, fresh, factor);
    }
    static Lines at_column(Lines x, int c) { return {x.data + c * sizeof(Word), x.stride}; }

    // Rows of `width` columns, whole vectors of them, as `outer` reads them: panels of up to four vectors of columns,
    // each [LINE][.], so that what it reads again and again lies together. body(first column, std::integral_constant of
    // how many vectors)
    static constexpr int LINE = ROWS / Op::PER_WORD;
    template <class Body>
    INLINE static void panels(int width, const Body& body) {
        int c = 0;
        for (; c + 4 * L <= width; c += 4 * L) body(c, std::integral_constant<int, 4>{});
        for (; c + 2 * L <= width; c += 2 * L) body(c, std::integral_constant<int, 2>{});
        for (; c < width; c += L) body(c, std::integral_constant<int, 1>{});
    }

    // to[j][c] += Σ_row a[j][row] from[row][c], for N keys and a panel of C vectors of columns, over the rows of all
    // parts; `a` is
    // [.][LINE], `to` is [.][width].
    struct Part {
        const Word *a, *from;
        int rows;  // in words
    };
    template <int N, int C>
    static void outer(const Part* parts, int count, int j0, int c0, int width, T* to) {
        V<T> sum[N][C];
        to += j0 * width + c0;
        UNROLL_TILE(j, N, c, C) {
            sum[j][c] = V<T>{};
            __builtin_prefetch(to + j * width + c * L,
                               1);  // of long sequences: with all cores at work they are far when they are asked for
        }
        for (const Part* part = parts; part < parts + count; part++) {
            const Word *a = part->a + j0 * LINE, *from = part->from + c0 * LINE;
            const int rows = part->rows;
            for (int r = 0; r < rows; r++, from += C * L)
                UNROLL_TILE(j, N, c, C) sum[j][c] = Op::add(sum[j][c], a[j * LINE + r], from + c * L);
        }
        UNROLL_TILE(j, N, c, C) add_to<T>(to + j * width + c * L, sum[j][c], false);
    }
    template <int C>
    static void outers(const Part* parts, int count, int keys, int c, int width, T* to) {
        constexpr int N = REGISTER_TILE / C < 12 ? REGISTER_TILE / C : 12;
        int j = 0;
        for (; j + N <= keys; j += N) outer<N, C>(parts, count, j, c, width, to);
        if constexpr (N > 4)
            for (; j + 4 <= keys; j += 4) outer<4, C>(parts, count, j, c, width, to);
        if constexpr (N > 2)
            for (; j + 2 <= keys; j += 2) outer<2, C>(parts, count, j, c, width, to);
        for (; j < keys; j++) outer<1, C>(parts, count, j, c, width, to);
    }
    static void outer_all(const Part* parts, int count, int keys, int width, T* to) {
        panels(width, [&](int c, auto vectors) { outers<decltype(vectors)::value>(parts, count, keys, c, width, to); });
    }
};

// Memory for a task, cut off piece by piece; beginning at 0, the end says how much is needed. Pieces are whole pages
// often enough: a gap keeps what is read and written side by side from the same lines of the first cache, where some
// CPUs take one for another.
struct Arena {
    static constexpr std::size_t PAGE = 4096, GAP = 5 * 64;
    std::uintptr_t next;
    template <class X>
    X* take(std::int64_t count) {
        X* const piece = reinterpret_cast<X*>(next);
        const std::size_t size = std::size_t(count) * sizeof(X);
        next += (size + 63) / 64 * 64 + (size >= PAGE ? GAP : 0);
        return piece;
    }
};

// The last key + 1 that any row may see, and how many words of two keys hold all that may be seen.
inline std::int64_t end_of_seen(const Forward& f) { return f.seen[1] < f.keys ? f.seen[1] : f.keys; }
inline std::int64_t pairs_seen(const Forward& f) { return (end_of_seen(f) + 1) / 2 - f.seen[0] / 2; }

// Rows 2n and 2n + 1 of bf16 as words, [(rows + 1) / 2][width]: neighbours down the rows instead of along them.
// `row(n)` is where a row lies, or null for zeros.
template <class Row>
void pair_rows(int rows, int width, int padded, std::uint32_t* to, const Row& row) {
    constexpr int L = LANES<float>;
    for (int n = 0; n < rows; n += 2, to += padded) {
        const std::uint16_t *low = row(n), *high = n + 1 < rows ? row(n + 1) : nullptr;
        int c = 0;
        if (low && high)
            for (; c + L <= width; c += L)
                store_anywhere(reinterpret_cast<float*>(to + c), words_of(low + c, high + c));
        for (; c < width; c++) to[c] = (low ? low[c] : 0) | std::uint32_t(high ? high[c] : 0) << 16;
        for (; c < padded; c++) to[c] = 0;
    }
}

// A block of rows: which they are, what they may see, and their logits.
template <class T, int QV, class Op = Plain<T>>
struct Scores {
    using Products = Tile<T, QV, Op>;
    using Word = typename Op::Word;
    static constexpr int L = LANES<T>;
    static constexpr int ROWS = QV * L;
    static constexpr int KEYS = Op::KEYS;
    static constexpr bool PAIRS = Op::PER_WORD == 2;

    const Forward& f;
    std::int64_t b, kv_head, group, first = 0;  // rows first .. first + count of the queries * group
    int count = 0;
    bool all_seen = false;                              // every row may see every key of the last block
    Word* q;                                            // [D / PER_WORD][ROWS]
    T* p;                                               // [KEYS][ROWS]
    T* line;                                            // for conversions: L rows of D or Dv
    Word *wide_k, *wide_v;                              // [KEYS][D], [KEYS][Dv]: a half type, widened or paired by keys
    Int<T> span[4][ROWS] __attribute__((aligned(64)));  // low0, high0, low1, high1
    std::int64_t ends[QV];    // no row of these vectors, or of those before, may see keys from there on
    std::int64_t begins[QV];  // no row of these vectors, or of those after, may see keys before
    static constexpr int WORDS = KEYS / 64;
    Int<T> judged[2 * WORDS][ROWS] __attribute__((aligned(64)));

    Scores(const Forward& call, std::int64_t batch, std::int64_t head, Arena& memory)
        : f(call), b(batch), kv_head(head), group(f.heads / f.kv_heads) {
        const bool half = sizeof(T) == 4 && f.q.dtype != Dtype::f32;
        q = memory.take<Word>(f.head_dim * ROWS);
        p = memory.take<T>(KEYS * ROWS);
        line = memory.take<T>((f.head_dim > f.v_head_dim ? f.head_dim : f.v_head_dim) * L);
        wide_k = memory.take<Word>(half ? f.head_dim * KEYS : 0);
        wide_v = memory.take<Word>(half ? f.v_head_dim * KEYS : 0);
    }

    // Of a row: its head, its place among the Q, which query it is, and its place in [B, H, Q]. A division for each row
    // would be felt where sequences are short.
    std::int64_t head(int r) const { return group == 1 ? kv_head : kv_head * group + (first + r) % group; }
    std::int64_t place(int r) const { return group == 1 ? first + r : (first + r) / group; }
    std::int64_t query(int r) const {
        return f.rows ? f.rows[b * f.rows_stride[0] + head(r) * f.rows_stride[1] + place(r)] : place(r);
    }
    std::int64_t row(int r) const { return (b * f.heads + head(r)) * f.queries + place(r); }

    // Rows j .. j + keys of a tensor [B, Hkv, K, width] as T: where they lie, or widened.
    Lines lines(const Tensor4& x, std::int64_t j, int keys, int width, T* wide) const {
        if (sizeof(T) == 8 || x.dtype == Dtype::f32)
            return {at(x, b, kv_head, j, sizeof(T)), x.stride[2] * std::int64_t(sizeof(T))};
        for (int n = 0; n < keys; n++) widen_row(at(x, b, kv_head, j + n, 2), x.dtype, width, wide + n * width);
        return {reinterpret_cast<const char*>(wide), width * std::int64_t(sizeof(T))};
    }
    // The same rows of bf16, as words of two keys each.
    Lines paired(const Tensor4& x, std::int64_t j, int keys, int width, std::uint32_t* to) const {
        const auto* first = reinterpret_cast<const std::uint16_t*>(at(x, b, kv_head, j, 2));
        pair_rows(keys, width, width, to, [first, stride = x.stride[2]](int n) { return first + n * stride; });
        return {reinterpret_cast<const char*>(to), width * 4};
    }
    // Rows as `Products::dots` takes them, and as `Products::mixes` does.
    Lines natural(const Tensor4& x, std::int64_t j, int keys, int width, Word* wide) const {
        if constexpr (PAIRS)
            return {at(x, b, kv_head, j, 2), x.stride[2] * 2};
        else
            return lines(x, j, keys, width, wide);
    }
    Lines across(const Tensor4& x, std::int64_t j, int keys, int width, Word* wide) const {
        if constexpr (PAIRS)
            return paired(x, j, keys, width, wide);
        else
            return lines(x, j, keys, width, wide);
    }

    // The logits of keys j .. j + keys into p; false if no row may see any of them. `slope`, if there is a softcap,
    // takes its derivative. `most`, if they are `untouched`, is raised to the largest of them; `less`, where there is
    // no softcap, is taken away from them.
    bool logits(std::int64_t j, int keys, T* slope = nullptr, V<T>* most = nullptr, V<T>* less = nullptr) {
        bool whole;
        if (!visible(j, keys, whole)) return false;
        all_seen = whole && !f.visible.count && !f.bias.data;
        const int depth = int(f.head_dim);
        const Lines k = natural(f.k, j, keys, depth, wide_k);
        const Also also = less ? Also::less : most && untouched() ? Also::most : Also::nothing;
        V<T>* const of = less ? less : most;
        in_steps(j, keys, [&](auto from_vector, auto vectors, int from, int count) {
            constexpr int v = decltype(from_vector)::value;
            Part<decltype(vectors)::value>::dots(q + v * L, {k.data + from * k.stride, k.stride}, count,
                                                 depth / Op::PER_WORD, query_factor(), p + from * ROWS + v * L,
                                                 in_pieces(), also, of ? of + v : of);
        });
        adjust(j, keys, whole, slope);
        return true;
    }
    // Whether products over D or Dv are summed in pieces. Plain torch multiplies up to three queries as vectors, in
    // sums of a few products each, and the gradients of dS and of the weights are to err at most twice as much.
    bool in_pieces() const { return !PAIRS && f.queries <= 3; }
    // Whether the logits of the last block are nothing but products, times the factor.
    bool untouched() const { return all_seen && !(f.softcap > 0); }
    // The products of so many vectors of rows.
    template <int VECTORS>
    using Part = Tile<T, VECTORS, Op, ROWS>;
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
    // From products of queries and keys to logits.
    void adjust(std::int64_t j, int keys, bool whole, T* slope = nullptr) {
        if (f.softcap > 0) cap(keys, slope);
        if (f.bias.data) add_bias(j, keys);
        if (!whole) hide(j, keys);
        if (f.visible.count) hide_judged(keys);
    }

    // What rows begin with, before any key: a sink, if there is one.
    void start_sums(V<T>* top, V<T>* sum, bool with_sinks) const {
        UNROLL_FOR(v, QV) {
            top[v] = splat(-std::numeric_limits<T>::max());
            sum[v] = V<T>{};
        }
        if (!f.sinks || !with_sinks) return;
        for (int r = 0; r < ROWS; r++) {
            const T least = -std::numeric_limits<T>::max(),
                    sink = static_cast<const T*>(f.sinks)[head(r < count ? r : count - 1)];
            if (sink == -std::numeric_limits<T>::infinity()) continue;
            const T logit = sink * T(LOG2E);
            top[r / L][r % L] = logit < least ? least : logit;
            sum[r / L][r % L] =
                logit <= -least ? 1 : std::numeric_limits<T>::quiet_NaN();  // NaN and +inf make the row NaN
        }
    }

    // With this factor products of queries and keys are logits times log2(e), or the argument of tanh.
    T query_factor() const { return T(f.softcap > 0 ? f.scale / f.softcap : f.scale * LOG2E); }
    void load_queries() { load_words(f.q, int(f.head_dim), query_factor(), q); }

    // The block's rows of a tensor [B, H, Q, depth], transposed to [depth / PER_WORD][ROWS]; plain ones times a factor.
    void load_words(const Tensor4& x, int depth, T factor, Word* to) {
        if constexpr (PAIRS)
            transpose_rows(x, depth / 2, to, [](const char* row, int) { return row; }, [](auto word) { return word; });
        else
            transpose_rows(
                x, depth, to, [&](const char* row, int r) { return as_numbers(row, x.dtype, depth, line + r * depth); },
                [&](auto number) { return number * factor; });
    }
    template <class From, class Change>
    void transpose_rows(const Tensor4& x, int words, Word* to, const From& from, const Change& change) {
        for (int v0 = 0; v0 < ROWS; v0 += L) {
            const char* row[L];
            places(static_cast<const char*>(x.data), x.stride, x.dtype, v0, row);
            for (int r = 0; r < L; r++) row[r] = from(row[r], r);
            const auto some = [&](int d, auto columns, const auto& load_some) __attribute__((always_inline)) {
                V<T> lanes[L];
                UNROLL_FOR(r, L) lanes[r] = change(load_some(reinterpret_cast<const T*>(row[r] + d * sizeof(Word))));
                transpose<T>(lanes);
                UNROLL_FOR(n, decltype(columns)::value) store(reinterpret_cast<T*>(to + (d + n) * ROWS + v0), lanes[n]);
            };
            int d = 0;
            for (; d + L <= words; d += L)
                some(d, std::integral_constant<int, L>{}, [](const T* at) { return load_anywhere(at); });
            if (d + L / 2 <= words) {  // D = 16 by pairs, for one
                some(d, std::integral_constant<int, L / 2>{}, [](const T* at) { return load_half(at); });
                d += L / 2;
            }
            for (; d < words; d++)
                for (int r = 0; r < L; r++) to[d * ROWS + v0 + r] = change(Products::word(row[r], d));
        }
    }
    static int size_of(Dtype dtype) { return dtype == Dtype::f32 ? 4 : dtype == Dtype::f64 ? 8 : 2; }
    // Where row r lies in [B, H, Q, .], and where rows v0 .. v0 + L do. Those past the last lie where it does, and are
    // never written.
    template <class C>
    C* place_of(C* data, const std::int64_t* stride, Dtype dtype, int r) const {
        if (r >= count) r = count - 1;
        return data + (b * stride[0] + head(r) * stride[1] + query(r) * stride[2]) * size_of(dtype);
    }
    template <class C>
    void places(C* data, const std::int64_t* stride, Dtype dtype, int v0, C** row) const {
        if (group > 1 || f.rows) {
            for (int r = 0; r < L; r++) row[r] = place_of(data, stride, dtype, v0 + r);
            return;
        }
        // the queries of one head, in turn: to look each up would be felt where sequences are short
        C* const begin = place_of(data, stride, dtype, 0);
        const std::int64_t step = stride[2] * size_of(dtype), last = count - 1;
        for (int r = 0; r < L; r++) row[r] = begin + (v0 + r < last ? v0 + r : last) * step;
    }
    const char* address_of(const Tensor4& x, int r) const {
        return place_of(static_cast<const char*>(x.data), x.stride, x.dtype, r);
    }
    const T* row_of(const Tensor4& x, int r, int depth, T* converted) const {
        return reinterpret_cast<const T*>(as_numbers(address_of(x, r), x.dtype, depth, converted));
    }
    const char* as_numbers(const char* row, Dtype dtype, int depth, T* converted) const {
        if (sizeof(T) == 8 || dtype == Dtype::f32) return row;
        widen_row(row, dtype, depth, converted);
        return reinterpret_cast<const char*>(converted);
    }
    APART static void widen_row(const char* from, Dtype dtype, int width, T* to) {
        const auto* half = reinterpret_cast<const std::uint16_t*>(from);
        int d = 0;
        if constexpr (sizeof(T) == 4) {
            if (dtype == Dtype::bf16)
                for (; d + L <= width; d += L)
                    store_anywhere(to + d, load_wide<T>(reinterpret_cast<const BFloat16*>(half + d)));
            else
                for (; d + L <= width; d += L)
                    store_anywhere(to + d, load_wide<T>(reinterpret_cast<const Float16*>(half + d)));
        }
        for (; d < width; d++) to[d] = widen(half[d], dtype);
    }

    // Rows from [width][ROWS], each times its factor, to where they belong in [B, H, Q, width] of q's dtype; whether
    // all of it, the lanes beyond the rows included, is finite.
    bool put_rows(const T* from, int width, const V<T>* factor, void* to, const std::int64_t* stride) const {
        V<T> zero{};
        for (int v = 0; v < QV && v * L < count; v++) {
            const int rows = count - v * L < L ? count - v * L : L;
            char* row[L];
            places(static_cast<char*>(to), stride, f.q.dtype, v * L, row);
            int c = 0;
            for (; c + L <= width; c += L) {
                V<T> lanes[L];
                UNROLL_FOR(n, L) {
                    lanes[n] = load(from + (c + n) * ROWS + v * L) * factor[v];
                    zero += lanes[n] * T(0);  // NaN or infinity times 0 is NaN
                }
                transpose<T>(lanes);
                for (int r = 0; r < rows; r++) put(row[r], c, lanes[r], width);
            }
            for (; c < width; c++) {
                const V<T> x = load(from + c * ROWS + v * L) * factor[v];
                zero += x * T(0);
                for (int r = 0; r < rows; r++) put_number(row[r], c, x[r], f.q.dtype);
            }
        }
        return !any<T>(zero != zero);
    }
    // Columns from c on of a row of q's dtype that is `width` wide.
    INLINE void put(char* row, int c, V<T> x, int width) const { put_numbers<T>(row, c, x, width, f.q.dtype); }

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

    void cap(int keys, T* slope) {
        const T factor = T(f.softcap * LOG2E);
        for (int n = 0; n < keys * QV; n++) {
            const V<T> x = load(p + n * L), y = tanh(x);
            if (slope) store(slope + n * L, slope_of_tanh(x, y));
            store(p + n * L, y * factor);
        }
    }

    // Adds bias[b, h, i, j], and hides where it is -inf; only there.
    void add_bias(std::int64_t j0, int keys) {
        const auto& s = f.bias.stride;
        if (s[2] == 0 && (s[1] == 0 || group == 1)) {  // the same for all rows
            const T* from = reinterpret_cast<const T*>(at(f.bias, b, head(0), 0, sizeof(T))) + j0 * s[3];
            for (int j = 0; j < keys; j++)
                UNROLL_FOR(v, QV) plus(p + j * ROWS + v * L, splat(from[j * s[3]]));
            return;
        }
        for (int v0 = 0; v0 < ROWS; v0 += L) {
            const T* row[L];
            for (int r = 0; r < L; r++) {
                const int real = v0 + r < count ? v0 + r : count - 1;
                row[r] = reinterpret_cast<const T*>(at(f.bias, b, head(real), query(real), sizeof(T))) + j0 * s[3];
            }
            for (int j = 0; j < keys; j++) {
                V<T> x;
                UNROLL_FOR(r, L) x[r] = row[r][j * s[3]];
                plus(p + j * ROWS + v0, x);
            }
        }
    }
    INLINE static void plus(T* s, V<T> bias) {
        const V<T> never = splat(-std::numeric_limits<T>::infinity()), least = splat(-std::numeric_limits<T>::max());
        const V<T> x =
            greater<T>(least, bias * T(LOG2E));  // the smallest number hides nothing, though log2(e) times it is -inf
        store(s, bias == never ? never : load(s) + x);
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

    // What dropout leaves of a weight: 0 or 1 / (1 - dropout), by the hash of (seed, b, h, i, j), so that every pass
    // and every size of block drops the same.
    APART void keep(std::int64_t j0, int keys, T* factor) const {
        const std::uint32_t limit = std::uint32_t(f.dropout * 4294967296.0);
        const T kept = T(1 / (1 - f.dropout));
        for (int r = 0; r < ROWS; r++) {
            const std::uint64_t start =
                f.seed + 0x9e3779b97f4a7c15u * std::uint64_t(row(r < count ? r : count - 1) + 1);
            for (int j = 0; j < keys; j++) {
                std::uint64_t x = start ^ (std::uint64_t(j0 + j) * 0xbf58476d1ce4e5b9u);
                x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
                x = (x ^ x >> 27) * 0x94d049bb133111ebu;
                factor[j * ROWS + r] = std::uint32_t((x ^ x >> 31) >> 32) >= limit ? kept : T(0);
            }
        }
    }
};

// The logits of a block of rows against a block of keys, once for every target and every pass. They are computed
// transposed, S = K Qᵀ, with query rows in the lanes: K is broadcast from where it lies, and a softmax needs no sum
// across lanes.
//
// A block holds up to QV * LANES rows: the pairs (i, g) of the queries and of the query heads that share one key/value
// head, g running fastest. Its buffers are transposed: [depth][row].
//
// Logits live in the domain of exp2: they carry a factor log2(e).

// What an inner product does beside, with a number for each row.
enum class Also { nothing, most, less };

// The inner products of queries and keys, for QV vectors of rows out of ROWS.
template <class T, int QV, class Op = Plain<T>, int ROWS = QV * LANES<T>>
struct QkTile {
    using Word = typename Op::Word;
    static constexpr int L = LANES<T>, R = TILE_COLUMNS<QV>;
    // a[r][row] += k[r] · q[row], over the words from `begin` to `end`.
    template <int N>
    INLINE static void add_products(const Word* q, const char* const* key, int begin, int end, V<T> (*a)[QV]) {
        for (int d = begin; d < end; d++)
            UNROLL_FOR(r, N) {
                const Word x = load_word<Op>(key[r], d);
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
};

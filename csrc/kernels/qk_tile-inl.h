// The logits of a block of rows against a block of keys, once for every target and every pass. They are computed
// transposed, S = K Qᵀ, with query rows in the lanes: K is broadcast from where it lies, and a softmax needs no sum
// across lanes.
//
// A block holds up to QV * LANES rows: the pairs (i, g) of the queries and of the query heads that share one key/value
// head, g running fastest. Its buffers are transposed: [depth][row].
//
// Logits live in the domain of exp2: they carry a factor log2(e).

// What an inner product does beside, with a number for each row.
enum class Epilogue { none, row_maxima, subtract };

// The inner products of queries and keys, for QV vectors of rows out of ROWS.
template <class T, int QV, class Op = Fma<T>, int ROWS = QV * LANES<T>>
struct QkTile {
    using Word = typename Op::Word;
    static constexpr int L = LANES<T>, R = TILE_COLUMNS<QV>;
    // a[r][row] += k[r] · q[row], over the words from `begin` to `end`.
    template <int N>
    INLINE static void add_products(const Word* q, const char* const* key, int begin, int end, V<T> (*a)[QV]) {
        for (int d = begin; d < end; d++)
            UNROLL_FOR(r, N) {
                const Word x = load_word<Op>(key[r], d);
                UNROLL_FOR(v, QV) a[r][v] = Op::multiply_add(a[r][v], x, q + d * ROWS + v * L);
            }
    }

    // s[r][row] = factor k[r] · q[row], for N keys of which the first `keys` are real; q is [depth][ROWS]. What is done
    // with them on the way costs less than to read them once more. most: row_values[row] = max(row_values[row],
    // s[..][row]); less: row_values[row] is taken away.
    template <int N, bool SCALES, Epilogue EPILOGUE>
    static void multiply_tile(const Word* q, StridedRows k, int keys, int depth, T factor, T* s, V<T>* row_values) {
        V<T> a[N][QV];
        const char* key[N];
        UNROLL_FOR(r, N) {
            key[r] = k.data + (r < keys ? r : keys - 1) * k.stride;
            UNROLL_FOR(v, QV) a[r][v] = V<T>{};
        }
        add_products<N>(q, key, 0, depth, a);
        if (SCALES && EPILOGUE == Epilogue::subtract)
            UNROLL_TILE(r, N, v, QV) a[r][v] = a[r][v] * factor - row_values[v];
        else if (SCALES)
            UNROLL_TILE(r, N, v, QV) a[r][v] *= factor;
        else if (EPILOGUE == Epilogue::subtract)
            UNROLL_TILE(r, N, v, QV) a[r][v] -= row_values[v];
        UNROLL_TILE(r, N, v, QV) store(s + r * ROWS + v * L, a[r][v]);
        if (EPILOGUE == Epilogue::row_maxima)
            UNROLL_TILE(r, N, v, QV) row_values[v] = maximum<T>(a[r][v], row_values[v]);
    }

    // The same, unscaled, in sums of SUM_BLOCK products: one chain of 64 or 128 roundings errs two to three times as
    // much.
    static constexpr int SUM_BLOCK = 16;
    template <int N>
    static void multiply_tile_in_blocks(const Word* q, StridedRows k, int keys, int depth, T* s, Epilogue epilogue,
                                        V<T>* row_values) {
        V<T> a[N][QV];
        const char* key[N];
        UNROLL_FOR(r, N) {
            key[r] = k.data + (r < keys ? r : keys - 1) * k.stride;
            UNROLL_FOR(v, QV) a[r][v] = V<T>{};
        }
        for (int d = 0; d < depth; d += SUM_BLOCK) {
            V<T> block[N][QV];
            UNROLL_TILE(r, N, v, QV) block[r][v] = V<T>{};
            add_products<N>(q, key, d, d + SUM_BLOCK < depth ? d + SUM_BLOCK : depth, block);
            UNROLL_TILE(r, N, v, QV) a[r][v] += block[r][v];
        }
        if (epilogue == Epilogue::subtract)
            UNROLL_TILE(r, N, v, QV) a[r][v] -= row_values[v];
        UNROLL_TILE(r, N, v, QV) store(s + r * ROWS + v * L, a[r][v]);
        if (epilogue == Epilogue::row_maxima)
            UNROLL_TILE(r, N, v, QV) row_values[v] = maximum<T>(a[r][v], row_values[v]);
    }

    // Keys left over share one tile with copies of the last of them; no tile ends beyond KEYS. `depth` and, in mixes,
    // `keys` count words. The factor is for pairs alone: plain queries bring it with them.
    static void multiply(const Word* q, StridedRows k, int keys, int depth, T factor, T* s, bool sums_in_blocks,
                         Epilogue epilogue, V<T>* row_values = nullptr) {
        constexpr bool MAY_SCALE = Op::PER_WORD > 1;
        if constexpr (!MAY_SCALE)
            if (sums_in_blocks) return multiply_in_blocks(q, k, keys, depth, s, epilogue, row_values);
        const bool scales = MAY_SCALE && factor != 1;
        if (epilogue == Epilogue::row_maxima)
            multiply_keys<MAY_SCALE, Epilogue::row_maxima>(q, k, keys, depth, factor, s, row_values);
        else if (epilogue == Epilogue::subtract && scales)
            multiply_keys<MAY_SCALE, Epilogue::subtract>(q, k, keys, depth, factor, s, row_values);
        else if (epilogue == Epilogue::subtract)
            multiply_keys<false, Epilogue::subtract>(q, k, keys, depth, factor, s, row_values);
        else if (scales)
            multiply_keys<MAY_SCALE, Epilogue::none>(q, k, keys, depth, factor, s, row_values);
        else
            multiply_keys<false, Epilogue::none>(q, k, keys, depth, factor, s, row_values);
    }
    template <bool SCALES, Epilogue EPILOGUE>
    static void multiply_keys(const Word* q, StridedRows k, int keys, int depth, T factor, T* s, V<T>* row_values) {
        for (; keys >= R; keys -= R, k.data += R * k.stride, s += R * ROWS)
            multiply_tile<R, SCALES, EPILOGUE>(q, k, R, depth, factor, s, row_values);
        if (keys > 12)
            multiply_tile<R, SCALES, EPILOGUE>(q, k, keys, depth, factor, s, row_values);
        else if (keys > 8)
            multiply_tile<(R < 12 ? R : 12), SCALES, EPILOGUE>(q, k, keys, depth, factor, s, row_values);
        else if (keys > 4)
            multiply_tile<(R < 8 ? R : 8), SCALES, EPILOGUE>(q, k, keys, depth, factor, s, row_values);
        else if (keys > 2)
            multiply_tile<(R < 4 ? R : 4), SCALES, EPILOGUE>(q, k, keys, depth, factor, s, row_values);
        else if (keys > 1)
            multiply_tile<2, SCALES, EPILOGUE>(q, k, keys, depth, factor, s, row_values);
        else if (keys > 0)
            multiply_tile<1, SCALES, EPILOGUE>(q, k, keys, depth, factor, s, row_values);
    }
    static void multiply_in_blocks(const Word* q, StridedRows k, int keys, int depth, T* s, Epilogue epilogue,
                                   V<T>* row_values) {
        for (; keys >= R; keys -= R, k.data += R * k.stride, s += R * ROWS)
            multiply_tile_in_blocks<R>(q, k, R, depth, s, epilogue, row_values);
        if (keys > 8)
            multiply_tile_in_blocks<R>(q, k, keys, depth, s, epilogue, row_values);
        else if (keys > 4)
            multiply_tile_in_blocks<(R < 8 ? R : 8)>(q, k, keys, depth, s, epilogue, row_values);
        else if (keys > 0)
            multiply_tile_in_blocks<(R < 4 ? R : 4)>(q, k, keys, depth, s, epilogue, row_values);
    }
};

// The inner products of a block of rows with a block of keys. They are computed transposed, S = K Qᵀ, with query rows
// in the lanes: K is broadcast without a copy, and a softmax needs no sum across lanes.
//
// A block has up to QV * LANES rows: the pairs (i, g) of the queries and of the query heads that share one key/value
// head, with g running fastest. Its buffers are transposed: [depth][row].
//
// Logits are multiplied by log2(e), so that weights are exp2 of them.

// An operation on the products of a tile, with one number for each row, while they are in registers: row_maxima raises
// the number to the largest product, subtract subtracts it from each.
enum class Epilogue { none, row_maxima, subtract };

// QV vectors of rows, of a block that has ROWS rows.
template <class T, int QV, class Op = Fma<T>, int ROWS = QV * LANES<T>>
struct QkTile {
    using Word = typename Op::Word;
    static constexpr int L = LANES<T>, R = TILE_COLUMNS<QV>;
    // The addresses of N keys, of which those from `keys` on repeat the last; and sums of 0.
    template <int N>
    INLINE static void start_tile(StridedRows k, int keys, const char** key, V<T> (*a)[QV]) {
        UNROLL_FOR(r, N) {
            key[r] = k.data + (r < keys ? r : keys - 1) * k.stride;
            UNROLL_FOR(v, QV) a[r][v] = V<T>{};
        }
    }
    // a[r][row] += k[r] · q[row], over the words from `begin` to `end`.
    template <int N>
    INLINE static void add_products(const Word* q, const char* const* key, int begin, int end, V<T> (*a)[QV]) {
        for (int d = begin; d < end; d++)
            UNROLL_FOR(r, N) {
                const Word x = load_word<Op>(key[r], d);
                UNROLL_FOR(v, QV) a[r][v] = Op::multiply_add(a[r][v], x, q + d * ROWS + v * L);
            }
    }

    // s[r][row] = factor k[r] · q[row] for N keys, of which those from `keys` on repeat the last; q is [depth][ROWS].
    template <int N, bool SCALES, Epilogue EPILOGUE>
    static void multiply_tile(const Word* q, StridedRows k, int keys, int depth, T factor, T* s, V<T>* row_values) {
        V<T> a[N][QV];
        const char* key[N];
        start_tile<N>(k, keys, key, a);
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

    // The same, unscaled, by blocked summation: `block_depth` products are summed and then added to the rest. The error
    // of one chain of 64 or 128 additions is two to three times that of chains of 16.
    template <int N>
    static void multiply_tile_in_blocks(const Word* q, StridedRows k, int keys, int depth, int block_depth, T* s,
                                        Epilogue epilogue, V<T>* row_values) {
        V<T> a[N][QV];
        const char* key[N];
        start_tile<N>(k, keys, key, a);
        for (int d = 0; d < depth; d += block_depth) {
            V<T> block[N][QV];
            UNROLL_TILE(r, N, v, QV) block[r][v] = V<T>{};
            add_products<N>(q, key, d, d + block_depth < depth ? d + block_depth : depth, block);
            UNROLL_TILE(r, N, v, QV) a[r][v] += block[r][v];
        }
        if (epilogue == Epilogue::subtract)
            UNROLL_TILE(r, N, v, QV) a[r][v] -= row_values[v];
        UNROLL_TILE(r, N, v, QV) store(s + r * ROWS + v * L, a[r][v]);
        if (epilogue == Epilogue::row_maxima)
            UNROLL_TILE(r, N, v, QV) row_values[v] = maximum<T>(a[r][v], row_values[v]);
    }

    // `depth` counts words. The remaining keys fill one tile with copies of the last; no tile ends beyond KEYS. Only
    // pairs of bf16 need a factor: float queries are multiplied by it when they are loaded. With a block_depth of 0
    // each sum is one chain.
    static void multiply(const Word* q, StridedRows k, int keys, int depth, T factor, T* s, int block_depth,
                         Epilogue epilogue, V<T>* row_values = nullptr) {
        constexpr bool MAY_SCALE = Op::PER_WORD > 1;
        if constexpr (!MAY_SCALE)
            if (block_depth) return multiply_in_blocks(q, k, keys, depth, block_depth, s, epilogue, row_values);
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
        else if (keys > 10)
            multiply_tile<(R < 12 ? R : 12), SCALES, EPILOGUE>(q, k, keys, depth, factor, s, row_values);
        else if (keys > 8)
            multiply_tile<(R < 10 ? R : 10), SCALES, EPILOGUE>(q, k, keys, depth, factor, s, row_values);
        else if (keys > 4)
            multiply_tile<(R < 8 ? R : 8), SCALES, EPILOGUE>(q, k, keys, depth, factor, s, row_values);
        else if (keys > 2)
            multiply_tile<(R < 4 ? R : 4), SCALES, EPILOGUE>(q, k, keys, depth, factor, s, row_values);
        else if (keys > 1)
            multiply_tile<2, SCALES, EPILOGUE>(q, k, keys, depth, factor, s, row_values);
        else if (keys > 0)
            multiply_tile<1, SCALES, EPILOGUE>(q, k, keys, depth, factor, s, row_values);
    }
    static void multiply_in_blocks(const Word* q, StridedRows k, int keys, int depth, int block_depth, T* s,
                                   Epilogue epilogue, V<T>* row_values) {
        for (; keys >= R; keys -= R, k.data += R * k.stride, s += R * ROWS)
            multiply_tile_in_blocks<R>(q, k, R, depth, block_depth, s, epilogue, row_values);
        if (keys > 12)
            multiply_tile_in_blocks<R>(q, k, keys, depth, block_depth, s, epilogue, row_values);
        else if (keys > 10)
            multiply_tile_in_blocks<(R < 12 ? R : 12)>(q, k, keys, depth, block_depth, s, epilogue, row_values);
        else if (keys > 8)
            multiply_tile_in_blocks<(R < 10 ? R : 10)>(q, k, keys, depth, block_depth, s, epilogue, row_values);
        else if (keys > 4)
            multiply_tile_in_blocks<(R < 8 ? R : 8)>(q, k, keys, depth, block_depth, s, epilogue, row_values);
        else if (keys > 0)
            multiply_tile_in_blocks<(R < 4 ? R : 4)>(q, k, keys, depth, block_depth, s, epilogue, row_values);
    }
};

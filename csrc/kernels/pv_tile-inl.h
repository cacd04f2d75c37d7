// Weights times values; and dS times keys, for dQ.

template <class T, int QV, class Op = Fma<T>, int ROWS = QV * LANES<T>>
struct PvTile {
    using Word = typename Op::Word;
    static constexpr int L = LANES<T>, R = TILE_COLUMNS<QV>;
    // o[c][row] = (o[c][row] factor[row], or 0 if fresh) + Σ_j p[j][row] value[j][c] for N columns; no factor: 1.
    // `keys` counts words.
    template <int N>
    static void accumulate_tile(const Word* p, StridedRows value, int keys, T* o, bool fresh, const V<T>* factor) {
        V<T> a[N][QV];  // summed by itself first: one chain of additions over a long row loses 1 to 2 bits
        UNROLL_TILE(c, N, v, QV) a[c][v] = V<T>{};
        for (int j = 0; j < keys; j++, value.data += value.stride)
            UNROLL_FOR(c, N) {
                const Word x = load_word<Op>(value.data, c);
                UNROLL_FOR(v, QV) a[c][v] = Op::multiply_add(a[c][v], x, p + j * ROWS + v * L);
            }
        if (factor && !fresh)
            UNROLL_TILE(c, N, v, QV) a[c][v] += load(o + c * ROWS + v * L) * factor[v];
        else if (!fresh)
            UNROLL_TILE(c, N, v, QV) a[c][v] += load(o + c * ROWS + v * L);
        UNROLL_TILE(c, N, v, QV) store(o + c * ROWS + v * L, a[c][v]);
    }

    static void accumulate_values(const Word* p, StridedRows v, int keys, int width, T* o, bool fresh,
                                  const V<T>* factor = nullptr) {
        int c = 0;
        for (; c + R <= width; c += R) accumulate_tile<R>(p, at_column(v, c), keys, o + c * ROWS, fresh, factor);
        if constexpr (R > 4)
            for (; c + 4 <= width; c += 4) accumulate_tile<4>(p, at_column(v, c), keys, o + c * ROWS, fresh, factor);
        for (; c + 2 <= width; c += 2) accumulate_tile<2>(p, at_column(v, c), keys, o + c * ROWS, fresh, factor);
        for (; c < width; c++) accumulate_tile<1>(p, at_column(v, c), keys, o + c * ROWS, fresh, factor);
    }
    static StridedRows at_column(StridedRows x, int c) { return {x.data + c * sizeof(Word), x.stride}; }
};

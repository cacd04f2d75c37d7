// Sums of outer products over rows, for dK and dV.

template <class T, int QV, class Op = Fma<T>, int ROWS = QV * LANES<T>>
struct OuterTile {
    using Word = typename Op::Word;
    static constexpr int L = LANES<T>;
    // The right factor is stored in panels of four, two or one vectors of columns, each [PANEL_ROWS][columns], so that
    // a tile reads it contiguously. Calls body(first column, std::integral_constant of the number of vectors).
    static constexpr int PANEL_ROWS = ROWS / Op::PER_WORD;
    template <class Body>
    INLINE static void for_each_panel(int width, const Body& body) {
        int c = 0;
        for (; c + 4 * L <= width; c += 4 * L) body(c, std::integral_constant<int, 4>{});
        for (; c + 2 * L <= width; c += 2 * L) body(c, std::integral_constant<int, 2>{});
        for (; c < width; c += L) body(c, std::integral_constant<int, 1>{});
    }

    // The two factors of one block of rows: left [keys][PANEL_ROWS], and right in panels.
    struct Factors {
        const Word *left, *right;
        int rows;  // in words
    };
    // to[j][c] += Σ_row left[j][row] right[row][c] for N keys and C vectors of columns, over the rows of all `count`
    // pairs of factors; `to` is [keys][width]. It is prefetched: in long sequences dK and dV are not in the L2 cache.
    template <int N, int C>
    static void accumulate_tile(const Factors* factors, int count, int j0, int c0, int width, T* to) {
        V<T> sum[N][C];
        to += j0 * width + c0;
        UNROLL_TILE(j, N, c, C) {
            sum[j][c] = V<T>{};
            __builtin_prefetch(to + j * width + c * L, 1);
        }
        for (const Factors* factor = factors; factor < factors + count; factor++) {
            const Word *left = factor->left + j0 * PANEL_ROWS, *right = factor->right + c0 * PANEL_ROWS;
            const int rows = factor->rows;
            for (int r = 0; r < rows; r++, right += C * L)
                UNROLL_TILE(j, N, c, C)
                    sum[j][c] = Op::multiply_add(sum[j][c], left[j * PANEL_ROWS + r], right + c * L);
        }
        UNROLL_TILE(j, N, c, C) accumulate<T>(to + j * width + c * L, sum[j][c], false);
    }
    template <int C>
    static void accumulate_panel(const Factors* factors, int count, int keys, int c, int width, T* to) {
        constexpr int N = REGISTER_TILE / C < 12 ? REGISTER_TILE / C : 12;
        int j = 0;
        for (; j + N <= keys; j += N) accumulate_tile<N, C>(factors, count, j, c, width, to);
        if constexpr (N > 4)
            for (; j + 4 <= keys; j += 4) accumulate_tile<4, C>(factors, count, j, c, width, to);
        if constexpr (N > 2)
            for (; j + 2 <= keys; j += 2) accumulate_tile<2, C>(factors, count, j, c, width, to);
        for (; j < keys; j++) accumulate_tile<1, C>(factors, count, j, c, width, to);
    }
    static void accumulate_all(const Factors* factors, int count, int keys, int width, T* to) {
        for_each_panel(width, [&](int c, auto vectors) {
            accumulate_panel<decltype(vectors)::value>(factors, count, keys, c, width, to);
        });
    }
};

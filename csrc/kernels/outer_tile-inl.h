// Sums of outer products over rows: dK and dV.

template <class T, int QV, class Op = Plain<T>, int ROWS = QV * LANES<T>>
struct OuterTile {
    using Word = typename Op::Word;
    static constexpr int L = LANES<T>;
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

// Projections, y = x wᵀ + bias, with the tiles of attention. Output features lie in the lanes: the weights are packed
// (transposed) once a call, in panels of up to QUERY_VECTORS vectors of features, and rows of x are broadcast in place.
// The backward pass is two projections, dx = dy w and dw = dyᵀ x; the operands of dw are both read transposed.

template <class T, class Op>
struct Projection {
    using Word = typename Op::Word;
    static constexpr int L = LANES<T>, MAX_OUTPUTS = QUERY_VECTORS * L;         // output features of a panel
    static constexpr std::int64_t ELEMENT_BYTES = sizeof(Word) / Op::PER_WORD;  // of an element
    static constexpr int DEPTH = 128;  // words that are summed by themselves first: a longer chain loses bits

    const Linear& f;
    explicit Projection(const Linear& call) : f(call) {}

    std::int64_t words() const { return f.in_features / Op::PER_WORD; }
    int vectors(std::int64_t panel) const {
        const std::int64_t left = f.out_features - panel * MAX_OUTPUTS;
        return left >= MAX_OUTPUTS ? QUERY_VECTORS : int((left + L - 1) / L);
    }

    // Packs the weights of a panel as [words][features of the panel]. Features past the last repeat it; their outputs
    // are never stored.
    void pack(std::int64_t panel, Word* to) const {
        const int out_features = vectors(panel) * L;
        if constexpr (Op::PER_WORD == 1)
            if (f.w_stride[1] != 1) return pack_contiguous(panel, to, out_features);
        for (int v = 0; v < out_features; v += L) {
            const char* row[L];
            for (int r = 0; r < L; r++) {
                const std::int64_t o = panel * MAX_OUTPUTS + v + r;
                row[r] = static_cast<const char*>(f.w) +
                         (o < f.out_features ? o : f.out_features - 1) * f.w_stride[0] * ELEMENT_BYTES;
            }
            transpose_words<T, Op>(row, words(), to + v, out_features, [](auto word) { return word; });
        }
    }

    // The same for weights that are contiguous along the output features.
    void pack_contiguous(std::int64_t panel, T* to, int out_features) const {
        const std::int64_t first = panel * MAX_OUTPUTS,
                           available = f.out_features - first < out_features ? f.out_features - first : out_features;
        const T* row = static_cast<const T*>(f.w) + first;
        for (std::int64_t d = 0; d < words(); d++, to += out_features, row += f.w_stride[1]) {
            int o = 0;
            for (; o + L <= available; o += L) store(to + o, load_unaligned(row + o));
            for (; o < out_features; o++) to[o] = row[o < available ? o : available - 1];
        }
    }

    // Computes outputs [first, first + count) of a panel; count is at most LINEAR_ROW_BLOCK. All rows are multiplied by
    // DEPTH words of the packed weights before the next DEPTH: that many stay in the L1 cache.
    void multiply(std::int64_t panel, const Word* packed, std::int64_t first, std::int64_t count) const {
        const int n = vectors(panel);
        if (n == QUERY_VECTORS)
            multiply_vectors<QUERY_VECTORS>(panel, packed, first, int(count));
        else if (n == 2)
            multiply_vectors<2>(panel, packed, first, int(count));
        else
            multiply_vectors<1>(panel, packed, first, int(count));
    }
    template <int QV>
    void multiply_vectors(std::int64_t panel, const Word* packed, std::int64_t first, int count) const {
        using Tile = QkTile<T, QV, Op>;
        constexpr int ROWS = QV * L, R = TILE_COLUMNS<QV>;
        T sums[(LINEAR_ROW_BLOCK + R) * ROWS] __attribute__((aligned(64)));
        V<T> bias[QV];
        std::int64_t head[QV], column[QV];  // byte offset of the head, and the vector's column in it
        for (int v = 0; v < QV; v++) {
            const std::int64_t o = panel * MAX_OUTPUTS + v * L;
            bias[v] = f.bias ? load_bias(o) : V<T>{};
            head[v] = o / f.head_width * f.y_stride[1] * ELEMENT_BYTES;
            column[v] = o % f.head_width;
        }
        const std::int64_t stride = f.x_stride[0] * ELEMENT_BYTES;
        const char* const x = static_cast<const char*>(f.x) + first * stride;
        for (std::int64_t d = 0; d < words(); d += DEPTH) {
            const int depth = int(words() - d < DEPTH ? words() - d : DEPTH);
            for (int r = 0; r < count; r += R) {
                V<T> a[R][QV];
                const char* row[R];
                Tile::template start_tile<R>({x + r * stride + d * std::int64_t(sizeof(Word)), stride}, count - r, row,
                                             a);
                Tile::template add_products<R>(packed + d * ROWS, row, 0, depth, a);
                T* const sum = sums + r * ROWS;
                if (d)
                    UNROLL_TILE(n, R, v, QV) a[n][v] += load(sum + n * ROWS + v * L);
                if (d + DEPTH < words()) {
                    UNROLL_TILE(n, R, v, QV) store(sum + n * ROWS + v * L, a[n][v]);
                    continue;
                }
                UNROLL_FOR(n, R) {
                    if (r + n == count) break;
                    const std::int64_t batch = (first + r + n) / f.batch_rows, i = (first + r + n) % f.batch_rows;
                    char* const to =
                        static_cast<char*>(f.y) + (batch * f.y_stride[0] + i * f.y_stride[2]) * ELEMENT_BYTES;
                    UNROLL_FOR(v, QV) {
                        if (f.accumulates) a[n][v] += load_outputs(to + head[v], column[v]);
                        store_elements<T>(to + head[v], column[v], a[n][v] + bias[v], f.head_width, f.dtype);
                    }
                }
            }
        }
    }
    V<T> load_outputs(const char* y, std::int64_t column) const {
        const T* const at = reinterpret_cast<const T*>(y) + column;
        if (column + L <= f.head_width) return load_unaligned(at);
        V<T> values{};
        for (int n = 0; column + n < f.head_width; n++) values[n] = at[n];
        return values;
    }
    V<T> load_bias(std::int64_t o) const {
        V<T> bias{};
        for (int n = 0; n < L && o + n < f.out_features; n++) {
            if constexpr (Op::PER_WORD == 2)
                bias[n] = widen(static_cast<const std::uint16_t*>(f.bias)[o + n], f.dtype);
            else
                bias[n] = static_cast<const T*>(f.bias)[o + n];
        }
        return bias;
    }
};

// Calls body with the Projection for the dtype.
template <class Body>
void with_projection(const Linear& f, const Body& body) {
#if defined(BF16_DOT)
    if (f.dtype == Dtype::bf16) return body(Projection<float, Bf16Dot>(f));
#endif
    if (f.dtype == Dtype::f64) return body(Projection<double, Fma<double>>(f));
    body(Projection<float, Fma<float>>(f));
}
bool supports_linear(const Linear& f) {
#if defined(BF16_DOT)
    if (f.dtype == Dtype::bf16)
        return f.in_features % 2 == 0 && f.x_stride[1] == 1 && f.w_stride[1] == 1 && !f.accumulates;
#endif
    if (f.dtype == Dtype::f64) return f.x_stride[1] == 1 && !f.accumulates;
    return f.dtype == Dtype::f32;
}
void transpose_input(const Linear& f, std::int64_t first, std::int64_t count, float* to, std::int64_t to_stride) {
    constexpr int L = LANES<float>;
    const float* const x = static_cast<const float*>(f.x) + first;
    const std::int64_t step = f.x_stride[1];
    std::int64_t r = 0;
    for (; r + L <= count; r += L) {
        std::int64_t d = 0;
        for (; d + L <= f.in_features; d += L) {
            V<float> lanes[L];
            UNROLL_FOR(n, L) lanes[n] = load_unaligned(x + (d + n) * step + r);
            transpose<float>(lanes);
            UNROLL_FOR(n, L) store_unaligned(to + (r + n) * to_stride + d, lanes[n]);
        }
        for (; d < f.in_features; d++)
            for (int n = 0; n < L; n++) to[(r + n) * to_stride + d] = x[d * step + r + n];
    }
    for (; r < count; r++)
        for (std::int64_t d = 0; d < f.in_features; d++) to[r * to_stride + d] = x[d * step + r];
}
std::int64_t linear_panels(const Linear& f) {
    std::int64_t panels = 0;
    with_projection(f, [&](const auto& p) { panels = (f.out_features + p.MAX_OUTPUTS - 1) / p.MAX_OUTPUTS; });
    return panels;
}
std::size_t panel_bytes(const Linear& f) {
    std::size_t size = 0;
    with_projection(f, [&](const auto& p) {
        size = sizeof(typename std::remove_cvref_t<decltype(p)>::Word) * std::size_t(p.MAX_OUTPUTS * p.words());
    });
    return (size + 63) / 64 * 64;
}
void pack_panel(const Linear& f, std::int64_t panel, void* to) {
    with_projection(
        f, [&]<class T, class Op>(const Projection<T, Op>& p) { p.pack(panel, static_cast<typename Op::Word*>(to)); });
}
void multiply_panel(const Linear& f, std::int64_t panel, const void* packed, std::int64_t first, std::int64_t count) {
    with_projection(f, [&]<class T, class Op>(const Projection<T, Op>& p) {
        p.multiply(panel, static_cast<const typename Op::Word*>(packed), first, count);
    });
}

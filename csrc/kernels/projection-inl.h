// The projections, y = x wᵀ + bias, by the tiles of attention. Outputs lie in the lanes: the weights are turned once a
// call, in panels of up to QUERY_VECTORS vectors of outputs, and rows of x are broadcast from where they lie. A
// backward pass is two of them: of the output's gradient with the weights, whose rows are then outputs, and of that
// gradient with x, both across.

template <class Op>
struct Projection {
    using Word = typename Op::Word;
    static constexpr int L = LANES<float>, MOST = QUERY_VECTORS * L;   // outputs of a panel
    static constexpr std::int64_t SIZE = sizeof(Word) / Op::PER_WORD;  // of a number
    static constexpr int DEPTH =
        128;  // words that are summed in registers before they join the rest: a longer chain loses bits

    const Linear& f;
    explicit Projection(const Linear& call) : f(call) {}

    std::int64_t words() const { return f.width / Op::PER_WORD; }
    int vectors(std::int64_t panel) const {
        const std::int64_t left = f.outs - panel * MOST;
        return left >= MOST ? QUERY_VECTORS : int((left + L - 1) / L);
    }

    // To [words][outputs of the panel]. Outputs past the last are copies of it, and are never written.
    void turn(std::int64_t panel, Word* to) const {
        const int outs = vectors(panel) * L;
        if constexpr (Op::PER_WORD == 1)
            if (f.w_stride[1] != 1) return copy(panel, to, outs);
        for (int v = 0; v < outs; v += L) {
            const char* row[L];
            for (int r = 0; r < L; r++) {
                const std::int64_t o = panel * MOST + v + r;
                row[r] = static_cast<const char*>(f.w) + (o < f.outs ? o : f.outs - 1) * f.w_stride[0] * SIZE;
            }
            std::int64_t d = 0;
            for (; d + L <= words(); d += L) {
                V<float> lanes[L];
                UNROLL_FOR(r, L) lanes[r] = load_anywhere(reinterpret_cast<const float*>(row[r]) + d);
                transpose<float>(lanes);
                UNROLL_FOR(n, L) store(reinterpret_cast<float*>(to + (d + n) * outs + v), lanes[n]);
            }
            for (; d < words(); d++)
                for (int r = 0; r < L; r++) to[d * outs + v + r] = load_word<Op>(row[r], d);
        }
    }

    // The same of weights whose outputs lie together.
    void copy(std::int64_t panel, float* to, int outs) const {
        const std::int64_t first = panel * MOST, there = f.outs - first < outs ? f.outs - first : outs;
        const float* row = static_cast<const float*>(f.w) + first;
        for (std::int64_t d = 0; d < words(); d++, to += outs, row += f.w_stride[1]) {
            int o = 0;
            for (; o + L <= there; o += L) store(to + o, load_anywhere(row + o));
            for (; o < outs; o++) to[o] = row[o < there ? o : there - 1];
        }
    }

    // Rows first .. first + count of the panel's outputs, LINEAR_ROWS at most. All rows meet one part of the depth
    // before the next: so much of the turned weights fits into the first cache.
    void multiply(std::int64_t panel, const Word* turned, std::int64_t first, std::int64_t count) const {
        const int n = vectors(panel);
        if (n == QUERY_VECTORS)
            multiply_by<QUERY_VECTORS>(panel, turned, first, int(count));
        else if (n == 2)
            multiply_by<2>(panel, turned, first, int(count));
        else
            multiply_by<1>(panel, turned, first, int(count));
    }
    template <int QV>
    void multiply_by(std::int64_t panel, const Word* turned, std::int64_t first, int count) const {
        constexpr int ROWS = QV * L, R = TILE_COLUMNS<QV>;
        float sums[(LINEAR_ROWS + R) * ROWS] __attribute__((aligned(64)));
        V<float> bias[QV];
        std::int64_t head[QV], column[QV];  // where the head lies, and the vector in it
        for (int v = 0; v < QV; v++) {
            const std::int64_t o = panel * MOST + v * L;
            bias[v] = f.bias ? bias_from(o) : V<float>{};
            head[v] = o / f.head_width * f.y_stride[1] * SIZE;
            column[v] = o % f.head_width;
        }
        const std::int64_t stride = f.x_stride[0] * SIZE;
        const char* const x = static_cast<const char*>(f.x) + first * stride;
        for (std::int64_t d = 0; d < words(); d += DEPTH) {
            const int depth = int(words() - d < DEPTH ? words() - d : DEPTH);
            for (int r = 0; r < count; r += R) {
                V<float> a[R][QV];
                add_products<R, QV>(turned + d * ROWS, {x + r * stride + d * std::int64_t(sizeof(Word)), stride},
                                    count - r, depth, a);
                float* const sum = sums + r * ROWS;
                if (d)
                    UNROLL_TILE(n, R, v, QV) a[n][v] += load(sum + n * ROWS + v * L);
                if (d + DEPTH < words()) {
                    UNROLL_TILE(n, R, v, QV) store(sum + n * ROWS + v * L, a[n][v]);
                    continue;
                }
                UNROLL_FOR(n, R) {
                    if (r + n == count) break;
                    const std::int64_t batch = (first + r + n) / f.batch_rows, row = (first + r + n) % f.batch_rows;
                    char* const to = static_cast<char*>(f.y) + (batch * f.y_stride[0] + row * f.y_stride[2]) * SIZE;
                    UNROLL_FOR(v, QV) {
                        if (f.adds) a[n][v] += there(to + head[v], column[v]);
                        put_numbers<float>(to + head[v], column[v], a[n][v] + bias[v], f.head_width, f.dtype);
                    }
                }
            }
        }
    }
    // The products of R rows, of which the first `rows` are real, with all outputs of the panel.
    template <int R, int QV>
    INLINE static void add_products(const Word* turned, Lines x, int rows, int depth, V<float> (&a)[R][QV]) {
        const char* row[R];
        UNROLL_FOR(n, R) {
            row[n] = x.data + (n < rows ? n : rows - 1) * x.stride;
            UNROLL_FOR(v, QV) a[n][v] = V<float>{};
        }
        for (int d = 0; d < depth; d++)
            UNROLL_FOR(n, R) {
                const Word word = load_word<Op>(row[n], d);
                UNROLL_FOR(v, QV) a[n][v] = Op::add(a[n][v], word, turned + (d * QV + v) * L);
            }
    }
    V<float> there(const char* y, std::int64_t column) const {
        const float* const at = reinterpret_cast<const float*>(y) + column;
        if (column + L <= f.head_width) return load_anywhere(at);
        V<float> values{};
        for (int n = 0; column + n < f.head_width; n++) values[n] = at[n];
        return values;
    }
    V<float> bias_from(std::int64_t o) const {
        V<float> bias{};
        for (int n = 0; n < L && o + n < f.outs; n++) {
            if constexpr (Op::PER_WORD == 2)
                bias[n] = widen(static_cast<const std::uint16_t*>(f.bias)[o + n], f.dtype);
            else
                bias[n] = static_cast<const float*>(f.bias)[o + n];
        }
        return bias;
    }
};

// body(the Projection that fits)
template <class Body>
void with_projection(const Linear& f, const Body& body) {
#if defined(BF16_DOT)
    if (f.dtype == Dtype::bf16) return body(Projection<Pairs>(f));
#endif
    body(Projection<Plain<float>>(f));
}
bool multiplies(const Linear& f) {
#if defined(BF16_DOT)
    if (f.dtype == Dtype::bf16) return f.width % 2 == 0 && f.x_stride[1] == 1 && f.w_stride[1] == 1 && !f.adds;
#endif
    return f.dtype == Dtype::f32;
}
void lengthwise(const Linear& f, std::int64_t first, std::int64_t count, float* to, std::int64_t to_stride) {
    constexpr int L = LANES<float>;
    const float* const x = static_cast<const float*>(f.x) + first;
    const std::int64_t step = f.x_stride[1];
    std::int64_t r = 0;
    for (; r + L <= count; r += L) {
        std::int64_t d = 0;
        for (; d + L <= f.width; d += L) {
            V<float> lanes[L];
            UNROLL_FOR(n, L) lanes[n] = load_anywhere(x + (d + n) * step + r);
            transpose<float>(lanes);
            UNROLL_FOR(n, L) store_anywhere(to + (r + n) * to_stride + d, lanes[n]);
        }
        for (; d < f.width; d++)
            for (int n = 0; n < L; n++) to[(r + n) * to_stride + d] = x[d * step + r + n];
    }
    for (; r < count; r++)
        for (std::int64_t d = 0; d < f.width; d++) to[r * to_stride + d] = x[d * step + r];
}
std::int64_t panels(const Linear& f) {
    return (f.outs + Projection<Plain<float>>::MOST - 1) / Projection<Plain<float>>::MOST;
}
std::size_t panel_size(const Linear& f) {
    std::size_t size = 0;
    with_projection(f, [&](const auto& p) { size = sizeof(float) * std::size_t(p.MOST * p.words()); });
    return (size + 63) / 64 * 64;
}
void turn(const Linear& f, std::int64_t panel, void* to) {
    with_projection(f, [&]<class Op>(const Projection<Op>& p) { p.turn(panel, static_cast<typename Op::Word*>(to)); });
}
void multiply(const Linear& f, std::int64_t panel, const void* turned, std::int64_t first, std::int64_t count) {
    with_projection(f, [&]<class Op>(const Projection<Op>& p) {
        p.multiply(panel, static_cast<const typename Op::Word*>(turned), first, count);
    });
}

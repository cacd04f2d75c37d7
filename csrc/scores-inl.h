// The logits of a block of rows against a block of keys, once for every target and every pass. They are computed
// transposed, S = K Qᵀ, with query rows in the lanes: K is broadcast from where it lies, and a softmax needs no sum across
// lanes.
//
// A block holds up to QV * LANES rows: the pairs (i, g) of the queries and of the query heads that share one key/value
// head, g running fastest. Its buffers are transposed: [depth][row].
//
// Logits live in the domain of exp2: they carry a factor log2(e).

constexpr double LOG2E = 1.4426950408889634, LN2 = 0.6931471805599453;
constexpr int KEYS = 64;  // keys in one softmax block

INLINE float widen(std::uint16_t x, Dtype dtype) {
    if (dtype == Dtype::bf16) return __builtin_bit_cast(float, std::uint32_t(x) << 16);
    return float(__builtin_bit_cast(Half, x));
}
INLINE std::uint16_t narrow(float x, Dtype dtype) {
    if (dtype == Dtype::f16) return __builtin_bit_cast(std::uint16_t, Half(x));
    std::uint32_t bits = __builtin_bit_cast(std::uint32_t, x);
    if (x != x) return std::uint16_t(bits >> 16 | 64);  // stays NaN
    return std::uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);  // to nearest, ties to even
}

INLINE const char* at(const Tensor4& x, std::int64_t a, std::int64_t b, std::int64_t c, int size) {
    return static_cast<const char*>(x.data) + (a * x.stride[0] + b * x.stride[1] + c * x.stride[2]) * size;
}

// The inner products, for QV vectors of rows.
template <class T, int QV> struct Tile {
    static constexpr int L = LANES<T>;
    static constexpr int ROWS = QV * L;
    static constexpr int R = REGISTER_TILE / QV < 16 ? REGISTER_TILE / QV : 16;  // keys, or value columns, at a time

    // s[r][row] = k[r] · q[row], for N keys of which the first `keys` are real
    template <int N> static void dot(const T* q, const T* k, std::int64_t k_stride, int keys, int depth, T* s) {
        V<T> a[N][QV];
        const T* key[N];
        UNROLL for (int r = 0; r < N; r++) {
            key[r] = k + (r < keys ? r : keys - 1) * k_stride;
            UNROLL for (int v = 0; v < QV; v++) a[r][v] = V<T>{};
        }
        for (int d = 0; d < depth; d++) {
            V<T> b[QV];
            UNROLL for (int v = 0; v < QV; v++) b[v] = load(q + d * ROWS + v * L);
            UNROLL for (int r = 0; r < N; r++) {
                V<T> x = splat(key[r][d]);
                UNROLL for (int v = 0; v < QV; v++) a[r][v] += x * b[v];
            }
        }
        UNROLL for (int r = 0; r < N; r++) UNROLL for (int v = 0; v < QV; v++) store(s + r * ROWS + v * L, a[r][v]);
    }

    // o[c][row] (+)= Σ_j p[j][row] value[j][c], for N columns
    template <int N> static void mix(const T* p, const T* value, std::int64_t v_stride, int keys, T* o, bool fresh) {
        V<T> a[N][QV];
        UNROLL for (int c = 0; c < N; c++) UNROLL for (int v = 0; v < QV; v++)
            a[c][v] = fresh ? V<T>{} : load(o + c * ROWS + v * L);
        for (int j = 0; j < keys; j++, value += v_stride) {
            V<T> b[QV];
            UNROLL for (int v = 0; v < QV; v++) b[v] = load(p + j * ROWS + v * L);
            UNROLL for (int c = 0; c < N; c++) {
                V<T> x = splat(value[c]);
                UNROLL for (int v = 0; v < QV; v++) a[c][v] += x * b[v];
            }
        }
        UNROLL for (int c = 0; c < N; c++) UNROLL for (int v = 0; v < QV; v++) store(o + c * ROWS + v * L, a[c][v]);
    }

    // Keys left over share one tile with copies of the last of them; no tile ends beyond KEYS.
    static void dots(const T* q, const T* k, std::int64_t k_stride, int keys, int depth, T* s) {
        int j = 0;
        for (; j + R <= keys; j += R) dot<R>(q, k + j * k_stride, k_stride, R, depth, s + j * ROWS);
        k += j * k_stride, s += j * ROWS, keys -= j;
        if (keys > 8) dot<R>(q, k, k_stride, keys, depth, s);
        else if (keys > 4) dot<R < 8 ? R : 8>(q, k, k_stride, keys, depth, s);
        else if (keys > 2) dot<R < 4 ? R : 4>(q, k, k_stride, keys, depth, s);
        else if (keys > 1) dot<2>(q, k, k_stride, keys, depth, s);
        else if (keys > 0) dot<1>(q, k, k_stride, keys, depth, s);
    }
    static void mixes(const T* p, const T* v, std::int64_t v_stride, int keys, int width, T* o, bool fresh) {
        int c = 0;
        for (; c + R <= width; c += R) mix<R>(p, v + c, v_stride, keys, o + c * ROWS, fresh);
        if constexpr (R > 4)
            for (; c + 4 <= width; c += 4) mix<4>(p, v + c, v_stride, keys, o + c * ROWS, fresh);
        for (; c + 2 <= width; c += 2) mix<2>(p, v + c, v_stride, keys, o + c * ROWS, fresh);
        for (; c < width; c++) mix<1>(p, v + c, v_stride, keys, o + c * ROWS, fresh);
    }

    // to[j][c] += Σ_row a[j][row] from[row][c], for N keys and C vectors of columns; `from` and `to` are [.][width]
    template <int N, int C> static void outer(const T* a, const T* from, int rows, int width, T* to) {
        V<T> sum[N][C];
        UNROLL for (int j = 0; j < N; j++) UNROLL for (int c = 0; c < C; c++) sum[j][c] = load(to + j * width + c * L);
        for (int r = 0; r < rows; r++) {
            V<T> b[C];
            UNROLL for (int c = 0; c < C; c++) b[c] = load(from + r * width + c * L);
            UNROLL for (int j = 0; j < N; j++) {
                V<T> x = splat(a[j * ROWS + r]);
                UNROLL for (int c = 0; c < C; c++) sum[j][c] += x * b[c];
            }
        }
        UNROLL for (int j = 0; j < N; j++) UNROLL for (int c = 0; c < C; c++) store(to + j * width + c * L, sum[j][c]);
    }
    template <int C> static void outers(const T* a, const T* from, int keys, int rows, int width, T* to) {
        constexpr int N = REGISTER_TILE / C < 12 ? REGISTER_TILE / C : 12;
        int j = 0;
        for (; j + N <= keys; j += N) outer<N, C>(a + j * ROWS, from, rows, width, to + j * width);
        if constexpr (N > 4)
            for (; j + 4 <= keys; j += 4) outer<4, C>(a + j * ROWS, from, rows, width, to + j * width);
        if constexpr (N > 2)
            for (; j + 2 <= keys; j += 2) outer<2, C>(a + j * ROWS, from, rows, width, to + j * width);
        for (; j < keys; j++) outer<1, C>(a + j * ROWS, from, rows, width, to + j * width);
    }
    // All columns; `width` is a multiple of L.
    static void outer_all(const T* a, const T* from, int keys, int rows, int width, T* to) {
        int c = 0;
        for (; c + 4 * L <= width; c += 4 * L) outers<4>(a, from + c, keys, rows, width, to + c);
        for (; c + 2 * L <= width; c += 2 * L) outers<2>(a, from + c, keys, rows, width, to + c);
        for (; c < width; c += L) outers<1>(a, from + c, keys, rows, width, to + c);
    }
};

// A block of rows: which they are, what they may see, and their logits.
template <class T, int QV> struct Scores {
    using Products = Tile<T, QV>;
    static constexpr int L = LANES<T>;
    static constexpr int ROWS = QV * L;

    const Forward& f;
    std::int64_t b, kv_head, first;  // rows first .. first + count of the queries * group
    int count;
    T *q, *p;                        // [D][ROWS], [KEYS][ROWS]
    T* line;                         // for conversions: L rows of D or Dv
    T *wide_k, *wide_v;              // [KEYS][D], [KEYS][Dv], where they are of a half type
    Int<T> span[4][ROWS] __attribute__((aligned(64)));  // low0, high0, low1, high1

    Scores(const Forward& call, std::int64_t batch, std::int64_t head, void* memory) : f(call), b(batch), kv_head(head) {
        q = static_cast<T*>(memory);
        p = q + f.head_dim * ROWS;
        line = p + KEYS * ROWS;
        wide_k = line + (f.head_dim > f.v_head_dim ? f.head_dim : f.v_head_dim) * L;
        wide_v = wide_k + f.head_dim * KEYS;
    }

    std::int64_t group() const { return f.heads / f.kv_heads; }
    std::int64_t head(int r) const { return kv_head * group() + (first + r) % group(); }
    std::int64_t query(int r) const { return (first + r) / group(); }
    std::int64_t row(int r) const { return (b * f.heads + head(r)) * f.queries + query(r); }

    // Elements of all of these; a multiple of L.
    static std::size_t scratch(const Forward& f) {
        return (f.head_dim + KEYS) * ROWS + (f.head_dim > f.v_head_dim ? f.head_dim : f.v_head_dim) * L +
               (f.head_dim + f.v_head_dim) * KEYS;
    }

    // Rows j .. j + keys of a tensor [B, Hkv, K, width] as T: where they lie, or widened.
    struct Lines {
        const T* data;
        std::int64_t stride;
    };
    Lines lines(const Tensor4& x, std::int64_t j, int keys, int width, T* wide) const {
        if (sizeof(T) == 8 || x.dtype == Dtype::f32) return {reinterpret_cast<const T*>(at(x, b, kv_head, j, sizeof(T))), x.stride[2]};
        for (int n = 0; n < keys; n++) {
            const auto* from = reinterpret_cast<const std::uint16_t*>(at(x, b, kv_head, j + n, 2));
            if (x.dtype == Dtype::bf16) for (int d = 0; d < width; d++) wide[n * width + d] = widen(from[d], Dtype::bf16);
            else for (int d = 0; d < width; d++) wide[n * width + d] = widen(from[d], Dtype::f16);
        }
        return {wide, width};
    }
    Lines keys_at(std::int64_t j, int keys) const { return lines(f.k, j, keys, int(f.head_dim), wide_k); }
    Lines values_at(std::int64_t j, int keys) const { return lines(f.v, j, keys, int(f.v_head_dim), wide_v); }

    // The logits of keys j .. j + keys into p; false if no row may see any of them. `tangent`, if there is a softcap, takes
    // tanh of what it caps.
    bool logits(std::int64_t j, int keys, T* tangent = nullptr) {
        bool whole;
        if (!visible(j, keys, whole)) return false;
        const Lines k = keys_at(j, keys);
        Products::dots(q, k.data, k.stride, keys, int(f.head_dim), p);
        adjust(j, keys, whole, tangent);
        return true;
    }
    // From products of queries and keys to logits.
    void adjust(std::int64_t j, int keys, bool whole, T* tangent = nullptr) {
        if (f.softcap > 0) cap(keys, tangent);
        if (f.bias.data) add_bias(j, keys);
        if (!whole) hide(j, keys);
        if (f.visible.count) hide_by_rules(j, keys);
    }

    // Their products with keys are logits times log2(e), or the argument of tanh.
    T query_factor() const { return T(f.softcap > 0 ? f.scale / f.softcap : f.scale * LOG2E); }
    void load_queries() { load_rows(f.q, int(f.head_dim), query_factor(), q); }

    // The block's rows of a tensor [B, H, Q, depth], times a factor, transposed to [depth][ROWS].
    void load_rows(const Tensor4& x, int depth, T factor, T* to) {
        for (int v0 = 0; v0 < ROWS; v0 += L) {
            const T* row[L];
            for (int r = 0; r < L; r++) row[r] = row_of(x, v0 + r, depth, line + r * depth);
            int d = 0;
            for (; d + L <= depth; d += L) {
                V<T> lanes[L];
                UNROLL for (int r = 0; r < L; r++) lanes[r] = load_anywhere(row[r] + d) * factor;
                transpose<T>(lanes);
                UNROLL for (int r = 0; r < L; r++) store(to + (d + r) * ROWS + v0, lanes[r]);
            }
            for (; d < depth; d++)
                for (int r = 0; r < L; r++) to[d * ROWS + v0 + r] = row[r][d] * factor;
        }
    }
    // One row as T; rows past the last repeat it, and are never written out.
    const T* row_of(const Tensor4& x, int r, int depth, T* converted) const {
        if (r >= count) r = count - 1;
        const char* from = at(x, b, head(r), query(r), x.dtype == Dtype::f32 ? 4 : x.dtype == Dtype::f64 ? 8 : 2);
        if (sizeof(T) == 8 || x.dtype == Dtype::f32) return reinterpret_cast<const T*>(from);
        const auto* half = reinterpret_cast<const std::uint16_t*>(from);
        for (int d = 0; d < depth; d++) converted[d] = widen(half[d], x.dtype);
        return converted;
    }

    // Rows from [width][ROWS], each times its factor, to where they belong in [B, H, Q, width] of q's dtype.
    void put_rows(const T* from, int width, const V<T>* factor, void* to, const std::int64_t* stride) const {
        for (int v = 0; v < QV && v * L < count; v++) {
            const int rows = count - v * L < L ? count - v * L : L;
            int c = 0;
            for (; c + L <= width; c += L) {
                V<T> lanes[L];
                UNROLL for (int n = 0; n < L; n++) lanes[n] = load(from + (c + n) * ROWS + v * L) * factor[v];
                transpose<T>(lanes);
                for (int r = 0; r < rows; r++) put(v * L + r, c, reinterpret_cast<const T*>(&lanes[r]), L, to, stride);
            }
            for (; c < width; c++) {
                const V<T> x = load(from + c * ROWS + v * L) * factor[v];
                for (int r = 0; r < rows; r++) {
                    const T value = x[r];
                    put(v * L + r, c, &value, 1, to, stride);
                }
            }
        }
    }
    void put(int r, int c, const T* x, int n, void* to, const std::int64_t* stride) const {
        const std::int64_t where = b * stride[0] + head(r) * stride[1] + query(r) * stride[2] + c;
        if (sizeof(T) == 8 || f.q.dtype == Dtype::f32)
            for (int d = 0; d < n; d++) static_cast<T*>(to)[where + d] = x[d];
        else
            for (int d = 0; d < n; d++) static_cast<std::uint16_t*>(to)[where + d] = narrow(float(x[d]), f.q.dtype);
    }

    void load_spans() {
        if (!f.visible.spans.data) return;
        for (int r = 0; r < ROWS; r++) {
            const int real = r < count ? r : count - 1;
            const std::int32_t* from = f.visible.spans.data + b * f.visible.spans.batch_stride + query(real) * f.visible.spans.query_stride;
            span[0][r] = from[0];
            span[1][r] = from[1];
            span[2][r] = f.visible.spans.count > 1 ? from[2] : Int<T>(f.keys);
            span[3][r] = f.visible.spans.count > 1 ? from[3] : Int<T>(f.keys);
        }
    }
    // The first and the last key + 1 that any row may see.
    void reach(std::int64_t& begin, std::int64_t& end) const {
        begin = 0, end = f.keys;
        if (!f.visible.spans.data) return;
        begin = f.keys, end = 0;
        for (int r = 0; r < count; r++)
            for (int n = 0; n < 4; n += 2)
                if (span[n][r] < span[n + 1][r]) {
                    if (span[n][r] < begin) begin = span[n][r];
                    if (span[n + 1][r] > end) end = span[n + 1][r];
                }
    }
    // Whether any row may see any of these keys; and whether every row may see all of them.
    bool visible(std::int64_t j, int keys, bool& whole) const {
        whole = true;
        if (!f.visible.spans.data) return true;
        const Int<T> low = Int<T>(j), high = Int<T>(j + keys);
        I<T> some{}, part{};
        UNROLL for (int v = 0; v < QV; v++) {
            I<T> a = load_int<T>(span[0] + v * L), z = load_int<T>(span[1] + v * L);
            I<T> c = load_int<T>(span[2] + v * L), y = load_int<T>(span[3] + v * L);
            some |= ((a < high) & (z > low)) | ((c < high) & (y > low));
            part |= ~(((a <= low) & (z >= high)) | ((c <= low) & (y >= high)));
        }
        whole = !any<T>(part);
        return any<T>(some);
    }

    void cap(int keys, T* tangent) {
        const T factor = T(f.softcap * LOG2E);
        for (int n = 0; n < keys * QV; n++) {
            const V<T> x = tanh(load(p + n * L));
            if (tangent) store(tangent + n * L, x);
            store(p + n * L, x * factor);
        }
    }

    // Adds bias[b, h, i, j], and hides where it is -inf.
    void add_bias(std::int64_t j0, int keys) {
        const auto& s = f.bias.stride;
        if (s[1] == 0 && s[2] == 0) {
            const T* from = reinterpret_cast<const T*>(at(f.bias, b, 0, 0, sizeof(T))) + j0 * s[3];
            for (int j = 0; j < keys; j++)
                UNROLL for (int v = 0; v < QV; v++) plus(p + j * ROWS + v * L, splat(from[j * s[3]]));
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
                UNROLL for (int r = 0; r < L; r++) x[r] = row[r][j * s[3]];
                plus(p + j * ROWS + v0, x);
            }
        }
    }
    INLINE static void plus(T* s, V<T> bias) {
        const V<T> never = splat(-std::numeric_limits<T>::infinity());
        store(s, bias == never ? never : load(s) + bias * T(LOG2E));
    }

    void hide(std::int64_t j0, int keys) {
        const V<T> never = splat(-std::numeric_limits<T>::infinity());
        UNROLL for (int v = 0; v < QV; v++) {
            const I<T> a = load_int<T>(span[0] + v * L), z = load_int<T>(span[1] + v * L);
            const I<T> c = load_int<T>(span[2] + v * L), y = load_int<T>(span[3] + v * L);
            for (int j = 0; j < keys; j++) {
                const Int<T> key = Int<T>(j0 + j);
                const I<T> seen = ((a <= key) & (z > key)) | ((c <= key) & (y > key));
                T* s = p + j * ROWS + v * L;
                store(s, seen ? load(s) : never);
            }
        }
    }
    void hide_by_rules(std::int64_t j0, int keys) {
        std::uint8_t seen[MOST_RULES][KEYS];
        for (int r = 0; r < count; r++) {
            int depth = 0;
            for (int n = 0; n < f.visible.count; n++) {
                const Rule& rule = f.visible.rules[n];
                if (rule.kind >= Rule::both) {
                    depth--;
                    std::uint8_t *x = seen[depth - 1], *y = seen[depth];
                    if (rule.kind == Rule::both) for (int j = 0; j < keys; j++) x[j] &= y[j];
                    else for (int j = 0; j < keys; j++) x[j] |= y[j];
                } else {
                    answer(rule, r, j0, keys, seen[depth++]);
                }
            }
            for (int j = 0; j < keys; j++)
                if (!seen[0][j]) p[j * ROWS + r] = -std::numeric_limits<T>::infinity();
        }
    }
    void answer(const Rule& rule, int r, std::int64_t j0, int keys, std::uint8_t* seen) const {
        if (rule.kind == Rule::bytes) {
            const auto* row = reinterpret_cast<const std::uint8_t*>(at(rule.q, b, head(r), query(r), 1));
            for (int j = 0; j < keys; j++) seen[j] = row[(j0 + j) * rule.q.stride[3]] != 0;
        } else if (rule.kind == Rule::same_id) {
            const std::int64_t id = static_cast<const std::int64_t*>(rule.q.data)[b * rule.q.stride[0] + query(r) * rule.q.stride[1]];
            const auto* ids = static_cast<const std::int64_t*>(rule.k.data) + b * rule.k.stride[0];
            for (int j = 0; j < keys; j++) seen[j] = ids[(j0 + j) * rule.k.stride[1]] == id;
        } else {
            const std::int32_t* ends = rule.reach.data + b * rule.reach.batch_stride + query(r) * rule.reach.query_stride;
            for (int j = 0; j < keys; j++) {
                const std::int64_t key = j0 + j;
                seen[j] = (key >= ends[0] && key < ends[1]) || (rule.reach.count > 1 && key >= ends[2] && key < ends[3]);
            }
        }
    }

    // What dropout leaves of a weight: 0 or 1 / (1 - dropout), by the hash of (seed, b, h, i, j), so that every pass and every
    // size of block drops the same.
    void keep(std::int64_t j0, int keys, T* factor) const {
        const std::uint32_t limit = std::uint32_t(f.dropout * 4294967296.0);
        const T kept = T(1 / (1 - f.dropout));
        for (int r = 0; r < ROWS; r++) {
            const std::uint64_t start = f.seed + 0x9e3779b97f4a7c15u * std::uint64_t(row(r < count ? r : count - 1) + 1);
            for (int j = 0; j < keys; j++) {
                std::uint64_t x = start ^ (std::uint64_t(j0 + j) * 0xbf58476d1ce4e5b9u);
                x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u, x = (x ^ x >> 27) * 0x94d049bb133111ebu;
                factor[j * ROWS + r] = std::uint32_t((x ^ x >> 31) >> 32) >= limit ? kept : T(0);
            }
        }
    }
};

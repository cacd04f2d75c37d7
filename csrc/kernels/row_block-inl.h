// A block of query rows: their addresses, and how they are loaded, transposed and stored.

// Interleaves rows 2n and 2n + 1 of bf16 into words, [(rows + 1) / 2][padded], with zeros from `width` on. row(n) is
// the address of a row, or null for zeros.
template <class Row>
void interleave_rows(int rows, int width, int padded, std::uint32_t* to, const Row& row) {
    constexpr int L = LANES<float>;
    for (int n = 0; n < rows; n += 2, to += padded) {
        const std::uint16_t *low = row(n), *high = n + 1 < rows ? row(n + 1) : nullptr;
        int c = 0;
        if (low && high)
            for (; c + L <= width; c += L)
                store_unaligned(reinterpret_cast<float*>(to + c), interleave_halves(low + c, high + c));
        for (; c < width; c++) to[c] = (low ? low[c] : 0) | std::uint32_t(high ? high[c] : 0) << 16;
        for (; c < padded; c++) to[c] = 0;
    }
}

// Transposes LANES rows of words into columns of `to` [words][stride], each word replaced by change(word).
template <class T, class Op, class Change>
INLINE void transpose_words(const char* const* row, std::int64_t words, typename Op::Word* to, std::int64_t stride,
                            const Change& change) {
    using Word = typename Op::Word;
    constexpr int L = LANES<T>;
    const auto transpose_tile = [&](std::int64_t d, auto columns,
                                    const auto& load_vector) __attribute__((always_inline)) {
        V<T> lanes[L];
        UNROLL_FOR(r, L) lanes[r] = change(load_vector(reinterpret_cast<const T*>(row[r] + d * sizeof(Word))));
        transpose<T>(lanes);
        UNROLL_FOR(n, decltype(columns)::value) store(reinterpret_cast<T*>(to + (d + n) * stride), lanes[n]);
    };
    std::int64_t d = 0;
    for (; d + L <= words; d += L)
        transpose_tile(d, std::integral_constant<int, L>{}, [](const T* at) { return load_unaligned(at); });
    if (d + L / 2 <= words) {  // D = 16 in pairs, for example
        transpose_tile(d, std::integral_constant<int, L / 2>{}, [](const T* at) { return load_half(at); });
        d += L / 2;
    }
    for (; d < words; d++)
        for (int r = 0; r < L; r++) to[d * stride + r] = change(load_word<Op>(row[r], d));
}

// Up to QV * LANES consecutive rows, of the queries * group rows of one key/value head.
template <class T, int QV, class Op = Fma<T>>
struct RowBlock {
    using Word = typename Op::Word;
    static constexpr int L = LANES<T>;
    static constexpr int ROWS = QV * L;
    static constexpr int KEYS = Op::KEYS;
    static constexpr bool PAIRS = Op::PER_WORD == 2;

    const Forward& f;
    std::int64_t b, kv_head, group, first = 0;  // rows first .. first + count of the queries * group
    int count = 0;
    bool all_visible = false;         // every key of the last block is visible to every row
    Word* q;                          // [D / PER_WORD][ROWS]
    T* p;                             // [KEYS][ROWS]
    T* row_buffer;                    // L rows of D or Dv, converted to T
    Word *converted_k, *converted_v;  // [KEYS][D], [KEYS][Dv]: converted to T, or interleaved by keys

    RowBlock(const Forward& call, std::int64_t batch, std::int64_t head, Arena& memory)
        : f(call), b(batch), kv_head(head), group(f.heads / f.kv_heads) {
        const bool half = sizeof(T) == 4 && f.q.dtype != Dtype::f32;
        q = memory.allocate<Word>(f.head_dim * ROWS);
        p = memory.allocate<T>(KEYS * ROWS);
        row_buffer = memory.allocate<T>((f.head_dim > f.v_head_dim ? f.head_dim : f.v_head_dim) * L);
        converted_k = memory.allocate<Word>(half ? f.head_dim * KEYS : 0);
        converted_v = memory.allocate<Word>(half ? f.v_head_dim * KEYS : 0);
    }

    // The number of keys of the block of keys that starts at j and does not extend beyond `end`.
    static int keys_of_block(std::int64_t j, std::int64_t end) { return int(end - j < KEYS ? end - j : KEYS); }

    // The head of row r, its index along the axis Q, its query, and its index in [B, H, Q]. With one head in a group
    // they avoid a division, which is measurable in short sequences.
    std::int64_t head(int r) const { return group == 1 ? kv_head : kv_head * group + (first + r) % group; }
    std::int64_t query_index(int r) const { return group == 1 ? first + r : (first + r) / group; }
    std::int64_t query(int r) const {
        return f.row_queries
                   ? f.row_queries[b * f.row_queries_stride[0] + head(r) * f.row_queries_stride[1] + query_index(r)]
                   : query_index(r);
    }
    std::int64_t flat_row(int r) const { return (b * f.heads + head(r)) * f.queries + query_index(r); }

    // Rows j .. j + keys of a tensor [B, Hkv, K, width] as T: in place, or converted into `wide`.
    StridedRows converted_rows(const Tensor4& x, std::int64_t j, int keys, int width, T* wide) const {
        if (sizeof(T) == 8 || x.dtype == Dtype::f32)
            return {element_address(x, b, kv_head, j, sizeof(T)), x.stride[2] * std::int64_t(sizeof(T))};
        for (int n = 0; n < keys; n++)
            widen_row(element_address(x, b, kv_head, j + n, 2), x.dtype, width, wide + n * width);
        return {reinterpret_cast<const char*>(wide), width * std::int64_t(sizeof(T))};
    }
    // The same rows of bf16, as words of two keys.
    StridedRows paired_rows(const Tensor4& x, std::int64_t j, int keys, int width, std::uint32_t* to) const {
        const auto* first = reinterpret_cast<const std::uint16_t*>(element_address(x, b, kv_head, j, 2));
        interleave_rows(keys, width, width, to, [first, stride = x.stride[2]](int n) { return first + n * stride; });
        return {reinterpret_cast<const char*>(to), width * 4};
    }
    // Rows of keys or values as QkTile reads them (words along D), and as PvTile does (words along the keys).
    StridedRows qk_operand(const Tensor4& x, std::int64_t j, int keys, int width, Word* wide) const {
        if constexpr (PAIRS)
            return {element_address(x, b, kv_head, j, 2), x.stride[2] * 2};
        else
            return converted_rows(x, j, keys, width, wide);
    }
    StridedRows pv_operand(const Tensor4& x, std::int64_t j, int keys, int width, Word* wide) const {
        if constexpr (PAIRS)
            return paired_rows(x, j, keys, width, wide);
        else
            return converted_rows(x, j, keys, width, wide);
    }

    // Loads the block's rows of a tensor [B, H, Q, depth] transposed, as [depth / PER_WORD][ROWS]; numbers, but not
    // pairs, are multiplied by a factor.
    void load_transposed(const Tensor4& x, int depth, T factor, Word* to) {
        if constexpr (PAIRS)
            transpose_rows(x, depth / 2, to, [](const char* row, int) { return row; }, [](auto word) { return word; });
        else
            transpose_rows(
                x, depth, to,
                [&](const char* row, int r) { return convert_row(row, x.dtype, depth, row_buffer + r * depth); },
                [&](auto number) { return number * factor; });
    }
    template <class From, class Change>
    void transpose_rows(const Tensor4& x, int words, Word* to, const From& from, const Change& change) {
        for (int v0 = 0; v0 < ROWS; v0 += L) {
            const char* row[L];
            row_addresses(static_cast<const char*>(x.data), x.stride, x.dtype, v0, row);
            for (int r = 0; r < L; r++) row[r] = from(row[r], r);
            transpose_words<T, Op>(row, words, to + v0, ROWS, change);
        }
    }
    static int element_size(Dtype dtype) { return dtype == Dtype::f32 ? 4 : dtype == Dtype::f64 ? 8 : 2; }
    // The address of row r in a tensor [B, H, Q, .], and those of rows v0 .. v0 + L. Rows past the last have its
    // address and are never written.
    template <class C>
    C* row_address(C* data, const std::int64_t* stride, Dtype dtype, int r) const {
        if (r >= count) r = count - 1;
        return data + (b * stride[0] + head(r) * stride[1] + query(r) * stride[2]) * element_size(dtype);
    }
    template <class C>
    void row_addresses(C* data, const std::int64_t* stride, Dtype dtype, int v0, C** row) const {
        if (group > 1 || f.row_queries) {
            for (int r = 0; r < L; r++) row[r] = row_address(data, stride, dtype, v0 + r);
            return;
        }
        // consecutive queries of one head: one multiplication a row, which is measurable in short sequences
        C* const begin = row_address(data, stride, dtype, 0);
        const std::int64_t step = stride[2] * element_size(dtype), last = count - 1;
        for (int r = 0; r < L; r++) row[r] = begin + (v0 + r < last ? v0 + r : last) * step;
    }
    const char* row_address(const Tensor4& x, int r) const {
        return row_address(static_cast<const char*>(x.data), x.stride, x.dtype, r);
    }
    const T* converted_row(const Tensor4& x, int r, int depth, T* converted) const {
        return reinterpret_cast<const T*>(convert_row(row_address(x, r), x.dtype, depth, converted));
    }
    const char* convert_row(const char* row, Dtype dtype, int depth, T* converted) const {
        if (sizeof(T) == 8 || dtype == Dtype::f32) return row;
        widen_row(row, dtype, depth, converted);
        return reinterpret_cast<const char*>(converted);
    }
    NOINLINE static void widen_row(const char* from, Dtype dtype, int width, T* to) {
        const auto* half = reinterpret_cast<const std::uint16_t*>(from);
        int d = 0;
        if constexpr (sizeof(T) == 4) {
            if (dtype == Dtype::bf16)
                for (; d + L <= width; d += L)
                    store_unaligned(to + d, load_widened<T>(reinterpret_cast<const BFloat16*>(half + d)));
            else
                for (; d + L <= width; d += L)
                    store_unaligned(to + d, load_widened<T>(reinterpret_cast<const Float16*>(half + d)));
        }
        for (; d < width; d++) to[d] = widen(half[d], dtype);
    }

    // Stores [width][ROWS], each row times its factor, as rows of a tensor [B, H, Q, width] of q's dtype. Returns
    // whether all numbers are finite, those of the lanes beyond the last row included.
    bool store_rows(const T* from, int width, const V<T>* factor, void* to, const std::int64_t* stride) const {
        V<T> nan_probe{};
        for (int v = 0; v < QV && v * L < count; v++) {
            const int rows = count - v * L < L ? count - v * L : L;
            char* row[L];
            row_addresses(static_cast<char*>(to), stride, f.q.dtype, v * L, row);
            int c = 0;
            for (; c + L <= width; c += L) {
                V<T> lanes[L];
                UNROLL_FOR(n, L) {
                    lanes[n] = load(from + (c + n) * ROWS + v * L) * factor[v];
                    nan_probe += lanes[n] * T(0);  // NaN or infinity times 0 is NaN
                }
                transpose<T>(lanes);
                for (int r = 0; r < rows; r++) store_columns(row[r], c, lanes[r], width);
            }
            for (; c < width; c++) {
                const V<T> x = load(from + c * ROWS + v * L) * factor[v];
                nan_probe += x * T(0);
                for (int r = 0; r < rows; r++) store_element(row[r], c, x[r], f.q.dtype);
            }
        }
        return !any<T>(nan_probe != nan_probe);
    }
    // Stores columns from c on of a row of q's dtype that is `width` wide.
    INLINE void store_columns(char* row, int c, V<T> x, int width) const {
        store_elements<T>(row, c, x, width, f.q.dtype);
    }
};

// The weights of a block of rows, stored until its rows are known whole; and where a share of the row blocks adds up
// what it makes of them. The row of the map that a query belongs to.
INLINE std::int64_t row_bin(const RowStats& s, std::int64_t query) {
    return ((query + 1) * s.bins - 1) / s.all_queries;
}

// Where a share of the row blocks adds up what it has of a query head. Blocks follow each other, and so do their rows
// of the map: all but the first are the share's alone, so that these lie in the whole. Where rows are picked, each may
// be in any.
std::int64_t lines_apart(const Forward& f) { return !f.look->bins ? 0 : f.rows ? f.look->bins : 1; }
// Whether pairs are counted by what rows may see, and not one by one; and whether they are the same pairs in every
// head, so that the first one's are counted.
bool counted_by_spans(const Forward& f) { return !f.visible.count && !f.bias.data; }
bool heads_alike(const Forward& f) {
    return counted_by_spans(f) && (!f.look->may_count || f.look->may_count_stride[1] == 0) &&
           (!f.rows || f.rows_stride[1] == 0);
}
struct ShareOfHead {
    const Forward& f;
    const std::int64_t share, head, apart;
    const std::int64_t first_line;  // of the map; the share before may have it too

    ShareOfHead(const Forward& call, std::int64_t share_number, std::int64_t head_number, std::int64_t first)
        : f(call), share(share_number), head(head_number), apart((share - 1) * f.heads + head), first_line(first) {}
    double* received() const {
        return share ? f.look->apart.received + apart * f.keys : f.look->whole.received + head * f.keys;
    }
    std::int64_t* eligible() const {
        return share ? f.look->apart.eligible + apart * f.keys : f.look->whole.eligible + head * f.keys;
    }
    bool counts_pairs() const { return head == 0 || !heads_alike(f); }
    bool is_apart(std::int64_t line) const { return share && (f.rows || line == first_line); }
    Columns map_line(std::int64_t line) const {
        const RowStats& s = *f.look;
        return is_apart(line) ? line_of(s.apart, apart * lines_apart(f) + (f.rows ? line : 0))
                              : line_of(s.whole, head * s.bins + line);
    }
    Edge* edges() const { return f.look->edge + (share * f.heads + head) * f.look->edges; }
    std::int64_t& edges_found() const { return f.look->edges_found[share * f.heads + head]; }
    std::atomic<double>& edge_least() const { return f.look->edge_least[head]; }

private:
    Columns line_of(const Columns& all, std::int64_t n) const {
        n *= f.look->bins;
        return {nullptr, nullptr, all.sum + n, all.max + n, all.count + n, all.largest + 3 * n};
    }
};

// Of a block of rows, all that needs its weights normalised, which they are once the whole rows are known. So the
// weights are kept for all keys, as they were relative to the maximum of the time, and swept through once more at the
// end: no product and no exp is taken twice. This is ROWS numbers a key for each thread.
template <class T, int QV>
struct StoredWeights {
    static constexpr int L = LANES<T>, ROWS = QV * L;
    static constexpr int MOST_KEYS = 128;  // of a block of keys
    T* stored;                             // [K][ROWS]; with a map, -0 where a key is not seen
    T* tops;                               // [blocks of keys][ROWS]: what its weights are relative to
    bool* there;                           // [blocks of keys]: it has any that is seen
    T* column;                             // [MOST_KEYS][L]
    Int<T>* hidden;                        // [MOST_KEYS][ROWS]: the sign bit where a key is not seen
    std::int64_t* column_edge;             // [bins + 1]: the first key of each column of the map
    T* cell_sum;                           // [bins][ROWS]: of each row
    std::uint64_t* wanted;                 // [ROWS][bins / 64]: the cells in which edges may be
    Int<T>*cell_most, *cell_key,
        *pairs;  // the same: the largest weight, as a whole number, and its key; how many keys are seen
    const RowStats* s;
    std::int64_t begin, end, blocks, share = 0, first_line = 0;
    int step;
    bool counts;  // keys that are seen are counted one by one

    void take(const Forward& f, Arena& memory) {
        s = f.look;
        const std::int64_t keys = s->columns() ? f.keys + 2 * MOST_KEYS : 0;
        stored = memory.take<T>(keys * ROWS);
        tops = memory.take<T>(keys / 64 * ROWS);
        there = memory.take<bool>(keys / 64);
        column = memory.take<T>(keys ? MOST_KEYS * L : 0);
        hidden = memory.take<Int<T>>(s->bins ? MOST_KEYS * ROWS : 0);
        column_edge = memory.take<std::int64_t>(s->bins + 1);
        cell_sum = memory.take<T>(s->bins * ROWS);
        for (Int<T>** to : {&cell_most, &cell_key, &pairs}) *to = memory.take<Int<T>>(s->bins * ROWS);
        wanted = memory.take<std::uint64_t>(s->edges ? (s->bins + 63) / 64 * ROWS : 0);
    }

    template <class Block>
    void start(const Block& block, std::int64_t first_key, std::int64_t end_of_keys) {
        const Forward& f = block.f;
        begin = first_key;
        end = end_of_keys;
        blocks = 0;
        step = Block::KEYS;
        counts = !counted_by_spans(f);
        for (std::int64_t n = 0; s->bins && n <= s->bins; n++) column_edge[n] = n * f.keys / s->bins;
        for (std::int64_t n = 0; n < s->bins * ROWS; n++) {
            cell_sum[n] = 0;
            cell_most[n] = -1;
        }
        for (std::int64_t n = 0; counts && n < s->bins * ROWS; n++) pairs[n] = 0;
    }

    // Where the logits of the keys from j on belong, if they are kept.
    T* place_for(std::int64_t j) {
        if (!s->columns()) return nullptr;
        for (; begin + blocks * step <= j; blocks++) there[blocks] = false;
        return stored + (j - begin) * ROWS;
    }

    // The block of weights that lies there now.
    template <class Block>
    void keep(const Block& block, std::int64_t j0, int keys) {
        const std::int64_t n = (j0 - begin) / Block::KEYS;
        there[n] = true;
        UNROLL_FOR(v, QV) store(tops + n * ROWS + v * L, block.top[v]);
        T* p = block.p;
        if (s->bins && !block.all_seen)
            for (int k = 0; k < keys * ROWS; k += L) store(p + k, (V<T>)((I<T>)load(p + k) | load_int<T>(hidden + k)));
    }

    std::int64_t column_bin(const Forward& f, std::int64_t j) const { return ((j + 1) * s->bins - 1) / f.keys; }
    template <class Block>
    ShareOfHead part_of(const Block& block, int r) const {
        return {block.f, share, block.head(r), first_line};
    }
    template <class Block>
    bool may_count(const Block& block, int r) const {
        const std::int64_t* stride = s->may_count_stride;
        return !s->may_count ||
               s->may_count[block.b * stride[0] + block.head(r) * stride[1] + block.place(r) * stride[2]];
    }
    static Int<T> bits_of(T x) {
        Int<T> bits;
        __builtin_memcpy(&bits, &x, sizeof(T));
        return bits;
    }
    static double of_bits(Int<T> bits) {  // -infinity where nothing is seen
        T x;
        __builtin_memcpy(&x, &bits, sizeof(T));
        return bits < 0 ? -std::numeric_limits<double>::infinity() : double(x);
    }
};

// What keys receive, the map and the edges: what is summed over rows.

// The row of the map that a query belongs to.
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
struct Sweep {
    static constexpr int L = LANES<T>, ROWS = QV * L;
    static constexpr int MOST_KEYS = 128;  // of a block of keys
    T* kept;                               // [K][ROWS]; with a map, -0 where a key is not seen
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
        kept = memory.take<T>(keys * ROWS);
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
        return kept + (j - begin) * ROWS;
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

    // The pairs of a row that counts, where spans say all. What keys are eligible for is kept as its differences until
    // the end.
    template <class Block>
    void count_spans(const Block& block, int r) const {
        const Forward& f = block.f;
        const ShareOfHead part = part_of(block, r);
        if (!part.counts_pairs()) return;
        const std::int64_t all[2] = {0, f.keys};
        for (int n = 0; n < (f.visible.spans.data ? 4 : 2); n += 2) {
            const std::int64_t low = f.visible.spans.data ? block.span[n][r] : all[n],
                               high = f.visible.spans.data ? block.span[n + 1][r] : all[n + 1];
            if (low >= high) continue;
            if (s->whole.received) {
                part.eligible()[low]++;
                if (high < f.keys) part.eligible()[high]--;
            }
            if (!s->bins) continue;
            std::int64_t* cell = part.map_line(row_bin(*s, block.query(r))).count;
            const std::int64_t x = column_bin(f, low), last = column_bin(f, high - 1);
            for (std::int64_t y = x; y <= last; y++) cell[y] += column_edge[y + 1] - column_edge[y];
            cell[x] -= low - column_edge[x];
            cell[last] -= column_edge[last + 1] - high;
        }
    }

    // Through all weights of the block again, now that it is known how to normalise them.
    template <class Block>
    void sweep(const Block& block, const T* scales) {
        const Forward& f = block.f;
        V<T> top[QV], scale[QV];
        bool some = false;
        UNROLL_FOR(v, QV) {
            top[v] = block.top[v];
            scale[v] = load(scales + v * L);
        }
        for (int r = 0; r < ROWS; r++) some |= scales[r] != 0;
        if (!some) return;
        for (std::int64_t n = 0; n < blocks; n++) {
            if (!there[n]) continue;
            const std::int64_t j0 = begin + n * Block::KEYS;
            const int keys = int(end - j0 < Block::KEYS ? end - j0 : Block::KEYS);
            T* factor = tops + n * ROWS;
            UNROLL_FOR(v, QV) store(factor + v * L, exp2(load(factor + v * L) - top[v]) * scale[v]);
            if (s->bins)
                normalise<true>(f, j0, keys, factor);
            else
                normalise<false>(f, j0, keys, factor);
            if (s->whole.received) receive(block, j0, keys, factor);
        }
        if (s->edges) keep_edges(block, scales);
        if (s->bins)
            for (int v = 0; v < QV && v * L < block.count; v++) fold(block, v, scales);
    }
    template <bool MAP>
    void normalise(const Forward& f, std::int64_t j0, int keys, const T* factors) {
        const T* p = kept + (j0 - begin) * ROWS;
        V<T> factor[QV];
        UNROLL_FOR(v, QV) factor[v] = load(factors + v * L);
        std::int64_t bin = MAP ? column_bin(f, j0) : 0;
        for (int n = 0, last; n < keys; n = last, bin++) {
            V<T> total[QV];
            I<T> high[QV], key[QV];
            if (MAP)
                while (column_edge[bin + 1] <= j0 + n) bin++;  // some are empty where there are more bins than keys
            const std::int64_t limit = MAP ? column_edge[bin + 1] - j0 : keys;
            last = int(limit < keys ? limit : keys);
            if constexpr (MAP)
                UNROLL_FOR(v, QV) {
                    total[v] = V<T>{};
                    high[v] = load_int<T>(cell_most + bin * ROWS + v * L);
                    key[v] = load_int<T>(cell_key + bin * ROWS + v * L);
                }
            for (int j = n; j < last; j++) {
                V<T> received{};
                UNROLL_FOR(v, QV) {
                    const V<T> x = load(p + j * ROWS + v * L) * factor[v];
                    received += x;
                    if constexpr (MAP) {
                        total[v] += x;
                        const I<T> more = (I<T>)x > high[v];  // as numbers that are not negative compare
                        high[v] = more ? (I<T>)x : high[v];
                        key[v] = more ? I<T>{} + Int<T>(j0 + j) : key[v];
                    }
                }
                store(column + j * L, received);
            }
            if constexpr (MAP)
                UNROLL_FOR(v, QV) {
                    store(cell_sum + bin * ROWS + v * L, load(cell_sum + bin * ROWS + v * L) + total[v]);
                    store_int<T>(cell_most + bin * ROWS + v * L, high[v]);
                    store_int<T>(cell_key + bin * ROWS + v * L, key[v]);
                }
        }
    }
    template <class Block>
    void receive(const Block& block, std::int64_t j0, int keys, const T* factor) const {
        const auto line_of = [&](int r) { return part_of(block, r).received() + j0; };
        const int group = int(block.group);
        if (L % group == 0 && block.first % group == 0) {  // a lane is of the same head in every vector
            for (int n = 0; n < keys; n += L) {
                const int width = keys - n < L ? keys - n : L;
                V<T> x[L];
                UNROLL_FOR(k, L) x[k] = load(column + (n + k) * L);  // beyond the last key: whatever is there
                if (group == 1) {
                    add_line(line_of(0) + n, sums<T>(x), width);
                    continue;
                }
                transpose<T>(x);  // keys in the lanes
                for (int g = 0; g < group; g++) {
                    V<T> all = x[g];
                    for (int r = g + group; r < L; r += group) all += x[r];
                    add_line(line_of(g) + n, all, width);
                }
            }
        } else {
            const T* p = kept + (j0 - begin) * ROWS;
            for (int r = 0; r < block.count; r++) {
                double* to = line_of(r);
                for (int j = 0; j < keys; j++) to[j] += double(p[j * ROWS + r] * factor[r]);
            }
        }
    }

    static void add_line(double* to, V<T> x, int width) {
        T line[L] __attribute__((aligned(64)));
        store(line, x);
        for (int k = 0; k < width; k++) to[k] += double(line[k]);
    }

    // What each row of a vector has in each bin goes to the map.
    template <class Block>
    void fold(const Block& block, int v, const T* scales) {
        const int from = v * L, rows = block.count - from < L ? block.count - from : L;
        for (int r = 0; r < L; r++)
            if (scales[from + r] == 0)  // does not count
                for (std::int64_t x = 0; x < s->bins; x++) {
                    cell_most[x * ROWS + from + r] = -1;
                    if (counts) pairs[x * ROWS + from + r] = 0;
                }
        std::int64_t line[L];  // of the map
        const auto line_of = [&](int r) { return row_bin(*s, block.query(from + r)); };
        bool together = block.group == 1;
        if (together && !block.f.rows && (line[0] = line_of(0)) == line_of(rows - 1)) {  // they ascend
        } else
            for (int r = 0; r < rows; r++) {
                line[r] = line_of(r);
                together &= line[r] == line[0];
            }
        for (std::int64_t x = 0; x < s->bins; x += L) {
            const int width = int(s->bins - x < L ? s->bins - x : L);
            if (together)
                fold_together(block, from, rows, line[0], x, width);
            else
                fold_apart(block, from, rows, line, x, width);
        }
    }
    // Of a vector of cells from x on, where they lie. Beyond the last cell: some cell.
    template <class Read>
    INLINE void read_cells(std::int64_t x, int width, V<T>* to, const Read& read) const {
        for (int k = 0; k < L; k++) to[k] = read((x + (k < width ? k : 0)) * ROWS);
    }
    // All rows of the vector go to one line.
    template <class Block>
    void fold_together(const Block& block, int from, int rows, std::int64_t line, std::int64_t x, int width) const {
        V<T> some[L], most_of[L];
        read_cells(x, width, some, [&](std::int64_t at) { return load(cell_sum + at + from); });
        read_cells(x, width, most_of, [&](std::int64_t at) { return (V<T>)load_int<T>(cell_most + at + from); });
        Cells cells;
        store(cells.sum, sums<T>(some));
        store_int<T>(cells.most, largest<T>(most_of));
        for (int k = 0; k < width; k++) {
            const std::int64_t at = (x + k) * ROWS + from;
            const int r = first_lane<T>(load_int<T>(cell_most + at) == cells.most[k]);
            cells.row[k] = from + r;
            cells.key[k] = cell_key[at + r];
            cells.count[k] = 0;
            if (counts)
                for (int n = 0; n < rows; n++) cells.count[k] += pairs[at + n];
        }
        add_to_map(block, part_of(block, from).map_line(line), x, width, cells);
    }
    // Bins in the lanes: one vector for each row.
    template <class Block>
    void fold_apart(const Block& block, int from, int rows, const std::int64_t* line, std::int64_t x, int width) const {
        V<T> some[L], most_of[L], key[L], seen_of[L];
        read_cells(x, width, some, [&](std::int64_t at) { return load(cell_sum + at + from); });
        transpose<T>(some);
        read_cells(x, width, most_of, [&](std::int64_t at) { return (V<T>)load_int<T>(cell_most + at + from); });
        transpose<T>(most_of);
        read_cells(x, width, key, [&](std::int64_t at) { return (V<T>)load_int<T>(cell_key + at + from); });
        transpose<T>(key);
        if (counts) {
            read_cells(x, width, seen_of, [&](std::int64_t at) { return (V<T>)load_int<T>(pairs + at + from); });
            transpose<T>(seen_of);
        }
        bool done[L] = {};
        for (int r = 0; r < rows; r++) {
            if (done[r]) continue;
            V<T> total{};
            I<T> best = I<T>{} - 1, of{}, row{}, count{};
            for (int n = r; n < rows; n++) {
                if (line[n] != line[r] || block.head(from + n) != block.head(from + r)) continue;
                done[n] = true;
                const I<T> more = (I<T>)most_of[n] > best;
                total += some[n];
                best = more ? (I<T>)most_of[n] : best;
                of = more ? (I<T>)key[n] : of;
                row = more ? I<T>{} + Int<T>(from + n) : row;
                if (counts) count += (I<T>)seen_of[n];
            }
            Cells cells;
            store(cells.sum, total);
            store_int<T>(cells.most, best);
            store_int<T>(cells.key, of);
            store_int<T>(cells.row, row);
            store_int<T>(cells.count, count);
            add_to_map(block, part_of(block, from + r).map_line(line[r]), x, width, cells);
        }
    }
    struct Cells {
        T sum[L] __attribute__((aligned(64)));
        Int<T> most[L] __attribute__((aligned(64)));  // the largest weight, as a whole number; -1: nothing is seen
        Int<T> key[L] __attribute__((aligned(64)));   // its key, and which row of the block
        Int<T> row[L] __attribute__((aligned(64)));
        Int<T> count[L] __attribute__((aligned(64)));
    };
    template <class Block>
    void add_to_map(const Block& block, const Columns& to, std::int64_t x, int width, const Cells& cells) const {
        for (int k = 0; k < width; k++) to.sum[x + k] += double(cells.sum[k]);
        if (counts)
            for (int k = 0; k < width; k++) to.count[x + k] += cells.count[k];
        for (int k = 0; k < width; k++) {
            const double p = of_bits(cells.most[k]);
            if (!(p > to.max[x + k])) continue;
            to.max[x + k] = p;
            std::int32_t* at = to.largest + 3 * (x + k);
            at[0] = std::int32_t(block.b);
            at[1] = std::int32_t(block.query(int(cells.row[k])));
            at[2] = std::int32_t(cells.key[k]);
        }
    }

    // The largest weights of each head, looked for in the cells whose largest is above the least of those that there
    // are.
    template <class Block>
    void keep_edges(const Block& block, const T* scales) {
        Int<T> least[ROWS] __attribute__((aligned(64)));
        for (int r = 0; r < ROWS; r++) {
            if (r < block.count && scales[r] != 0) {
                if (r > 0 && block.group == 1 && scales[r - 1] != 0)
                    least[r] = least[r - 1];
                else
                    least[r] = least_of(block, part_of(block, r));
            } else
                least[r] = std::numeric_limits<Int<T>>::max();
        }
        const std::int64_t words = (s->bins + 63) / 64;
        for (std::int64_t n = 0; n < ROWS * words; n++) wanted[n] = 0;
        for (std::int64_t x = 0; x < s->bins; x++)
            UNROLL_FOR(v, QV)
                for (unsigned some =
                         lanes_of<T>(load_int<T>(cell_most + x * ROWS + v * L) > load_int<T>(least + v * L));
                     some; some &= some - 1)
                    wanted[(v * L + __builtin_ctz(some)) * words + x / 64] |= std::uint64_t(1) << x % 64;
        for (int r = 0; r < block.count; r++) {
            const ShareOfHead part = part_of(block, r);
            for (std::int64_t word = 0; word < words; word++)
                for (std::uint64_t some = wanted[r * words + word]; some; some &= some - 1)
                    keep_edges_of_cell(block, r, word * 64 + __builtin_ctzll(some), least[r], part.edges(),
                                       part.edges_found());
            if (part.edges_found() == s->edges) raise(part.edge_least(), part.edges()[0].p);
        }
    }
    static void raise(std::atomic<double>& least, double to) {
        double now = least.load(std::memory_order_relaxed);
        while (now < to && !least.compare_exchange_weak(now, to, std::memory_order_relaxed)) {
        }
    }
    // What a weight of the block has to be above. Of one that is as large as the least of another share's, the place
    // decides.
    template <class Block>
    Int<T> least_of(const Block& block, const ShareOfHead& part) const {
        const double elsewhere = part.edge_least().load(std::memory_order_relaxed);
        const Int<T> least = elsewhere > 0 ? bits_of(T(elsewhere)) - 1 : -1;
        if (part.edges_found() == s->edges) {
            const Int<T> here = bits_of(T(part.edges()[0].p));
            return here > least ? here : least;
        }
        if (least >= 0 || block.group > 1 || block.count < s->edges) return least;
        // as many rows as there are to be edges have weights that are not below
        Int<T> highest_of[ROWS] __attribute__((aligned(64)));
        for (int v = 0; v < QV; v++) {
            I<T> high = I<T>{} - 1;
            for (std::int64_t x = 0; x < s->bins; x++) {
                const I<T> here = load_int<T>(cell_most + x * ROWS + v * L);
                high = here > high ? here : high;
            }
            store_int<T>(highest_of + v * L, high);
        }
        for (int r = 0; r < block.count; r++) {
            int before = 0;
            for (int n = 0; n < block.count; n++)
                before += highest_of[n] > highest_of[r] || (highest_of[n] == highest_of[r] && n < r);
            if (before == s->edges - 1) return highest_of[r] > 0 ? highest_of[r] - 1 : -1;
        }
        return -1;
    }
    template <class Block>
    void keep_edges_of_cell(const Block& block, int r, std::int64_t x, Int<T> least, Edge* edges,
                            std::int64_t& found) const {
        const double below = of_bits(least);
        const auto above = [&](double p) { return p > below && (found < s->edges || p > edges[0].p); };
        if (!above(of_bits(cell_most[x * ROWS + r]))) return;
        const std::int64_t first = column_edge[x] > begin ? column_edge[x] : begin,
                           last = column_edge[x + 1] < end ? column_edge[x + 1] : end;
        for (std::int64_t j = first, n; j < last; j++) {
            if (n = (j - begin) / Block::KEYS; !there[n]) continue;
            const double p = of_bits(bits_of(kept[(j - begin) * ROWS + r] * tops[n * ROWS + r]));
            if (above(p)) put_edge(edges, found, {p, block.b, block.query(r), j});
        }
    }
    // Into a heap, of which the least is the first, of equal ones the last.
    void put_edge(Edge* edges, std::int64_t& found, const Edge& x) const {
        const auto before = [](const Edge& a, const Edge& z) {
            return a.p != z.p ? a.p < z.p : a.b != z.b ? a.b > z.b : a.i != z.i ? a.i > z.i : a.j > z.j;
        };
        std::int64_t at = 0;
        if (found < s->edges) {
            for (at = found++; at > 0 && before(x, edges[(at - 1) / 2]); at = (at - 1) / 2)
                edges[at] = edges[(at - 1) / 2];
        } else
            for (std::int64_t n = 1; n < found; n = 2 * at + 1) {
                if (n + 1 < found && before(edges[n + 1], edges[n])) n++;
                if (!before(edges[n], x)) break;
                edges[at] = edges[n];
                at = n;
            }
        edges[at] = x;
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

// What keys receive, and the map: what is summed over rows.

template <class T, int QV>
struct Sweep : EdgeSearch<T, QV> {
    using Base = EdgeSearch<T, QV>;
    using Base::L, Base::ROWS, Base::s, Base::stored, Base::tops, Base::there, Base::column, Base::column_edge,
        Base::cell_sum, Base::cell_most, Base::cell_key, Base::pairs, Base::begin, Base::end, Base::blocks,
        Base::counts, Base::column_bin, Base::part_of, Base::of_bits;
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
        if (s->edges) this->keep_edges(block, scales);
        if (s->bins)
            for (int v = 0; v < QV && v * L < block.count; v++) fold(block, v, scales);
    }
    template <bool MAP>
    void normalise(const Forward& f, std::int64_t j0, int keys, const T* factors) {
        const T* p = stored + (j0 - begin) * ROWS;
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
            const T* p = stored + (j0 - begin) * ROWS;
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
};

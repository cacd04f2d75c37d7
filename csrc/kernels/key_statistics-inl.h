// Statistics over rows: the weight that each key receives and its largest weight, the map, and the weight between
// segments.

template <class T, int QV>
struct KeyStatistics : EdgeSearch<T, QV> {
    using Base = EdgeSearch<T, QV>;
    using Base::L, Base::ROWS, Base::s, Base::stored, Base::block_tops, Base::has_visible, Base::key_sums,
        Base::column_begin, Base::cell_sum, Base::cell_max, Base::cell_key, Base::cell_pairs, Base::segment_mass,
        Base::begin, Base::end, Base::first_column, Base::end_column, Base::blocks, Base::counts_single_pairs,
        Base::map_column, Base::partition_of, Base::weight_of_bits;
    // Counts the visible pairs of a row from its spans. `eligible` holds differences between neighbouring keys until
    // `reduce_partitions` computes their prefix sum.
    template <class Block>
    void count_pairs_of_spans(const Block& block, int r) const {
        const Forward& f = block.f;
        const HeadPartition partition = partition_of(block, r);
        if (!partition.counts_pairs()) return;
        const std::int64_t all[2] = {0, f.keys};
        for (int n = 0; n < (f.mask.spans.data ? 4 : 2); n += 2) {
            const std::int64_t low = f.mask.spans.data ? block.span[n][r] : all[n],
                               high = f.mask.spans.data ? block.span[n + 1][r] : all[n + 1];
            if (low >= high) continue;
            if (s->total.received) {
                partition.eligible()[low]++;
                if (high < f.keys) partition.eligible()[high]--;
            }
            if (!s->bins) continue;
            std::int64_t* cell = partition.map_row(map_row_of_query(*s, block.query(r))).count;
            const std::int64_t x = map_column(low), last = map_column(high - 1);
            for (std::int64_t y = x; y <= last; y++) cell[y] += column_begin[y + 1] - column_begin[y];
            cell[x] -= low - column_begin[x];
            cell[last] -= column_begin[last + 1] - high;
        }
    }

    // Normalizes all stored weights of the block and sums them over rows. scales[r] normalizes row r; 0: not counted.
    template <class Block>
    void accumulate_columns(const Block& block, const T* scales) {
        V<T> top[QV], scale[QV];
        I<T> counted{};
        UNROLL_FOR(v, QV) {
            top[v] = block.top[v];
            scale[v] = load(scales + v * L);
            counted |= scale[v] != 0;
        }
        if (!any<T>(counted)) return;
        for (std::int64_t n = 0; n < blocks; n++) {
            if (!has_visible[n]) continue;
            const std::int64_t j0 = begin + n * Block::KEYS;
            const int keys = Block::keys_of_block(j0, end);
            T* factor = block_tops + n * ROWS;
            UNROLL_FOR(v, QV) store(factor + v * L, exp2(load(factor + v * L) - top[v]) * scale[v]);
            if (s->bins)
                normalize<true>(j0, keys, factor);
            else
                normalize<false>(j0, keys, factor);
            if (s->total.received) add_received(block, j0, keys, factor);
            if (s->total.received_max) raise_received_max(block, j0, keys, factor);
            if (s->segments) add_to_segments(block, j0, keys, factor);
        }
        if (s->segments)
            for (int v = 0; v < QV && v * L < block.count; v++) fold_segments(block, v, scales);
        if (s->max_edges) this->insert_edges(block, scales);
        if (s->bins)
            for (int v = 0; v < QV && v * L < block.count; v++) fold_into_map(block, v, scales);
    }
    template <bool MAP>
    void normalize(std::int64_t j0, int keys, const T* factors) {
        const T* p = stored + (j0 - begin) * ROWS;
        V<T> factor[QV];
        UNROLL_FOR(v, QV) factor[v] = load(factors + v * L);
        std::int64_t bin = MAP ? map_column(j0) : 0;
        for (int n = 0, last; n < keys; n = last, bin++) {
            V<T> total[QV];
            I<T> max[QV], key[QV];
            if (MAP)
                while (column_begin[bin + 1] <= j0 + n) bin++;  // with more bins than keys some bins are empty
            const std::int64_t limit = MAP ? column_begin[bin + 1] - j0 : keys;
            last = int(limit < keys ? limit : keys);
            if constexpr (MAP)
                UNROLL_FOR(v, QV) {
                    total[v] = V<T>{};
                    max[v] = load_int<T>(cell_max + bin * ROWS + v * L);
                    key[v] = load_int<T>(cell_key + bin * ROWS + v * L);
                }
            for (int j = n; j < last; j++) {
                V<T> received{};
                UNROLL_FOR(v, QV) {
                    const V<T> x = load(p + j * ROWS + v * L) * factor[v];
                    received += x;
                    if constexpr (MAP) {
                        total[v] += x;
                        const I<T> exceeds = (I<T>)x > max[v];  // non-negative floats order as their bits do
                        max[v] = exceeds ? (I<T>)x : max[v];
                        key[v] = exceeds ? I<T>{} + Int<T>(j0 + j) : key[v];
                    }
                }
                store(key_sums + j * L, received);
            }
            if constexpr (MAP)
                UNROLL_FOR(v, QV) {
                    store(cell_sum + bin * ROWS + v * L, load(cell_sum + bin * ROWS + v * L) + total[v]);
                    store_int<T>(cell_max + bin * ROWS + v * L, max[v]);
                    store_int<T>(cell_key + bin * ROWS + v * L, key[v]);
                }
        }
    }
    template <class Block>
    void add_received(const Block& block, std::int64_t j0, int keys, const T* factor) const {
        const auto received_of = [&](int r) { return partition_of(block, r).received() + j0; };
        const int group = int(block.group);
        if (L % group == 0 && block.first % group == 0) {  // a lane has the same head in every vector
            for (int n = 0; n < keys; n += L) {
                const int width = keys - n < L ? keys - n : L;
                V<T> x[L];
                UNROLL_FOR(k, L) x[k] = load(key_sums + (n + k) * L);  // beyond the last key: unused
                if (group == 1) {
                    add_to_keys(received_of(0) + n, reduce_sums<T>(x), width);
                    continue;
                }
                transpose<T>(x);  // keys in the lanes
                for (int g = 0; g < group; g++) {
                    V<T> all = x[g];
                    for (int r = g + group; r < L; r += group) all += x[r];
                    add_to_keys(received_of(g) + n, all, width);
                }
            }
        } else {
            const T* p = stored + (j0 - begin) * ROWS;
            for (int r = 0; r < block.count; r++) {
                double* to = received_of(r);
                for (int j = 0; j < keys; j++) to[j] += double(p[j * ROWS + r] * factor[r]);
            }
        }
    }

    static void add_to_keys(double* to, V<T> x, int width) {
        T values[L] __attribute__((aligned(64)));
        store(values, x);
        for (int k = 0; k < width; k++) to[k] += double(values[k]);
    }

    // Raises the largest weight of each key. Rows that are not counted have the factor 0, masked keys the weight 0.
    template <class Block>
    void raise_received_max(const Block& block, std::int64_t j0, int keys, const T* factors) const {
        const T* p = stored + (j0 - begin) * ROWS;
        const auto maxima_of = [&](int r) { return partition_of(block, r).received_max() + j0; };
        const int group = int(block.group);
        if (L % group != 0 || block.first % group != 0) {
            for (int r = 0; r < block.count; r++)
                raise(maxima_of(r), keys, [&](int j) { return p[j * ROWS + r] * factors[r]; });
            return;
        }
        for (int n = 0; n < keys; n += L) {
            const int width = keys - n < L ? keys - n : L;
            V<T> x[L];
            for (int k = 0; k < L; k++) {
                x[k] = V<T>{};
                if (k < width)
                    UNROLL_FOR(v, QV) x[k] = maximum<T>(load(p + (n + k) * ROWS + v * L) * load(factors + v * L), x[k]);
            }
            T values[L] __attribute__((aligned(64)));
            if (group == 1) {
                store(values, (V<T>)reduce_maxima<T>(x));
                raise(maxima_of(0) + n, width, [&](int k) { return values[k]; });
                continue;
            }
            transpose<T>(x);  // keys in the lanes
            for (int g = 0; g < group; g++) {
                V<T> all = x[g];
                for (int r = g + group; r < L; r += group) all = maximum<T>(x[r], all);
                store(values, all);
                raise(maxima_of(g) + n, width, [&](int k) { return values[k]; });
            }
        }
    }
    template <class Value>
    INLINE static void raise(double* to, int count, const Value& value) {
        for (int k = 0; k < count; k++) to[k] = double(value(k)) > to[k] ? double(value(k)) : to[k];
    }

    // Adds the weights of a block of keys to the segments of each row, a run of keys with one segment at a time. They
    // are normalized once a run.
    template <class Block>
    void add_to_segments(const Block& block, std::int64_t j0, int keys, const T* factors) const {
        const std::int64_t offset = block.b * s->key_segment_stride + j0;
        const std::int8_t* segment = s->key_segments + offset;
        const std::int32_t* ends = s->segment_ends + offset;
        const T* p = stored + (j0 - begin) * ROWS;
        V<T> factor[QV];
        UNROLL_FOR(v, QV) factor[v] = load(factors + v * L);
        for (int n = 0, last; n < keys; n = last) {
            last = int(ends[n] - j0 < keys ? ends[n] - j0 : keys);
            if (segment[n] < 0) continue;
            constexpr int CHAINS = 4;  // sums in flight, since an addition has a latency of some cycles
            V<T> all[QV] = {};
            int j = n;
            if (last - n >= 2 * CHAINS) {
                V<T> total[CHAINS][QV] = {};
                for (; j + CHAINS <= last; j += CHAINS)
                    UNROLL_FOR(c, CHAINS)
                        UNROLL_FOR(v, QV) total[c][v] += load(p + (j + c) * ROWS + v * L);
                UNROLL_FOR(v, QV) all[v] = (total[0][v] + total[1][v]) + (total[2][v] + total[3][v]);
            }
            for (; j < last; j++)
                UNROLL_FOR(v, QV) all[v] += load(p + j * ROWS + v * L);
            T* to = segment_mass + segment[n] * ROWS;
            UNROLL_FOR(v, QV) store(to + v * L, load(to + v * L) + all[v] * factor[v]);
        }
    }
    // Adds the segments of a vector of rows to those of their heads.
    template <class Block>
    void fold_segments(const Block& block, int v, const T* scales) const {
        const int from = v * L, rows = block.count - from < L ? block.count - from : L;
        int segment[L], of_all = -1;
        bool is_one = block.group == 1;  // all counted rows have one segment
        for (int r = 0; r < rows; r++) {
            segment[r] = -1;
            if (scales[from + r] == 0) continue;  // not counted
            segment[r] = s->row_segments[block.b * s->row_segment_stride + block.query_index(from + r)];
            if (segment[r] >= 0) partition_of(block, from + r).segment_count()[segment[r]]++;
            is_one &= of_all < 0 || segment[r] == of_all;
            is_one &= segment[r] >= 0;
            of_all = segment[r];
        }
        for (std::int64_t y = 0; y < s->segments; y += L) {
            const int width = int(s->segments - y < L ? s->segments - y : L);
            const auto to = [&](int r, int n) {
                return partition_of(block, from + r).segment_sum() + n * s->segments + y;
            };
            V<T> x[L];
            for (int k = 0; k < L; k++) x[k] = load(segment_mass + (y + (k < width ? k : 0)) * ROWS + from);
            if (is_one) {
                if (of_all >= 0) add_to_keys(to(0, of_all), reduce_sums<T>(x), width);
                continue;
            }
            transpose<T>(x);  // segments in the lanes
            for (int r = 0; r < rows; r++)
                if (segment[r] >= 0) add_to_keys(to(r, segment[r]), x[r], width);
        }
    }

    // Adds the cells of a vector of rows to the map.
    template <class Block>
    void fold_into_map(const Block& block, int v, const T* scales) {
        const int from = v * L, rows = block.count - from < L ? block.count - from : L;
        for (int r = 0; r < L; r++)
            if (scales[from + r] == 0)  // not counted
                for (std::int64_t x = first_column; x < end_column; x++) {
                    cell_max[x * ROWS + from + r] = -1;
                    if (counts_single_pairs) cell_pairs[x * ROWS + from + r] = 0;
                }
        std::int64_t map_rows[L];
        const auto map_row_at = [&](int r) { return map_row_of_query(*s, block.query(from + r)); };
        bool one_row = block.group == 1;
        map_rows[0] = map_row_at(0);
        const bool ascend = one_row && !block.f.row_queries;  // then equal ends mean equal map rows
        if (!ascend || map_rows[0] != map_row_at(rows - 1))
            for (int r = 0; r < rows; r++) {
                map_rows[r] = map_row_at(r);
                one_row &= map_rows[r] == map_rows[0];
            }
        for (std::int64_t x = first_column; x < end_column; x += L) {
            const int width = int(end_column - x < L ? end_column - x : L);
            if (one_row)
                fold_into_one_row(block, from, rows, map_rows[0], x, width);
            else
                fold_into_rows(block, from, rows, map_rows, x, width);
        }
    }
    // Reads L vectors of cells from column x on. Beyond `width` columns it repeats column x.
    template <class Read>
    INLINE void read_cells(std::int64_t x, int width, V<T>* to, const Read& read) const {
        for (int k = 0; k < L; k++) to[k] = read((x + (k < width ? k : 0)) * ROWS);
    }
    // The case that all rows of the vector belong to one row of the map.
    template <class Block>
    void fold_into_one_row(const Block& block, int from, int rows, std::int64_t map_row, std::int64_t x,
                           int width) const {
        V<T> sums[L], maxima[L];
        read_cells(x, width, sums, [&](std::int64_t at) { return load(cell_sum + at + from); });
        read_cells(x, width, maxima, [&](std::int64_t at) { return (V<T>)load_int<T>(cell_max + at + from); });
        Cells cells;
        store(cells.sum, reduce_sums<T>(sums));
        store_int<T>(cells.max, reduce_maxima<T>(maxima));
        for (int k = 0; k < width; k++) {
            const std::int64_t at = (x + k) * ROWS + from;
            const int r = first_set_lane<T>(load_int<T>(cell_max + at) == cells.max[k]);
            cells.row[k] = from + r;
            cells.key[k] = cell_key[at + r];
            cells.count[k] = 0;
            if (counts_single_pairs)
                for (int n = 0; n < rows; n++) cells.count[k] += cell_pairs[at + n];
        }
        add_to_map(block, partition_of(block, from).map_row(map_row), x, width, cells);
    }
    // The general case. Cells are transposed so that columns lie in the lanes, one vector for each row.
    template <class Block>
    void fold_into_rows(const Block& block, int from, int rows, const std::int64_t* map_rows, std::int64_t x,
                        int width) const {
        V<T> sums[L], maxima[L], key[L], counts[L];
        read_cells(x, width, sums, [&](std::int64_t at) { return load(cell_sum + at + from); });
        transpose<T>(sums);
        read_cells(x, width, maxima, [&](std::int64_t at) { return (V<T>)load_int<T>(cell_max + at + from); });
        transpose<T>(maxima);
        read_cells(x, width, key, [&](std::int64_t at) { return (V<T>)load_int<T>(cell_key + at + from); });
        transpose<T>(key);
        if (counts_single_pairs) {
            read_cells(x, width, counts, [&](std::int64_t at) { return (V<T>)load_int<T>(cell_pairs + at + from); });
            transpose<T>(counts);
        }
        bool folded[L] = {};
        for (int r = 0; r < rows; r++) {
            if (folded[r]) continue;
            V<T> total{};
            I<T> max = I<T>{} - 1, max_key{}, row{}, count{};
            for (int n = r; n < rows; n++) {
                if (map_rows[n] != map_rows[r] || block.head(from + n) != block.head(from + r)) continue;
                folded[n] = true;
                const I<T> exceeds = (I<T>)maxima[n] > max;
                total += sums[n];
                max = exceeds ? (I<T>)maxima[n] : max;
                max_key = exceeds ? (I<T>)key[n] : max_key;
                row = exceeds ? I<T>{} + Int<T>(from + n) : row;
                if (counts_single_pairs) count += (I<T>)counts[n];
            }
            Cells cells;
            store(cells.sum, total);
            store_int<T>(cells.max, max);
            store_int<T>(cells.key, max_key);
            store_int<T>(cells.row, row);
            store_int<T>(cells.count, count);
            add_to_map(block, partition_of(block, from + r).map_row(map_rows[r]), x, width, cells);
        }
    }
    struct Cells {
        T sum[L] __attribute__((aligned(64)));
        Int<T> max[L] __attribute__((aligned(64)));    // the bits of the largest weight; -1: no visible key
        Int<T> key[L] __attribute__((aligned(64)));    // its key
        Int<T> row[L] __attribute__((aligned(64)));    // its row in the block
        Int<T> count[L] __attribute__((aligned(64)));  // visible pairs
    };
    template <class Block>
    void add_to_map(const Block& block, const ColumnStatistics& to, std::int64_t x, int width,
                    const Cells& cells) const {
        for (int k = 0; k < width; k++) to.sum[x + k] += double(cells.sum[k]);
        if (counts_single_pairs)
            for (int k = 0; k < width; k++) to.count[x + k] += cells.count[k];
        for (int k = 0; k < width; k++) {
            const double p = weight_of_bits(cells.max[k]);
            if (!(p > to.max[x + k])) continue;
            to.max[x + k] = p;
            std::int32_t* at = to.largest + 3 * (x + k);
            at[0] = std::int32_t(block.b);
            at[1] = std::int32_t(block.query(int(cells.row[k])));
            at[2] = std::int32_t(cells.key[k]);
        }
    }
};

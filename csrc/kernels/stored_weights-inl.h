// The weights of a block of rows, stored until the sums of its rows are complete; and the buffers to which a partition
// of the row blocks adds.

// The row of the map to which a query belongs.
INLINE std::int64_t map_row_of_query(const Statistics& s, std::int64_t query) {
    return ((s.first_query + query + 1) * s.bins - 1) / s.total_queries;
}

// The map rows of a query head that a partition may share with others, and so adds to `partial`. A partition has
// consecutive row blocks, hence consecutive map rows, of which only its first can also belong to the partition before.
// With row_queries any map row can be shared.
std::int64_t boundary_map_rows(const Forward& f) {
    return !f.statistics->bins ? 0 : f.row_queries ? f.statistics->bins : 1;
}
// Whether spans alone determine the visible pairs, so that they are counted by interval and not one by one.
bool counts_pairs_by_spans(const Forward& f) { return !f.mask.rule_count && !f.bias.data; }
// Whether all heads have the same visible pairs, so that only those of head 0 are counted.
bool counts_equal_in_heads(const Forward& f) {
    return counts_pairs_by_spans(f) && (!f.statistics->may_count || f.statistics->may_count_stride[1] == 0) &&
           (!f.row_queries || f.row_queries_stride[1] == 0);
}
// The buffers to which one partition of the row blocks adds for one query head.
struct HeadPartition {
    const Forward& f;
    const std::int64_t partition, head, partial_index;
    const std::int64_t first_map_row;  // the partition before may share it

    HeadPartition(const Forward& call, std::int64_t partition_number, std::int64_t head_number, std::int64_t first)
        : f(call),
          partition(partition_number),
          head(head_number),
          partial_index((partition - 1) * f.heads + head),
          first_map_row(first) {}
    double* received() const {
        return partition ? f.statistics->partial.received + partial_index * f.keys
                         : f.statistics->total.received + head * f.keys;
    }
    double* received_max() const {
        return partition ? f.statistics->partial.received_max + partial_index * f.keys
                         : f.statistics->total.received_max + head * f.keys;
    }
    double* segment_sum() const {
        const std::int64_t size = f.statistics->segments * f.statistics->segments;
        return partition ? f.statistics->partial.segment_sum + partial_index * size
                         : f.statistics->total.segment_sum + head * size;
    }
    std::int64_t* segment_count() const {
        const std::int64_t size = f.statistics->segments;
        return partition ? f.statistics->partial.segment_count + partial_index * size
                         : f.statistics->total.segment_count + head * size;
    }
    std::int64_t* eligible() const {
        return partition ? f.statistics->partial.eligible + partial_index * f.keys
                         : f.statistics->total.eligible + head * f.keys;
    }
    bool counts_pairs() const { return head == 0 || !counts_equal_in_heads(f); }
    bool is_boundary(std::int64_t row) const { return partition && (f.row_queries || row == first_map_row); }
    ColumnStatistics map_row(std::int64_t row) const {
        const Statistics& s = *f.statistics;
        return is_boundary(row) ? cells_of(s.partial, partial_index * boundary_map_rows(f) + (f.row_queries ? row : 0))
                                : cells_of(s.total, head * s.bins + row);
    }
    Edge* edges() const { return f.statistics->edges + (partition * f.heads + head) * f.statistics->max_edges; }
    std::int64_t& edge_counts() const { return f.statistics->edge_counts[partition * f.heads + head]; }
    std::atomic<double>& edge_threshold() const { return f.statistics->edge_threshold[head]; }

private:
    ColumnStatistics cells_of(const ColumnStatistics& all, std::int64_t n) const {
        n *= f.statistics->bins;
        return {nullptr, nullptr, all.sum + n, all.max + n, all.count + n, all.largest + 3 * n};
    }
};

// Column statistics need normalized weights, but the sum of a row is known only after its last key. So the weights of a
// block of rows are stored for all keys, relative to the running maximum of the time, and read once more at the end: no
// product and no exponential is computed twice. A thread needs ROWS numbers for each key.
template <class T, int QV>
struct StoredWeights {
    static constexpr int L = LANES<T>, ROWS = QV * L;
    static constexpr int MAX_KEYS = 128;  // of a block of keys
    T* stored;                            // [K][ROWS]; with a map, -0 for a masked key
    T* block_tops;                        // [blocks of keys][ROWS]: the maximum that its weights are relative to
    bool* has_visible;                    // [blocks of keys]: a key is visible to some row
    T* key_sums;                          // [MAX_KEYS][L]: weights, summed over the vectors of rows
    Int<T>* mask_signs;                   // [MAX_KEYS][ROWS]: the sign bit, set for a masked key
    std::int64_t* column_begin;           // [bins + 1]: the first key of each column of the map
    std::uint64_t* candidate_cells;       // [ROWS][bins / 64]: a bit for each cell that may hold an edge
    T* cell_sum;                          // [bins][ROWS]: the sum of the weights of a row in a column of the map
    Int<T>*cell_max, *cell_key;           // [bins][ROWS]: the bits of the largest weight, and its key
    Int<T>* cell_pairs;                   // [bins][ROWS]: visible keys
    T* segment_mass;                      // [S][ROWS]: the sum of the weights of a row in a segment of keys
    const Statistics* s;
    std::int64_t begin, end, blocks, partition = 0, first_map_row = 0;
    std::int64_t first_column, end_column;  // the columns of the map that have keys of [begin, end)
    int block_keys;
    bool counts_single_pairs;  // visible pairs are counted one by one

    void allocate(const Forward& f, Arena& memory) {
        s = f.statistics;
        const std::int64_t keys = s->has_column_statistics() ? f.keys + 2 * MAX_KEYS : 0;
        stored = memory.allocate<T>(keys * ROWS);
        block_tops = memory.allocate<T>(keys / 64 * ROWS);
        has_visible = memory.allocate<bool>(keys / 64);
        key_sums = memory.allocate<T>(keys ? MAX_KEYS * L : 0);
        mask_signs = memory.allocate<Int<T>>(s->bins ? MAX_KEYS * ROWS : 0);
        column_begin = memory.allocate<std::int64_t>(s->bins + 1);
        cell_sum = memory.allocate<T>(s->bins * ROWS);
        for (Int<T>** to : {&cell_max, &cell_key, &cell_pairs}) *to = memory.allocate<Int<T>>(s->bins * ROWS);
        segment_mass = memory.allocate<T>(s->segments * ROWS);
        candidate_cells = memory.allocate<std::uint64_t>(s->max_edges ? (s->bins + 63) / 64 * ROWS : 0);
    }

    template <class Block>
    void start(const Block& block, std::int64_t first_key, std::int64_t end_of_keys) {
        const Forward& f = block.f;
        begin = first_key;
        end = end_of_keys;
        blocks = 0;
        block_keys = Block::KEYS;
        counts_single_pairs = !counts_pairs_by_spans(f);
        for (std::int64_t n = 0; n < s->segments * ROWS; n++) segment_mass[n] = 0;
        if (s->bins) start_map();
    }
    void start_map() {
        // column n begins at the key n * total_keys / bins, rounded down: without a division for each
        const std::int64_t whole = s->total_keys / s->bins, remainder = s->total_keys % s->bins;
        for (std::int64_t n = 0, key = 0, rest = 0; n <= s->bins; n++, key += whole, rest += remainder) {
            if (rest >= s->bins) rest -= s->bins, key++;
            column_begin[n] = key;
        }
        first_column = begin < end ? map_column(begin) : 0;
        end_column = begin < end ? map_column(end - 1) + 1 : 0;
        for (std::int64_t n = first_column * ROWS; n < end_column * ROWS; n++) {
            cell_sum[n] = 0;
            cell_max[n] = -1;
        }
        for (std::int64_t n = first_column * ROWS; counts_single_pairs && n < end_column * ROWS; n++) cell_pairs[n] = 0;
    }

    // The buffer for the logits of the keys from j on, or null if weights are not stored.
    T* logits_buffer(std::int64_t j) {
        if (!s->has_column_statistics()) return nullptr;
        for (; begin + blocks * block_keys <= j; blocks++) has_visible[blocks] = false;
        return stored + (j - begin) * ROWS;
    }

    // Completes the block of weights that `logits_buffer` holds now.
    template <class Block>
    void store_weights(const Block& block, std::int64_t j0, int keys) {
        const std::int64_t n = (j0 - begin) / Block::KEYS;
        has_visible[n] = true;
        UNROLL_FOR(v, QV) store(block_tops + n * ROWS + v * L, block.top[v]);
        T* p = block.p;
        if (s->bins && !block.all_visible)
            for (int k = 0; k < keys * ROWS; k += L)
                store(p + k, (V<T>)((I<T>)load(p + k) | load_int<T>(mask_signs + k)));
    }

    std::int64_t map_column(std::int64_t j) const { return ((j + 1) * s->bins - 1) / s->total_keys; }
    template <class Block>
    HeadPartition partition_of(const Block& block, int r) const {
        return {block.f, partition, block.head(r), first_map_row};
    }
    template <class Block>
    bool may_count(const Block& block, int r) const {
        const std::int64_t* stride = s->may_count_stride;
        return !s->may_count ||
               s->may_count[block.b * stride[0] + block.head(r) * stride[1] + block.query_index(r) * stride[2]];
    }
    static Int<T> bits_of_weight(T x) {
        Int<T> bits;
        __builtin_memcpy(&bits, &x, sizeof(T));
        return bits;
    }
    static double weight_of_bits(Int<T> bits) {  // -infinity for -1, no visible key
        T x;
        __builtin_memcpy(&x, &bits, sizeof(T));
        return bits < 0 ? -std::numeric_limits<double>::infinity() : double(x);
    }
};

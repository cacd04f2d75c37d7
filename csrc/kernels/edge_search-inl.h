// The largest weights of each head, found by means of the cells of the map.

template <class T, int QV>
struct EdgeSearch : StoredWeights<T, QV> {
    using Base = StoredWeights<T, QV>;
    using Base::L, Base::ROWS, Base::s, Base::stored, Base::block_tops, Base::has_visible, Base::candidate_cells,
        Base::cell_max, Base::column_begin, Base::begin, Base::end, Base::first_column, Base::end_column,
        Base::partition_of, Base::bits_of_weight, Base::weight_of_bits;
    // Inserts the block's weights into the heaps of edges. Only cells whose largest weight is above the threshold are
    // searched.
    template <class Block>
    void insert_edges(const Block& block, const T* scales) {
        Int<T> threshold[ROWS] __attribute__((aligned(64)));
        for (int r = 0; r < ROWS; r++) {
            if (r < block.count && scales[r] != 0) {
                if (r > 0 && block.group == 1 && scales[r - 1] != 0)
                    threshold[r] = threshold[r - 1];
                else
                    threshold[r] = find_edge_threshold(block, partition_of(block, r));
            } else
                threshold[r] = std::numeric_limits<Int<T>>::max();
        }
        const std::int64_t words = (s->bins + 63) / 64;
        for (std::int64_t n = 0; n < ROWS * words; n++) candidate_cells[n] = 0;
        for (std::int64_t x = first_column; x < end_column; x++)
            UNROLL_FOR(v, QV) {
                const I<T> exceeds = load_int<T>(cell_max + x * ROWS + v * L) > load_int<T>(threshold + v * L);
                for (unsigned lanes = lane_bits<T>(exceeds); lanes; lanes &= lanes - 1)
                    candidate_cells[(v * L + __builtin_ctz(lanes)) * words + x / 64] |= std::uint64_t(1) << x % 64;
            }
        for (int r = 0; r < block.count; r++) {
            const HeadPartition partition = partition_of(block, r);
            for (std::int64_t word = 0; word < words; word++)
                for (std::uint64_t bits = candidate_cells[r * words + word]; bits; bits &= bits - 1)
                    insert_edges_of_cell(block, r, word * 64 + __builtin_ctzll(bits), threshold[r], partition.edges(),
                                         partition.edge_counts());
            if (partition.edge_counts() == s->max_edges)
                raise_threshold(partition.edge_threshold(), partition.edges()[0].p);
        }
    }
    static void raise_threshold(std::atomic<double>& threshold, double to) {
        double now = threshold.load(std::memory_order_relaxed);
        while (now < to && !threshold.compare_exchange_weak(now, to, std::memory_order_relaxed)) {
        }
    }
    // A threshold, as bits, that every new edge of the block exceeds. It is just below the threshold that partitions
    // share: a weight equal to that one may still precede by its indices.
    template <class Block>
    Int<T> find_edge_threshold(const Block& block, const HeadPartition& partition) const {
        const double shared_threshold = partition.edge_threshold().load(std::memory_order_relaxed);
        const Int<T> threshold = shared_threshold > 0 ? bits_of_weight(T(shared_threshold)) - 1 : -1;
        if (partition.edge_counts() == s->max_edges) {
            const Int<T> own_threshold = bits_of_weight(T(partition.edges()[0].p));
            return own_threshold > threshold ? own_threshold : threshold;
        }
        if (threshold >= 0 || block.group > 1 || block.count < s->max_edges) return threshold;
        // The heap is not full: max_edges rows of the block have a weight at least as large as the max_edges-th largest
        // row maximum.
        Int<T> row_max[ROWS] __attribute__((aligned(64)));
        for (int v = 0; v < QV; v++) {
            I<T> vector_max = I<T>{} - 1;
            for (std::int64_t x = first_column; x < end_column; x++) {
                const I<T> cell = load_int<T>(cell_max + x * ROWS + v * L);
                vector_max = cell > vector_max ? cell : vector_max;
            }
            store_int<T>(row_max + v * L, vector_max);
        }
        for (int r = 0; r < block.count; r++) {
            int larger_rows = 0;
            for (int n = 0; n < block.count; n++)
                larger_rows += row_max[n] > row_max[r] || (row_max[n] == row_max[r] && n < r);
            if (larger_rows == s->max_edges - 1) return row_max[r] > 0 ? row_max[r] - 1 : -1;
        }
        return -1;
    }
    template <class Block>
    void insert_edges_of_cell(const Block& block, int r, std::int64_t x, Int<T> threshold, Edge* edges,
                              std::int64_t& edge_count) const {
        const double limit = weight_of_bits(threshold);
        const auto above = [&](double p) { return p > limit && (edge_count < s->max_edges || p > edges[0].p); };
        if (!above(weight_of_bits(cell_max[x * ROWS + r]))) return;
        const std::int64_t first = column_begin[x] > begin ? column_begin[x] : begin,
                           last = column_begin[x + 1] < end ? column_begin[x + 1] : end;
        for (std::int64_t j = first; j < last; j++) {
            const std::int64_t n = (j - begin) / Block::KEYS;
            if (!has_visible[n]) continue;
            const double p = weight_of_bits(bits_of_weight(stored[(j - begin) * ROWS + r] * block_tops[n * ROWS + r]));
            if (above(p)) insert_edge(edges, edge_count, {p, block.b, block.query(r), j});
        }
    }
    // Inserts x into a min-heap of at most max_edges edges; of equal weights the one with the largest indices is the
    // root.
    void insert_edge(Edge* edges, std::int64_t& edge_count, const Edge& x) const {
        const auto precedes = [](const Edge& a, const Edge& z) {
            return a.p != z.p ? a.p < z.p : a.b != z.b ? a.b > z.b : a.i != z.i ? a.i > z.i : a.j > z.j;
        };
        std::int64_t hole = 0;
        if (edge_count < s->max_edges) {
            for (hole = edge_count++; hole > 0 && precedes(x, edges[(hole - 1) / 2]); hole = (hole - 1) / 2)
                edges[hole] = edges[(hole - 1) / 2];
        } else
            for (std::int64_t n = 1; n < edge_count; n = 2 * hole + 1) {
                if (n + 1 < edge_count && precedes(edges[n + 1], edges[n])) n++;
                if (!precedes(edges[n], x)) break;
                edges[hole] = edges[n];
                hole = n;
            }
        edges[hole] = x;
    }
};

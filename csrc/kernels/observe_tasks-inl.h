// The tasks of an observation.

template <class T, class Op, int QV>
using ObservedBlock = ForwardBlock<T, QV, 0, Op, StatisticsObserver<T, QV>>;

// Calls body(ForwardBlock with a StatisticsObserver, first row, number of rows) for row block `number` of a head.
template <class T, class Body>
void with_observed_block(const Forward& f, std::int64_t head, std::int64_t number, void* scratch, const Body& body) {
    with_multiply_add<T>(uses_pairs(f), [&]<class Op>() {
        const RowRange rows = rows_of_block<T>(f, number);
        if (rows.count <= LANES<T>) return with_rows<T, ObservedBlock<T, Op, 1>>(f, head, rows, scratch, body);
        if (QUERY_VECTORS > 2 && rows.count <= 2 * LANES<T>)
            return with_rows<T, ObservedBlock<T, Op, 2>>(f, head, rows, scratch, body);
        with_rows<T, ObservedBlock<T, Op, QUERY_VECTORS>>(f, head, rows, scratch, body);
    });
}
std::size_t observation_scratch(const Forward& f) {
    return with_accumulation_type(f, [&]<class T>() {
        const std::size_t forward = forward_scratch_of<T>(f);
        const std::size_t observed = with_multiply_add<T>(
            uses_pairs(f), [&]<class Op>() { return ObservedBlock<T, Op, QUERY_VECTORS>::scratch(f); });
        return observed > forward ? observed : forward;
    });
}
// The number of partitions, one task each, of the row blocks of a key/value head; for column statistics. It depends on
// the sizes alone, so that results do not depend on the number of threads.
std::int64_t observation_partitions(const Forward& f) {
    const std::int64_t max_tasks = f.keys > 16384 ? 16 : 32;  // each has its own sums of all keys
    const std::int64_t min_pairs = 1 << 19;                   // of a partition, to be worth their reduction
    const std::int64_t blocks = row_block_count(f);
    const std::int64_t max_partitions = f.batch * f.queries * f.keys * (f.heads / f.kv_heads) / min_pairs;
    std::int64_t partitions = (max_tasks + f.kv_heads - 1) / f.kv_heads;
    if (partitions > max_partitions) partitions = max_partitions;
    if (partitions > blocks) partitions = blocks;
    return partitions > 1 ? partitions : 1;
}
std::int64_t observation_tasks(const Forward& f) {
    if (f.statistics->has_column_statistics()) return f.kv_heads * f.statistics->partitions;
    return f.batch * f.kv_heads * row_block_count(f);
}
// Computes the statistics of a row block, and its output if Dv > 0. A block of few rows attends separately, so that its
// output is the same to the bit as without statistics.
template <class T>
void observe_block(const Forward& f, std::int64_t head, std::int64_t number, std::int64_t partition,
                   std::int64_t first_map_row, void* scratch) {
    const auto observe_rows = [&](auto&& attend, std::int64_t first, int count) {
        attend.observer.partition = partition;
        attend.observer.first_map_row = first_map_row;
        attend.attend_rows(first, count, 0, 1, nullptr);
    };
    if (f.v_head_dim == 0 || rows_of_block<T>(f, number).count > LANES<T>)
        return with_observed_block<T>(f, head, number, scratch, observe_rows);
    const auto attend_only = [](auto&& attend, std::int64_t first, int count) {
        attend.attend_rows(first, count, 0, 1, nullptr);
    };
    with_forward_block<T>(f, head, number, scratch, attend_only);
    Forward statistics_only = f;
    statistics_only.v_head_dim = 0;
    statistics_only.lse = nullptr;
    with_observed_block<T>(statistics_only, head, number, scratch, observe_rows);
}
// The row blocks of a partition, and the rows of the map that they can reach.
struct RowPartition {
    std::int64_t first_block, end_block, first_map_row, last_map_row;
    RowPartition(const Forward& f, std::int64_t partition) {
        const Statistics& s = *f.statistics;
        const std::int64_t blocks = row_block_count(f);
        first_block = partition * blocks / s.partitions;
        end_block = (partition + 1) * blocks / s.partitions;
        first_map_row = 0;
        last_map_row = s.bins - 1;
        if (f.row_queries || !s.bins) return;
        const std::int64_t group = f.heads / f.kv_heads, rows = f.queries * group;
        const auto map_row_of_block = [&](std::int64_t block) {  // of its first row
            const std::int64_t row =
                with_accumulation_type(f, [&]<class T>() { return rows_of_block<T>(f, block).first; });
            return map_row_of_query(s, (row < rows ? row : rows - 1) / group);
        };
        if (partition > 0) first_map_row = map_row_of_block(first_block);
        if (partition + 1 < s.partitions) last_map_row = map_row_of_block(end_block);
    }
};
// Clears the buffers of a partition of one query head.
void clear_partition(const HeadPartition& part, const RowPartition& range) {
    const Forward& f = part.f;
    const Statistics& s = *f.statistics;
    const bool counts_pairs = part.counts_pairs();
    if (s.total.received) {
        double* const received = part.received();
        std::int64_t* const eligible = part.eligible();
        for (std::int64_t j = 0; j < f.keys; j++) received[j] = 0;
        for (std::int64_t j = 0; j < f.keys && counts_pairs; j++) eligible[j] = 0;
    }
    for (std::int64_t j = 0; j < f.keys && s.total.received_max; j++) part.received_max()[j] = 0;
    for (std::int64_t n = 0; n < s.segments * s.segments; n++) part.segment_sum()[n] = 0;
    for (std::int64_t n = 0; n < s.segments; n++) part.segment_count()[n] = 0;
    if (s.max_edges) part.edge_counts() = 0;
    for (std::int64_t y = range.first_map_row; y <= range.last_map_row; y++) {
        const ColumnStatistics cells = part.map_row(y);
        for (std::int64_t n = 0; n < s.bins; n++) {
            cells.sum[n] = 0;
            cells.max[n] = -std::numeric_limits<double>::infinity();
        }
        for (std::int64_t n = 0; n < s.bins && counts_pairs; n++) cells.count[n] = 0;
        for (std::int64_t n = 0; n < 3 * s.bins; n++) cells.largest[n] = -1;
    }
}
template <class T>
void run_observation_task(const Forward& f, std::int64_t task, void* scratch) {
    const std::int64_t blocks = row_block_count<T>(f);
    const Statistics& s = *f.statistics;
    if (!s.has_column_statistics())
        return observe_block<T>(f, task / blocks, blocks - 1 - task % blocks, 0, 0, scratch);
    // Partitions of one head run at the same time, so that threads share keys and values in the cache; the last run
    // first: under a causal mask they take longest.
    const std::int64_t kv_head = task / s.partitions, partition = s.partitions - 1 - task % s.partitions;
    const std::int64_t group = f.heads / f.kv_heads;
    const RowPartition range(f, partition);
    for (std::int64_t h = kv_head * group; h < (kv_head + 1) * group; h++)
        clear_partition(HeadPartition(f, partition, h, range.first_map_row), range);
    for (std::int64_t b = 0; b < f.batch; b++)
        for (std::int64_t n = range.first_block; n < range.end_block; n++) {
            if (is_cancelled(f)) return;
            observe_block<T>(f, b * f.kv_heads + kv_head, n, partition, range.first_map_row, scratch);
        }
}
void run_observation(const Forward& f, std::int64_t task, void* scratch) {
    with_accumulation_type(f, [&]<class T>() { run_observation_task<T>(f, task, scratch); });
}
// Adds the cells `from` of one map row to the cells `to`. Of equal largest weights the one with the smallest indices
// wins.
void add_cells(const ColumnStatistics& from, const ColumnStatistics& to, std::int64_t bins, bool counts_pairs) {
    for (std::int64_t n = 0; n < bins && counts_pairs; n++) to.count[n] += from.count[n];
    for (std::int64_t n = 0; n < bins; n++) {
        to.sum[n] += from.sum[n];
        const std::int32_t* const a = from.largest + 3 * n;
        std::int32_t* const z = to.largest + 3 * n;
        if (a[0] < 0 || from.max[n] < to.max[n]) continue;
        const bool precedes = a[0] != z[0] ? a[0] < z[0] : a[1] != z[1] ? a[1] < z[1] : a[2] < z[2];
        if (from.max[n] == to.max[n] && !precedes) continue;
        to.max[n] = from.max[n];
        for (int k = 0; k < 3; k++) z[k] = a[k];
    }
}
// Adds the partial column statistics of a query head to the total. What is equal in all heads is copied from head 0.
void reduce_partitions(const Forward& f, std::int64_t head) {
    const Statistics& s = *f.statistics;
    const HeadPartition total(f, 0, head, 0), first(f, 0, 0, 0);
    const bool counts_pairs = total.counts_pairs();
    for (std::int64_t partition = 1; partition < s.partitions; partition++) {
        const RowPartition range(f, partition);
        const HeadPartition part(f, partition, head, range.first_map_row);
        if (s.total.received) {
            const double* const received = part.received();
            const std::int64_t* const eligible = part.eligible();
            for (std::int64_t j = 0; j < f.keys; j++) total.received()[j] += received[j];
            for (std::int64_t j = 0; j < f.keys && counts_pairs; j++) total.eligible()[j] += eligible[j];
        }
        if (s.total.received_max)
            for (std::int64_t j = 0; j < f.keys; j++)
                total.received_max()[j] = std::max(total.received_max()[j], part.received_max()[j]);
        for (std::int64_t n = 0; n < s.segments * s.segments; n++) total.segment_sum()[n] += part.segment_sum()[n];
        for (std::int64_t n = 0; n < s.segments; n++) total.segment_count()[n] += part.segment_count()[n];
        for (std::int64_t y = range.first_map_row; y < range.first_map_row + boundary_map_rows(f); y++)
            add_cells(part.map_row(y), total.map_row(y), s.bins, counts_pairs);
    }
    if (s.total.received && counts_pairs && counts_pairs_by_spans(f))  // from differences to counts
        for (std::int64_t j = 1; j < f.keys; j++) total.eligible()[j] += total.eligible()[j - 1];
    if (s.total.received && !counts_pairs)
        for (std::int64_t j = 0; j < f.keys; j++) total.eligible()[j] = first.eligible()[j];
    for (std::int64_t y = 0; y < s.bins; y++) {
        const ColumnStatistics cells = total.map_row(y);
        for (std::int64_t n = 0; n < s.bins && !counts_pairs; n++) cells.count[n] = first.map_row(y).count[n];
        for (std::int64_t n = 0; n < s.bins; n++)  // cells without a visible pair
            if (cells.max[n] == -std::numeric_limits<double>::infinity())
                cells.max[n] = std::numeric_limits<double>::quiet_NaN();
    }
}

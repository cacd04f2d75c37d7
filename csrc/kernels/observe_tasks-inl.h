// How an observation is cut into tasks; included inside each target's namespace.
// Attending while rows are measured. body(an ForwardBlock that fits) for block `number` of a head.
template <class T, class Body>
void with_observed_block(const Forward& f, std::int64_t head, std::int64_t number, void* scratch, const Body& body) {
    const std::int64_t b = head / f.kv_heads, h = head % f.kv_heads;
    const auto [first, count] = rows_of_block<T>(f, number);
    Arena memory{reinterpret_cast<std::uintptr_t>(scratch)};
#if defined(BF16_DOT)
    if constexpr (sizeof(T) == 4)
        if (uses_pairs(f)) {
            if (count <= LANES<T>)
                return body(ForwardBlock<T, 1, 0, Bf16Dot, StatisticsObserver<T, 1>>(f, b, h, memory), first, count);
            return body(
                ForwardBlock<T, QUERY_VECTORS, 0, Bf16Dot, StatisticsObserver<T, QUERY_VECTORS>>(f, b, h, memory),
                first, count);
        }
#endif
    if (count <= LANES<T>)
        return body(ForwardBlock<T, 1, 0, Fma<T>, StatisticsObserver<T, 1>>(f, b, h, memory), first, count);
    body(ForwardBlock<T, QUERY_VECTORS, 0, Fma<T>, StatisticsObserver<T, QUERY_VECTORS>>(f, b, h, memory), first,
         count);
}
template <class T>
std::size_t observation_scratch_of(const Forward& f) {
    std::size_t plain = ForwardBlock<T, QUERY_VECTORS, 0, Fma<T>, StatisticsObserver<T, QUERY_VECTORS>>::scratch(f);
    if (const std::size_t attend_scratch = forward_scratch_of<T>(f); attend_scratch > plain) plain = attend_scratch;
#if defined(BF16_DOT)
    if constexpr (sizeof(T) == 4) {
        const std::size_t pairs =
            ForwardBlock<T, QUERY_VECTORS, 0, Bf16Dot, StatisticsObserver<T, QUERY_VECTORS>>::scratch(f);
        return plain > pairs ? plain : pairs;
    }
#endif
    return plain;
}
std::size_t observation_scratch(const Forward& f) {
    return is_double(f) ? observation_scratch_of<double>(f) : observation_scratch_of<float>(f);
}
// Keys and map: how many tasks partition the row blocks of a key/value head. From the sizes alone.
std::int64_t observation_partitions(const Forward& f) {
    // tasks, fewer where what each has of its range is long; pairs of a partition, for all that is to be added up
    const std::int64_t max_tasks = f.keys > 16384 ? 16 : 32, min_pairs = 1 << 19;
    const std::int64_t blocks = is_double(f) ? row_block_count<double>(f) : row_block_count<float>(f);
    const std::int64_t max_partitions = f.batch * f.queries * f.keys * (f.heads / f.kv_heads) / min_pairs;
    std::int64_t partitions = (max_tasks + f.kv_heads - 1) / f.kv_heads;
    if (partitions > max_partitions) partitions = max_partitions;
    if (partitions > blocks) partitions = blocks;  // one query of very many keys
    return partitions > 1 ? partitions : 1;
}
std::int64_t observation_tasks(const Forward& f) {
    if (f.statistics->has_column_statistics()) return f.kv_heads * f.statistics->partitions;
    return f.batch * f.kv_heads * (is_double(f) ? row_block_count<double>(f) : row_block_count<float>(f));
}
template <class T>
void observe_block(const Forward& f, std::int64_t head, std::int64_t number, std::int64_t partition,
                   std::int64_t first_map_row, void* scratch) {
    const auto observe = [&](auto&& attend, std::int64_t first, int count) {
        attend.observer.partition = partition;
        attend.observer.first_map_row = first_map_row;
        attend.run(first, count, 0, 1, nullptr);
    };
    if (f.v_head_dim == 0 || rows_of_block<T>(f, number).count > LANES<T>)
        return with_observed_block<T>(f, head, number, scratch, observe);
    const auto attend_only = [](auto&& attend, std::int64_t first, int count) {
        attend.run(first, count, 0, 1, nullptr);
    };
    with_forward_block<T>(f, head, number, scratch,
                          attend_only);  // so that out is to the bit what it is when nobody looks
    Forward statistics_only = f;
    statistics_only.v_head_dim = 0;
    statistics_only.lse = nullptr;
    with_observed_block<T>(statistics_only, head, number, scratch, observe);
}
// A partition of the row blocks of a head: its blocks, and the lines of the map that these can reach.
struct RowPartition {
    std::int64_t first_block, end_block, first_map_row, last_map_row;
    RowPartition(const Forward& f, std::int64_t partition) {
        const Statistics& s = *f.statistics;
        const std::int64_t blocks = is_double(f) ? row_block_count<double>(f) : row_block_count<float>(f);
        first_block = partition * blocks / s.partitions;
        end_block = (partition + 1) * blocks / s.partitions;
        first_map_row = 0;
        last_map_row = s.bins - 1;
        if (f.row_queries || !s.bins) return;
        const std::int64_t group = f.heads / f.kv_heads, rows = f.queries * group;
        const auto map_row_of_block = [&](std::int64_t block) {  // of its first row
            const std::int64_t row =
                is_double(f) ? rows_of_block<double>(f, block).first : rows_of_block<float>(f, block).first;
            return map_row_of_query(s, (row < rows ? row : rows - 1) / group);
        };
        if (partition > 0) first_map_row = map_row_of_block(first_block);
        if (partition + 1 < s.partitions) last_map_row = map_row_of_block(end_block);
    }
};
template <class T>
void run_observation_task(const Forward& f, std::int64_t task, void* scratch) {
    const std::int64_t blocks = row_block_count<T>(f);
    const Statistics& s = *f.statistics;
    if (!s.has_column_statistics())
        return observe_block<T>(f, task / blocks, blocks - 1 - task % blocks, 0, 0, scratch);
    // Threads meet at the same keys and values; the last shares come first, for of a causal mask they are the longest.
    const std::int64_t kv_head = task / s.partitions, partition = s.partitions - 1 - task % s.partitions,
                       group = f.heads / f.kv_heads;
    const RowPartition range(f, partition);
    for (std::int64_t h = kv_head * group; h < (kv_head + 1) * group; h++) {
        const HeadPartition part(f, partition, h, range.first_map_row);
        const bool counts_pairs = part.counts_pairs();
        if (s.total.received) {
            double* const received = part.received();
            std::int64_t* const eligible = part.eligible();
            for (std::int64_t j = 0; j < f.keys; j++) received[j] = 0;
            for (std::int64_t j = 0; j < f.keys && counts_pairs; j++) eligible[j] = 0;
        }
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
    for (std::int64_t b = 0; b < f.batch; b++)
        for (std::int64_t n = range.first_block; n < range.end_block; n++) {
            if (is_cancelled(f)) return;
            observe_block<T>(f, b * f.kv_heads + kv_head, n, partition, range.first_map_row, scratch);
        }
}
void run_observation(const Forward& f, std::int64_t task, void* scratch) {
    if (is_double(f)) return run_observation_task<double>(f, task, scratch);
    run_observation_task<float>(f, task, scratch);
}
// What shares have apart of a query head goes to the whole.
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
        for (std::int64_t y = range.first_map_row; y < range.first_map_row + boundary_map_rows(f); y++) {
            const ColumnStatistics to = total.map_row(y), from = part.map_row(y);
            for (std::int64_t n = 0; n < s.bins && counts_pairs; n++) to.count[n] += from.count[n];
            for (std::int64_t n = 0; n < s.bins; n++) {
                to.sum[n] += from.sum[n];
                std::int32_t *to_place = to.largest + 3 * n, *from_place = from.largest + 3 * n;
                if (from_place[0] < 0 || from.max[n] < to.max[n]) continue;
                const auto earlier = [&] {
                    return from_place[0] != to_place[0]   ? from_place[0] < to_place[0]
                           : from_place[1] != to_place[1] ? from_place[1] < to_place[1]
                                                          : from_place[2] < to_place[2];
                };
                if (from.max[n] == to.max[n] && !earlier()) continue;
                to.max[n] = from.max[n];
                for (int k = 0; k < 3; k++) to_place[k] = from_place[k];
            }
        }
    }
    if (s.total.received && counts_pairs && counts_pairs_by_spans(f))
        for (std::int64_t j = 1; j < f.keys; j++) total.eligible()[j] += total.eligible()[j - 1];
    if (s.total.received && !counts_pairs)
        for (std::int64_t j = 0; j < f.keys; j++) total.eligible()[j] = first.eligible()[j];
    for (std::int64_t y = 0; y < s.bins; y++) {
        const ColumnStatistics cells = total.map_row(y);
        for (std::int64_t n = 0; n < s.bins && !counts_pairs; n++) cells.count[n] = first.map_row(y).count[n];
        for (std::int64_t n = 0; n < s.bins; n++)  // nothing was seen
            if (cells.max[n] == -std::numeric_limits<double>::infinity())
                cells.max[n] = std::numeric_limits<double>::quiet_NaN();
    }
}

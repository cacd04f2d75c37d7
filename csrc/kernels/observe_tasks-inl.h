// How an observation is cut into tasks; included inside each target's namespace.
// Attending while rows are measured. body(an Attend that fits) for block `number` of a head.
template <class T, class Body>
void with_look(const Forward& f, std::int64_t head, std::int64_t number, void* scratch, const Body& body) {
    const std::int64_t b = head / f.kv_heads, h = head % f.kv_heads;
    const auto [first, count] = rows_of<T>(f, number);
    Arena memory{reinterpret_cast<std::uintptr_t>(scratch)};
#if defined(BF16_DOT)
    if constexpr (sizeof(T) == 4)
        if (in_pairs(f)) {
            if (count <= LANES<T>) return body(Attend<T, 1, 0, Pairs, Look<T, 1>>(f, b, h, memory), first, count);
            return body(Attend<T, QUERY_VECTORS, 0, Pairs, Look<T, QUERY_VECTORS>>(f, b, h, memory), first, count);
        }
#endif
    if (count <= LANES<T>) return body(Attend<T, 1, 0, Plain<T>, Look<T, 1>>(f, b, h, memory), first, count);
    body(Attend<T, QUERY_VECTORS, 0, Plain<T>, Look<T, QUERY_VECTORS>>(f, b, h, memory), first, count);
}
template <class T>
std::size_t look_scratch_of(const Forward& f) {
    std::size_t plain = Attend<T, QUERY_VECTORS, 0, Plain<T>, Look<T, QUERY_VECTORS>>::scratch(f);
    if (const std::size_t few = scratch_of<T>(f); few > plain) plain = few;
#if defined(BF16_DOT)
    if constexpr (sizeof(T) == 4) {
        const std::size_t pairs = Attend<T, QUERY_VECTORS, 0, Pairs, Look<T, QUERY_VECTORS>>::scratch(f);
        return plain > pairs ? plain : pairs;
    }
#endif
    return plain;
}
std::size_t look_scratch(const Forward& f) {
    return is_double(f) ? look_scratch_of<double>(f) : look_scratch_of<float>(f);
}
// Keys and map: how many tasks share the row blocks of a key/value head. From the sizes alone.
std::int64_t look_shares(const Forward& f) {
    // tasks, fewer where what each has of its own is long; pairs of a share, for all that is to be added up
    const std::int64_t enough = f.keys > 16384 ? 16 : 32, least = 1 << 19;
    const std::int64_t blocks = is_double(f) ? blocks_of<double>(f) : blocks_of<float>(f);
    const std::int64_t possible = f.batch * f.queries * f.keys * (f.heads / f.kv_heads) / least;
    std::int64_t wanted = (enough + f.kv_heads - 1) / f.kv_heads;
    if (wanted > possible) wanted = possible;
    if (wanted > blocks) wanted = blocks;  // one query of very many keys
    return wanted > 1 ? wanted : 1;
}
std::int64_t look_tasks(const Forward& f) {
    if (f.look->columns()) return f.kv_heads * f.look->shares;
    return f.batch * f.kv_heads * (is_double(f) ? blocks_of<double>(f) : blocks_of<float>(f));
}
template <class T>
void run_look_block(const Forward& f, std::int64_t head, std::int64_t number, std::int64_t share,
                    std::int64_t first_line, void* scratch) {
    const auto look = [&](auto&& attend, std::int64_t first, int count) {
        attend.rider.share = share;
        attend.rider.first_line = first_line;
        attend.run(first, count, 0, 1, nullptr);
    };
    if (f.v_head_dim == 0 || rows_of<T>(f, number).count > LANES<T>)
        return with_look<T>(f, head, number, scratch, look);
    const auto alone = [](auto&& attend, std::int64_t first, int count) { attend.run(first, count, 0, 1, nullptr); };
    with_block<T>(f, head, number, scratch, alone);  // so that out is to the bit what it is when nobody looks
    Forward rest = f;
    rest.v_head_dim = 0;
    rest.lse = nullptr;
    with_look<T>(rest, head, number, scratch, look);
}
// A share of the row blocks of a head: its blocks, and the lines of the map that these can reach.
struct Share {
    std::int64_t first_block, end_of_blocks, first_line, last_line;
    Share(const Forward& f, std::int64_t share) {
        const RowStats& s = *f.look;
        const std::int64_t blocks = is_double(f) ? blocks_of<double>(f) : blocks_of<float>(f);
        first_block = share * blocks / s.shares;
        end_of_blocks = (share + 1) * blocks / s.shares;
        first_line = 0;
        last_line = s.bins - 1;
        if (f.rows || !s.bins) return;
        const std::int64_t group = f.heads / f.kv_heads, rows = f.queries * group;
        const auto line = [&](std::int64_t block) {  // of its first row
            const std::int64_t row = is_double(f) ? rows_of<double>(f, block).first : rows_of<float>(f, block).first;
            return row_bin(s, (row < rows ? row : rows - 1) / group);
        };
        if (share > 0) first_line = line(first_block);
        if (share + 1 < s.shares) last_line = line(end_of_blocks);
    }
};
template <class T>
void run_look_task(const Forward& f, std::int64_t task, void* scratch) {
    const std::int64_t blocks = blocks_of<T>(f);
    const RowStats& s = *f.look;
    if (!s.columns()) return run_look_block<T>(f, task / blocks, blocks - 1 - task % blocks, 0, 0, scratch);
    // Threads meet at the same keys and values; the last shares come first, for of a causal mask they are the longest.
    const std::int64_t kv_head = task / s.shares, share = s.shares - 1 - task % s.shares, group = f.heads / f.kv_heads;
    const Share own(f, share);
    for (std::int64_t h = kv_head * group; h < (kv_head + 1) * group; h++) {
        const ShareOfHead x(f, share, h, own.first_line);
        const bool pairs = x.counts_pairs();
        if (s.whole.received) {
            double* const received = x.received();
            std::int64_t* const eligible = x.eligible();
            for (std::int64_t j = 0; j < f.keys; j++) received[j] = 0;
            for (std::int64_t j = 0; j < f.keys && pairs; j++) eligible[j] = 0;
        }
        if (s.edges) x.edges_found() = 0;
        for (std::int64_t y = own.first_line; y <= own.last_line; y++) {
            const Columns line = x.map_line(y);
            for (std::int64_t n = 0; n < s.bins; n++) {
                line.sum[n] = 0;
                line.max[n] = -std::numeric_limits<double>::infinity();
            }
            for (std::int64_t n = 0; n < s.bins && pairs; n++) line.count[n] = 0;
            for (std::int64_t n = 0; n < 3 * s.bins; n++) line.largest[n] = -1;
        }
    }
    for (std::int64_t b = 0; b < f.batch; b++)
        for (std::int64_t n = own.first_block; n < own.end_of_blocks; n++) {
            if (stops(f)) return;
            run_look_block<T>(f, b * f.kv_heads + kv_head, n, share, own.first_line, scratch);
        }
}
void run_look(const Forward& f, std::int64_t task, void* scratch) {
    if (is_double(f)) return run_look_task<double>(f, task, scratch);
    run_look_task<float>(f, task, scratch);
}
// What shares have apart of a query head goes to the whole.
void gather_look(const Forward& f, std::int64_t head) {
    const RowStats& s = *f.look;
    const ShareOfHead all(f, 0, head, 0), first(f, 0, 0, 0);
    const bool pairs = all.counts_pairs();
    for (std::int64_t share = 1; share < s.shares; share++) {
        const Share own(f, share);
        const ShareOfHead x(f, share, head, own.first_line);
        if (s.whole.received) {
            const double* const received = x.received();
            const std::int64_t* const eligible = x.eligible();
            for (std::int64_t j = 0; j < f.keys; j++) all.received()[j] += received[j];
            for (std::int64_t j = 0; j < f.keys && pairs; j++) all.eligible()[j] += eligible[j];
        }
        for (std::int64_t y = own.first_line; y < own.first_line + lines_apart(f); y++) {
            const Columns to = all.map_line(y), from = x.map_line(y);
            for (std::int64_t n = 0; n < s.bins && pairs; n++) to.count[n] += from.count[n];
            for (std::int64_t n = 0; n < s.bins; n++) {
                to.sum[n] += from.sum[n];
                std::int32_t *a = to.largest + 3 * n, *z = from.largest + 3 * n;
                if (z[0] < 0 || from.max[n] < to.max[n]) continue;
                const auto earlier = [&] {
                    return z[0] != a[0] ? z[0] < a[0] : z[1] != a[1] ? z[1] < a[1] : z[2] < a[2];
                };
                if (from.max[n] == to.max[n] && !earlier()) continue;
                to.max[n] = from.max[n];
                for (int k = 0; k < 3; k++) a[k] = z[k];
            }
        }
    }
    if (s.whole.received && pairs && counted_by_spans(f))
        for (std::int64_t j = 1; j < f.keys; j++) all.eligible()[j] += all.eligible()[j - 1];
    if (s.whole.received && !pairs)
        for (std::int64_t j = 0; j < f.keys; j++) all.eligible()[j] = first.eligible()[j];
    for (std::int64_t y = 0; y < s.bins; y++) {
        const Columns line = all.map_line(y);
        for (std::int64_t n = 0; n < s.bins && !pairs; n++) line.count[n] = first.map_line(y).count[n];
        for (std::int64_t n = 0; n < s.bins; n++)  // nothing was seen
            if (line.max[n] == -std::numeric_limits<double>::infinity())
                line.max[n] = std::numeric_limits<double>::quiet_NaN();
    }
}

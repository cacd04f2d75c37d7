// How a backward pass is cut into tasks; included inside each target's namespace.
template <class T>
std::size_t sums_of(const Forward& f) {
    constexpr int L = LANES<T>;
    return sizeof(T) * std::size_t(f.keys * ((f.head_dim + L - 1) / L * L + (f.v_head_dim + L - 1) / L * L));
}
std::size_t sums(const Forward& f) { return is_double(f) ? sums_of<double>(f) : sums_of<float>(f); }
template <class T>
std::size_t gradient_scratch_of(const Backward& g) {
#if defined(BF16_DOT)
    if constexpr (sizeof(T) == 4) {  // the gradient of a bias is plain whatever the rest is
        const std::size_t plain = Gradient<T, QUERY_VECTORS>::scratch(g),
                          pairs = Gradient<T, QUERY_VECTORS, Pairs>::scratch(g);
        return plain > pairs ? plain : pairs;
    }
#endif
    return Gradient<T, QUERY_VECTORS>::scratch(g);
}
// The row blocks of a head, and the groups they are cut into, from the sizes alone: a last block of one vector is a
// group of its own.
template <class T>
struct Groups {
    std::int64_t rows, blocks, groups;
    int size, rest;  // blocks of a group; rows of that last block, or 0
    explicit Groups(const Forward& f) : rows(f.queries * (f.heads / f.kv_heads)), rest(int(rows % MOST)) {
        constexpr std::int64_t enough = 16;  // groups of all heads, that threads are busy to the end
        if (rest > LANES<T>) rest = 0;
        blocks = (rows - rest + MOST - 1) / MOST;
        const std::int64_t wanted = enough / (f.batch * f.kv_heads + 1) + 1, even = blocks / wanted;
        size = even < 1 ? 1 : even < TOGETHER ? int(even) : TOGETHER;
        groups = (blocks + size - 1) / size;
    }
    std::int64_t count() const { return groups + (rest > 0 || groups == 0); }
    // Which blocks a group has: all but the last of `rest` rows are whole.
    int some(std::int64_t group, Rows* to) const {
        if (group == groups) {
            *to = {blocks * MOST, rest};
            return rest > 0;
        }
        int count = 0;
        for (std::int64_t n = size * group; n < blocks && n < size * (group + 1); n++) {
            const std::int64_t left = rows - n * MOST;
            to[count++] = {n * MOST, int(left < MOST ? left : MOST)};
        }
        return count;
    }

private:
    static constexpr int MOST = QUERY_VECTORS * LANES<T>;
};
std::int64_t groups(const Forward& f) { return is_double(f) ? Groups<double>(f).count() : Groups<float>(f).count(); }
std::size_t gradient_scratch(const Backward& g) {
    const std::int64_t blocks = is_double(g.forward) ? blocks_of<double>(g.forward) : blocks_of<float>(g.forward);
    const std::size_t one = is_double(g.forward) ? gradient_scratch_of<double>(g) : gradient_scratch_of<float>(g);
    return one * std::size_t(blocks < 1 ? 1 : blocks < TOGETHER ? blocks : TOGETHER);
}

template <class T, int QV, class Op = Plain<T>>
void run_gradient_blocks(Turns<T>& turns, void* scratch, const Rows* rows, int count) {
    using Block = Gradient<T, QV, Op>;
    const Forward& f = turns.g.forward;
    Arena memory{reinterpret_cast<std::uintptr_t>(scratch)};
    alignas(Block) unsigned char room[TOGETHER][sizeof(Block)];
    Block* block[TOGETHER];
    std::int64_t begin = f.keys, end = 0;
    for (int n = 0; n < count; n++) {
        block[n] = new (room[n]) Block(turns.g, turns.head / f.kv_heads, turns.head % f.kv_heads, memory);
        if (n) block[n]->share(*block[0]);
        block[n]->start(rows[n].first, rows[n].count);
        if (block[n]->begin < begin) begin = block[n]->begin;
        if (block[n]->end > end) end = block[n]->end;
    }
    for (std::int64_t j = begin; j < end; j += Block::KEYS) {
        if (stops(f)) return;
        const std::int64_t to = j + Block::KEYS < end ? j + Block::KEYS : end;
        Block* met[TOGETHER];
        int alike = 0;  // of those that met, how many still to be added have met the same keys
        bool entered = false;
        const auto add = [&] {
            if (!entered && !(entered = turns.enter(to))) return false;
            Block::add(met, alike, turns);
            alike = 0;
            return true;
        };
        for (int n = 0; n < count; n++) {
            if (!block[n]->meet(j)) continue;
            if (alike && (met[0]->from != block[n]->from || met[0]->to != block[n]->to) && !add()) return;
            met[alike++] = block[n];
        }
        if (alike && !add()) return;
        if (entered) turns.leave(to);
    }
    for (int n = 0; n < count; n++) block[n]->finish();
    turns.leave_all();
}
template <class T>
void run_gradient_group(const Backward& g, std::int64_t head, std::int64_t group, void* scratch, void* sums,
                        std::atomic<std::int64_t>* passed) {
    const Forward& f = g.forward;
    constexpr int L = LANES<T>;
    const Groups<T> all(f);
    const int k_width = int((f.head_dim + L - 1) / L * L), v_width = int((f.v_head_dim + L - 1) / L * L);
    T* const dk = static_cast<T*>(sums);
    Turns<T> turns{g, head, group, all.count(), dk, dk + f.keys * k_width, k_width, v_width, passed};
    Rows some[TOGETHER];
    const int count = all.some(group, some);
    const auto run = [&](auto vectors) {
        constexpr int QV = decltype(vectors)::value;
#if defined(BF16_DOT)
        if constexpr (sizeof(T) == 4)
            if (gradient_in_pairs(f)) return run_gradient_blocks<T, QV, Pairs>(turns, scratch, some, count);
#endif
        run_gradient_blocks<T, QV>(turns, scratch, some, count);
    };
    if (group == all.groups)
        run(std::integral_constant<int, 1>{});
    else
        run(std::integral_constant<int, QUERY_VECTORS>{});
}
void run_gradient(const Backward& g, std::int64_t head, std::int64_t group, void* scratch, void* sums,
                  std::atomic<std::int64_t>* passed) {
    if (is_double(g.forward)) return run_gradient_group<double>(g, head, group, scratch, sums, passed);
    run_gradient_group<float>(g, head, group, scratch, sums, passed);
}

// The gradient of the bias. Where the bias repeats over an axis, one task goes through all of it, in order.
struct BiasTasks {
    std::int64_t batches, heads, blocks;  // how many of each are tasks of their own
};
template <class T>
BiasTasks bias_tasks_of(const Backward& g) {
    const Forward& f = g.forward;
    const std::int64_t group = f.heads / f.kv_heads;
    const bool straddles =
        g.dbias_stride[1] == 0 && (QUERY_VECTORS * LANES<T>) % group != 0;  // a query's heads in two blocks
    return {g.dbias_stride[0] ? f.batch : 1, g.dbias_stride[1] ? f.kv_heads : 1,
            g.dbias_stride[2] && !straddles ? blocks_of<T>(f) : 1};
}
std::int64_t bias_tasks(const Backward& g) {
    const BiasTasks n = is_double(g.forward) ? bias_tasks_of<double>(g) : bias_tasks_of<float>(g);
    return n.batches * n.heads * n.blocks;
}
template <class T>
void run_bias_task(const Backward& g, std::int64_t task, void* scratch) {
    const Forward& f = g.forward;
    const BiasTasks n = bias_tasks_of<T>(g);
    const std::int64_t rows = f.queries * (f.heads / f.kv_heads), all = blocks_of<T>(f);
    const std::int64_t block = task % n.blocks, head = task / n.blocks % n.heads, batch = task / n.blocks / n.heads;
    constexpr int most = QUERY_VECTORS * LANES<T>;
    for (std::int64_t b = n.batches > 1 ? batch : 0; b < (n.batches > 1 ? batch + 1 : f.batch); b++)
        for (std::int64_t h = n.heads > 1 ? head : 0; h < (n.heads > 1 ? head + 1 : f.kv_heads); h++)
            for (std::int64_t m = n.blocks > 1 ? block : 0; m < (n.blocks > 1 ? block + 1 : all); m++) {
                if (stops(f)) return;
                const std::int64_t first = m * most;
                const int count = int(rows - first < most ? rows - first : most);
                Arena memory{reinterpret_cast<std::uintptr_t>(scratch)};
                Gradient<T, QUERY_VECTORS>(g, b, h, memory).add_to_bias(first, count);
            }
}
void run_bias_gradient(const Backward& g, std::int64_t task, void* scratch) {
    if (is_double(g.forward)) return run_bias_task<double>(g, task, scratch);
    run_bias_task<float>(g, task, scratch);
}

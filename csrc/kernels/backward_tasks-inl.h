// The tasks of a backward pass.

std::size_t gradient_sums_bytes(const Forward& f) {
    return with_accumulation_type(f, [&]<class T>() {
        return sizeof(T) * std::size_t(f.keys * (padded_width<T>(f.head_dim) + padded_width<T>(f.v_head_dim)));
    });
}
template <class T>
std::size_t gradient_scratch_of(const Backward& g) {
    const std::size_t bias = g.dbias ? BackwardBlock<T, QUERY_VECTORS>::scratch(g) : 0;  // computed without pairs
    const std::size_t block = with_multiply_add<T>(
        gradient_uses_pairs(g.forward), [&]<class Op>() { return BackwardBlock<T, QUERY_VECTORS, Op>::scratch(g); });
    return block > bias ? block : bias;
}
// Divides the rows of a head into blocks, and these into groups. The division depends on the rows alone, so that
// results depend neither on the number of threads nor on the size of the batch. A last block of at most one vector of
// rows is a group of its own.
template <class T>
struct Groups {
    std::int64_t rows, blocks, groups;
    int size, remainder;  // blocks of a group; rows of that last block, or 0
    explicit Groups(const Forward& f) : rows(f.queries * (f.heads / f.kv_heads)), remainder(int(rows % MAX_ROWS)) {
        if (remainder > LANES<T> || f.uniform) remainder = 0;
        blocks = (rows - remainder + MAX_ROWS - 1) / MAX_ROWS;
        const std::int64_t least = (blocks + MAX_GROUP_BLOCKS - 1) / MAX_GROUP_BLOCKS;
        size = f.uniform ? MAX_GROUP_BLOCKS : least ? int((blocks + least - 1) / least) : 1;
        groups = (blocks + size - 1) / size;
    }
    std::int64_t count() const { return groups + (remainder > 0 || groups == 0); }
    // The rows of a group's blocks; returns their number.
    int row_blocks(std::int64_t group, RowRange* to) const {
        if (group == groups) {
            *to = {blocks * MAX_ROWS, remainder};
            return remainder > 0;
        }
        int count = 0;
        for (std::int64_t n = size * group; n < blocks && n < size * (group + 1); n++) {
            const std::int64_t left = rows - n * MAX_ROWS;
            to[count++] = {n * MAX_ROWS, int(left < MAX_ROWS ? left : MAX_ROWS)};
        }
        return count;
    }

private:
    static constexpr int MAX_ROWS = QUERY_VECTORS * LANES<T>;
};
std::int64_t gradient_groups(const Forward& f) {
    return with_accumulation_type(f, [&]<class T>() { return Groups<T>(f).count(); });
}
std::size_t gradient_scratch(const Backward& g) {
    const std::int64_t blocks = row_block_count(g.forward);
    const std::size_t block_bytes =
        with_accumulation_type(g.forward, [&]<class T>() { return gradient_scratch_of<T>(g); });
    return block_bytes * std::size_t(blocks < 1 ? 1 : blocks < MAX_GROUP_BLOCKS ? blocks : MAX_GROUP_BLOCKS);
}

// Runs the backward pass of a group of row blocks, one block of keys at a time.
template <class T, int QV, class Op>
void run_row_blocks(GradientTurns<T>& ordered, void* scratch, const RowRange* rows, int count) {
    using Block = BackwardBlock<T, QV, Op>;
    const Forward& f = ordered.g.forward;
    Arena memory{reinterpret_cast<std::uintptr_t>(scratch)};
    alignas(Block) unsigned char storage[MAX_GROUP_BLOCKS][sizeof(Block)];
    Block* block[MAX_GROUP_BLOCKS];
    std::int64_t begin = f.keys, end = 0;
    for (int n = 0; n < count; n++) {
        block[n] = new (storage[n]) Block(ordered.g, ordered.head / f.kv_heads, ordered.head % f.kv_heads, memory);
        if (n) block[n]->share_buffers(*block[0]);
        block[n]->start(rows[n].first, rows[n].count);
        if (block[n]->begin == block[n]->end) continue;  // rows without visible keys must not move the blocks of keys
        if (block[n]->begin < begin) begin = block[n]->begin;
        if (block[n]->end > end) end = block[n]->end;
    }
    for (std::int64_t j = begin; j < end; j += Block::KEYS) {
        if (is_cancelled(f)) return;
        const std::int64_t to = j + Block::KEYS < end ? j + Block::KEYS : end;
        Block* processed[MAX_GROUP_BLOCKS];
        int pending = 0;  // blocks that have processed the same keys, whose gradients are not added yet
        bool has_turn = false;
        const auto add_pending = [&] {
            if (!has_turn) has_turn = ordered.wait_for_turn(to);
            if (!has_turn) return false;
            Block::add_key_gradients(processed, pending, ordered);
            pending = 0;
            return true;
        };
        for (int n = 0; n < count; n++) {
            if (!block[n]->process_keys(j)) continue;
            // Sums over the rows of several blocks would depend on which of them have the same range of keys.
            const bool is_apart =
                pending && (f.uniform || processed[0]->from != block[n]->from || processed[0]->to != block[n]->to);
            if (is_apart && !add_pending()) return;
            processed[pending++] = block[n];
        }
        if (pending && !add_pending()) return;
        if (has_turn) ordered.end_turn(to);
    }
    for (int n = 0; n < count; n++) {
        block[n]->store_dq();
        block[n]->store_dsinks();
    }
    ordered.finish();
}
template <class T>
void run_gradient_group(const Backward& g, std::int64_t head, std::int64_t group, void* scratch, void* sums,
                        std::atomic<std::int64_t>* passed) {
    const Forward& f = g.forward;
    const Groups<T> all(f);
    const int k_width = padded_width<T>(f.head_dim), v_width = padded_width<T>(f.v_head_dim);
    T* const dk = static_cast<T*>(sums);
    GradientTurns<T> ordered{g, head, group, all.count(), dk, dk + f.keys * k_width, k_width, v_width, passed};
    RowRange row_ranges[MAX_GROUP_BLOCKS];
    const int count = all.row_blocks(group, row_ranges);
    with_multiply_add<T>(gradient_uses_pairs(f), [&]<class Op>() {
        if (group == all.groups)  // the last block, of one vector
            run_row_blocks<T, 1, Op>(ordered, scratch, row_ranges, count);
        else
            run_row_blocks<T, QUERY_VECTORS, Op>(ordered, scratch, row_ranges, count);
    });
}
void run_gradient(const Backward& g, std::int64_t head, std::int64_t group, void* scratch, void* sums,
                  std::atomic<std::int64_t>* passed) {
    with_accumulation_type(g.forward, [&]<class T>() { run_gradient_group<T>(g, head, group, scratch, sums, passed); });
}

// The gradient of the bias. If the bias is broadcast along an axis, one task sums over all of it, in order.
struct BiasTasks {
    std::int64_t batches, heads, blocks;  // 1 for an axis that each task sums over
};
template <class T>
BiasTasks bias_tasks_of(const Backward& g) {
    const Forward& f = g.forward;
    const std::int64_t group = f.heads / f.kv_heads;
    const bool query_straddles_blocks =
        g.dbias_stride[1] == 0 && (QUERY_VECTORS * LANES<T>) % group != 0;  // the heads of one query lie in two blocks
    return {g.dbias_stride[0] ? f.batch : 1, g.dbias_stride[1] ? f.kv_heads : 1,
            g.dbias_stride[2] && !query_straddles_blocks ? row_block_count<T>(f) : 1};
}
std::int64_t bias_tasks(const Backward& g) {
    const BiasTasks n = with_accumulation_type(g.forward, [&]<class T>() { return bias_tasks_of<T>(g); });
    return n.batches * n.heads * n.blocks;
}
template <class T>
void run_bias_task(const Backward& g, std::int64_t task, void* scratch) {
    const Forward& f = g.forward;
    const BiasTasks n = bias_tasks_of<T>(g);
    const std::int64_t rows = f.queries * (f.heads / f.kv_heads), all = row_block_count<T>(f);
    const std::int64_t block = task % n.blocks, head = task / n.blocks % n.heads, batch = task / n.blocks / n.heads;
    constexpr int max_rows = QUERY_VECTORS * LANES<T>;
    for (std::int64_t b = n.batches > 1 ? batch : 0; b < (n.batches > 1 ? batch + 1 : f.batch); b++)
        for (std::int64_t h = n.heads > 1 ? head : 0; h < (n.heads > 1 ? head + 1 : f.kv_heads); h++)
            for (std::int64_t m = n.blocks > 1 ? block : 0; m < (n.blocks > 1 ? block + 1 : all); m++) {
                if (is_cancelled(f)) return;
                const std::int64_t first = m * max_rows;
                const int count = int(rows - first < max_rows ? rows - first : max_rows);
                Arena memory{reinterpret_cast<std::uintptr_t>(scratch)};
                BackwardBlock<T, QUERY_VECTORS>(g, b, h, memory).accumulate_bias_gradient(first, count);
            }
}
void run_bias_gradient(const Backward& g, std::int64_t task, void* scratch) {
    with_accumulation_type(g.forward, [&]<class T>() { run_bias_task<T>(g, task, scratch); });
}

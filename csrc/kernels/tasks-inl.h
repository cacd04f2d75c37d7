// What a target offers to dispatch.cpp, but for what reductions-inl.h does; included inside each target's namespace.

template <class T>
std::int64_t blocks_of(const Forward& f) {
    constexpr int most = QUERY_VECTORS * LANES<T>;
    return (f.queries * (f.heads / f.kv_heads) + most - 1) / most;
}
struct Rows {
    std::int64_t first;
    int count;
};
// The rows of a block. A short last one would leave registers idle, so all are made about equally long; but few rows
// are fast.
template <class T>
Rows rows_of(const Forward& f, std::int64_t number) {
    constexpr int L = LANES<T>, most = QUERY_VECTORS * L;
    const std::int64_t rows = f.queries * (f.heads / f.kv_heads), rest = rows % most;
    std::int64_t first = number * most, end = first + most;
    if (rest > MOST_FEW<T>) {
        const std::int64_t vectors = (rows + L - 1) / L, blocks = blocks_of<T>(f);
        first = vectors * number / blocks * L;
        end = vectors * (number + 1) / blocks * L;
    }
    return {first, int((end < rows ? end : rows) - first)};
}
inline bool is_double(const Forward& f) { return f.q.dtype == Dtype::f64; }

// Into how many parts the keys of each block are cut: few blocks, many keys. From the sizes alone.
std::int64_t shares(const Forward& f) {
    constexpr std::int64_t enough = 64, least = 1024;  // tasks; keys of a share
    const std::int64_t blocks = f.batch * f.kv_heads * (is_double(f) ? blocks_of<double>(f) : blocks_of<float>(f));
    if (blocks == 0 || blocks >= enough || f.keys < 2 * least) return 1;
    const std::int64_t wanted = (enough + blocks - 1) / blocks, possible = f.keys / least;
    return wanted < possible ? wanted : possible;
}
template <class T>
std::int64_t partial_of(const Forward& f) {
    return ((f.v_head_dim + 31) / 32 * 32 + 2) * QUERY_VECTORS * LANES<T>;  // 32: whole words of Few
}
std::size_t partial(const Forward& f) {
    const std::int64_t parts = shares(f);
    if (parts == 1) return 0;
    const std::int64_t heads = f.batch * f.kv_heads;
    if (is_double(f)) return sizeof(double) * std::size_t(heads * blocks_of<double>(f) * parts * partial_of<double>(f));
    return sizeof(float) * std::size_t(heads * blocks_of<float>(f) * parts * partial_of<float>(f));
}
std::int64_t tasks(const Forward& f) {
    return f.batch * f.kv_heads * (is_double(f) ? blocks_of<double>(f) : blocks_of<float>(f)) * shares(f);
}
// Whether products are taken of pairs of bf16. The pairs of q and k run along D, so D must be even.
bool in_pairs([[maybe_unused]] const Forward& f) {
#if defined(BF16_DOT)
    return f.q.dtype == Dtype::bf16 && f.head_dim % 2 == 0;
#else
    return false;
#endif
}
// Backward, those of dout and v run along Dv.
[[maybe_unused]] bool gradient_in_pairs(const Forward& f) { return in_pairs(f) && f.v_head_dim % 2 == 0; }

// Values as words of two keys: made once where several blocks of rows will read them, and of keys alone that any may
// see.
constexpr std::int64_t PREPARED_KEYS = 512;  // of a task; even
std::size_t prepared(const Forward& f) {
    constexpr std::int64_t little = 1 << 16;  // words that are made again sooner than threads have met once more
    const std::int64_t words = f.batch * f.kv_heads * pairs_seen(f) * f.v_head_dim;
    if (!in_pairs(f) || (blocks_of<float>(f) - 1) * words < little) return 0;
    return std::size_t(words * 4);
}
std::int64_t prepare_tasks(const Forward& f) {
    return f.batch * f.kv_heads * ((2 * pairs_seen(f) + PREPARED_KEYS - 1) / PREPARED_KEYS);
}
void prepare(const Forward& f, std::int64_t task) {
    const std::int64_t pairs = pairs_seen(f), parts = (2 * pairs + PREPARED_KEYS - 1) / PREPARED_KEYS,
                       head = task / parts;
    const std::int64_t pair = task % parts * (PREPARED_KEYS / 2), j = f.seen[0] / 2 * 2 + 2 * pair,
                       end = end_of_seen(f);
    const int keys = int(end - j < PREPARED_KEYS ? end - j : PREPARED_KEYS), width = int(f.v_head_dim);
    auto* to = static_cast<std::uint32_t*>(f.paired_v) + (head * pairs + pair) * width;
    const auto* first = reinterpret_cast<const std::uint16_t*>(at(f.v, head / f.kv_heads, head % f.kv_heads, j, 2));
    const int hidden = int(j < f.seen[0] ? f.seen[0] - j : 0);  // the other half of the first word
    pair_rows(keys, width, width, to,
              [=, stride = f.v.stride[2]](int n) { return n < hidden ? nullptr : first + n * stride; });
}

// body(an Attend that fits), for block `number` of a head.
template <class T, class Body>
void with_block(const Forward& f, std::int64_t head, std::int64_t number, void* scratch, const Body& body) {
    constexpr int L = LANES<T>, few = MOST_FEW<T>;
    const std::int64_t b = head / f.kv_heads, h = head % f.kv_heads;
    const auto [first, count] = rows_of<T>(f, number);
    Arena memory{reinterpret_cast<std::uintptr_t>(scratch)};
#if defined(BF16_DOT)
    if constexpr (sizeof(T) == 4)
        if (in_pairs(f)) {
            if (count == 1) return body(Attend<T, 1, 1, Pairs>(f, b, h, memory), first, count);
            if (count == 2) return body(Attend<T, 1, 2, Pairs>(f, b, h, memory), first, count);
            if (count <= 4) return body(Attend<T, 1, 4, Pairs>(f, b, h, memory), first, count);
            if (count <= 8) return body(Attend<T, 1, 8, Pairs>(f, b, h, memory), first, count);
            if (count <= L) return body(Attend<T, 1, L, Pairs>(f, b, h, memory), first, count);
            if (count <= 2 * L) return body(Attend<T, 2, 0, Pairs>(f, b, h, memory), first, count);
            return body(Attend<T, QUERY_VECTORS, 0, Pairs>(f, b, h, memory), first, count);
        }
#endif
    if (count == 1) return body(Attend<T, 1, 1>(f, b, h, memory), first, count);
    if (count == 2) return body(Attend<T, 1, 2>(f, b, h, memory), first, count);
    if (few >= 4 && count <= 4) return body(Attend < T, 1, few<4 ? few : 4>(f, b, h, memory), first, count);
    if (few >= 8 && count <= 8) return body(Attend<T, 1, few>(f, b, h, memory), first, count);
    if (L > few && count <= L) return body(Attend<T, 1, L>(f, b, h, memory), first, count);
    if (QUERY_VECTORS > 2 && count <= 2 * L) return body(Attend<T, 2>(f, b, h, memory), first, count);
    body(Attend<T, QUERY_VECTORS>(f, b, h, memory), first, count);
}
template <class T>
std::size_t scratch_of(const Forward& f) {
    std::size_t most = Attend<T, QUERY_VECTORS>::scratch(f);
    const auto at_least = [&](std::size_t size) {
        if (size > most) most = size;
    };
    at_least(Attend<T, 1, MOST_FEW<T>>::scratch(f));
    at_least(Attend<T, 1, LANES<T>>::scratch(f));
#if defined(BF16_DOT)
    if constexpr (sizeof(T) == 4) {
        at_least(Attend<T, QUERY_VECTORS, 0, Pairs>::scratch(f));
        at_least(Attend<T, 1, 16, Pairs>::scratch(f));
    }
#endif
    return most;
}
std::size_t scratch(const Forward& f) { return is_double(f) ? scratch_of<double>(f) : scratch_of<float>(f); }

// Head by head, so that neighbouring tasks find the keys and values in the cache; of each head the last blocks come
// first: under a causal mask they see the most.
template <class T>
void run_task(const Forward& f, std::int64_t task, void* scratch) {
    const std::int64_t blocks = blocks_of<T>(f), parts = shares(f), share = task % parts, block = task / parts;
    T* left = static_cast<T*>(f.partial) + task * partial_of<T>(f);
    with_block<T>(f, block / blocks, blocks - 1 - block % blocks, scratch,
                  [&](auto&& attend, std::int64_t first, int count) { attend.run(first, count, share, parts, left); });
}
void run(const Forward& f, std::int64_t task, void* scratch) {
    if (is_double(f)) return run_task<double>(f, task, scratch);
    run_task<float>(f, task, scratch);
}
template <class T>
void merge_block(const Forward& f, std::int64_t block, void* scratch) {
    const std::int64_t blocks = blocks_of<T>(f), parts = shares(f), size = partial_of<T>(f);
    const T* left = static_cast<const T*>(f.partial) + block * parts * size;
    with_block<T>(f, block / blocks, blocks - 1 - block % blocks, scratch,
                  [&](auto&& attend, std::int64_t first, int count) { attend.merge(first, count, parts, left, size); });
}
void merge(const Forward& f, std::int64_t block, void* scratch) {
    if (is_double(f)) return merge_block<double>(f, block, scratch);
    merge_block<float>(f, block, scratch);
}

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

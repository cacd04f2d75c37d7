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

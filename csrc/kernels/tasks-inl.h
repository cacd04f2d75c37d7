// What a target offers to dispatch.cpp, but for what reductions-inl.h does; included inside each target's namespace.

template <class T>
std::int64_t row_block_count(const Forward& f) {
    constexpr int max_rows = QUERY_VECTORS * LANES<T>;
    return (f.queries * (f.heads / f.kv_heads) + max_rows - 1) / max_rows;
}
struct RowRange {
    std::int64_t first;
    int count;
};
// The rows of a block. A short last one would leave registers idle, so all are made about equally long; but few rows
// are fast.
template <class T>
RowRange rows_of_block(const Forward& f, std::int64_t number) {
    constexpr int L = LANES<T>, max_rows = QUERY_VECTORS * L;
    const std::int64_t rows = f.queries * (f.heads / f.kv_heads), rest = rows % max_rows;
    std::int64_t first = number * max_rows, end = first + max_rows;
    if (rest > MAX_DECODE_ROWS<T>) {
        const std::int64_t vectors = (rows + L - 1) / L, blocks = row_block_count<T>(f);
        first = vectors * number / blocks * L;
        end = vectors * (number + 1) / blocks * L;
    }
    return {first, int((end < rows ? end : rows) - first)};
}
inline bool is_double(const Forward& f) { return f.q.dtype == Dtype::f64; }

// Into how many splits the keys of each block are cut: few blocks, many keys. From the sizes alone.
std::int64_t key_splits(const Forward& f) {
    constexpr std::int64_t MIN_TASKS = 64, MIN_SPLIT_KEYS = 1024;  // tasks; keys of a split
    const std::int64_t blocks =
        f.batch * f.kv_heads * (is_double(f) ? row_block_count<double>(f) : row_block_count<float>(f));
    if (blocks == 0 || blocks >= MIN_TASKS || f.keys < 2 * MIN_SPLIT_KEYS) return 1;
    const std::int64_t target_splits = (MIN_TASKS + blocks - 1) / blocks, max_splits = f.keys / MIN_SPLIT_KEYS;
    return target_splits < max_splits ? target_splits : max_splits;
}
template <class T>
std::int64_t partial_size(const Forward& f) {
    return ((f.v_head_dim + 31) / 32 * 32 + 2) * QUERY_VECTORS * LANES<T>;  // 32: whole words of Few
}
std::size_t partial_bytes(const Forward& f) {
    const std::int64_t splits = key_splits(f);
    if (splits == 1) return 0;
    const std::int64_t heads = f.batch * f.kv_heads;
    if (is_double(f))
        return sizeof(double) * std::size_t(heads * row_block_count<double>(f) * splits * partial_size<double>(f));
    return sizeof(float) * std::size_t(heads * row_block_count<float>(f) * splits * partial_size<float>(f));
}
std::int64_t forward_tasks(const Forward& f) {
    return f.batch * f.kv_heads * (is_double(f) ? row_block_count<double>(f) : row_block_count<float>(f)) *
           key_splits(f);
}
// Whether products are taken of pairs of bf16. The pairs of q and k run along D, so D must be even.
bool uses_pairs([[maybe_unused]] const Forward& f) {
#if defined(BF16_DOT)
    return f.q.dtype == Dtype::bf16 && f.head_dim % 2 == 0;
#else
    return false;
#endif
}
// Backward, those of dout and v run along Dv.
[[maybe_unused]] bool gradient_uses_pairs(const Forward& f) { return uses_pairs(f) && f.v_head_dim % 2 == 0; }

// Values as words of two keys: made once where several blocks of rows will read them, and of keys alone that any may
// see.
constexpr std::int64_t PAIRING_TASK_KEYS = 512;  // of a task; even
std::size_t paired_v_bytes(const Forward& f) {
    constexpr std::int64_t MIN_PAIRED_WORDS =
        1 << 16;  // words that are made again sooner than threads have met once more
    const std::int64_t words = f.batch * f.kv_heads * visible_pairs(f) * f.v_head_dim;
    if (!uses_pairs(f) || (row_block_count<float>(f) - 1) * words < MIN_PAIRED_WORDS) return 0;
    return std::size_t(words * 4);
}
std::int64_t pairing_tasks(const Forward& f) {
    return f.batch * f.kv_heads * ((2 * visible_pairs(f) + PAIRING_TASK_KEYS - 1) / PAIRING_TASK_KEYS);
}
void pair_values(const Forward& f, std::int64_t task) {
    const std::int64_t pairs = visible_pairs(f), splits = (2 * pairs + PAIRING_TASK_KEYS - 1) / PAIRING_TASK_KEYS,
                       head = task / splits;
    const std::int64_t pair = task % splits * (PAIRING_TASK_KEYS / 2), j = f.visible_begin / 2 * 2 + 2 * pair,
                       end = visible_end_of(f);
    const int keys = int(end - j < PAIRING_TASK_KEYS ? end - j : PAIRING_TASK_KEYS), width = int(f.v_head_dim);
    auto* to = static_cast<std::uint32_t*>(f.paired_v) + (head * pairs + pair) * width;
    const auto* first =
        reinterpret_cast<const std::uint16_t*>(element_address(f.v, head / f.kv_heads, head % f.kv_heads, j, 2));
    const int skipped = int(j < f.visible_begin ? f.visible_begin - j : 0);  // the other half of the first word
    interleave_rows(keys, width, width, to,
                    [=, stride = f.v.stride[2]](int n) { return n < skipped ? nullptr : first + n * stride; });
}

// body(an ForwardBlock that fits), for block `number` of a head.
template <class T, class Body>
void with_forward_block(const Forward& f, std::int64_t head, std::int64_t number, void* scratch, const Body& body) {
    constexpr int L = LANES<T>, few = MAX_DECODE_ROWS<T>;
    const std::int64_t b = head / f.kv_heads, h = head % f.kv_heads;
    const auto [first, count] = rows_of_block<T>(f, number);
    Arena memory{reinterpret_cast<std::uintptr_t>(scratch)};
#if defined(BF16_DOT)
    if constexpr (sizeof(T) == 4)
        if (uses_pairs(f)) {
            if (count == 1) return body(ForwardBlock<T, 1, 1, Bf16Dot>(f, b, h, memory), first, count);
            if (count == 2) return body(ForwardBlock<T, 1, 2, Bf16Dot>(f, b, h, memory), first, count);
            if (count <= 4) return body(ForwardBlock<T, 1, 4, Bf16Dot>(f, b, h, memory), first, count);
            if (count <= 8) return body(ForwardBlock<T, 1, 8, Bf16Dot>(f, b, h, memory), first, count);
            if (count <= L) return body(ForwardBlock<T, 1, L, Bf16Dot>(f, b, h, memory), first, count);
            if (count <= 2 * L) return body(ForwardBlock<T, 2, 0, Bf16Dot>(f, b, h, memory), first, count);
            return body(ForwardBlock<T, QUERY_VECTORS, 0, Bf16Dot>(f, b, h, memory), first, count);
        }
#endif
    if (count == 1) return body(ForwardBlock<T, 1, 1>(f, b, h, memory), first, count);
    if (count == 2) return body(ForwardBlock<T, 1, 2>(f, b, h, memory), first, count);
    if (few >= 4 && count <= 4) return body(ForwardBlock < T, 1, few<4 ? few : 4>(f, b, h, memory), first, count);
    if (few >= 8 && count <= 8) return body(ForwardBlock<T, 1, few>(f, b, h, memory), first, count);
    if (L > few && count <= L) return body(ForwardBlock<T, 1, L>(f, b, h, memory), first, count);
    if (QUERY_VECTORS > 2 && count <= 2 * L) return body(ForwardBlock<T, 2>(f, b, h, memory), first, count);
    body(ForwardBlock<T, QUERY_VECTORS>(f, b, h, memory), first, count);
}
template <class T>
std::size_t forward_scratch_of(const Forward& f) {
    std::size_t max_rows = ForwardBlock<T, QUERY_VECTORS>::scratch(f);
    const auto at_least = [&](std::size_t size) {
        if (size > max_rows) max_rows = size;
    };
    at_least(ForwardBlock<T, 1, MAX_DECODE_ROWS<T>>::scratch(f));
    at_least(ForwardBlock<T, 1, LANES<T>>::scratch(f));
#if defined(BF16_DOT)
    if constexpr (sizeof(T) == 4) {
        at_least(ForwardBlock<T, QUERY_VECTORS, 0, Bf16Dot>::scratch(f));
        at_least(ForwardBlock<T, 1, 16, Bf16Dot>::scratch(f));
    }
#endif
    return max_rows;
}
std::size_t forward_scratch(const Forward& f) {
    return is_double(f) ? forward_scratch_of<double>(f) : forward_scratch_of<float>(f);
}

// Head by head, so that neighbouring tasks find the keys and values in the cache; of each head the last blocks come
// first: under a causal mask they see the max_rows.
template <class T>
void run_forward_task(const Forward& f, std::int64_t task, void* scratch) {
    const std::int64_t blocks = row_block_count<T>(f), splits = key_splits(f), split = task % splits,
                       block = task / splits;
    T* partial = static_cast<T*>(f.partial_results) + task * partial_size<T>(f);
    with_forward_block<T>(
        f, block / blocks, blocks - 1 - block % blocks, scratch,
        [&](auto&& attend, std::int64_t first, int count) { attend.run(first, count, split, splits, partial); });
}
void run_forward(const Forward& f, std::int64_t task, void* scratch) {
    if (is_double(f)) return run_forward_task<double>(f, task, scratch);
    run_forward_task<float>(f, task, scratch);
}
template <class T>
void merge_splits_of_block(const Forward& f, std::int64_t block, void* scratch) {
    const std::int64_t blocks = row_block_count<T>(f), splits = key_splits(f), size = partial_size<T>(f);
    const T* partial = static_cast<const T*>(f.partial_results) + block * splits * size;
    with_forward_block<T>(f, block / blocks, blocks - 1 - block % blocks, scratch,
                          [&](auto&& attend, std::int64_t first, int count) {
                              attend.merge_splits(first, count, splits, partial, size);
                          });
}
void merge_splits(const Forward& f, std::int64_t block, void* scratch) {
    if (is_double(f)) return merge_splits_of_block<double>(f, block, scratch);
    merge_splits_of_block<float>(f, block, scratch);
}

// The tasks of a forward pass.

template <class T>
std::int64_t row_block_count(const Forward& f) {
    constexpr int max_rows = QUERY_VECTORS * LANES<T>;
    return (f.queries * (f.heads / f.kv_heads) + max_rows - 1) / max_rows;
}
std::int64_t row_block_count(const Forward& f) {
    return with_accumulation_type(f, [&]<class T>() { return row_block_count<T>(f); });
}
struct RowRange {
    std::int64_t first;
    int count;
};
// The rows of block `number`. A short last block would leave registers idle, so blocks have about equally many vectors;
// except if so few rows remain that the products of a decoding step compute them faster.
template <class T>
INLINE RowRange rows_of_block(const Forward& f, std::int64_t number) {
    constexpr int L = LANES<T>, max_rows = QUERY_VECTORS * L;
    const std::int64_t rows = f.queries * (f.heads / f.kv_heads), remainder = rows % max_rows;
    std::int64_t first = number * max_rows, end = first + max_rows;
    if (remainder > MAX_DECODE_ROWS<T> && !f.uniform) {
        const std::int64_t vectors = (rows + L - 1) / L, blocks = row_block_count<T>(f);
        first = vectors * number / blocks * L;
        end = vectors * (number + 1) / blocks * L;
    }
    return {first, int((end < rows ? end : rows) - first)};
}

// The most splits of the keys of a row block: more than 1 for few rows and many keys. It depends on the queries and
// keys of one batch entry and head alone, so that results depend neither on the number of threads nor on the size of
// the batch. Partial results of many rows take longer to merge, so they have more keys.
template <class T>
std::int64_t key_splits(const Forward& f) {
    constexpr std::int64_t MAX_SPLITS = 64;
    const std::int64_t rows = f.queries * (f.heads / f.kv_heads), splits = f.keys / min_split_keys<T>(f);
    if (splits < 2 || rows > 2 * QUERY_VECTORS * LANES<T> || f.uniform) return 1;
    return splits < MAX_SPLITS ? splits : MAX_SPLITS;
}
std::int64_t key_splits(const Forward& f) {
    return with_accumulation_type(f, [&]<class T>() { return key_splits<T>(f); });
}
// The size of the partial result of one split, in numbers. Dv is padded to 32, the STEP of DecodePairs.
template <class T>
std::int64_t partial_size(const Forward& f) {
    const std::int64_t rows = f.queries * (f.heads / f.kv_heads), L = LANES<T>;
    return ((f.v_head_dim + 31) / 32 * 32 + 2) * (rows <= L ? L : QUERY_VECTORS * L);
}
std::size_t partial_bytes(const Forward& f) {
    const std::int64_t splits = key_splits(f);
    if (splits == 1) return 0;
    return with_accumulation_type(f, [&]<class T>() {
        return sizeof(T) * std::size_t(f.batch * f.kv_heads * row_block_count<T>(f) * splits * partial_size<T>(f));
    });
}
std::int64_t forward_tasks(const Forward& f) { return f.batch * f.kv_heads * row_block_count(f) * key_splits(f); }

// Whether matrix products multiply pairs of bf16. The pairs of q and k run along D, so D must be even.
bool uses_pairs([[maybe_unused]] const Forward& f) {
#if defined(BF16_DOT)
    return f.q.dtype == Dtype::bf16 && f.head_dim % 2 == 0;
#else
    return false;
#endif
}
// In the backward pass, pairs of dout and v run along Dv.
[[maybe_unused]] bool gradient_uses_pairs(const Forward& f) { return uses_pairs(f) && f.v_head_dim % 2 == 0; }
// Whether a row block has a query that is needed.
template <class T>
bool is_needed(const Forward& f, std::int64_t number) {
    const std::int64_t group = f.heads / f.kv_heads;
    const RowRange rows = rows_of_block<T>(f, number);
    const std::int64_t first = rows.first / group, last = (rows.first + rows.count - 1) / group;
    for (std::int64_t n = 0; n < f.needed_ranges; n++)
        if (last >= f.needed_queries[2 * n] && first < f.needed_queries[2 * n + 1]) return true;
    return false;
}

// Calls body.operator()<Op>() with the multiply-add of the products.
template <class T, class Body>
decltype(auto) with_multiply_add([[maybe_unused]] bool pairs, const Body& body) {
#if defined(BF16_DOT)
    if constexpr (sizeof(T) == 4)
        if (pairs) return body.template operator()<Bf16Dot>();
#endif
    return body.template operator()<Fma<T>>();
}

// Values with two keys to a word are written once a call if several row blocks read them, for visible keys only.
constexpr std::int64_t PAIRING_TASK_KEYS = 512;  // of a task; even
std::size_t paired_v_bytes(const Forward& f) {
    constexpr std::int64_t MIN_PAIRED_WORDS = 1 << 16;  // below, pairing in each block is faster than a barrier
    const std::int64_t words = f.batch * f.kv_heads * visible_pairs(f) * f.v_head_dim;
    if (!uses_pairs(f) || (row_block_count<float>(f) - 1) * words < MIN_PAIRED_WORDS) return 0;
    return std::size_t(words * 4);
}
std::int64_t pairing_tasks_of_head(const Forward& f) {
    return (2 * visible_pairs(f) + PAIRING_TASK_KEYS - 1) / PAIRING_TASK_KEYS;
}
std::int64_t pairing_tasks(const Forward& f) { return f.batch * f.kv_heads * pairing_tasks_of_head(f); }
void pair_values(const Forward& f, std::int64_t task) {
    const std::int64_t pairs = visible_pairs(f), head_tasks = pairing_tasks_of_head(f), head = task / head_tasks;
    const std::int64_t pair = task % head_tasks * (PAIRING_TASK_KEYS / 2), j = f.visible_begin / 2 * 2 + 2 * pair;
    const std::int64_t end = visible_end_of(f);
    const int keys = int(end - j < PAIRING_TASK_KEYS ? end - j : PAIRING_TASK_KEYS), width = int(f.v_head_dim);
    auto* to = static_cast<std::uint32_t*>(f.paired_v) + (head * pairs + pair) * width;
    const auto* first =
        reinterpret_cast<const std::uint16_t*>(element_address(f.v, head / f.kv_heads, head % f.kv_heads, j, 2));
    const int masked =
        int(j < f.visible_begin ? f.visible_begin - j : 0);  // 1 if only half of the first word is visible
    interleave_rows(keys, width, width, to,
                    [=, stride = f.v.stride[2]](int n) { return n < masked ? nullptr : first + n * stride; });
}

// Calls body(Block, first row, number of rows) for some rows of a head.
template <class T, class Block, class Body>
void with_rows(const Forward& f, std::int64_t head, RowRange rows, void* scratch, const Body& body) {
    Arena memory{reinterpret_cast<std::uintptr_t>(scratch)};
    body(Block(f, head / f.kv_heads, head % f.kv_heads, memory), rows.first, rows.count);
}
// The same for row block `number`, with the ForwardBlock for the number of rows.
template <class T, class Body>
void with_forward_block(const Forward& f, std::int64_t head, std::int64_t number, void* scratch, const Body& body) {
    constexpr int L = LANES<T>, D = MAX_DECODE_ROWS<T>;
    const RowRange rows = rows_of_block<T>(f, number);
    const int count = rows.count;
    with_multiply_add<T>(uses_pairs(f), [&]<class Op>() {
        const auto run = [&]<int QV, int G>() {
            with_rows<T, ForwardBlock<T, QV, G, Op>>(f, head, rows, scratch, body);
        };
        if (f.uniform && count <= L) return run.template operator()<1, 0>();
        if (f.uniform && QUERY_VECTORS > 2 && count <= 2 * L) return run.template operator()<2, 0>();
        if (f.uniform) return run.template operator()<QUERY_VECTORS, 0>();
        if (count == 1) return run.template operator()<1, 1>();
        if (count == 2) return run.template operator()<1, 2>();
        if (D >= 4 && count <= 4) return run.template operator()<1, (D < 4 ? D : 4)>();
        if (D >= 8 && count <= 8) return run.template operator()<1, D>();
        if (L > D && count <= L) return run.template operator()<1, L>();
        if (QUERY_VECTORS > 2 && count <= 2 * L) return run.template operator()<2, 0>();
        run.template operator()<QUERY_VECTORS, 0>();
    });
}
template <class T>
std::size_t forward_scratch_of(const Forward& f) {
    return with_multiply_add<T>(uses_pairs(f), [&]<class Op>() {
        const std::size_t sizes[] = {ForwardBlock<T, QUERY_VECTORS, 0, Op>::scratch(f),
                                     ForwardBlock<T, 1, MAX_DECODE_ROWS<T>, Op>::scratch(f),
                                     ForwardBlock<T, 1, LANES<T>, Op>::scratch(f)};
        std::size_t largest = 0;
        for (std::size_t size : sizes)
            if (size > largest) largest = size;
        return largest;
    });
}
std::size_t forward_scratch(const Forward& f) {
    return with_accumulation_type(f, [&]<class T>() { return forward_scratch_of<T>(f); });
}

// Tasks run head by head, so that neighbouring tasks share keys and values in the cache. The last blocks of a head run
// first: under a causal mask they have the most visible keys.
void run_forward(const Forward& f, std::int64_t task, void* scratch) {
    with_accumulation_type(f, [&]<class T>() {
        std::int64_t block = task, split = 0, splits = 1;
        T* partial = nullptr;
        if (f.partial_results) {  // else without its divisions, which are measurable in short sequences
            splits = key_splits<T>(f);
            split = task % splits;
            block = task / splits;
            partial = static_cast<T*>(f.partial_results) + task * partial_size<T>(f);
        }
        const std::int64_t blocks = row_block_count<T>(f), number = blocks - 1 - block % blocks;
        if (f.needed_queries && !is_needed<T>(f, number)) return;
        with_forward_block<T>(f, block / blocks, number, scratch, [&](auto&& attend, std::int64_t first, int count) {
            attend.attend_rows(first, count, split, splits, partial);
        });
    });
}
void merge_splits(const Forward& f, std::int64_t block, void* scratch) {
    with_accumulation_type(f, [&]<class T>() {
        const std::int64_t blocks = row_block_count<T>(f), splits = key_splits(f), size = partial_size<T>(f);
        const T* partial = static_cast<const T*>(f.partial_results) + block * splits * size;
        if (f.needed_queries && !is_needed<T>(f, blocks - 1 - block % blocks)) return;
        with_forward_block<T>(f, block / blocks, blocks - 1 - block % blocks, scratch,
                              [&](auto&& attend, std::int64_t first, int count) {
                                  attend.merge_splits(first, count, splits, partial, size);
                              });
    });
}

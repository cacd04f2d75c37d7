// The plain structs that cross between the Python binding and a target. They hold no vector types and no vector code:
// an inline function compiled for one instruction set must not be linked into another.
#pragma once

#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>

namespace headscope {

enum class Dtype : std::int32_t { f32 = 0, f64 = 1, bf16 = 2, f16 = 3 };

struct BFloat16 {
    std::uint16_t bits;
};
struct Float16 {
    std::uint16_t bits;
};

// In the comments, B is the batch size, H the number of query heads, Hkv that of key/value heads, Q and K the numbers
// of queries and keys, D the width of a query or key head, Dv that of a value head. The "accumulation type" is double
// for float64 inputs and float for all others.

// A tensor of four axes. Strides count elements; an axis of stride 0 is broadcast.
struct Tensor4 {
    const void* data = nullptr;
    std::int64_t stride[4] = {0, 0, 0, 0};
    Dtype dtype = Dtype::f32;
};

// For each (b, i), `count` half-open intervals [low, high) of keys, ascending and disjoint: int32 [B, Q, count, 2].
struct Spans {
    const std::int32_t* data = nullptr;
    std::int64_t batch_stride = 0;  // 0: broadcast
    std::int64_t query_stride = 0;
    std::int32_t count = 0;
};

// One instruction of a mask program in postfix order. `spans`, `same_id` and `bytes` push a Boolean for each
// (b, h, i, j); `both` and `either` replace the two topmost Booleans by their conjunction or disjunction.
struct Rule {
    enum Kind : std::int32_t { spans = 0, same_id = 1, bytes = 2, both = 3, either = 4 } kind;
    Spans key_spans;  // spans
    Tensor4 q, k;     // same_id: int64 [B, Q] and [B, K], strides 0 and 1; bytes: q is one byte a pair, [B, H, Q, K]
};
constexpr int MAX_RULES = 32;  // 16 operands and the 15 operators that combine them

// A key is visible if it lies in the spans (no data: every key) and the program of rules (none: always) is true.
struct Mask {
    Spans spans;
    Rule rules[MAX_RULES];
    std::int32_t rule_count = 0;
};

// Polled by any thread, between tasks and inside long ones. Once `requested` is true, the call is abandoned and its
// outputs are undefined.
struct Cancellation {
    bool (*requested)(Cancellation*);
};

struct Statistics;

// The place of a call within a larger one, [B, heads, queries, K], whose weights it drops: its first head, query and
// key there. No heads: the call is not part of another.
struct DropoutPlace {
    std::int64_t heads = 0, queries = 0, first_head = 0, first_query = 0, first_key = 0;
};

struct Forward {
    std::int64_t batch, heads, kv_heads, queries, keys, head_dim, v_head_dim;
    Tensor4 q, k, v;              // [B, H, Q, D], [B, Hkv, K, D], [B, Hkv, K, Dv]; the last stride is 1
    Tensor4 bias;                 // [B, H, Q, K] of the accumulation type; no data: no bias
    const void* sinks = nullptr;  // [H] of the accumulation type; or null
    Mask mask;
    const std::int64_t* row_queries =
        nullptr;  // the query of each of the Q rows, [B or 1, H or 1, Q]; null: 0, 1, 2, …
    std::int64_t row_queries_stride[2] = {0, 0};
    // Only these queries are needed, as pairs of the first and the last + 1, ascending: blocks of rows with none of
    // them are skipped, and the others computed whole, so that a row has the bits that it has with all queries. Null:
    // all.
    const std::int64_t* needed_queries = nullptr;
    std::int64_t needed_ranges = 0;
    const Statistics* statistics = nullptr;  // to compute for each row; or null
    double scale = 1;
    double softcap = 0;  // 0: none
    double dropout = 0;  // probability of dropping a weight
    std::uint64_t seed = 0;
    DropoutPlace dropout_place;
    // Every row is summed in one order, whatever rows follow it: no products for few rows, no splits of keys, blocks of
    // rows that depend on their numbers alone.
    bool uniform = false;
    void* out = nullptr;              // [B, H, Q, Dv], dtype of q
    std::int64_t out_stride[3];       // the last stride is 1
    void* lse = nullptr;              // [B, H, Q], contiguous, of the accumulation type; or null
    void* partial_results = nullptr;  // unnormalized outputs of the key splits, which `merge_splits` reduces
    std::int64_t visible_begin = 0, visible_end = INT64_MAX;  // keys outside are masked in every row
    void* paired_v = nullptr;  // v with two keys to a word, [B, Hkv, visible pairs, Dv], if `pair_values` wrote it
    std::atomic<bool>* nonfinite = nullptr;  // set if out holds NaN or infinity; or null
    Cancellation* cancellation = nullptr;    // or null
};

struct Backward {
    Forward forward;                 // its lse is read; its out is not used
    Tensor4 out, grad_out;           // [B, H, Q, Dv]; the last stride is 1
    const void* grad_lse = nullptr;  // [B, H, Q], contiguous, as lse; or null
    // The gradient of the entropy of each row, and its product with entropy - mass, as grad_lse; or null. Excludes
    // dropout.
    const void *grad_entropy = nullptr, *entropy_delta = nullptr;
    void *dq = nullptr, *dk = nullptr, *dv = nullptr;  // dtype of q; the last stride is 1
    std::int64_t dq_stride[3], dk_stride[3], dv_stride[3];
    void* dbias = nullptr;  // zeroed, of the accumulation type; strides of 0 where the bias is broadcast
    std::int64_t dbias_stride[4];
    bool double_dbias = false;               // dbias is double for every dtype: it sums over many rows
    void* dsinks = nullptr;                  // of each row, [B, H, Q], of the accumulation type; or null
    std::atomic<bool>* nonfinite = nullptr;  // set if dq, dk or dv holds NaN or infinity; or null
    void mark_nonfinite() const {
        if (nonfinite) nonfinite->store(true, std::memory_order_relaxed);
    }
};

// The statistics of one row, in the order of QUANTITIES in src/headscope/_observe/native_observer.py. Outputs are [B,
// H, Q], contiguous, of the accumulation type; null: not computed. Rows that are not counted, or for which the quantity
// is undefined, get NaN. docs/concepts/statistics.md defines each.
enum Quantity : int {
    LSE,
    MAX_LOGIT,
    ENTROPY,
    NORMALIZED_ENTROPY,
    MAX_WEIGHT,
    EFFECTIVE_KEYS,
    MASS,
    FIRST,
    DISTANCE,
    SELF,
    PREVIOUS,
    NEXT,
    DUPLICATE,
    INDUCTION,
    VALUE_NORM,
    CHANCE,
    SECOND_WEIGHT,
    QUANTITIES
};
constexpr int MAX_WINDOWS = 8, MAX_FIRST_KEYS = 16;

// Sums over rows: for each key, and for each cell of the map (bins of queries by bins of keys).
struct ColumnStatistics {
    double* received = nullptr;             // [.., K]: the sum of the weights of a key; or null
    std::int64_t* eligible = nullptr;       // [.., K]: the number of rows to which it is visible
    double *sum = nullptr, *max = nullptr;  // [.., bins]
    std::int64_t* count = nullptr;          // [.., bins]: visible pairs
    std::int32_t* largest = nullptr;        // [.., bins, 3]: batch entry, query and key of the largest weight
    double* received_max = nullptr;         // [.., K]: the largest weight of a key, 0 if there is none; or null
    double* segment_sum = nullptr;          // [.., S, S]: the sum of weights, by the segments of query and key
    std::int64_t* segment_count = nullptr;  // [.., S]: the number of rows of each segment
};

// A weight p, of batch entry b, query i and key j.
struct Edge {
    double p;
    std::int64_t b, i, j;
};

struct Statistics {
    void* value[QUANTITIES] = {};
    int window_count = 0;
    double window_radius[MAX_WINDOWS];
    void *window[MAX_WINDOWS], *streaming[MAX_WINDOWS];
    // The position of each row, [B or 1, Q]; key j has position j. Null: queries and keys share no axis.
    const std::int64_t* position = nullptr;
    const std::int64_t* own_key = nullptr;  // the key at each row's position, or -1, [B or 1, Q]; read with token_ids
    std::int64_t position_stride = 0, own_key_stride = 0;
    const std::int32_t* token_ids = nullptr;   // of the keys, [B, K]; or null
    const std::int64_t* first_keys = nullptr;  // the first keys that are not padding, or -1, [B or 1, first_count]
    std::int64_t first_stride = 0;
    int first_count = 0;
    const void* value_norms = nullptr;        // Euclidean norms of v, [B, Hkv, K], of the accumulation type; or null
    const std::uint8_t* may_count = nullptr;  // broadcasts to [B, H, Q]; 0: the row is not counted; null: all are
    std::int64_t may_count_stride[3] = {0, 0, 0};
    const void* external_lse = nullptr;     // [B, H, Q]; normalizes the weights where it differs from the row's own lse
    double lse_tolerance = 0;               // relative difference up to which the row's own lse is used
    std::uint8_t* counted = nullptr;        // out, [B, H, Q]
    int top_k = 0;                          // number of largest weights to return for each row
    void* top_weight = nullptr;             // out, [B, H, Q, top_k], descending; NaN where fewer keys are visible
    std::int64_t* top_key = nullptr;        // -1 where fewer keys are visible
    const void* logit_threshold = nullptr;  // [B, H, Q]: top-k ignores logits * log2(e) at or below it; or null
    std::atomic<bool>* nonfinite =
        nullptr;  // set if a row with a visible key is not finite; outputs are then undefined

    // Column statistics sum over counted rows and batch entries. The row blocks of a key/value head are divided into
    // partitions, one task each. Partition 0, and every map row that only one partition reaches, adds to `total`; the
    // others add to `partial`, which `reduce_partitions` adds to `total` in ascending order of partitions.
    std::int64_t bins = 0;  // of the map along each axis; 0: no map
    // The whole that the bins of the map divide, and the place in it of the first query; key 0 is its first key.
    std::int64_t first_query = 0, total_queries = 0, total_keys = 0;
    std::int64_t partitions = 1;
    ColumnStatistics total;    // out, [H, K] and [H, bins, bins]; `received_max` comes with `received`
    ColumnStatistics partial;  // [partitions - 1, H, K] and [partitions - 1, H, boundary_map_rows, bins]
    bool has_column_statistics() const { return total.received || bins || segments; }
    // With a map: the largest weights of each head, a heap for each partition.
    int max_edges = 0;
    Edge* edges = nullptr;                          // [partitions, H, max_edges]
    std::int64_t* edge_counts = nullptr;            // [partitions, H]
    std::atomic<double>* edge_threshold = nullptr;  // [H]: a full heap of some partition has no smaller weight
    // Named segments of keys and rows, -1 for none: [B or 1, K] and [B or 1, Q].
    std::int64_t segments = 0;  // S; 0: none
    const std::int8_t *key_segments = nullptr, *row_segments = nullptr;
    const std::int32_t* segment_ends =
        nullptr;  // for each key the end of the run of keys with its segment, as the keys
    std::int64_t key_segment_stride = 0, row_segment_stride = 0;
};

// A projection: y[n][o] = Σ_e x[n][e] w[o][e] + bias[o], all of one dtype. Strides count elements.
struct Linear {
    std::int64_t rows, in_features, out_features;
    const void *x, *w, *bias;  // bias may be null
    void* y;
    std::int64_t x_stride[2], w_stride[2];  // between rows, and along a row; one of the two is 1
    Dtype dtype;
    // Row n of y is row n % batch_rows of its batch entry; column o is column o % head_width of its head. With several
    // heads, head_width is a multiple of 16.
    std::int64_t batch_rows, head_width;
    std::int64_t y_stride[3];  // over batch entries, heads, rows
    bool accumulates;          // adds to y, which is float32; without bias
};
constexpr std::int64_t LINEAR_ROW_BLOCK = 128;  // the most rows of one `multiply_panel`

// `runs` runs of `count` float or double numbers each, `stride` numbers apart.
struct NumberRuns {
    const void* first;
    bool wide;  // double
    std::int64_t runs, stride, count;
};
// Of numbers that are not NaN. Without any, mean to max are NaN.
struct Summary {
    std::int64_t count;
    double mean, M2, min, max;
};

// The weights of rows, as sums of nulls need them: Σp, 1 / n and Σ(p - Σp / n)², with room for a whole vector at the
// end.
constexpr std::int64_t EXCHANGE_ROWS = 256;
struct ExchangeRows {
    double *mass, *even, *uneven;  // aligned to 64 bytes
};

// The functions of one instruction set. A call is divided into tasks, which threads may run in any order. Each thread
// passes its own scratch memory, aligned to 64 bytes, of the size that the `*_scratch` function returns.
struct Target {
    const char* name;
    bool (*runs_here)();

    // Forward. First `pairing_tasks` tasks write paired_v, of `paired_v_bytes` bytes (often 0: then there are none).
    std::int64_t (*pairing_tasks)(const Forward&);
    std::size_t (*paired_v_bytes)(const Forward&);
    void (*pair_values)(const Forward&, std::int64_t task);
    std::int64_t (*forward_tasks)(const Forward&);
    std::size_t (*forward_scratch)(const Forward&);
    void (*run_forward)(const Forward&, std::int64_t task, void* scratch);
    // Few rows and many keys: the keys of a row block are split among tasks, then `merge_splits` runs once a row block.
    std::int64_t (*key_splits)(const Forward&);
    std::size_t (*partial_bytes)(const Forward&);  // of all splits
    void (*merge_splits)(const Forward&, std::int64_t block, void* scratch);

    // Backward. The row blocks of each of the B * Hkv heads are divided into groups, which add to one buffer of
    // `gradient_sums_bytes` bytes a head. Groups of a head may run concurrently but must start in order: each waits
    // for the groups before it, whose progress is in `passed` (zeroed, one number for each group).
    std::int64_t (*gradient_groups)(const Forward&);
    std::size_t (*gradient_scratch)(const Backward&);
    std::size_t (*gradient_sums_bytes)(const Forward&);
    void (*run_gradient)(const Backward&, std::int64_t head, std::int64_t group, void* scratch, void* sums,
                         std::atomic<std::int64_t>* passed);
    std::int64_t (*bias_tasks)(const Backward&);
    void (*run_bias_gradient)(const Backward&, std::int64_t task, void* scratch);

    // Forward with `statistics`, without dropout and key splits. With Dv = 0 only the statistics are computed.
    std::int64_t (*observation_partitions)(const Forward&);
    std::int64_t (*boundary_map_rows)(const Forward&);  // map rows that a partition may share with others
    std::int64_t (*observation_tasks)(const Forward&);
    std::size_t (*observation_scratch)(const Forward&);
    void (*run_observation)(const Forward&, std::int64_t task, void* scratch);
    void (*reduce_partitions)(const Forward&, std::int64_t head);  // head 0 before all others
    // The norms of the values of one of the B * Hkv heads, into norms [B, Hkv, K].
    void (*compute_value_norms)(const Forward&, std::int64_t head, void* norms);
    // Reductions of float or (wide) double values; NaN is skipped. counts[k] grows by the number of values >= border k.
    // Summarizes numbers, and counts those of each bin of a histogram. A bin ends below the next border; the borders
    // are of the numbers' type, in order, and padded with NaN.
    Summary (*summarize)(const NumberRuns&, const void* borders, std::int64_t bins, std::int64_t* histogram);
    // What chance gives for at most EXCHANGE_ROWS rows: their inputs, and what one quantity adds to two sums.
    void (*prepare_exchange)(const void* mass, const void* chance, const void* effective_keys, bool wide,
                             std::int64_t count, const ExchangeRows& to);
    void (*sum_exchange)(const void* values, bool wide, std::int64_t count, const ExchangeRows&, const double* mean,
                         const double* spread, double* sums);

    // Projections. The output features are divided into panels. `pack_panel` transposes the weights of one into
    // `panel_bytes` bytes, aligned to 64; `multiply_panel` then multiplies up to LINEAR_ROW_BLOCK rows of x by them.
    // An x whose rows are not contiguous (float32 only) goes through `transpose_input` first.
    bool (*supports_linear)(const Linear&);
    void (*transpose_input)(const Linear&, std::int64_t first_row, std::int64_t rows, float* to,
                            std::int64_t to_stride);
    std::int64_t (*linear_panels)(const Linear&);
    std::size_t (*panel_bytes)(const Linear&);
    void (*pack_panel)(const Linear&, std::int64_t panel, void* to);
    void (*multiply_panel)(const Linear&, std::int64_t panel, const void* packed, std::int64_t first_row,
                           std::int64_t rows);
};

void find_visible_range(Forward&);             // sets visible_begin and visible_end, from the spans
const Target* const* all_targets(int* count);  // best first
const Target* selected_target();               // the best that runs here, or the one that HEADSCOPE_CPU_TARGET names

}  // namespace headscope

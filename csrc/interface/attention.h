// Plain structs: all that crosses between the binding and a target. No vector types, no inline code.
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

// A tensor of four axes; strides in elements. A stride of 0 repeats.
struct Tensor4 {
    const void* data = nullptr;
    std::int64_t stride[4] = {0, 0, 0, 0};
    Dtype dtype = Dtype::f32;
};

// For each (b, i) `count` half-open key spans [low, high), ascending and disjoint: int32 [b, i, count, 2].
struct Spans {
    const std::int32_t* data = nullptr;
    std::int64_t batch_stride = 0;  // 0 repeats
    std::int64_t query_stride = 0;
    std::int32_t count = 0;
};

// What spans cannot say, as a small program in postfix order: a rule answers for each (b, h, i, j), or joins two
// answers.
struct Rule {
    enum Kind : std::int32_t { spans = 0, same_id = 1, bytes = 2, both = 3, either = 4 } kind;
    Spans reach;   // spans
    Tensor4 q, k;  // same_id: int64 [B, Q] and [B, K], strides 0 and 1; bytes: q is a byte a pair, [B, H, Q, K]
};
constexpr int MOST_RULES = 32;  // sixteen parts of a mask, and what joins them

// What may be seen: what is inside the spans (no data: every key), and the rules, if there are any, allow.
struct Visible {
    Spans spans;
    Rule rules[MOST_RULES];
    std::int32_t count = 0;
};

// Asked between tasks and inside long ones, by any thread: whether to leave at once, since nobody wants the result any
// more.
struct Watch {
    bool (*stops)(Watch*);
};

struct RowStats;

struct Forward {
    std::int64_t batch, heads, kv_heads, queries, keys, head_dim, v_head_dim;
    Tensor4 q, k, v;              // [B, H, Q, D], [B, Hkv, K, D], [B, Hkv, K, Dv]; the last stride is 1
    Tensor4 bias;                 // [B, H, Q, K], float or double as the arithmetic; no data: none
    const void* sinks = nullptr;  // [H], float or double as the arithmetic; or null
    Visible visible;
    const std::int64_t* rows = nullptr;  // which query each of the Q rows is, [B or 1, H or 1, Q]; null: 0, 1, 2, …
    std::int64_t rows_stride[2] = {0, 0};
    const RowStats* look = nullptr;  // what is to be measured of each row; or null
    double scale = 1;
    double softcap = 0;  // 0: none
    double dropout = 0;  // probability of dropping a weight
    std::uint64_t seed = 0;
    void* out = nullptr;                    // [B, H, Q, Dv], dtype of q
    std::int64_t out_stride[3];             // the last stride is 1
    void* lse = nullptr;                    // [B, H, Q] contiguous, float or double as the arithmetic; may be null
    void* partial = nullptr;                // what the shares of a block's keys leave for `merge`
    std::int64_t seen[2] = {0, INT64_MAX};  // the first key that any row may see and the last + 1, if `narrow` looked
    void* paired_v = nullptr;  // v as words of two keys, [B, Hkv, pairs that hold a seen one, Dv], if `prepare` made it
    std::atomic<bool>* spoilt = nullptr;  // set where out holds NaN or infinity; may be null
    Watch* watch = nullptr;               // may be null
};

struct Backward {
    Forward forward;                                   // its lse is read; its out is not used
    Tensor4 out, grad_out;                             // [B, H, Q, Dv]; the last stride is 1
    const void* grad_lse = nullptr;                    // [B, H, Q] contiguous, as lse; or null
    void *dq = nullptr, *dk = nullptr, *dv = nullptr;  // dtype of q; the last stride is 1
    std::int64_t dq_stride[3], dk_stride[3], dv_stride[3];
    void* dbias = nullptr;  // zeroed, float or double as the arithmetic; strides of 0 where the bias repeats
    std::int64_t dbias_stride[4];
    bool wide_dbias = false;              // dbias is double in any case: sums over many rows
    std::atomic<bool>* spoilt = nullptr;  // set where dq, dk or dv holds NaN or infinity; may be null
    void spoil() const {
        if (spoilt) spoilt->store(true, std::memory_order_relaxed);
    }
};

// What is measured of each row. Outputs are [B, H, Q], contiguous, of the arithmetic's type; null: not asked for. They
// are NaN in rows that do not count or do not have the quantity. docs/statistics.md defines each.
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
constexpr int MOST_WINDOWS = 8, MOST_FIRST = 16;

// What is summed over rows: of keys, and of the cells of the map, row by row.
struct Columns {
    double* received = nullptr;  // [.., K]; or null
    std::int64_t* eligible = nullptr;
    double *sum = nullptr, *max = nullptr;  // [.., bins]
    std::int64_t* count = nullptr;          // [.., bins]
    std::int32_t* largest = nullptr;        // [.., bins, 3]: batch entry, query and key of the largest
};

// A weight: of which batch entry, query and key.
struct Edge {
    double p;
    std::int64_t b, i, j;
};

struct RowStats {
    void* value[QUANTITIES] = {};
    int windows = 0;
    double reach[MOST_WINDOWS];
    void *window[MOST_WINDOWS], *streaming[MOST_WINDOWS];
    // Where rows stand, [B or 1, Q]; keys stand at 0, 1, 2, … Null: they share no axis.
    const std::int64_t* line = nullptr;
    const std::int64_t* own = nullptr;  // the key that is each row's own, or -1, [B or 1, Q]; read with ids
    std::int64_t line_stride = 0, own_stride = 0;
    const std::int32_t* ids = nullptr;    // tokens of the keys, [B, K]; or null
    const std::int64_t* first = nullptr;  // the first real keys, or -1, [B or 1, firsts]
    std::int64_t first_stride = 0;
    int firsts = 0;
    const void* norms = nullptr;              // lengths of the values, [B, Hkv, K], of the arithmetic's type; or null
    const std::uint8_t* may_count = nullptr;  // broadcasts to [B, H, Q]; null: all
    std::int64_t may_count_stride[3] = {0, 0, 0};
    const void* other_lse = nullptr;   // lse that came from elsewhere, [B, H, Q]; or null
    double rounding = 0;               // how far it may be from the row's own, relative, to be taken for the same
    std::uint8_t* counted = nullptr;   // out, [B, H, Q]
    int most = 0;                      // how many of a row's largest weights
    void* most_weight = nullptr;       // out, [B, H, Q, most], largest first; NaN where there are fewer
    std::int64_t* most_key = nullptr;  // -1 where there are fewer
    const void* floor =
        nullptr;  // [B, H, Q]: those whose logit times log2(e) is not above this are not wanted; or null
    std::atomic<bool>* spoilt =
        nullptr;  // set where a row that sees keys is not finite: nothing of the rest then holds

    // Of keys and of the map, over counted rows and batch entries. The row blocks are shared out; what two shares may
    // both add to, each share but the first has apart, and `gather_look` adds it to the whole, in a fixed order.
    std::int64_t bins = 0;         // of the map; 0: none
    std::int64_t all_queries = 0;  // over which the map's rows reach
    std::int64_t shares = 1;
    Columns whole;  // out, [H, K] and [H, bins, bins]
    Columns apart;  // [shares - 1, H, K] and [shares - 1, H, lines_apart, bins]
    bool columns() const { return whole.received || bins; }
    // With a map, the largest weights of each head, of each share for itself and in no order.
    int edges = 0;                        // how many are kept
    Edge* edge = nullptr;                 // [shares, H, edges]
    std::int64_t* edges_found = nullptr;  // [shares, H]
    std::atomic<double>* edge_least =
        nullptr;  // [H]: some share has as many that are no smaller, so that nothing below is wanted
};

// A projection: y[n][o] = Σ_e x[n][e] w[o][e] + bias[o], all of one dtype. Strides in elements.
struct Linear {
    std::int64_t rows, width, outs;
    const void *x, *w, *bias;  // bias may be null
    void* y;
    std::int64_t x_stride[2], w_stride[2];  // from row to row, and along it; one of the two is 1
    Dtype dtype;
    // Row n of y is row n % batch_rows of its batch entry, and column o is column o % head_width of its head: where
    // there are several heads, that width is a multiple of 16.
    std::int64_t batch_rows, head_width;
    std::int64_t y_stride[3];  // over batch entries, heads, rows
    bool adds;                 // to y, which is float32; without bias
};
constexpr std::int64_t LINEAR_ROWS = 128;  // that are multiplied at once, at most

// What `pool` adds to.
struct Pool {
    std::int64_t count = 0;
    double sum = 0, least = HUGE_VAL, largest = -HUGE_VAL;
};

// One instruction set. A call is cut into tasks that any threads may run in any order; each thread brings `scratch`
// bytes of its own, aligned to 64.
struct Target {
    const char* name;
    bool (*runs_here)();
    std::int64_t (*prepare_tasks)(const Forward&);
    std::size_t (*prepared)(const Forward&);  // bytes of what these make before anything else; often 0
    void (*prepare)(const Forward&, std::int64_t task);
    std::int64_t (*tasks)(const Forward&);
    std::size_t (*scratch)(const Forward&);
    void (*run)(const Forward&, std::int64_t task, void* scratch);
    // Few rows against many keys: the keys of a block are shared among tasks, and what they leave is merged for each
    // block.
    std::int64_t (*shares)(const Forward&);
    std::size_t (*partial)(const Forward&);  // bytes, of all shares
    void (*merge)(const Forward&, std::int64_t block, void* scratch);

    // Backward: the row blocks of each of batch * kv_heads heads are cut into groups, which add to the head's `sums`
    // bytes. Groups of a head may run at the same time, but must begin in order: each waits where one before it has not
    // yet been, which is told in `passed`, zeroed, a number for each group.
    std::int64_t (*groups)(const Forward&);
    std::size_t (*gradient_scratch)(const Backward&);
    std::size_t (*sums)(const Forward&);
    void (*run_gradient)(const Backward&, std::int64_t head, std::int64_t group, void* scratch, void* sums,
                         std::atomic<std::int64_t>* passed);
    std::int64_t (*bias_tasks)(const Backward&);
    void (*run_bias_gradient)(const Backward&, std::int64_t task, void* scratch);

    // Attending while `look` is measured, without dropout and with all keys of a row in one task; where Dv is 0,
    // measuring alone.
    std::int64_t (*look_shares)(const Forward&);  // for keys and map
    std::int64_t (*lines_apart)(const Forward&);  // rows of the map that a share has apart
    std::int64_t (*look_tasks)(const Forward&);
    std::size_t (*look_scratch)(const Forward&);
    void (*run_look)(const Forward&, std::int64_t task, void* scratch);
    void (*gather_look)(const Forward&, std::int64_t head);  // head 0 before the others
    void (*lengths)(const Forward&, std::int64_t head,
                    void* to);  // of the values, [B, Hkv, K], those of one of the B * Hkv
    // Of numbers, float or (wide) double, that are not NaN; the sum of their squared distances from a mean; and to
    // reached[k] how many of them are not below border k.
    void (*pool)(const void* values, bool wide, std::int64_t count, Pool&);
    double (*squares)(const void* values, bool wide, std::int64_t count, double mean);
    void (*reach)(const void* values, bool wide, std::int64_t count, const void* borders, std::int64_t bins,
                  std::int64_t* reached);

    // A projection of a dtype that the target multiplies: its outputs are cut into panels, whose weights are turned,
    // each into `panel_size` bytes aligned to 64, before any rows, up to LINEAR_ROWS of them at once, are multiplied by
    // them. Rows of x that lie across, with a stride along them, which is for float32 alone, are laid lengthwise first.
    bool (*multiplies)(const Linear&);
    void (*lengthwise)(const Linear&, std::int64_t first_row, std::int64_t rows, float* to, std::int64_t to_stride);
    std::int64_t (*panels)(const Linear&);
    std::size_t (*panel_size)(const Linear&);
    void (*turn)(const Linear&, std::int64_t panel, void* to);
    void (*multiply)(const Linear&, std::int64_t panel, const void* turned, std::int64_t first_row, std::int64_t rows);
};

void narrow(Forward&);                     // finds `seen`, from spans
const Target* const* targets(int* count);  // best first
const Target* chosen();                    // the best that runs here, or the one that HEADSCOPE_CPU_TARGET forces

}  // namespace headscope

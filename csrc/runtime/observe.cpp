#include "observe.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "paired_values.h"
#include "threads.h"

namespace headscope {
namespace {

bool is_double(const Forward& f) { return f.q.dtype == Dtype::f64; }

double number(const void* values, std::int64_t n, bool wide) {
    return wide ? static_cast<const double*>(values)[n] : double(static_cast<const float*>(values)[n]);
}

// Descending by weight, then ascending by indices.
bool precedes(const Edge& x, const Edge& z) {
    return x.p != z.p ? x.p > z.p : x.b != z.b ? x.b < z.b : x.i != z.i ? x.i < z.i : x.j < z.j;
}
// Sorts the k largest edges to the front. Returns their number.
std::int64_t select_largest(Edge* edges, std::int64_t edge_count, std::int64_t k) {
    const std::int64_t remaining = std::min(edge_count, k);
    std::partial_sort(edges, edges + remaining, edges + edge_count, precedes);
    return remaining;
}
void store_edges(const EdgeList& list, std::int64_t head, const Edge* edges, std::int64_t edge_count) {
    for (std::int64_t n = 0; n < list.k; n++) {
        const bool is_present = n < edge_count;
        std::int64_t* at = list.at + 4 * (head * list.k + n);
        list.p[head * list.k + n] = is_present ? edges[n].p : std::numeric_limits<double>::quiet_NaN();
        at[0] = is_present ? 0 : -1;
        at[1] = is_present ? edges[n].b : -1;
        at[2] = is_present ? edges[n].i : -1;
        at[3] = is_present ? edges[n].j : -1;
    }
}

constexpr std::int64_t MAX_CANDIDATES = 1 << 20;  // weights listed at a time

// The rows that can hold edges: those of each batch entry and head with the largest maxima.
struct EdgeRows {
    const EdgeList& list;
    const std::int64_t count, queries;
    const bool wide;
    std::vector<std::int64_t> order;  // [B, H, Q]: rows; the first `count` of each head can hold edges
    std::vector<double> threshold;    // [B, H]: no edge is below it

    EdgeRows(const Forward& f, const EdgeList& edges, Signals& signals, int threads)
        : list(edges),
          count(std::min<std::int64_t>(edges.k, f.queries)),
          queries(f.queries),
          wide(is_double(f)),
          order(f.batch * f.heads * queries),
          threshold(f.batch * f.heads) {
        const std::int64_t heads = f.batch * f.heads;
        parallel_for(signals, heads, usable_threads(threads, heads), [&](std::int64_t head, int) {
            const auto from = order.begin() + head * queries;
            std::iota(from, from + queries, 0);
            const auto precedes_row = [&](std::int64_t r, std::int64_t z) {
                const double x = maximum(head, r), y = maximum(head, z);
                return x != y ? x > y : r < z;
            };
            std::nth_element(from, from + (count - 1), from + queries, precedes_row);
            threshold[head] = count == list.k ? maximum(head, from[count - 1]) : 0;  // fewer than k rows: no threshold
        });
        signals.raise();
    }
    // The largest weight of a row; -1 if it is not counted.
    double maximum(std::int64_t head, std::int64_t r) const {
        const double x = number(list.maxima, head * queries + r, wide);
        return x == x ? x : -1;
    }
    // The logit times log2(e) of the threshold in a row, less a margin for rounding.
    double logit_threshold(std::int64_t head, std::int64_t r) const {
        if (!(threshold[head] > 0)) return -HUGE_VAL;
        const double top = number(list.max_logits, head * queries + r, wide) * 1.4426950408889634;
        return top + std::log2(threshold[head] / maximum(head, r)) - 1e-4 * (1 + std::abs(top));
    }
};

// An observation of n of these rows of each batch entry and head, for their largest weights.
struct EdgeRowObservation {
    const Forward& call;
    std::int64_t n, size;
    std::vector<std::int64_t> queries, keys;
    std::vector<std::uint8_t> counts, counted;
    std::vector<char> lse_values, weights, thresholds;
    Forward f;
    Statistics statistics;

    EdgeRowObservation(const Forward& all, const Statistics& rows, const EdgeRows& edge_rows, std::int64_t first,
                       std::int64_t n, int top_k)
        : call(all),
          n(n),
          size(edge_rows.wide ? 8 : 4),
          queries(all.batch * all.heads * n),
          keys(queries.size() * top_k),
          counts(queries.size()),
          counted(queries.size()),
          lse_values(rows.external_lse ? queries.size() * size : 0),
          weights(keys.size() * size),
          thresholds(queries.size() * size),
          f(all) {
        for (std::int64_t to = 0; to < std::int64_t(queries.size()); to++) {
            const std::int64_t head = to / n, r = edge_rows.order[head * all.queries + first + to % n],
                               b = head / all.heads, h = head % all.heads;
            queries[to] = all.row_queries
                              ? all.row_queries[b * all.row_queries_stride[0] + h * all.row_queries_stride[1] + r]
                              : r;
            counts[to] = edge_rows.maximum(head, r) >= 0;
            const double threshold = counts[to] ? edge_rows.logit_threshold(head, r) : 0;
            if (edge_rows.wide)
                reinterpret_cast<double*>(thresholds.data())[to] = threshold;
            else
                reinterpret_cast<float*>(thresholds.data())[to] = float(threshold);
            if (rows.external_lse)
                std::copy_n(static_cast<const char*>(rows.external_lse) + (head * all.queries + r) * size, size,
                            &lse_values[to * size]);
        }
        f.queries = n;
        f.v_head_dim = 0;
        f.out = f.lse = nullptr;
        f.row_queries = queries.data();
        f.row_queries_stride[0] = all.heads * n;
        f.row_queries_stride[1] = n;
        statistics.may_count = counts.data();
        statistics.may_count_stride[0] = all.heads * n;
        statistics.may_count_stride[1] = n;
        statistics.may_count_stride[2] = 1;
        statistics.external_lse = rows.external_lse ? lse_values.data() : nullptr;
        statistics.lse_tolerance = rows.lse_tolerance;
        statistics.counted = counted.data();
        statistics.logit_threshold = thresholds.data();
        statistics.top_k = top_k;
        statistics.top_weight = weights.data();
        statistics.top_key = keys.data();
    }
    // Adds the weights of a head to `edges`, and keeps the k largest. Returns their number.
    std::int64_t add_to(Edge* edges, std::int64_t edge_count, std::int64_t h, std::int64_t k) const {
        for (std::int64_t b = 0; b < call.batch; b++)
            for (std::int64_t m = 0; m < n * statistics.top_k; m++) {
                const std::int64_t row = (b * call.heads + h) * n + m / statistics.top_k,
                                   at = row * statistics.top_k + m % statistics.top_k;
                if (keys[at] >= 0)
                    edges[edge_count++] = {number(weights.data(), at, size == 8), b, queries[row], keys[at]};
            }
        return select_largest(edges, edge_count, k);
    }
};

// Computes entry n of [names, heads].
void compute_moments_of(const Moments& m, const void* values, bool wide, std::int64_t n) {
    const std::int64_t name = n / m.heads, head = n % m.heads, size = wide ? 8 : 4;
    const char* const first = static_cast<const char*>(values) + (name * m.batch * m.heads + head) * m.rows * size;
    const char* const borders = static_cast<const char*>(m.borders) + name * m.bins * size;
    const Summary x = selected_target()->summarize({first, wide, m.batch, m.heads * m.rows, m.rows}, borders, m.bins,
                                                   m.histogram + n * m.bins);
    m.count[n] = x.count;
    m.mean[n] = x.mean;
    m.M2[n] = x.M2;
    m.min[n] = x.min;
    m.max[n] = x.max;
}

// Adds what chance gives for rows from `first` on to the sums of their segments.
void sum_between_segments(const SegmentExchange& x, std::int64_t b, std::int64_t head, std::int64_t first,
                          std::int64_t count, const ExchangeRows& rows) {
    const std::int64_t size = x.segments;
    for (std::int64_t n = 0; n < count; n++) {
        const std::int64_t segment = x.rows[b * x.rows_stride + first + n];
        const double mass = rows.mass[n], even = rows.even[n];
        if (segment < 0 || !(even > 0)) continue;  // rows that are not counted have no mass
        const double uneven = even < 1 ? rows.uneven[n] / (1 - even) : 0;
        // `even` is rounded. With whole numbers the variance is 0, and not below, for a segment with all visible keys.
        const double visible = std::round(1 / even), per_key = mass / visible;
        const double per_pair = uneven / (visible * visible);
        const std::int32_t* __restrict keys =
            x.keys + b * x.batch_stride + head * x.head_stride + (first + n) * x.row_stride;
        double* __restrict means = x.means + (head * size + segment) * size;
        double* __restrict variances = x.variances + (head * size + segment) * size;
        for (std::int64_t y = 0; y < size; y++) {
            const double inside = keys[y];
            means[y] += per_key * inside;
            variances[y] += per_pair * (inside * std::max(visible - inside, 0.0));
        }
    }
}

// Sums what chance gives of one head: for each quantity the means and the variances of its rows.
void sum_exchange_of(const Moments& m, const void* values, bool wide, std::int64_t head) {
    const Exchange& x = m.exchange;
    const Target& target = *selected_target();
    alignas(64) double rows[3][EXCHANGE_ROWS];
    const ExchangeRows prepared{rows[0], rows[1], rows[2]};
    for (std::int64_t name = 0; name < m.names; name++)
        x.means[name * m.heads + head] = x.variances[name * m.heads + head] = 0;
    const std::int64_t pairs = x.between.segments * x.between.segments;
    for (std::int64_t n = head * pairs; n < (head + 1) * pairs; n++) x.between.means[n] = x.between.variances[n] = 0;
    for (std::int64_t b = 0; b < m.batch; b++)
        for (std::int64_t first = 0; first < m.rows; first += EXCHANGE_ROWS) {
            const std::int64_t count = std::min(EXCHANGE_ROWS, m.rows - first);
            const auto values_of = [&](std::int64_t name) {
                const std::int64_t n = ((name * m.batch + b) * m.heads + head) * m.rows + first;
                return static_cast<const char*>(values) + n * (wide ? 8 : 4);
            };
            target.prepare_exchange(values_of(x.mass), values_of(x.chance), values_of(x.effective_keys), wide, count,
                                    prepared);
            if (x.between.segments) sum_between_segments(x.between, b, head, first, count, prepared);
            for (std::int64_t name = 0; name < m.names; name++) {
                const std::int64_t factor = x.factor[name];
                if (factor == NO_NULL) continue;
                const std::int64_t at = factor * x.factor_stride + b * x.batch_stride + head * x.head_stride + first;
                const double* const mean = factor == ONE_KEY ? prepared.even : x.mean + at;
                const double* const spread = factor == ONE_KEY ? prepared.even : x.spread + at;
                double sums[2] = {};
                target.sum_exchange(values_of(name), wide, count, prepared, mean, spread, sums);
                x.means[name * m.heads + head] += sums[0];
                x.variances[name * m.heads + head] += sums[1];
            }
        }
}

// Lays out `s.partial` and the heaps of edges in memory from `next` on, unless that is null. Returns the number of
// bytes.
std::size_t lay_out_partitions(const Forward& f, Statistics& s, std::size_t boundary_map_rows, char* next) {
    std::size_t size = 0;
    const auto take = [&](auto*& to, std::size_t count) {
        if (next) to = reinterpret_cast<std::decay_t<decltype(to)>>(next + size);
        size += count * sizeof *to;
    };
    const std::size_t partial = std::size_t((s.partitions - 1) * f.heads), all = std::size_t(s.partitions * f.heads);
    const std::size_t keys = s.total.received ? partial * std::size_t(f.keys) : 0,
                      cells = partial * boundary_map_rows * std::size_t(s.bins);
    take(s.partial.received, keys);
    take(s.partial.eligible, keys);
    take(s.partial.received_max, s.total.received_max ? keys : 0);
    take(s.partial.segment_sum, partial * std::size_t(s.segments * s.segments));
    take(s.partial.segment_count, partial * std::size_t(s.segments));
    take(s.partial.sum, cells);
    take(s.partial.max, cells);
    take(s.partial.count, cells);
    if (s.max_edges) {
        take(s.edges, all * std::size_t(s.max_edges));
        take(s.edge_counts, all);
        take(s.edge_threshold, std::size_t(f.heads));
    }
    take(s.partial.largest, 3 * cells);  // last, since its alignment is smaller
    return size;
}

// Merges the heaps of edges that the partitions have of a head.
void merge_edges(const Forward& f, const Statistics& s, const EdgeList& list, std::int64_t head) {
    std::int64_t edge_count = s.edge_counts[head];
    Edge* const edges = s.edges + head * s.max_edges;
    std::vector<Edge> all(edges, edges + edge_count);
    for (std::int64_t partition = 1; partition < s.partitions; partition++) {
        const std::int64_t n = partition * f.heads + head;
        all.insert(all.end(), s.edges + n * s.max_edges, s.edges + n * s.max_edges + s.edge_counts[n]);
    }
    edge_count = select_largest(all.data(), std::int64_t(all.size()), list.k);
    store_edges(list, head, all.data(), edge_count);
}

}  // namespace

bool run_observation_tasks(Forward& f, Statistics& rows, const EdgeList* list, const Moments* moments,
                           const void* values, int threads) {
    Signals signals;
    std::atomic<bool> nonfinite{false};
    rows.nonfinite = f.nonfinite = &nonfinite;
    f.statistics = &rows;
    f.cancellation = &signals;
    const Forward with_values = f;
    if (!f.out) f.v_head_dim = 0;
    const Target* target = selected_target();
    rows.partitions = rows.has_column_statistics() ? target->observation_partitions(f) : 1;
    rows.max_edges = list ? list->k : 0;
    const std::int64_t tasks = target->observation_tasks(f), value_heads = f.batch * f.kv_heads;
    const int thread_count = usable_threads(threads, tasks);
    const std::size_t scratch_bytes = padded_scratch_bytes(target->observation_scratch(f));
    const std::size_t norms_offset = scratch_bytes * std::size_t(thread_count);
    const std::size_t partial_offset =
        norms_offset +
        (rows.value[VALUE_NORM] ? std::size_t(value_heads * f.keys) * (is_double(f) ? 8 : 4) + 64 : 0) / 64 * 64;
    const std::size_t boundary_map_rows = std::size_t(target->boundary_map_rows(f));
    const Scratch<> scratch(partial_offset + lay_out_partitions(f, rows, boundary_map_rows, nullptr));
    lay_out_partitions(f, rows, boundary_map_rows, scratch.at(partial_offset));
    if (list) std::uninitialized_fill_n(rows.edge_threshold, f.heads, -1.0);
    if (rows.value[VALUE_NORM]) rows.value_norms = scratch.at(norms_offset);
    ParallelStep norming_values(rows.value_norms ? value_heads : 0, thread_count), observing(tasks, thread_count);
    PairedValues paired_values(*target, f, thread_count);
    const std::int64_t reduced_heads = rows.has_column_statistics() ? f.heads : 0;
    ParallelStep reducing_first(std::min<std::int64_t>(reduced_heads, 1), thread_count),
        reducing(std::max<std::int64_t>(reduced_heads - 1, 0), thread_count);
    ParallelStep summarizing(moments ? moments->names * moments->heads : 0, thread_count);
    ParallelStep exchanging(moments && moments->exchange.factor ? moments->heads : 0, thread_count);
    parallel_region(thread_count, [&](int thread) {
        norming_values.run(signals, thread, [&](std::int64_t n, int) {
            target->compute_value_norms(with_values, n, scratch.at(norms_offset));
        });
        norming_values.wait(signals);
        paired_values.run(signals, thread);
        observing.run(signals, thread, [&](std::int64_t n, int) {
            target->run_observation(f, n, scratch.at(scratch_bytes * std::size_t(thread)));
        });
        observing.wait(signals);
        summarizing.run(signals, thread,
                        [&](std::int64_t n, int) { compute_moments_of(*moments, values, is_double(f), n); });
        exchanging.run(signals, thread,
                       [&](std::int64_t head, int) { sum_exchange_of(*moments, values, is_double(f), head); });
        reducing_first.run(signals, thread, [&](std::int64_t, int) { target->reduce_partitions(f, 0); });
        reducing_first.wait(signals);
        reducing.run(signals, thread, [&](std::int64_t n, int) { target->reduce_partitions(f, n + 1); });
    });
    signals.raise();
    if (list)
        for (std::int64_t head = 0; head < f.heads; head++) merge_edges(f, rows, *list, head);
    return !nonfinite;
}

void find_edges(const Forward& call, const Statistics& rows, const EdgeList& list, int threads) {
    Signals signals;
    const EdgeRows edge_rows(call, list, signals, threads);
    const std::int64_t heads = call.batch * call.heads, top_k = std::min<std::int64_t>(list.k, call.keys);
    const std::int64_t step = std::clamp<std::int64_t>(MAX_CANDIDATES / (heads * top_k), 1, edge_rows.count);
    const std::int64_t capacity = list.k + call.batch * step * top_k;  // of a head: edges so far, and new candidates
    std::vector<Edge> candidates(call.heads * capacity);
    std::vector<std::int64_t> edge_counts(call.heads);
    for (std::int64_t first = 0; first < edge_rows.count; first += step) {
        EdgeRowObservation observation(call, rows, edge_rows, first, std::min(step, edge_rows.count - first),
                                       int(top_k));
        run_observation_tasks(observation.f, observation.statistics, nullptr, nullptr, nullptr, threads);
        parallel_for(signals, call.heads, usable_threads(threads, call.heads), [&](std::int64_t h, int) {
            edge_counts[h] = observation.add_to(&candidates[h * capacity], edge_counts[h], h, list.k);
        });
        signals.raise();
    }
    for (std::int64_t h = 0; h < call.heads; h++) store_edges(list, h, &candidates[h * capacity], edge_counts[h]);
}

void compute_moments(const Moments& m, const void* values, bool wide, int threads) {
    Signals signals;
    const std::int64_t tasks = m.names * m.heads;
    parallel_for(signals, tasks, usable_threads(threads, tasks),
                 [&](std::int64_t n, int) { compute_moments_of(m, values, wide, n); });
    signals.raise();
}

}  // namespace headscope

#include "observe.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "threads.h"

namespace headscope {
namespace {

bool is_double(const Forward& f) { return f.q.dtype == Dtype::f64; }

double number(const void* values, std::int64_t n, bool wide) {
    return wide ? static_cast<const double*>(values)[n] : double(static_cast<const float*>(values)[n]);
}

bool larger(const Edge& x, const Edge& z) {  // of equal ones the first
    return x.p != z.p ? x.p > z.p : x.b != z.b ? x.b < z.b : x.i != z.i ? x.i < z.i : x.j < z.j;
}
// The largest of them come first; how many there are then, at most k.
std::int64_t keep_largest(Edge* edges, std::int64_t edge_count, std::int64_t k) {
    const std::int64_t remaining = std::min(edge_count, k);
    std::partial_sort(edges, edges + remaining, edges + edge_count, larger);
    return remaining;
}
void put(const EdgeList& list, std::int64_t head, const Edge* edges, std::int64_t edge_count) {
    for (std::int64_t n = 0; n < list.k; n++) {
        const bool has = n < edge_count;
        std::int64_t* at = list.at + 4 * (head * list.k + n);
        list.p[head * list.k + n] = has ? edges[n].p : std::numeric_limits<double>::quiet_NaN();
        at[0] = has ? 0 : -1;
        at[1] = has ? edges[n].b : -1;
        at[2] = has ? edges[n].i : -1;
        at[3] = has ? edges[n].j : -1;
    }
}

// The rows that edges can be in: of each batch entry and head those with the largest maxima.
constexpr std::int64_t AT_ONCE = 1 << 20;  // weights that are listed at a time
struct Rows {
    const EdgeList& list;
    const std::int64_t count, queries;
    const bool wide;
    std::vector<std::int64_t> order;  // [B, H, Q], of which the first `count` are they
    std::vector<double> least;        // [B, H]: nothing below it is wanted

    Rows(const Forward& f, const EdgeList& edges, Signals& signals, int threads)
        : list(edges),
          count(std::min<std::int64_t>(edges.k, f.queries)),
          queries(f.queries),
          wide(is_double(f)),
          order(f.batch * f.heads * queries),
          least(f.batch * f.heads) {
        const std::int64_t heads = f.batch * f.heads;
        each(signals, heads, usable(threads, heads), [&](std::int64_t head, int) {
            const auto from = order.begin() + head * queries;
            std::iota(from, from + queries, 0);
            const auto before = [&](std::int64_t r, std::int64_t z) {
                const double x = maximum(head, r), y = maximum(head, z);
                return x != y ? x > y : r < z;
            };
            std::nth_element(from, from + (count - 1), from + queries, before);
            least[head] =
                count == list.k ? maximum(head, from[count - 1]) : 0;  // with fewer rows, smaller ones are wanted too
        });
        signals.raise();
    }
    double maximum(std::int64_t head, std::int64_t r) const {  // -1 where it does not count
        const double x = number(list.maxima, head * queries + r, wide);
        return x == x ? x : -1;
    }
    // The logit, times log2(e), above which weights of a row are wanted.
    double floor(std::int64_t head, std::int64_t r) const {
        if (!(least[head] > 0)) return -HUGE_VAL;
        const double top = number(list.max_logits, head * queries + r, wide) * 1.4426950408889634;
        return top + std::log2(least[head] / maximum(head, r)) - 1e-4 * (1 + std::abs(top));
    }
};

// A second look at some of them, `n` of each batch entry and head, for their largest weights.
struct Second {
    const Forward& call;
    std::int64_t n, size;
    std::vector<std::int64_t> queries, keys;
    std::vector<std::uint8_t> counts, counted;
    std::vector<char> lse_values, weights, floors;
    Forward f;
    RowStats few;

    Second(const Forward& all, const RowStats& rows, const Rows& from, std::int64_t first, std::int64_t n, int most)
        : call(all),
          n(n),
          size(from.wide ? 8 : 4),
          queries(all.batch * all.heads * n),
          keys(queries.size() * most),
          counts(queries.size()),
          counted(queries.size()),
          lse_values(rows.other_lse ? queries.size() * size : 0),
          weights(keys.size() * size),
          floors(queries.size() * size),
          f(all) {
        for (std::int64_t to = 0; to < std::int64_t(queries.size()); to++) {
            const std::int64_t head = to / n, r = from.order[head * all.queries + first + to % n], b = head / all.heads,
                               h = head % all.heads;
            queries[to] = all.rows ? all.rows[b * all.rows_stride[0] + h * all.rows_stride[1] + r] : r;
            counts[to] = from.maximum(head, r) >= 0;
            const double floor = counts[to] ? from.floor(head, r) : 0;
            if (from.wide)
                reinterpret_cast<double*>(floors.data())[to] = floor;
            else
                reinterpret_cast<float*>(floors.data())[to] = float(floor);
            if (rows.other_lse)
                std::copy_n(static_cast<const char*>(rows.other_lse) + (head * all.queries + r) * size, size,
                            &lse_values[to * size]);
        }
        f.queries = n;
        f.v_head_dim = 0;
        f.out = f.lse = nullptr;
        f.rows = queries.data();
        f.rows_stride[0] = all.heads * n;
        f.rows_stride[1] = n;
        few.may_count = counts.data();
        few.may_count_stride[0] = all.heads * n;
        few.may_count_stride[1] = n;
        few.may_count_stride[2] = 1;
        few.other_lse = rows.other_lse ? lse_values.data() : nullptr;
        few.rounding = rows.rounding;
        few.counted = counted.data();
        few.floor = floors.data();
        few.most = most;
        few.most_weight = weights.data();
        few.most_key = keys.data();
    }
    // Adds what a head has here to `found` edges; how many there are then, at most k.
    std::int64_t add_to(Edge* edges, std::int64_t edge_count, std::int64_t h, std::int64_t k) const {
        for (std::int64_t b = 0; b < call.batch; b++)
            for (std::int64_t m = 0; m < n * few.most; m++) {
                const std::int64_t row = (b * call.heads + h) * n + m / few.most, at = row * few.most + m % few.most;
                if (keys[at] >= 0)
                    edges[edge_count++] = {number(weights.data(), at, size == 8), b, queries[row], keys[at]};
            }
        return keep_largest(edges, edge_count, k);
    }
};

void add_up(const Moments& m, const void* values, bool wide, std::int64_t n) {
    const Target& target = *chosen();
    const std::int64_t name = n / m.heads, head = n % m.heads, size = wide ? 8 : 4;
    const auto each_batch = [&](const auto& body) {
        for (std::int64_t b = 0; b < m.batch; b++)
            body(static_cast<const char*>(values) + ((name * m.batch + b) * m.heads + head) * m.rows * size);
    };
    Pool pool;
    std::int64_t* const histogram = m.histogram + n * m.bins;
    std::fill_n(histogram, m.bins, 0);
    each_batch([&](const char* x) { target.pool(x, wide, m.rows, pool); });
    const auto border = [&](std::int64_t k) { return number(m.borders, name * m.bins + k, wide); };
    std::int64_t first = 0, last = 0;  // borders that part the values
    while (first < m.bins && border(first) <= pool.least) histogram[first++] = pool.count;
    for (last = first; last < m.bins && border(last) <= pool.largest;) last++;
    const char* const borders = static_cast<const char*>(m.borders) + (name * m.bins + first) * size;
    if (last > first)
        each_batch([&](const char* x) { target.reach(x, wide, m.rows, borders, last - first, histogram + first); });
    for (std::int64_t k = 0; k + 1 < m.bins; k++) histogram[k] -= histogram[k + 1];
    const double none = std::numeric_limits<double>::quiet_NaN(),
                 mean = pool.count ? pool.sum / double(pool.count) : none;
    double squares = 0;
    each_batch([&](const char* x) { squares += target.squares(x, wide, m.rows, mean); });
    m.count[n] = pool.count;
    m.mean[n] = mean;
    m.M2[n] = pool.count ? squares : none;
    m.least[n] = pool.count ? pool.least : none;
    m.largest[n] = pool.count ? pool.largest : none;
}

// What the shares have apart, and the edges of all of them: from `next` on, if that is known. How many bytes it is.
std::size_t lay_out_shares(const Forward& f, RowStats& s, std::size_t lines_apart, char* next) {
    std::size_t size = 0;
    const auto take = [&](auto*& to, std::size_t count) {
        if (next) to = reinterpret_cast<std::decay_t<decltype(to)>>(next + size);
        size += count * sizeof *to;
    };
    const std::size_t apart = std::size_t((s.shares - 1) * f.heads), all = std::size_t(s.shares * f.heads);
    const std::size_t keys = s.whole.received ? apart * std::size_t(f.keys) : 0,
                      cells = apart * lines_apart * std::size_t(s.bins);
    take(s.apart.received, keys);
    take(s.apart.eligible, keys);
    take(s.apart.sum, cells);
    take(s.apart.max, cells);
    take(s.apart.count, cells);
    if (s.edges) {
        take(s.edge, all * std::size_t(s.edges));
        take(s.edges_found, all);
        take(s.edge_least, std::size_t(f.heads));
    }
    take(s.apart.largest, 3 * cells);  // last, for it is narrower
    return size;
}

// What the shares have found of a head's edges.
void gather_edges(const Forward& f, const RowStats& s, const EdgeList& list, std::int64_t head) {
    std::int64_t edge_count = s.edges_found[head];
    Edge* const edges = s.edge + head * s.edges;
    std::vector<Edge> all(edges, edges + edge_count);
    for (std::int64_t share = 1; share < s.shares; share++) {
        const std::int64_t n = share * f.heads + head;
        all.insert(all.end(), s.edge + n * s.edges, s.edge + n * s.edges + s.edges_found[n]);
    }
    edge_count = keep_largest(all.data(), std::int64_t(all.size()), list.k);
    put(list, head, all.data(), edge_count);
}

}  // namespace

bool look(Forward& f, RowStats& rows, const EdgeList* list, const Moments* moments, const void* values, int threads) {
    Signals signals;
    std::atomic<bool> spoilt{false};
    rows.spoilt = f.spoilt = &spoilt;
    f.look = &rows;
    f.watch = &signals;
    const Forward with_values = f;
    if (!f.out) f.v_head_dim = 0;
    const Target* target = chosen();
    rows.shares = rows.columns() ? target->look_shares(f) : 1;
    rows.edges = list ? list->k : 0;
    const std::int64_t tasks = target->look_tasks(f), value_heads = f.batch * f.kv_heads;
    const int used = usable(threads, tasks);
    const std::size_t own = room_of_own(target->look_scratch(f));
    const std::size_t lengths = own * std::size_t(used);  // from there on
    const std::size_t apart =
        lengths +
        (rows.value[VALUE_NORM] ? std::size_t(value_heads * f.keys) * (is_double(f) ? 8 : 4) + 64 : 0) / 64 * 64;
    const std::size_t lines_apart = std::size_t(target->lines_apart(f));
    const Scratch<> scratch(apart + lay_out_shares(f, rows, lines_apart, nullptr));
    lay_out_shares(f, rows, lines_apart, scratch.at(apart));
    if (list) std::uninitialized_fill_n(rows.edge_least, f.heads, -1.0);
    if (rows.value[VALUE_NORM]) rows.norms = scratch.at(lengths);
    Step measuring_values(rows.norms ? value_heads : 0, used), observing(tasks, used);
    Preparation preparation(*target, f, used);
    const std::int64_t gathered = rows.columns() ? f.heads : 0;
    Step gathering_first(std::min<std::int64_t>(gathered, 1), used),
        gathering(std::max<std::int64_t>(gathered - 1, 0), used);
    Step pooling(moments ? moments->names * moments->heads : 0, used);
    parallel_region(used, [&](int thread) {
        measuring_values.run(signals, thread,
                             [&](std::int64_t n, int) { target->lengths(with_values, n, scratch.at(lengths)); });
        measuring_values.wait(signals);
        preparation.run(signals, thread);
        observing.run(signals, thread,
                      [&](std::int64_t n, int) { target->run_look(f, n, scratch.at(own * std::size_t(thread))); });
        observing.wait(signals);
        pooling.run(signals, thread, [&](std::int64_t n, int) { add_up(*moments, values, is_double(f), n); });
        gathering_first.run(signals, thread, [&](std::int64_t, int) { target->gather_look(f, 0); });
        gathering_first.wait(signals);
        gathering.run(signals, thread, [&](std::int64_t n, int) { target->gather_look(f, n + 1); });
    });
    signals.raise();
    if (list)
        for (std::int64_t head = 0; head < f.heads; head++) gather_edges(f, rows, *list, head);
    return !spoilt;
}

void edges(const Forward& call, const RowStats& rows, const EdgeList& list, int threads) {
    Signals signals;
    const Rows chosen_rows(call, list, signals, threads);
    const std::int64_t heads = call.batch * call.heads, most = std::min<std::int64_t>(list.k, call.keys);
    const std::int64_t step = std::clamp<std::int64_t>(AT_ONCE / (heads * most), 1, chosen_rows.count);
    const std::int64_t room = list.k + call.batch * step * most;  // of a head: what is kept, and what comes to it
    std::vector<Edge> candidates(call.heads * room);
    std::vector<std::int64_t> edge_counts(call.heads);
    for (std::int64_t first = 0; first < chosen_rows.count; first += step) {
        Second again(call, rows, chosen_rows, first, std::min(step, chosen_rows.count - first), int(most));
        look(again.f, again.few, nullptr, nullptr, nullptr, threads);
        each(signals, call.heads, usable(threads, call.heads), [&](std::int64_t h, int) {
            edge_counts[h] = again.add_to(&candidates[h * room], edge_counts[h], h, list.k);
        });
        signals.raise();
    }
    for (std::int64_t h = 0; h < call.heads; h++) put(list, h, &candidates[h * room], edge_counts[h]);
}

void moments(const Moments& m, const void* values, bool wide, int threads) {
    Signals signals;
    const std::int64_t tasks = m.names * m.heads;
    each(signals, tasks, usable(threads, tasks), [&](std::int64_t n, int) { add_up(m, values, wide, n); });
    signals.raise();
}

}  // namespace headscope

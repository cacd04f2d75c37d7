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

struct Edge {
    double p;
    std::int64_t b, i, j;
    bool operator<(const Edge& x) const { return p != x.p ? p > x.p : b != x.b ? b < x.b : i != x.i ? i < x.i : j < x.j; }
};

// Which bin of a histogram a value is in: bin k holds [edge k, edge k + 1), the outer two what lies beyond too.
class Bins {
public:
    Bins(const double* edges, std::int64_t bins) : edges(edges), last(bins - 1), step((edges[bins] - edges[0]) / double(bins)) {
        even = true;
        for (std::int64_t k = 0; k <= bins; k++) even &= std::abs(edges[k] - (edges[0] + double(k) * step)) < 1e-6 * step;
    }
    std::int64_t of(double x) const {
        if (!even) return std::upper_bound(edges + 1, edges + last + 1, x) - (edges + 1);
        const double guess = (x - edges[0]) / step;
        std::int64_t k = guess > 0 ? (guess < double(last) ? std::int64_t(guess) : last) : 0;
        if (k > 0 && x < edges[k]) k--;  // the edges are what they are, whatever the division rounds to
        else if (k < last && x >= edges[k + 1]) k++;
        return k;
    }

private:
    const double* edges;
    std::int64_t last;
    double step;
    bool even;
};

template <class T> void add_up(const Moments& m, const T* values, std::int64_t n) {
    const std::int64_t name = n / m.heads, head = n % m.heads;
    const double* edges = m.edges + name * (m.bins + 1);
    std::int64_t bins = m.bins;
    while (bins > 1 && !std::isfinite(edges[bins])) bins--;
    const Bins which(edges, bins);
    std::int64_t* histogram = m.histogram + n * m.bins;
    std::fill_n(histogram, m.bins, 0);
    const auto each_value = [&](const auto& body) {
        for (std::int64_t b = 0; b < m.batch; b++) {
            const T* at = values + ((name * m.batch + b) * m.heads + head) * m.rows;
            for (std::int64_t r = 0; r < m.rows; r++) if (at[r] == at[r]) body(double(at[r]));
        }
    };
    std::int64_t count = 0;
    double sum = 0, M2 = 0, least = std::numeric_limits<double>::infinity(), largest = -least;
    each_value([&](double x) {
        count++, sum += x;
        if (x < least) least = x;
        if (x > largest) largest = x;
        histogram[which.of(x)]++;
    });
    const double none = std::numeric_limits<double>::quiet_NaN(), mean = count ? sum / double(count) : none;
    each_value([&](double x) { M2 += (x - mean) * (x - mean); });
    m.count[n] = count, m.mean[n] = mean, m.M2[n] = count ? M2 : none;
    m.least[n] = count ? least : none, m.largest[n] = count ? largest : none;
}

}  // namespace

bool look(Forward& f, RowStats& rows, int threads) {
    Signals signals;
    std::atomic<bool> spoilt{false};
    rows.spoilt = f.spoilt = &spoilt, f.look = &rows, f.watch = &signals;
    const Target* target = chosen();
    const std::int64_t tasks = target->look_tasks(f);
    threads = usable(threads, tasks);
    const std::size_t own = (target->look_scratch(f) + 127) / 64 * 64;
    const Scratch scratch(own * std::size_t(threads));
    const Memory made = prepared(*target, f, signals, threads);
    each(signals, tasks, threads, [&](std::int64_t n, int thread) {
        target->run_look(f, n, scratch.at(own * std::size_t(thread)));
    });
    if (rows.columns()) each(signals, f.heads, usable(threads, f.heads), [&](std::int64_t n, int) { target->gather_look(f, n); });
    signals.raise();
    return !spoilt;
}

void edges(const Forward& call, const RowStats& rows, const EdgeList& list, int threads) {
    const bool wide = is_double(call);
    const std::int64_t size = wide ? 8 : 4, count = std::min<std::int64_t>(list.k, call.queries), heads = call.batch * call.heads;
    const int most = int(std::min<std::int64_t>(list.k, call.keys));
    std::vector<std::int64_t> queries(heads * count), keys(heads * count * most);
    std::vector<std::uint8_t> counts(heads * count), counted(heads * count);
    std::vector<char> given(rows.given ? heads * count * size : 0), weights(heads * count * most * size), floors(heads * count * size);
    std::vector<std::int64_t> orders(heads * call.queries);
    Signals signals;
    each(signals, heads, usable(threads, heads), [&](std::int64_t head, int) {
        const auto order = orders.begin() + head * call.queries;
        const auto maximum = [&](std::int64_t r) {
            const double x = number(list.maxima, head * call.queries + r, wide);
            return x == x ? x : -1;
        };
        std::iota(order, order + call.queries, 0);
        const auto larger = [&](std::int64_t r, std::int64_t z) { return maximum(r) != maximum(z) ? maximum(r) > maximum(z) : r < z; };
        std::nth_element(order, order + (count - 1), order + call.queries, larger);
        const double least = count == list.k ? maximum(order[count - 1]) : 0;  // with fewer rows, smaller ones are wanted too
        for (std::int64_t n = 0; n < count; n++) {
            const std::int64_t r = order[n], to = head * count + n;
            const std::int64_t* known = call.rows;
            queries[to] = known ? known[head / call.heads * call.rows_stride[0] + head % call.heads * call.rows_stride[1] + r] : r;
            counts[to] = maximum(r) >= 0;
            const double top = counts[to] ? number(list.max_logits, head * call.queries + r, wide) * 1.4426950408889634 : 0;
            const double floor = least > 0 ? top + std::log2(least / maximum(r)) - 1e-4 * (1 + std::abs(top)) : -HUGE_VAL;
            if (wide) reinterpret_cast<double*>(floors.data())[to] = floor;
            else reinterpret_cast<float*>(floors.data())[to] = float(floor);
            if (rows.given) std::copy_n(static_cast<const char*>(rows.given) + (head * call.queries + r) * size, size, &given[to * size]);
        }
    });
    signals.raise();
    Forward f = call;
    f.queries = count, f.v_head_dim = 0, f.out = f.lse = nullptr;
    f.rows = queries.data(), f.rows_stride[0] = call.heads * count, f.rows_stride[1] = count;
    RowStats few;
    few.may_count = counts.data();
    few.may_count_stride[0] = call.heads * count, few.may_count_stride[1] = count, few.may_count_stride[2] = 1;
    few.given = rows.given ? given.data() : nullptr, few.rounding = rows.rounding, few.counted = counted.data();
    few.floor = floors.data();
    few.most = most, few.most_weight = weights.data(), few.most_key = keys.data();
    look(f, few, threads);
    std::vector<Edge> candidates(heads * count * most);
    each(signals, call.heads, usable(threads, call.heads), [&](std::int64_t h, int) {
        Edge* const found = candidates.data() + h * call.batch * count * most;
        std::int64_t there = 0;
        for (std::int64_t b = 0; b < call.batch; b++) for (std::int64_t n = 0; n < count * most; n++) {
            const std::int64_t row = (b * call.heads + h) * count + n / most, at = row * most + n % most;
            if (keys[at] >= 0) found[there++] = {number(weights.data(), at, wide), b, queries[row], keys[at]};
        }
        const std::int64_t kept = std::min<std::int64_t>(there, list.k);
        std::partial_sort(found, found + kept, found + there);
        for (std::int64_t n = 0; n < list.k; n++) {
            double* p = list.p + h * list.k + n;
            std::int64_t* at = list.at + 4 * (h * list.k + n);
            const bool has = n < kept;
            *p = has ? found[n].p : std::numeric_limits<double>::quiet_NaN();
            at[0] = has ? 0 : -1, at[1] = has ? found[n].b : -1, at[2] = has ? found[n].i : -1, at[3] = has ? found[n].j : -1;
        }
    });
    signals.raise();
}

void moments(const Moments& m, const void* values, bool wide, int threads) {
    Signals signals;
    const std::int64_t tasks = m.names * m.heads;
    each(signals, tasks, usable(threads, tasks), [&](std::int64_t n, int) {
        if (wide) add_up(m, static_cast<const double*>(values), n);
        else add_up(m, static_cast<const float*>(values), n);
    });
    signals.raise();
}

}  // namespace headscope

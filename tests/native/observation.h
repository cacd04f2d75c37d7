// One random observation of a problem: which statistics of which rows; and their expected values by the definitions of
// docs/concepts/statistics.md, computed a pair at a time.
#pragma once

#include <algorithm>
#include <functional>

#include "problem.h"

namespace selfcheck {

using headscope::MAX_FIRST_KEYS;
using headscope::MAX_WINDOWS;
using headscope::QUANTITIES;

struct Observation {
    std::int64_t R;               // rows that are observed
    Array queries;                // which query each of them is, [B or 1, H or 1, 1, R]; not given: 0, 1, 2, …
    Array line, own, ids, first;  // [B or 1, 1, 1, R] both, [B, 1, 1, K], [B or 1, 1, 1, first_count]; as in Statistics
    Array norms, may_count, external_lse;  // [B, Hkv, K, 1], [B or 1, H or 1, R or 1, 1], [B, H, R, 1]
    std::vector<double> reach;
    bool attends, received, values, floor;  // floor: none of the largest weights is below it
    std::int64_t most, bins, shares, edges;
    std::int64_t first_query = 0, total_queries = 0, total_keys = 0;  // the whole that the map divides
    bool received_max;                                                // with `received`
    std::int64_t segments;                                            // 0: none
    Array key_segments, row_segments, ends;  // [B or 1, 1, 1, K], [B or 1, 1, 1, R] and as the keys; as in Statistics

    std::int64_t query(std::int64_t b, std::int64_t h, std::int64_t r) const {
        return queries.present ? std::int64_t(queries(b, h, 0, r)) : r;
    }
    std::string describe() const {
        std::string text = "; observing " + std::to_string(R) + " rows";
        if (queries.present) text += " picked out";
        if (line.present) text += ", on a line";
        if (ids.present) text += ", tokens";
        if (norms.present) text += ", norms";
        if (may_count.present) text += ", may_count";
        if (external_lse.present) text += ", given lse";
        if (attends) text += ", attending";
        if (received) text += received_max ? ", received and its maximum" : ", received";
        if (segments) text += ", " + std::to_string(segments) + " segments";
        text += ", " + std::to_string(reach.size()) + " windows, first " + std::to_string(first.n[3]) + ", most " +
                std::to_string(most);
        return text + ", bins " + std::to_string(bins) + ", shares " + std::to_string(shares) + ", edges " +
               std::to_string(edges);
    }
};

// `lse` of all rows of the problem.
inline Observation draw_observation(Random& r, const Problem& p, const Array& lse) {
    Observation x{};
    const auto batch = [&] { return r.one_in(2) ? 1 : p.B; };
    x.attends = r.one_in(2);
    x.R = p.Q;
    if (!x.attends && r.one_in(2)) {
        x.R = r.range(1, p.Q + 2);
        x.queries = Array(batch(), r.one_in(2) ? 1 : p.H, 1, x.R);
        for (double& i : x.queries.x) i = double(r.range(0, p.Q - 1));
    }
    if (!r.one_in(4)) {
        x.line = Array(batch(), 1, 1, x.R);
        const std::int64_t offset = r.one_in(4) ? r.range(-70'000, 70'000) : r.range(-p.Q, p.K), anywhere = r.one_in(4);
        for (std::size_t n = 0; n < x.line.x.size(); n++)
            x.line.x[n] = double(anywhere ? r.range(-3, p.K + 3) : std::int64_t(n) % x.R + offset);
        for (std::int64_t n = r.one_in(2) ? 0 : r.range(1, MAX_WINDOWS); n > 0; n--)
            x.reach.push_back(r.one_in(8) ? INF : r.one_in(4) ? 0 : r.range(1, 2 * p.K) / 2.0);
        if (r.one_in(2)) {
            x.own = Array(batch(), 1, 1, x.R);
            x.ids = Array(p.B, 1, 1, p.K);
            for (double& j : x.own.x) j = double(r.range(-1, p.K - 1));
            for (double& id : x.ids.x) id = double(r.range(-2, r.one_in(2) ? 2 : 30));
        }
    }
    x.first = Array(batch(), 1, 1, r.one_in(2) ? 1 : r.range(0, p.K < MAX_FIRST_KEYS ? p.K : MAX_FIRST_KEYS));
    for (std::int64_t b = 0; b < x.first.n[0] && x.first.n[3]; b++) {
        std::int64_t j = r.range(0, p.K - 1);
        for (std::int64_t n = 0; n < x.first.n[3]; n++, j += r.one_in(3) ? 2 : 1)
            x.first(b, 0, 0, n) = j < p.K ? double(j) : -1;
    }
    if (r.one_in(2)) {
        x.norms = Array(p.B, p.Hkv, p.K, 1);
        for (std::int64_t b = 0; b < p.B; b++)
            for (std::int64_t h = 0; h < p.Hkv; h++)
                for (std::int64_t j = 0; j < p.K; j++) {
                    double squares = 0;
                    for (std::int64_t c = 0; c < p.Dv; c++) squares += p.v(b, h, j, c) * p.v(b, h, j, c);
                    x.norms(b, h, j, 0) = rounded(std::sqrt(squares), arithmetic(p.dtype));
                }
    }
    if (r.one_in(2)) {
        x.may_count = Array(batch(), r.one_in(2) ? 1 : p.H, r.one_in(4) ? 1 : x.R, 1);
        for (double& may : x.may_count.x) may = !r.one_in(4);
    }
    if (r.one_in(4)) {
        x.external_lse = Array(p.B, p.H, x.R, 1);
        const double off = r.one_in(2) ? 0 : 0.4;
        for (std::int64_t b = 0; b < p.B; b++)
            for (std::int64_t h = 0; h < p.H; h++)
                for (std::int64_t n = 0; n < x.R; n++)
                    x.external_lse(b, h, n, 0) = rounded(lse(b, h, x.query(b, h, n), 0) + off, arithmetic(p.dtype));
    }
    x.values = !r.one_in(4);
    x.received = r.one_in(2);
    x.shares = r.range(1, 4);
    x.most = r.one_in(2) ? 0 : r.one_in(6) ? p.K + 2 : r.range(1, 4);
    x.floor = r.one_in(2);
    x.bins = r.one_in(2) ? 0 : r.one_in(4) ? p.K + r.range(0, 9) : r.range(1, 9);
    if (x.shares * p.H * x.bins * x.bins > 100'000) x.bins = 3;
    const bool is_part = r.one_in(3);
    x.first_query = is_part ? r.range(0, 40) : 0;
    x.total_queries = x.first_query + p.Q + (is_part ? r.range(0, 40) : 0);
    x.total_keys = p.K + (is_part ? r.range(0, 40) : 0);
    x.edges = !x.bins || r.one_in(2) ? 0 : r.one_in(3) ? r.range(1, 40) : r.range(1, 3);
    x.received_max = x.received && r.one_in(2);
    x.segments = r.one_in(2) ? 0 : r.one_in(4) ? 64 : r.range(1, 20);
    if (x.segments == 0) return x;
    x.key_segments = x.ends = Array(batch(), 1, 1, p.K);
    x.row_segments = Array(batch(), 1, 1, x.R);
    const std::int64_t change = r.one_in(2) ? 1 : 20;  // one in so many keys starts another run
    for (Array* ids : {&x.key_segments, &x.row_segments})
        for (std::size_t n = 0; n < ids->x.size(); n++)
            ids->x[n] = n && !r.one_in(int(change)) ? ids->x[n - 1] : double(r.range(-1, x.segments - 1));
    for (std::int64_t b = 0; b < x.ends.n[0]; b++)
        for (std::int64_t j = p.K - 1; j >= 0; j--)
            x.ends(b, 0, 0, j) = j + 1 < p.K && x.key_segments(b, 0, 0, j) == x.key_segments(b, 0, 0, j + 1)
                                     ? x.ends(b, 0, 0, j + 1)
                                     : double(j + 1);
    return x;
}

// What should come out. `size` of a number is how far it moves where each weight moves by its own size.
struct Measured {
    Array value[QUANTITIES], size[QUANTITIES], window[MAX_WINDOWS], streaming[MAX_WINDOWS];
    Array counted, weights;                                 // [B, H, R, 1] and [B, H, R, K], -1 where a key is not seen
    Array received, eligible, map_sum, map_count, map_max;  // [1, H, K, 1] and [1, H, bins, bins]
    Array received_max, segment_sum, segment_count;         // [1, H, K, 1], [1, H, S, S] and [1, H, S, 1]
};

// One row: the keys it sees, in arithmetic of type A.
template <class A>
struct MeasuredRow {
    std::vector<std::int64_t> keys;
    std::vector<A> weight;
    A lse, top = A(-INF);

    // Σ of what(j, p) over the keys that are seen.
    template <class What>
    double sum(const What& what) const {
        A total = 0;
        for (std::size_t n = 0; n < keys.size(); n++) total += what(keys[n], weight[n]);
        return double(total);
    }
    // The weight of such keys; NaN where none is seen and one is `needed`.
    template <class Which>
    double mass(bool needed, const Which& which) const {
        const double total = sum([&](std::int64_t j, A) { return A(which(j)); });
        return total > 0 || !needed ? sum([&](std::int64_t j, A w) { return which(j) ? w : A(0); }) : NOT;
    }
};

template <class A>
MeasuredRow<A> measured_row(const Problem& p, const Observation& x, double rounding, std::int64_t b, std::int64_t h,
                            std::int64_t r) {
    MeasuredRow<A> row;
    const std::int64_t i = x.query(b, h, r);
    for (std::int64_t j = 0; j < p.K; j++)
        if (p.seen(b, h, i, j)) {
            A s = 0;
            for (std::int64_t d = 0; d < p.D; d++) s += A(p.q(b, h, i, d)) * A(p.k(b, h / p.group(), j, d));
            s *= A(p.scale);
            if (p.softcap > 0) s = A(p.softcap) * std::tanh(s / A(p.softcap));
            if (p.bias.present) s += A(p.bias(b, h, i, j));
            row.keys.push_back(j);
            row.weight.push_back(s);
            row.top = std::max(row.top, s);
        }
    const A sink = p.sinks.empty() ? A(-INF) : A(p.sinks[std::size_t(h)]), top = std::max(row.top, sink);
    A total = std::exp(sink - top);
    for (A s : row.weight) total += std::exp(s - top);
    row.lse = top + std::log(total);
    if (x.external_lse.present) {
        const A other = A(x.external_lse(b, h, r, 0)), size = std::fabs(row.lse);
        if (std::fabs(other - row.lse) > A(rounding) * (size > 1 ? size : A(1))) row.lse = other;
    }
    for (A& s : row.weight) s = std::exp(s - row.lse);
    return row;
}

template <class A>
void measure_row(const Problem& p, const Observation& x, const MeasuredRow<A>& row, std::int64_t b, std::int64_t h,
                 std::int64_t r, Measured& m) {
    using namespace headscope;
    const auto put = [&](int n, double value, double size) {
        m.value[n](b, h, r, 0) = value;
        m.size[n](b, h, r, 0) = size;
    };
    const auto sum = [&](int n, double value) { put(n, value, std::fabs(value)); };
    const double choices = double(row.keys.size()), mass = row.sum([](std::int64_t, A w) { return w; });
    const double entropy = row.sum([](std::int64_t, A w) { return w > 0 ? -w * std::log(w) : A(0); });
    const double spread = mass + row.sum([](std::int64_t, A w) { return w > 0 ? std::fabs(w * std::log(w)) : A(0); });
    const double squares = row.sum([](std::int64_t, A w) { return w * w; });
    put(LSE, double(row.lse), 1);
    put(MAX_LOGIT, double(row.top), 1);
    put(ENTROPY, entropy > 0 ? entropy : 0, spread);
    put(NORMALIZED_ENTROPY, choices < 2 ? NOT : (entropy > 0 ? entropy : 0) / std::log(choices),
        spread / std::log(choices));
    sum(MAX_WEIGHT, double(std::exp(row.top - row.lse)));
    A largest = 0, second = 0;
    for (const A w : row.weight) {
        second = std::max(second, std::min(w, largest));
        largest = std::max(largest, w);
    }
    sum(SECOND_WEIGHT, double(second));
    sum(MASS, mass);
    sum(CHANCE, 1 / choices);
    put(EFFECTIVE_KEYS, 1 / squares, 2 / squares);
    const auto is_first = [&](std::int64_t j) {
        for (std::int64_t n = 0; n < x.first.n[3]; n++)
            if (x.first(b, 0, 0, n) == double(j)) return true;
        return false;
    };
    sum(FIRST, row.mass(false, is_first));
    if (x.norms.present)
        sum(VALUE_NORM, row.sum([&](std::int64_t j, A w) { return w * A(x.norms(b, h / p.group(), j, 0)); }));
    if (!x.line.present) return;
    const double at = x.line(b, 0, 0, r);
    sum(DISTANCE, row.sum([&](std::int64_t j, A w) { return w * A(std::fabs(at - double(j))); }));
    for (int n = 0; n < 3; n++) {
        const double there = at + (n == 0 ? 0 : n == 1 ? -1 : 1);
        sum(SELF + n, row.mass(true, [&](std::int64_t j) { return double(j) == there; }));
    }
    for (std::size_t n = 0; n < x.reach.size(); n++) {
        const auto near = [&](std::int64_t j) { return std::fabs(at - double(j)) <= x.reach[n]; };
        m.window[n](b, h, r, 0) = row.mass(false, near);
        m.streaming[n](b, h, r, 0) = row.mass(false, [&](std::int64_t j) { return near(j) || is_first(j); });
    }
    if (!x.ids.present) return;
    const std::int64_t own = std::int64_t(x.own(b, 0, 0, r));
    const auto same = [&](std::int64_t j) { return own >= 0 && j >= 0 && x.ids(b, 0, 0, j) == x.ids(b, 0, 0, own); };
    sum(DUPLICATE, row.mass(true, [&](std::int64_t j) { return j != own && same(j); }));
    sum(INDUCTION, row.mass(true, [&](std::int64_t j) { return same(j - 1); }));
}

inline std::int64_t bin_of(std::int64_t place, std::int64_t bins, std::int64_t length) {
    std::int64_t bin = 0;
    while ((bin + 1) * length / bins <= place) bin++;
    return bin;
}

template <class A>
Measured measured(const Problem& p, const Observation& x, double rounding) {
    Measured m;
    const Array empty(p.B, p.H, x.R, 1, NOT);
    for (Array& a : m.value) a = empty;
    for (Array& a : m.size) a = empty;
    for (Array& a : m.window) a = empty;
    for (Array& a : m.streaming) a = empty;
    m.counted = Array(p.B, p.H, x.R, 1);
    m.weights = Array(p.B, p.H, x.R, p.K, -1);
    m.received = Array(1, p.H, p.K, 1);
    m.eligible = m.received_max = m.received;
    m.segment_sum = Array(1, p.H, x.segments, x.segments);
    m.segment_count = Array(1, p.H, x.segments, 1);
    m.map_sum = Array(1, p.H, x.bins, x.bins);
    m.map_count = m.map_sum;
    m.map_max = Array(1, p.H, x.bins, x.bins, NOT);
    // of thousands of equal weights double would lose as much as is allowed
    std::vector<long double> map_sum(m.map_sum.x.size()), received(m.received.x.size()),
        segment_sum(m.segment_sum.x.size());
    for (std::int64_t b = 0; b < p.B; b++)
        for (std::int64_t h = 0; h < p.H; h++)
            for (std::int64_t r = 0; r < x.R; r++) {
                const MeasuredRow<A> row = measured_row<A>(p, x, rounding, b, h, r);
                if (row.keys.empty() || (x.may_count.present && x.may_count(b, h, r, 0) == 0)) continue;
                m.counted(b, h, r, 0) = 1;
                measure_row(p, x, row, b, h, r, m);
                const std::int64_t y = x.bins ? bin_of(x.first_query + x.query(b, h, r), x.bins, x.total_queries) : 0;
                const std::int64_t of_row = x.segments ? std::int64_t(x.row_segments(b, 0, 0, r)) : -1;
                if (of_row >= 0) m.segment_count(0, h, of_row, 0)++;
                for (std::size_t n = 0; n < row.keys.size(); n++) {
                    const std::int64_t j = row.keys[n];
                    const double w = m.weights(b, h, r, j) = double(row.weight[n]);
                    received[m.received.where(0, h, j, 0)] += w;
                    m.eligible(0, h, j, 0)++;
                    m.received_max(0, h, j, 0) = std::max(m.received_max(0, h, j, 0), w);
                    const std::int64_t of_key = of_row < 0 ? -1 : std::int64_t(x.key_segments(b, 0, 0, j));
                    if (of_key >= 0) segment_sum[m.segment_sum.where(0, h, of_row, of_key)] += w;
                    if (!x.bins) continue;
                    const std::size_t cell = m.map_sum.where(0, h, y, bin_of(j, x.bins, x.total_keys));
                    map_sum[cell] += w;
                    m.map_count.x[cell]++;
                    if (!(m.map_max.x[cell] >= w)) m.map_max.x[cell] = w;
                }
            }
    for (std::size_t n = 0; n < map_sum.size(); n++) m.map_sum.x[n] = double(map_sum[n]);
    for (std::size_t n = 0; n < received.size(); n++) m.received.x[n] = double(received[n]);
    for (std::size_t n = 0; n < segment_sum.size(); n++) m.segment_sum.x[n] = double(segment_sum[n]);
    return m;
}

}  // namespace selfcheck

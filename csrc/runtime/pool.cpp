#include "pool.h"

#include <algorithm>

namespace headscope {
namespace {

template <class T>
void add(T* to, const T* more, std::int64_t count) {
    for (std::int64_t n = 0; n < count; n++) to[n] += more[n];
}

// Adds rows to those so far (Chan, Golub and LeVeque 1983, equation 2.1): the operations of `Moments.merge` in
// src/headscope/stats/_moments.py, in their order. This file is compiled without fused ones.
void merge_moments(const Moments& to, const Moments& one, std::int64_t n) {
    const std::int64_t before = to.count[n], more = one.count[n];
    if (more == 0) return;  // its bins are 0
    add(to.histogram + n * to.bins, one.histogram + n * to.bins, to.bins);
    to.count[n] = before + more;
    if (before == 0) {
        to.mean[n] = one.mean[n];
        to.M2[n] = one.M2[n];
        to.min[n] = one.min[n];
        to.max[n] = one.max[n];
        return;
    }
    const double share = double(more) / double(before + more), apart = one.mean[n] - to.mean[n];
    to.mean[n] += apart * share;
    to.M2[n] = to.M2[n] + one.M2[n] + apart * apart * double(before) * share;
    to.min[n] = std::min(to.min[n], one.min[n]);
    to.max[n] = std::max(to.max[n], one.max[n]);
}

void copy_moments(const Moments& to, const Moments& one) {
    const std::int64_t entries = to.names * to.heads;
    std::copy_n(one.count, entries, to.count);
    std::copy_n(one.histogram, entries * to.bins, to.histogram);
    std::copy_n(one.mean, entries, to.mean);
    std::copy_n(one.M2, entries, to.M2);
    std::copy_n(one.min, entries, to.min);
    std::copy_n(one.max, entries, to.max);
}

// Applies `each` to the sums of both, which have no keys.
template <class Each>
void for_sums(const Results& to, const Results& one, Each each) {
    const Exchange &x = to.moments.exchange, &y = one.moments.exchange;
    const std::int64_t entries = x.factor ? to.moments.names * to.heads : 0, rows = to.heads * to.segments,
                       pairs = rows * to.segments;
    each(x.means, y.means, entries);
    each(x.variances, y.variances, entries);
    each(to.columns.segment_sum, one.columns.segment_sum, pairs);
    each(to.columns.segment_count, one.columns.segment_count, rows);
    each(x.between.means, y.between.means, x.between.segments ? pairs : 0);
    each(x.between.variances, y.between.variances, x.between.segments ? pairs : 0);
}

// A call gives 0 to a key that it does not have.
void copy_columns(const Results& to, const Results& one) {
    for (std::int64_t head = 0; head < to.heads; head++) {
        const auto copy = [&](auto* into, const auto* from) {
            if (!into) return;
            std::copy_n(from + head * one.keys, one.keys, into + head * to.keys);
            std::fill_n(into + head * to.keys + one.keys, to.keys - one.keys, 0);
        };
        copy(to.columns.received, one.columns.received);
        copy(to.columns.eligible, one.columns.eligible);
        copy(to.columns.received_max, one.columns.received_max);
    }
}

void add_columns(const Results& to, const Results& one) {
    const ColumnStatistics &sums = to.columns, &more = one.columns;
    for (std::int64_t head = 0; sums.received && head < to.heads; head++) {
        const std::int64_t at = head * to.keys, from = head * one.keys;
        add(sums.received + at, more.received + from, one.keys);
        add(sums.eligible + at, more.eligible + from, one.keys);
        for (std::int64_t j = 0; sums.received_max && j < one.keys; j++)
            sums.received_max[at + j] = std::max(sums.received_max[at + j], more.received_max[from + j]);
    }
}

}  // namespace

void pool_results(const Results& to, const std::vector<Results>& several) {
    const std::int64_t entries = to.moments.names * to.heads;
    for (const Results& one : several)
        if (&one == several.data()) {
            copy_moments(to.moments, one.moments);
            copy_columns(to, one);
            for_sums(to, one, [](auto* into, const auto* from, std::int64_t count) { std::copy_n(from, count, into); });
        } else {
            for (std::int64_t n = 0; n < entries; n++) merge_moments(to.moments, one.moments, n);
            add_columns(to, one);
            for_sums(to, one, [](auto* into, const auto* more, std::int64_t count) { add(into, more, count); });
        }
}

}  // namespace headscope

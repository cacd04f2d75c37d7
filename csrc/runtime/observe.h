// Runs an observation on threads, and computes what needs no vectors: edges, moments and histograms.
#pragma once

#include <cstdint>

#include "../interface/attention.h"

namespace headscope {

// The k largest weights of each head over batch entries, rows and keys; of equal ones those with the smallest indices.
struct EdgeList {
    int k;
    double* p;           // out, [H, k], descending; NaN where there are fewer
    std::int64_t* at;    // out, [H, k, 4]: 0, batch entry, query and key; -1 where there are fewer
    const void* maxima;  // [B, H, Q] of the accumulation type: the largest weight of each row; NaN if it is not counted
    const void* max_logits;  // the same for the largest logit
};

// Finds the edges of a call without a map, in a second pass over few rows. They lie in the k rows of each batch entry
// and head with the largest maxima, and are no smaller than the smallest of these maxima.
void find_edges(const Forward& f, const Statistics& rows, const EdgeList& list, int threads);

// What chance gives between segments: the visible keys of each row in each segment, and the sums over the rows of each
// segment. The factors of a row are those of a sum of indicators: mean m / n, spread m (1 - m / n) / (n - 1).
struct SegmentExchange {
    std::int64_t segments = 0;                           // S; 0: no sums
    const std::int32_t* keys = nullptr;                  // [B or 1, H or 1, rows or 1, S]
    std::int64_t batch_stride, head_stride, row_stride;  // 0 along an axis of 1
    const std::int8_t* rows = nullptr;                   // the segment of each row, -1 for none: [B or 1, rows]
    std::int64_t rows_stride;
    double *means, *variances;  // out, [H, S, S]
};

// What chance gives if the keys of each row are exchanged: the facts of the rows, and the sums over rows that have a
// quantity. src/headscope/_observe/exchange.py defines them.
struct Exchange {
    const std::int64_t* factor;   // [names]: the index of the quantity's factors; ONE_KEY or NO_NULL; null: no sums
    const double *mean, *spread;  // [factors, B or 1, H or 1, rows]
    std::int64_t factor_stride, batch_stride, head_stride;  // of both; 0 along an axis of 1
    std::int64_t mass, chance, effective_keys;              // indices in the values
    double *means, *variances;                              // out, [names, H]; 0 without a null
    SegmentExchange between = {};
};
constexpr std::int64_t ONE_KEY = -1, NO_NULL = -2;

// Moments and histograms of row quantities, for each name and head; NaN is skipped.
struct Moments {
    std::int64_t names, batch, heads, rows;  // of values, contiguous
    // The smallest value of each bin, [names, bins], of the type of the values. The first is -infinity; names with
    // fewer bins are padded with NaN.
    const void* borders;
    std::int64_t bins;
    std::int64_t *count, *histogram;  // [names, H], [names, H, bins]
    double *mean, *M2, *min, *max;    // [names, H]
    Exchange exchange = {};
};

// Computes statistics, and the output of attention unless f.out is null. With a map it also finds the edges if `list`
// is not null, and then the `moments` (or null) of `values`. Returns whether every row with a visible key is finite.
bool run_observation_tasks(Forward& f, Statistics& rows, const EdgeList* list, const Moments* moments,
                           const void* values, int threads);

void compute_moments(const Moments& m, const void* values, bool wide, int threads);

}  // namespace headscope

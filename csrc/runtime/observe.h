// Observing: what calls the targets, and what is done without vectors.
#pragma once

#include <cstdint>

#include "../interface/attention.h"

namespace headscope {

// The k largest weights of each head over batch entries, rows and keys; of equal ones the first.
struct EdgeList {
    int k;
    double* p;           // out, [H, k], largest first; NaN where there are fewer
    std::int64_t* at;    // out, [H, k, 4]: 0, batch entry, query and key; -1 where there are fewer
    const void* maxima;  // [B, H, Q] of the arithmetic's type: each row's largest weight; NaN where it does not count
    const void* max_logits;  // the same: and its largest logit
};

// Without a map: they lie in the k rows of each batch entry and head with the largest maxima, which are looked at once
// more, and are no smaller than the least of these.
void find_edges(const Forward& f, const Statistics& rows, const EdgeList& list, int threads);

// Of each name and head: count, mean, M2, least, largest and histogram of the values that are not NaN.
struct Moments {
    std::int64_t names, batch, heads, rows;  // of values, contiguous
    const void* borders;  // from where on values are in each bin of a histogram, [names, bins], of the values' type:
                          // the first is
    std::int64_t bins;    // -infinity; where a name has fewer, the rest is NaN
    std::int64_t *count, *histogram;  // [names, H], [names, H, bins]
    double *mean, *M2, *min, *max;    // [names, H]
};

// Attends, unless there is no place for that, while rows are measured; true where every row that sees keys is finite.
// With a map the edges, if there is a list for them, are found on the way. `moments`, which may be null, are those of
// `values`.
bool observe(Forward& f, Statistics& rows, const EdgeList* list, const Moments* moments, const void* values,
             int threads);

void compute_moments(const Moments& m, const void* values, bool wide, int threads);

}  // namespace headscope

// The results of several calls of a layer together.
#pragma once

#include <cstdint>
#include <vector>

#include "../interface/attention.h"
#include "observe.h"

namespace headscope {

// The results of one observation in memory; null, or 0 names or segments: not computed.
struct Results {
    std::int64_t heads, keys, segments;
    ColumnStatistics columns;  // without a map
    Moments moments;           // with the sums of nulls
};

// Writes what `several` are together: of the same heads, names and segments, and of at most as many keys as `to`. The
// numbers are those of `LayerStats.merge` in src/headscope/stats/_layer.py, result by result, to the bit.
void pool_results(const Results& to, const std::vector<Results>& several);

}  // namespace headscope

// Included by every target before its region: the standard headers (outside the region, so that none of their inline
// functions is compiled for the target's instructions) and the macros of the kernels.
#pragma once

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <new>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // false positives of g++ 12 in its own intrinsics
#endif
#include <immintrin.h>

#include "cpu_features.h"
#endif

#include "../interface/attention.h"

// The compiler's float16 type, if it has one: g++ has _Float16 on AArch64 from version 13, Clang on x86 from
// version 15.
#if defined(__aarch64__)
using Half = __fp16;
#define HAS_HALF 1
#elif defined(__clang__) && __clang_major__ < 15
#define HAS_HALF 0
#else
using Half = _Float16;
#define HAS_HALF 1
#endif

#define INLINE inline __attribute__((always_inline))
#define NOINLINE __attribute__((noinline))  // large functions that are called rarely
#if defined(__clang__)
#define UNROLL _Pragma("unroll 64")
#else
#define UNROLL _Pragma("GCC unroll 64")
#endif
// Unrolled loops: over begin, begin + step, … below end; over 0 .. count; and over 0 .. rows times 0 .. columns.
#define UNROLL_RANGE(index, begin, end, step) \
    UNROLL                                    \
    for (int index = begin; index < (end); index += step)
#define UNROLL_FOR(index, count) UNROLL_RANGE(index, 0, count, 1)
#define UNROLL_TILE(row, rows, column, columns) \
    UNROLL_FOR(row, rows)                       \
        UNROLL_FOR(column, columns)

// Functions between these two are compiled for the features of a target. g++ also needs prefer-vector-width=512; Clang
// has no such feature and drops an attribute that names it.
#define PRAGMA(...) _Pragma(#__VA_ARGS__)
#if defined(__clang__)
#define BEGIN_TARGET(features) PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define END_TARGET PRAGMA(clang attribute pop)
#else
#define BEGIN_TARGET(features) PRAGMA(GCC push_options) PRAGMA(GCC target(features, "prefer-vector-width=512"))
#define END_TARGET PRAGMA(GCC pop_options)
#endif

// The functions of a target, in the order of Target (interface/attention.h).
#define TARGET_FUNCTIONS                                                                                               \
    runs_here, pairing_tasks, paired_v_bytes, pair_values, forward_tasks, forward_scratch, run_forward, key_splits,    \
        partial_bytes, merge_splits, gradient_groups, gradient_scratch, gradient_sums_bytes, run_gradient, bias_tasks, \
        run_bias_gradient, observation_partitions, boundary_map_rows, observation_tasks, observation_scratch,          \
        run_observation, reduce_partitions, compute_value_norms, summarize, prepare_exchange, sum_exchange,            \
        supports_linear, transpose_input, linear_panels, panel_bytes, pack_panel, multiply_panel

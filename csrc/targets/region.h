// What every target includes before its region: the standard headers (they must be read outside the region, so that no
// inline function of theirs is compiled with the target's instructions) and the few macros the algorithms use.
#pragma once

#include <sched.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <new>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // g++ 12 says it of its own intrinsics
#include <immintrin.h>
#endif

#include "../interface/attention.h"

#if defined(__aarch64__)
using Half = __fp16;  // g++ knows _Float16 there from version 13 on
#else
using Half = _Float16;
#endif

#define INLINE inline __attribute__((always_inline))
#define APART __attribute__((noinline))  // once for all who call it: what is large and not called often
#define UNROLL _Pragma("GCC unroll 64")
// Unrolled loops: over begin, begin + step, … below end; over 0 .. count; and over 0 .. rows times 0 .. columns.
#define UNROLL_RANGE(index, begin, end, step) \
    UNROLL                                    \
    for (int index = begin; index < (end); index += step)
#define UNROLL_FOR(index, count) UNROLL_RANGE(index, 0, count, 1)
#define UNROLL_TILE(row, rows, column, columns) \
    UNROLL_FOR(row, rows)                       \
        UNROLL_FOR(column, columns)

// What a target, tasks-inl.h, reductions-inl.h and projection-inl.h define, in the order of Target.
#define OFFERS                                                                                                     \
    runs_here, prepare_tasks, prepared, prepare, tasks, scratch, run, shares, partial, merge, groups,              \
        gradient_scratch, sums, run_gradient, bias_tasks, run_bias_gradient, look_shares, lines_apart, look_tasks, \
        look_scratch, run_look, gather_look, lengths, pool, squares, reach, multiplies, lengthwise, panels,        \
        panel_size, turn, multiply

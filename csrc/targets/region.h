// What every target includes before its region: the standard headers (they must be read outside the region, so that no
// inline function of theirs is compiled with the target's instructions) and the few macros the algorithms use.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>

#include "../attention.h"

#define INLINE inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 64")

// Builds the structs of the interface from the arguments that Python passes: addresses, strides and numbers.
#pragma once

#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>

#include "../interface/attention.h"

namespace headscope {

using Axes = std::array<std::int64_t, 4>;

inline Tensor4 make_tensor(std::uintptr_t data, const Axes& stride, int dtype) {
    Tensor4 x;
    x.data = reinterpret_cast<const void*>(data);
    for (int n = 0; n < 4; n++) x.stride[n] = stride[n];
    x.dtype = static_cast<Dtype>(dtype);
    return x;
}

inline Spans make_spans(std::uintptr_t data, const std::array<std::int64_t, 3>& at) {
    return {reinterpret_cast<const std::int32_t*>(data), at[0], at[1], std::int32_t(at[2])};
}

inline void check_memory(const char* name, const void* data, std::int64_t count) {
    if (!data && count)
        throw std::invalid_argument(std::string(name) +
                                    ": its storage is empty, expected a tensor that holds its data");
}
inline void check_memory(const Forward& f) {
    check_memory("q", f.q.data, f.batch * f.heads * f.queries);
    check_memory("k", f.k.data, f.batch * f.kv_heads * f.keys);
    check_memory("v", f.v.data, f.batch * f.kv_heads * f.keys * f.v_head_dim);
}

// The kind, and up to two tensors, each as its address and its strides.
using RuleArguments = std::tuple<int, std::uintptr_t, Axes, std::uintptr_t, Axes>;

}  // namespace headscope

// One random projection of a target against the definition.
#pragma once

#include <algorithm>
#include <cstdio>

#include "memory.h"

namespace selfcheck {

// Whether it is right; says so where it is not.
inline bool check_linear(const headscope::Target& target, Random& r) {
    headscope::Linear f{};
    f.dtype = r.one_in(2) ? Dtype::bf16 : Dtype::f32;
    const bool heads = r.one_in(2);
    const std::int64_t batch = r.range(1, 3), length = r.range(1, 40), count = heads ? r.range(1, 5) : 1;
    f.rows = batch * length, f.batch_rows = length, f.head_width = heads ? 16 * r.range(1, 3) : r.range(1, 130), f.outs = count * f.head_width;
    f.width = r.one_in(4) ? r.range(1, 1100) : r.range(1, 70);
    if (!target.multiplies(f)) {
        f.dtype = Dtype::f32;
        if (!target.multiplies(f)) return std::printf("wrong: linear refuses float32\n"), false;
    }
    const Element e = element(f.dtype);
    const auto draw = [&](std::int64_t rows, std::int64_t width) {
        Array x(1, 1, rows, width);
        for (double& n : x.x) n = rounded(r.normal(), e);
        return x;
    };
    const Array x = draw(f.rows, f.width), w = draw(f.outs, f.width), bias = draw(1, f.outs);
    const Placed x_at(r, x, e, false), w_at(r, w, e, false), bias_at(r, bias, e, false, true);
    const Placed y_at(r, Array(batch, count, length, f.head_width), e, true);
    const bool biased = !r.one_in(4);
    f.x = x_at.data(), f.w = w_at.data(), f.bias = biased ? bias_at.data() : nullptr, f.y = y_at.data();
    f.x_stride = x_at.stride[2], f.w_stride = w_at.stride[2];
    std::copy(y_at.stride, y_at.stride + 3, f.y_stride);

    const std::size_t size = target.panel_size(f);
    const std::int64_t panels = target.panels(f), rows = r.range(1, f.rows);  // at a time
    for (std::int64_t n = 0; n < panels; n++) {
        const Memory turned(size, 0xff);
        target.turn(f, n, turned.data());
        for (std::int64_t first = 0; first < f.rows; first += rows) target.multiply(f, n, turned.data(), first, std::min(rows, f.rows - first));
    }

    const Array y = y_at.read();
    double ours = 0, plain = 0, largest = 0;
    for (std::int64_t n = 0; n < f.rows; n++) for (std::int64_t o = 0; o < f.outs; o++) {
        double exact = biased ? bias(0, 0, 0, o) : 0, sum = 0;
        float near = 0;
        for (std::int64_t d = 0; d < f.width; d++) sum += x(0, 0, n, d) * w(0, 0, o, d), near += float(x(0, 0, n, d)) * float(w(0, 0, o, d));
        exact += sum, near += biased ? float(bias(0, 0, 0, o)) : 0;
        const double found = y(n / length, o / f.head_width, n % length, o % f.head_width), error = std::fabs(found - exact);
        ours = std::isnan(error) ? INF : std::max(ours, error), plain = std::max(plain, std::fabs(rounded(double(near), e) - exact));
        largest = std::max(largest, std::fabs(exact));
    }
    const double allowed = 2 * plain + 4 * epsilon(f.dtype) * largest;
    if (ours <= allowed && y_at.untouched_around()) return true;
    std::printf("wrong: linear of %d, %lld x %lld -> %lld in heads of %lld: error %g, allowed %g%s\n", int(f.dtype), static_cast<long long>(f.rows),
                static_cast<long long>(f.width), static_cast<long long>(f.outs), static_cast<long long>(f.head_width), ours, allowed,
                y_at.untouched_around() ? "" : "; it wrote outside");
    return false;
}

}  // namespace selfcheck

// One random projection of a target against the definition.
#pragma once

#include <algorithm>
#include <cstdio>

#include "memory.h"

namespace selfcheck {

inline Array across(const Array& x) {
    Array y(1, 1, x.n[3], x.n[2]);
    for (std::int64_t n = 0; n < x.n[2]; n++)
        for (std::int64_t d = 0; d < x.n[3]; d++) y(0, 0, d, n) = x(0, 0, n, d);
    return y;
}
// Whether it is right; says so where it is not.
inline bool check_linear(const headscope::Target& target, Random& r) {
    headscope::Linear f{};
    f.dtype = r.one_in(2) ? Dtype::bf16 : Dtype::f32;
    const bool heads = r.one_in(2);
    const std::int64_t batch = r.range(1, 3), length = r.range(1, 40), count = heads ? r.range(1, 5) : 1;
    f.rows = batch * length;
    f.batch_rows = length;
    f.head_width = heads ? 16 * r.range(1, 3) : r.range(1, 130);
    f.out_features = count * f.head_width;
    f.in_features = r.one_in(4) ? r.range(1, 1100) : r.range(1, 70);
    f.x_stride[1] = f.w_stride[1] = 1;
    if (!target.supports_linear(f)) {
        f.dtype = Dtype::f32;
        if (!target.supports_linear(f)) {
            std::printf("wrong: linear refuses float32\n");
            return false;
        }
    }
    const Element e = element(f.dtype);
    const auto draw = [&](std::int64_t rows, std::int64_t width) {
        Array x(1, 1, rows, width);
        for (double& n : x.x) n = rounded(r.normal(), e);
        return x;
    };
    const bool wide = f.dtype == Dtype::f32, x_across = wide && r.one_in(3), w_across = wide && r.one_in(3);
    f.accumulates = wide && r.one_in(4);
    const Array x = draw(f.rows, f.in_features), w = draw(f.out_features, f.in_features),
                bias = draw(1, f.out_features), before = draw(f.rows, f.out_features);
    const Placed x_at(r, x_across ? across(x) : x, e, false), w_at(r, w_across ? across(w) : w, e, false),
        bias_at(r, bias, e, false, true);
    Array y(batch, count, length, f.head_width);
    Placed y_at(r, y, e, true);
    const bool biased = !f.accumulates && !r.one_in(4);
    f.x = x_at.data();
    f.w = w_at.data();
    f.bias = biased ? bias_at.data() : nullptr;
    f.y = y_at.data();
    const auto strides = [](const Placed& at, bool lies_across, std::int64_t* to) {
        to[lies_across] = at.stride[2];
        to[!lies_across] = 1;
    };
    strides(x_at, x_across, f.x_stride);
    strides(w_at, w_across, f.w_stride);
    std::copy(y_at.stride, y_at.stride + 3, f.y_stride);
    const auto of_y = [&](std::int64_t n, std::int64_t o) -> double& {
        return y(n / length, o / f.head_width, n % length, o % f.head_width);
    };
    if (f.accumulates) {
        for (std::int64_t n = 0; n < f.rows; n++)
            for (std::int64_t o = 0; o < f.out_features; o++) of_y(n, o) = before(0, 0, n, o);
        y_at.write(y);
    }
    const std::int64_t room = f.in_features + r.range(0, 3);
    const Memory laid(std::size_t(f.rows * room) * sizeof(float), 0xff);
    if (f.x_stride[1] != 1) {
        float* const to = static_cast<float*>(static_cast<void*>(laid.data()));
        const std::int64_t some = r.range(1, f.rows);
        for (std::int64_t first = 0; first < f.rows; first += some)
            target.transpose_input(f, first, std::min(some, f.rows - first), to + first * room, room);
        f.x = to;
        f.x_stride[0] = room;
        f.x_stride[1] = 1;
    }

    const std::size_t size = target.panel_bytes(f);
    const std::int64_t panels = target.linear_panels(f), rows = r.range(1, f.rows);  // at a time
    for (std::int64_t n = 0; n < panels; n++) {
        const Memory packed(size, 0xff);
        target.pack_panel(f, n, packed.data());
        for (std::int64_t first = 0; first < f.rows; first += rows)
            target.multiply_panel(f, n, packed.data(), first, std::min(rows, f.rows - first));
    }

    y = y_at.read();
    double ours = 0, plain = 0, largest = 0;
    for (std::int64_t n = 0; n < f.rows; n++)
        for (std::int64_t o = 0; o < f.out_features; o++) {
            const double beside = biased ? bias(0, 0, 0, o) : f.accumulates ? before(0, 0, n, o) : 0;
            double exact = beside, sum = 0;
            float near = 0;
            for (std::int64_t d = 0; d < f.in_features; d++) {
                sum += x(0, 0, n, d) * w(0, 0, o, d);
                near += float(x(0, 0, n, d)) * float(w(0, 0, o, d));
            }
            exact += sum;
            near += float(beside);
            const double result = of_y(n, o), error = std::fabs(result - exact);
            ours = std::isnan(error) ? INF : std::max(ours, error);
            plain = std::max(plain, std::fabs(rounded(double(near), e) - exact));
            largest = std::max(largest, std::fabs(exact));
        }
    const double allowed = 2 * plain + 4 * epsilon(f.dtype) * largest;
    if (ours <= allowed && y_at.untouched_around()) return true;
    std::printf("wrong: linear of %d, %lld x %lld -> %lld in heads of %lld%s%s%s: error %g, allowed %g%s\n",
                int(f.dtype), static_cast<long long>(f.rows), static_cast<long long>(f.in_features),
                static_cast<long long>(f.out_features), static_cast<long long>(f.head_width),
                x_across ? ", x across" : "", w_across ? ", w across" : "", f.accumulates ? ", added" : "", ours,
                allowed, y_at.untouched_around() ? "" : "; it wrote outside");
    return false;
}

}  // namespace selfcheck

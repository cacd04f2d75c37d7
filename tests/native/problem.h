// One random attention: its sizes, options and values, in double and without any layout.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "../../csrc/interface/attention.h"

namespace selfcheck {

using headscope::Dtype;
using headscope::Rule;
constexpr double INF = std::numeric_limits<double>::infinity(), NOT = std::numeric_limits<double>::quiet_NaN();

// splitmix64: the same numbers on every machine.
struct Random {
    std::uint64_t state;
    std::uint64_t bits() {
        std::uint64_t x = state += 0x9e3779b97f4a7c15u;
        x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
        x = (x ^ x >> 27) * 0x94d049bb133111ebu;
        return x ^ x >> 31;
    }
    std::int64_t range(std::int64_t low, std::int64_t high) {
        return low + std::int64_t(bits() % std::uint64_t(high - low + 1));
    }
    double uniform() { return double(bits() >> 11) * 0x1p-53; }
    double normal() { return std::sqrt(-2 * std::log(1 - uniform())) * std::cos(6.283185307179586 * uniform()); }
    bool one_in(int n) { return range(1, n) == 1; }
};

// What a tensor's elements are in memory.
enum class Element { f32, f64, bf16, f16, i32, i64, u8, i8 };
inline int bytes_of(Element e) {
    switch (e) {
        case Element::f64:
        case Element::i64:
            return 8;
        case Element::f32:
        case Element::i32:
            return 4;
        case Element::bf16:
        case Element::f16:
            return 2;
        default:
            return 1;
    }
}
inline Element element(Dtype dtype) { return static_cast<Element>(dtype); }
inline Element arithmetic(Dtype dtype) { return dtype == Dtype::f64 ? Element::f64 : Element::f32; }

// To `digits` binary digits, to nearest, ties to even; below 2**(least - 1) numbers lie evenly.
inline double rounded(double x, int digits, int least) {
    if (x == 0 || !std::isfinite(x)) return x;
    int e;
    std::frexp(x, &e);
    const double unit = std::ldexp(1.0, (e > least ? e : least) - digits);
    return std::nearbyint(x / unit) * unit;
}
inline double rounded(double x, Element e) {
    switch (e) {
        case Element::f32:
            return double(float(x));
        case Element::bf16:
            return rounded(x, 8, -125);
        case Element::f16:
            return rounded(x, 11, -13);
        default:
            return x;
    }
}
inline double epsilon(Dtype dtype) {
    switch (dtype) {
        case Dtype::f32:
            return 0x1p-23;
        case Dtype::f64:
            return 0x1p-52;
        case Dtype::bf16:
            return 0x1p-7;
        default:
            return 0x1p-10;
    }
}

// Four axes; one of size 1 repeats.
struct Array {
    std::int64_t n[4] = {0, 0, 0, 0};
    std::vector<double> x;
    bool present = false;

    Array() = default;
    Array(std::int64_t a, std::int64_t b, std::int64_t c, std::int64_t d, double value = 0)
        : n{a, b, c, d}, x(std::size_t(a * b * c * d), value), present(true) {}
    std::size_t where(std::int64_t a, std::int64_t b, std::int64_t c, std::int64_t d) const {
        const std::int64_t at[4] = {a, b, c, d};
        std::int64_t place = 0;
        for (int axis = 0; axis < 4; axis++) place = place * n[axis] + (n[axis] == 1 ? 0 : at[axis]);
        return std::size_t(place);
    }
    double& operator()(std::int64_t a, std::int64_t b, std::int64_t c, std::int64_t d) { return x[where(a, b, c, d)]; }
    double operator()(std::int64_t a, std::int64_t b, std::int64_t c, std::int64_t d) const {
        return x[where(a, b, c, d)];
    }
    double largest() const {
        double top = 0;
        for (double value : x)
            if (std::isfinite(value) && std::fabs(value) > top) top = std::fabs(value);
        return top;
    }
};

// A rule over (b, h, i, j), or two rules joined.
struct Node {
    Rule::Kind kind;
    Array first, second;  // spans [B, 1, Q, 2 * count]; bytes [B, H, Q, K]; same_id [B, 1, 1, Q] and [B, 1, 1, K]
    std::vector<Node> parts;

    bool allows(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const {
        switch (kind) {
            case Rule::spans:
                return inside(first, b, i, j);
            case Rule::bytes:
                return first(b, h, i, j) != 0;
            case Rule::same_id:
                return first(b, 0, 0, i) == second(b, 0, 0, j);
            case Rule::both:
                return parts[0].allows(b, h, i, j) && parts[1].allows(b, h, i, j);
            default:
                return parts[0].allows(b, h, i, j) || parts[1].allows(b, h, i, j);
        }
    }
    static bool inside(const Array& spans, std::int64_t b, std::int64_t i, std::int64_t j) {
        for (std::int64_t n = 0; n < spans.n[3]; n += 2)
            if (j >= spans(b, 0, i, n) && j < spans(b, 0, i, n + 1)) return true;
        return false;
    }
};

struct Problem {
    std::int64_t B, H, Hkv, Q, K, D, Dv;
    Dtype dtype;
    Array q, k, v, bias, grad_out, grad_lse, grad_entropy;
    std::vector<double> sinks;
    Array spans;
    std::vector<Node> rules;  // none or one
    Array dropout_factors;    // what dropout leaves of each weight: 0 or 1 / (1 - dropout)
    double scale, softcap = 0, dropout = 0;
    std::uint64_t seed = 0;
    bool nonfinite = false;  // there is a NaN in q, k or v

    std::int64_t group() const { return H / Hkv; }
    bool seen(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const {
        return (!spans.present || Node::inside(spans, b, i, j)) && (rules.empty() || rules[0].allows(b, h, i, j)) &&
               !(bias.present && bias(b, h, i, j) == -INF);
    }
    std::string describe() const {
        static const char* const names[] = {"float32", "float64", "bfloat16", "float16"};
        std::string text = std::string(names[int(dtype)]) + " [B, H, Hkv, Q, K, D, Dv] = [";
        for (std::int64_t n : {B, H, Hkv, Q, K, D, Dv}) text += std::to_string(n) + ", ";
        text.replace(text.size() - 2, 2, "]");
        if (spans.present) text += ", spans";
        if (!rules.empty()) text += ", rules";
        if (bias.present) text += ", bias";
        if (!sinks.empty()) text += ", sinks";
        if (softcap > 0) text += ", softcap " + std::to_string(softcap);
        if (dropout > 0) text += ", dropout " + std::to_string(dropout);
        if (nonfinite) text += ", a NaN";
        return text + ", scale " + std::to_string(scale);
    }
};

// ---------------------------------------------------------------- drawing

inline Array draw_values(Random& r, std::int64_t a, std::int64_t b, std::int64_t c, std::int64_t d, double size,
                         Element e) {
    Array x(r.one_in(8) ? 1 : a, r.one_in(12) ? 1 : b, r.one_in(16) ? 1 : c, d);
    if (a == 0 || b == 0 || c == 0) x = Array(a, b, c, d);
    for (double& value : x.x) value = rounded(size * r.normal(), e);
    return x;
}

// One or two key spans for each (b, i), ascending and disjoint: as masks come to them, or anywhere.
inline Array draw_spans(Random& r, const Problem& p) {
    const std::int64_t count = r.range(1, 2), kind = r.range(0, 3);
    const std::int64_t left = r.range(0, p.K), right = r.range(0, 3), sink = r.range(0, p.K < 9 ? p.K : 9);
    Array spans(r.one_in(3) ? 1 : p.B, 1, r.one_in(4) ? 1 : p.Q, 2 * count);
    for (std::int64_t b = 0; b < spans.n[0]; b++)
        for (std::int64_t i = 0; i < spans.n[2]; i++) {
            const auto within = [&](std::int64_t j) { return j < 0 ? 0 : j > p.K ? p.K : j; };
            std::int64_t ends[4] = {0, p.K, p.K, p.K};
            const std::int64_t position = i + p.K - p.Q;
            if (kind == 0) ends[1] = within(position + 1);  // causal
            if (kind == 1) {
                ends[0] = within(position - left);
                ends[1] = within(position + right + 1);
            }  // a band
            if (kind == 2) {  // a prefix and a band
                ends[0] = 0;
                ends[1] = within(sink);
                ends[2] = within(position - left);
                ends[2] = ends[2] < ends[1] ? ends[1] : ends[2];
                ends[3] = within(position + 1);
                ends[3] = ends[3] < ends[2] ? ends[2] : ends[3];
            }
            if (kind == 3) {  // anything
                for (std::int64_t& end : ends) end = r.range(0, p.K);
                for (int m = 0; m < 3; m++)
                    for (int n = 0; n < 3; n++)
                        if (ends[n] > ends[n + 1]) std::swap(ends[n], ends[n + 1]);
            }
            if (ends[1] < ends[0]) ends[1] = ends[0];
            for (std::int64_t n = 0; n < 2 * count; n++) spans(b, 0, i, n) = double(ends[n]);
        }
    return spans;
}

inline Node draw_rule(Random& r, const Problem& p, int leaves) {
    if (leaves > 1) {
        const int first = int(r.range(1, leaves - 1));
        Node node{r.one_in(2) ? Rule::both : Rule::either, {}, {}, {}};
        node.parts.push_back(draw_rule(r, p, first));
        node.parts.push_back(draw_rule(r, p, leaves - first));
        return node;
    }
    const int kind = int(r.range(0, 2));
    if (kind == 0) return {Rule::spans, draw_spans(r, p), {}, {}};
    if (kind == 1) {
        Node node{Rule::bytes,
                  Array(r.one_in(3) ? 1 : p.B, r.one_in(3) ? 1 : p.H, r.one_in(3) ? 1 : p.Q, r.one_in(5) ? 1 : p.K),
                  {},
                  {}};
        const double share = r.one_in(5) ? 0 : r.uniform() + 0.1;
        for (double& seen : node.first.x) seen = r.uniform() < share;
        return node;
    }
    Node node{Rule::same_id, Array(r.one_in(3) ? 1 : p.B, 1, 1, p.Q), Array(r.one_in(3) ? 1 : p.B, 1, 1, p.K), {}};
    const std::int64_t documents = r.range(1, 4);
    for (Array* ids : {&node.first, &node.second})
        for (double& id : ids->x) id = double(r.range(-1, documents - 2));
    return node;
}

inline void draw_options(Random& r, Problem& p) {
    if (r.one_in(2)) p.spans = draw_spans(r, p);
    if (r.one_in(4))
        p.rules.push_back(draw_rule(r, p, r.one_in(20) ? (headscope::MAX_RULES + 1) / 2 : int(r.range(1, 4))));
    if (r.one_in(3)) {
        p.bias = Array(r.one_in(3) ? 1 : p.B, r.one_in(3) ? 1 : p.H, r.one_in(3) ? 1 : p.Q, r.one_in(8) ? 1 : p.K);
        const double hidden = r.one_in(3) ? 0.4 : 0;
        for (double& x : p.bias.x) x = r.uniform() < hidden ? -INF : rounded(r.normal(), element(p.dtype));
    }
    if (r.one_in(3))
        for (std::int64_t h = 0; h < p.H; h++)
            p.sinks.push_back(r.one_in(6) ? -INF : rounded(2 * r.normal(), element(p.dtype)));
    if (r.one_in(3)) p.softcap = r.one_in(2) ? 0.5 + r.uniform() : 30 * r.uniform() + 1;
    if (r.one_in(5)) p.dropout = r.one_in(8) ? 0.99 : r.uniform() * 0.8;
    p.seed = r.bits() >> 2;
    p.scale = 1 / std::sqrt(double(p.D));
    if (r.one_in(4)) p.scale = r.one_in(8) ? 0 : r.normal();
}

inline void draw_sizes(Random& r, Problem& p) {
    constexpr std::int64_t usual[] = {16, 32, 64, 128};
    p.B = r.range(1, 3);
    p.Hkv = r.range(1, 3);
    p.H = p.Hkv * (r.one_in(2) ? 1 : r.range(2, 5));
    const bool small = r.one_in(3);
    p.Q = r.one_in(6) ? 1 : r.range(1, small ? 9 : 70);
    p.K = r.one_in(8) ? p.Q : r.range(1, small ? 17 : r.one_in(8) ? 700 : 150);
    if (r.one_in(60)) p.K = 0;
    if (r.one_in(60)) p.Q = 0;
    p.D = r.one_in(6) ? usual[r.range(0, 3)] : r.range(1, 40);
    p.Dv = r.one_in(3) ? p.D : r.range(1, 40);
    if (r.one_in(40)) p.D = r.range(250, 300);
    if (r.one_in(40)) p.Dv = r.range(250, 300);
    const bool few = r.one_in(16);  // rows, and so many keys that they are shared out among tasks
    if (few) {
        p.Q = r.range(1, 3);
        p.K = r.range(2000, 4200);
        p.D = r.range(1, 20);
        p.Dv = r.range(1, 20);
    }
    while (p.B * p.H * p.Q * (p.K + 1) * (p.D + p.Dv) > 400'000) {  // keep a call short
        if (few && p.B == 1 && p.Hkv == 1) break;
        if (p.B > 1)
            p.B--;
        else if (p.H > p.Hkv)
            p.H -= p.Hkv;
        else if (p.Hkv > 1) {
            p.Hkv--;
            p.H = p.Hkv;
        } else if (p.Q > 3 && r.one_in(2))
            p.Q = p.Q * 3 / 4;
        else
            p.K = p.K * 3 / 4;
    }
}

inline Problem draw(Random& r) {
    Problem p{};
    p.dtype = static_cast<Dtype>(r.range(0, 3));
    draw_sizes(r, p);
    draw_options(r, p);
    const Element e = element(p.dtype);
    const double size = r.one_in(4) ? 3 : 1;
    p.q = draw_values(r, p.B, p.H, p.Q, p.D, size, e);
    p.k = draw_values(r, p.B, p.Hkv, p.K, p.D, 1, e);
    p.v = draw_values(r, p.B, p.Hkv, p.K, p.Dv, size, e);
    Array* const of[] = {&p.q, &p.k, &p.v};
    Array& x = *of[r.range(0, 2)];
    if (r.one_in(16) && !x.x.empty()) {
        p.nonfinite = true;
        x.x[std::size_t(r.range(0, std::int64_t(x.x.size()) - 1))] = NOT;
    }
    p.grad_out = draw_values(r, p.B, p.H, p.Q, p.Dv, 1, e);
    if (r.one_in(2)) {
        p.grad_lse = Array(p.B, p.H, p.Q, 1);
        for (double& x : p.grad_lse.x) x = rounded(r.normal(), e);
    }
    if (p.dropout == 0 && r.one_in(3)) {
        p.grad_entropy = Array(p.B, p.H, p.Q, 1);
        for (double& x : p.grad_entropy.x) x = rounded(r.normal(), e);
    }
    return p;
}

}  // namespace selfcheck

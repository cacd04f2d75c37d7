// Attention and its gradient by the definition, one number at a time.
#pragma once

#include <algorithm>

#include "problem.h"

namespace selfcheck {

struct Results {
    Array out, lse, dq, dk, dv, dbias, dsinks;  // dsinks: of each row
    Array excess;                               // the entropy minus the sum of the weights
    explicit Results(const Problem& p)
        : out(p.B, p.H, p.Q, p.Dv),
          lse(p.B, p.H, p.Q, 1, -INF),
          dq(p.B, p.H, p.Q, p.D),
          dk(p.B, p.Hkv, p.K, p.D),
          dv(p.B, p.Hkv, p.K, p.Dv),
          dsinks(p.B, p.H, p.Q, 1),
          excess(p.B, p.H, p.Q, 1) {
        if (p.bias.present) dbias = Array(p.bias.n[0], p.bias.n[1], p.bias.n[2], p.bias.n[3]);
    }
};

// In arithmetic of type A. What tensors in memory would hold is rounded to `store`; what a matrix product would take,
// to `multiply`: with both as the inputs this is what one writes by hand in that dtype, with f64 and a wide A it is
// exact.
template <class A>
Results attention(const Problem& p, Element store, Element multiply) {
    Results r(p);
    std::vector<A> dk(r.dk.x.size()), dv(r.dv.x.size()), dbias(r.dbias.x.size()), s(std::size_t(p.K)), tangent(s),
        weight(s);
    const auto dropout_factor = [&](std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) {
        return p.dropout > 0 ? A(p.dropout_factors(b, h, i, j)) : A(1);
    };
    for (std::int64_t b = 0; b < p.B; b++)
        for (std::int64_t h = 0; h < p.H; h++)
            for (std::int64_t i = 0; i < p.Q; i++) {
                const std::int64_t g = h / p.group();
                const A sink = p.sinks.empty() ? A(-INF) : A(p.sinks[std::size_t(h)]);
                A top = sink;
                for (std::int64_t j = 0; j < p.K; j++) {
                    if (!p.seen(b, h, i, j)) continue;
                    A& x = s[std::size_t(j)];
                    x = 0;
                    for (std::int64_t d = 0; d < p.D; d++) x += A(p.q(b, h, i, d)) * A(p.k(b, g, j, d));
                    x *= A(p.scale);
                    if (p.softcap > 0) {
                        const A t = tangent[std::size_t(j)] = std::tanh(x / A(p.softcap));
                        x = A(p.softcap) * t;
                    }
                    if (p.bias.present) x += A(p.bias(b, h, i, j));
                    top = std::max(top, x);
                }
                if (top == A(-INF)) continue;  // nothing to see: zeros, and lse -inf
                A total = std::exp(sink - top);
                for (std::int64_t j = 0; j < p.K; j++)
                    if (p.seen(b, h, i, j)) total += std::exp(s[std::size_t(j)] - top);
                r.lse(b, h, i, 0) = double(top + std::log(total));
                for (std::int64_t j = 0; j < p.K; j++)
                    weight[std::size_t(j)] = p.seen(b, h, i, j) ? std::exp(s[std::size_t(j)] - top) / total : A(0);
                A delta = p.grad_lse.present ? -A(p.grad_lse(b, h, i, 0)) : A(0), excess = 0;
                const auto log_weight = [&](std::int64_t j) { return s[std::size_t(j)] - top - std::log(total); };
                for (std::int64_t j = 0; j < p.K; j++)
                    if (p.seen(b, h, i, j)) excess -= weight[std::size_t(j)] * (log_weight(j) + 1);
                r.excess(b, h, i, 0) = double(excess);
                const A grad_entropy = p.grad_entropy.present ? A(p.grad_entropy(b, h, i, 0)) : A(0);
                delta += grad_entropy * excess;
                for (std::int64_t c = 0; c < p.Dv; c++) {
                    A x = 0;
                    for (std::int64_t j = 0; j < p.K; j++) {
                        if (!p.seen(b, h, i, j)) continue;
                        x += A(rounded(double(weight[std::size_t(j)] * dropout_factor(b, h, i, j)), multiply)) *
                             A(p.v(b, g, j, c));
                    }
                    r.out(b, h, i, c) = store == Element::f64 ? double(x) : rounded(double(x), store);
                    delta += (store == Element::f64 ? x : A(r.out(b, h, i, c))) * A(p.grad_out(b, h, i, c));
                }
                r.dsinks(b, h, i, 0) = double(-std::exp(sink - top) / total * delta);
                std::vector<A> dq(std::size_t(p.D), A(0));
                for (std::int64_t j = 0; j < p.K; j++) {
                    if (!p.seen(b, h, i, j)) continue;
                    const A w = weight[std::size_t(j)],
                            met = A(rounded(double(w * dropout_factor(b, h, i, j)), multiply));
                    A dot = 0;
                    for (std::int64_t c = 0; c < p.Dv; c++) {
                        dot += A(p.grad_out(b, h, i, c)) * A(p.v(b, g, j, c));
                        dv[r.dv.where(b, g, j, c)] += met * A(p.grad_out(b, h, i, c));
                    }
                    A ds = w * (dot * dropout_factor(b, h, i, j) - grad_entropy * (log_weight(j) + 1) - delta);
                    if (p.bias.present) dbias[r.dbias.where(b, h, i, j)] += ds;
                    if (p.softcap > 0) ds *= 1 - tangent[std::size_t(j)] * tangent[std::size_t(j)];
                    ds = multiply == Element::f64 ? ds : A(rounded(double(ds), multiply));
                    for (std::int64_t d = 0; d < p.D; d++) {
                        dq[std::size_t(d)] += ds * A(p.k(b, g, j, d));
                        dk[r.dk.where(b, g, j, d)] += ds * A(p.q(b, h, i, d));
                    }
                }
                for (std::int64_t d = 0; d < p.D; d++)
                    r.dq(b, h, i, d) = rounded(double(dq[std::size_t(d)] * A(p.scale)), store);
            }
    for (std::size_t n = 0; n < dk.size(); n++) r.dk.x[n] = rounded(double(dk[n] * A(p.scale)), store);
    for (std::size_t n = 0; n < dv.size(); n++) r.dv.x[n] = rounded(double(dv[n]), store);
    for (std::size_t n = 0; n < dbias.size(); n++) r.dbias.x[n] = double(dbias[n]);
    return r;
}

// For each number of the results, the sum of the sizes of the terms it is made of; lse gets that of the row's largest
// logit.
inline Results sizes(const Problem& p, const Results& exact) {
    Results r(p);
    std::vector<double> weight(static_cast<std::size_t>(p.K)), direct(weight);
    for (std::int64_t b = 0; b < p.B; b++)
        for (std::int64_t h = 0; h < p.H; h++)
            for (std::int64_t i = 0; i < p.Q; i++) {
                const std::int64_t g = h / p.group();
                const double lse = exact.lse(b, h, i, 0);
                const double grad_entropy = p.grad_entropy.present ? std::fabs(p.grad_entropy(b, h, i, 0)) : 0;
                double top = 0, excess = 0;
                for (std::int64_t j = 0; j < p.K; j++) {
                    if (!p.seen(b, h, i, j)) continue;
                    double x = 0, size = 0;
                    for (std::int64_t d = 0; d < p.D; d++) x += p.scale * p.q(b, h, i, d) * p.k(b, g, j, d);
                    for (std::int64_t d = 0; d < p.D; d++)
                        size += std::fabs(p.scale * p.q(b, h, i, d) * p.k(b, g, j, d));
                    const double t = p.softcap > 0 ? std::tanh(x / p.softcap) : 0,
                                 bias = p.bias.present ? p.bias(b, h, i, j) : 0;
                    top = std::max(top, size + std::fabs(bias));
                    const double log_weight = (p.softcap > 0 ? p.softcap * t : x) + bias - lse,
                                 w = std::exp(log_weight), met = p.dropout > 0 ? w * p.dropout_factors(b, h, i, j) : w;
                    double dot = 0;
                    for (std::int64_t c = 0; c < p.Dv; c++) {
                        dot += std::fabs(p.grad_out(b, h, i, c) * p.v(b, g, j, c));
                        r.out(b, h, i, c) += std::fabs(met * p.v(b, g, j, c));
                        r.dv(b, g, j, c) += std::fabs(met * p.grad_out(b, h, i, c));
                    }
                    const double of_entropy = w * (std::fabs(log_weight) + 1);
                    excess += of_entropy;
                    weight[std::size_t(j)] = w;
                    direct[std::size_t(j)] = met * dot + grad_entropy * of_entropy;
                }
                double delta = p.grad_lse.present ? std::fabs(p.grad_lse(b, h, i, 0))
                                                  : 0;  // of the terms of out, which may cancel
                for (std::int64_t c = 0; c < p.Dv; c++) delta += r.out(b, h, i, c) * std::fabs(p.grad_out(b, h, i, c));
                delta += grad_entropy * excess;
                if (!p.sinks.empty() && lse > -INF)
                    r.dsinks(b, h, i, 0) = std::exp(p.sinks[std::size_t(h)] - lse) * delta;
                for (std::int64_t j = 0; j < p.K; j++) {
                    if (!p.seen(b, h, i, j)) continue;
                    const double ds = direct[std::size_t(j)] + weight[std::size_t(j)] * delta;
                    if (p.bias.present) r.dbias(b, h, i, j) += ds;
                    for (std::int64_t d = 0; d < p.D; d++) {
                        r.dq(b, h, i, d) += ds * std::fabs(p.scale * p.k(b, g, j, d));
                        r.dk(b, g, j, d) += ds * std::fabs(p.scale * p.q(b, h, i, d));
                    }
                }
                r.lse(b, h, i, 0) = top;
            }
    return r;
}

// As far beyond the arithmetic of the targets as there is.
inline Results exact(const Problem& p) {
    return p.dtype == Dtype::f64 ? attention<long double>(p, Element::f64, Element::f64)
                                 : attention<double>(p, Element::f64, Element::f64);
}
// What one would write by hand in the dtype of the inputs: the yardstick.
inline Results plain(const Problem& p) {
    const Element e = element(p.dtype);
    return p.dtype == Dtype::f64 ? attention<double>(p, e, e) : attention<float>(p, e, e);
}

}  // namespace selfcheck

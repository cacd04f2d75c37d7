// Random calls of one target against the definition, without Python: every option, forward, observed and backward, and
// projections, guards around every buffer. `selfcheck TARGET CALLS SEED [FIRST]`, FIRST to begin with a later call;
// exit code 1 where a result is wrong, 77 where this CPU lacks the target.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <tuple>
#include <vector>

#include "linear.h"
#include "observation.h"
#include "memory.h"
#include "problem.h"
#include "reference.h"

using namespace selfcheck;
using headscope::Backward;
using headscope::Forward;
using headscope::Statistics;
using headscope::Target;

namespace {

// ---------------------------------------------------------------- running a target, as bind.cpp does

std::vector<std::int64_t> shuffled(Random& r, std::int64_t count) {
    std::vector<std::int64_t> order(static_cast<std::size_t>(count));
    for (std::int64_t n = 0; n < count; n++) order[std::size_t(n)] = n;
    for (std::int64_t n = count - 1; n > 0; n--) std::swap(order[std::size_t(n)], order[std::size_t(r.range(0, n))]);
    return order;
}

// Tasks come in any order, and find anything in their scratch.
void run(const Target& target, Forward& f, Random& r) {
    if (r.one_in(2)) find_visible_range(f);
    const std::int64_t shares = target.key_splits(f), tasks = target.forward_tasks(f);
    const std::size_t prepared = target.paired_v_bytes(f);
    Memory scratch(target.forward_scratch(f)), partial(target.partial_bytes(f), 0xff), paired_v(prepared, 0xff);
    f.partial_results = partial.data();
    f.paired_v = prepared ? paired_v.data() : nullptr;
    if (prepared)
        for (std::int64_t task : shuffled(r, target.pairing_tasks(f))) target.pair_values(f, task);
    for (std::int64_t task : shuffled(r, tasks)) {
        scratch.fill(r.one_in(2) ? 0xff : 0x3f);
        target.run_forward(f, task, scratch.data());
    }
    if (shares > 1)
        for (std::int64_t block : shuffled(r, tasks / shares)) {
            scratch.fill(0xff);
            target.merge_splits(f, block, scratch.data());
        }
    f.partial_results = f.paired_v = nullptr;
}
void run(const Target& target, const Backward& g, Random& r) {
    const Forward& f = g.forward;
    const std::int64_t heads = f.batch * f.kv_heads, groups = target.gradient_groups(f);
    for (std::int64_t head : shuffled(r, heads)) {
        Memory sums(target.gradient_sums_bytes(f), 0xff);
        std::vector<std::atomic<std::int64_t>> passed(static_cast<std::size_t>(groups));
        std::atomic<std::int64_t> begun{0};
        const auto work = [&] {
            Memory own(target.gradient_scratch(g));
            for (std::int64_t group; (group = begun++) < groups;) {
                own.fill(0xff);
                target.run_gradient(g, head, group, own.data(), sums.data(), passed.data());
            }
        };
        std::thread other;
        if (groups > 1 && r.one_in(2)) other = std::thread(work);
        work();
        if (other.joinable()) other.join();
    }
    if (!g.dbias) return;
    Memory scratch(target.gradient_scratch(g));
    for (std::int64_t task : shuffled(r, target.bias_tasks(g))) {
        scratch.fill(0xff);
        target.run_bias_gradient(g, task, scratch.data());
    }
}

void run_observation_tasks(const Target& target, Forward& f, Random& r) {
    if (r.one_in(2)) find_visible_range(f);
    const std::size_t prepared = target.paired_v_bytes(f);
    Memory scratch(target.observation_scratch(f)), paired_v(prepared, 0xff);
    f.paired_v = prepared ? paired_v.data() : nullptr;
    if (prepared)
        for (std::int64_t task : shuffled(r, target.pairing_tasks(f))) target.pair_values(f, task);
    for (std::int64_t task : shuffled(r, target.observation_tasks(f))) {
        scratch.fill(r.one_in(2) ? 0xff : 0x3f);
        target.run_observation(f, task, scratch.data());
    }
    if (f.statistics->has_column_statistics()) {
        target.reduce_partitions(f, 0);
        for (std::int64_t head : shuffled(r, f.heads - 1)) target.reduce_partitions(f, head + 1);
    }
    f.paired_v = nullptr;
}

// ---------------------------------------------------------------- a problem in memory

struct Call {
    Forward f;
    std::vector<std::unique_ptr<Placed>> held;

    Placed& place(Random& r, const Array& x, Element e, bool tight = false, bool unit = true) {
        held.push_back(std::make_unique<Placed>(r, x, e, false, tight, unit));
        return *held.back();
    }
    Call(Random& r, const Problem& p) : f{} {
        const Element e = element(p.dtype), wide = arithmetic(p.dtype);
        f.batch = p.B;
        f.heads = p.H;
        f.kv_heads = p.Hkv;
        f.queries = p.Q;
        f.keys = p.K;
        f.head_dim = p.D;
        f.v_head_dim = p.Dv;
        f.q = place(r, p.q, e).tensor(p.dtype);
        f.k = place(r, p.k, e).tensor(p.dtype);
        f.v = place(r, p.v, e).tensor(p.dtype);
        f.bias = place(r, p.bias, wide, false, false).tensor(p.dtype);
        if (!p.sinks.empty()) {
            Array sinks(1, 1, 1, p.H);
            sinks.x = p.sinks;
            f.sinks = place(r, sinks, wide, true).data();
        }
        if (p.spans.present) f.mask.spans = reach(r, p.spans);
        if (!p.rules.empty()) add(r, p.rules[0]);
        f.scale = p.scale;
        f.softcap = p.softcap;
        f.dropout = p.dropout;
        f.seed = p.seed;
    }
    headscope::Spans reach(Random& r, const Array& spans) {
        const Placed& at = place(r, spans, Element::i32, true);
        return {reinterpret_cast<const std::int32_t*>(at.data()), at.stride[0], at.stride[2],
                std::int32_t(spans.n[3] / 2)};
    }
    void add(Random& r, const Node& node) {  // in postfix order
        for (const Node& part : node.parts) add(r, part);
        Rule& rule = f.mask.rules[f.mask.rule_count++];
        rule = {node.kind, {}, {}, {}};
        if (node.kind == Rule::spans) rule.key_spans = reach(r, node.first);
        if (node.kind == Rule::bytes) rule.q = place(r, node.first, Element::u8, false, false).tensor(Dtype::f32);
        if (node.kind == Rule::same_id) {
            rule.q = ids(r, node.first);
            rule.k = ids(r, node.second);
        }
    }
    headscope::Tensor4 ids(Random& r, const Array& x) {
        const Placed& at = place(r, x, Element::i64, false, false);
        return {at.data(), {at.stride[0], at.stride[3], 0, 0}, Dtype::f32};
    }
};

void strides(const Placed& x, std::int64_t* three) { std::copy(x.stride, x.stride + 3, three); }

// An observation and its output buffers. Given the same random numbers, a second one is laid out alike.
struct ObservationBuffers {
    Statistics s;
    std::atomic<bool> nonfinite{false};
    std::vector<std::unique_ptr<Placed>> out;
    Placed *value[QUANTITIES], *window[MAX_WINDOWS], *streaming[MAX_WINDOWS], *counted, *top_weight, *top_key,
        *received, *eligible, *sum, *max, *count, *at, *received_max, *segment_sum, *segment_count, *edge, *edge_counts;

    ObservationBuffers(Random& r, const Problem& p, const Observation& x, const Array& floor, double rounding,
                       Call& call) {
        const Element wide = arithmetic(p.dtype);
        const auto whole = [&](const Array& a, std::int64_t& stride) {
            const Placed& at = call.place(r, a, Element::i64, true);
            stride = at.stride[0];
            return reinterpret_cast<const std::int64_t*>(at.data());
        };
        s.position = whole(x.line, s.position_stride);
        s.own_key = whole(x.own, s.own_key_stride);
        s.first_keys = whole(x.first, s.first_stride);
        s.first_count = int(x.first.n[3]);
        s.token_ids = reinterpret_cast<const std::int32_t*>(call.place(r, x.ids, Element::i32, true).data());
        s.value_norms = call.place(r, x.norms, wide, true).data();
        s.external_lse = call.place(r, x.external_lse, wide, true).data();
        s.lse_tolerance = rounding;
        s.logit_threshold = call.place(r, floor, wide, true).data();
        const Placed& may_count = call.place(r, x.may_count, Element::u8, false, false);
        s.may_count = reinterpret_cast<const std::uint8_t*>(may_count.data());
        std::copy(may_count.stride, may_count.stride + 3, s.may_count_stride);
        const Array rows(p.B, p.H, x.R, 1);
        for (int n = 0; n < QUANTITIES; n++) {
            const bool of_tokens = n == headscope::DUPLICATE || n == headscope::INDUCTION;
            const bool of_places = of_tokens || (n >= headscope::DISTANCE && n <= headscope::NEXT);
            const bool has = (!of_tokens || x.ids.present) && (!of_places || x.line.present) &&
                             (n != headscope::VALUE_NORM || x.norms.present);
            s.value[n] = (value[n] = place(r, rows, wide, x.values && has && !r.one_in(5)))->data();
        }
        for (; s.window_count < int(x.reach.size()); s.window_count++) {
            const int n = s.window_count;
            s.window_radius[n] = x.reach[std::size_t(n)];
            s.window[n] = (window[n] = place(r, rows, wide, !r.one_in(5)))->data();
            s.streaming[n] = (streaming[n] = place(r, rows, wide, !r.one_in(5)))->data();
        }
        s.counted = reinterpret_cast<std::uint8_t*>((counted = place(r, rows, Element::u8))->data());
        s.top_k = int(x.most);
        s.top_weight = (top_weight = place(r, Array(p.B, p.H, x.R, x.most), wide, x.most > 0))->data();
        s.top_key = reinterpret_cast<std::int64_t*>(
            (top_key = place(r, Array(p.B, p.H, x.R, x.most), Element::i64, x.most > 0))->data());
        s.bins = x.bins;
        s.first_query = x.first_query;
        s.total_queries = x.total_queries;
        s.total_keys = x.total_keys;
        s.partitions = x.shares;
        s.segments = x.segments;
        const auto bytes = [&](const Array& ids, std::int64_t& stride) {
            const Placed& at = call.place(r, ids, Element::i8, true);
            stride = at.stride[0];
            return reinterpret_cast<const std::int8_t*>(at.data());
        };
        s.key_segments = bytes(x.key_segments, s.key_segment_stride);
        s.row_segments = bytes(x.row_segments, s.row_segment_stride);
        s.segment_ends = reinterpret_cast<const std::int32_t*>(call.place(r, x.ends, Element::i32, true).data());
        s.nonfinite = &nonfinite;
        place_columns(r, s.total, 1, p, x, x.bins);
        const std::size_t of_whole = out.size();
        place_columns(r, s.partial, x.shares - 1, p, x, x.queries.present ? x.bins : 1);
        const auto piece = [&](std::size_t n) { return out[of_whole - 9 + n].get(); };
        received = piece(0);
        eligible = piece(1);
        sum = piece(2);
        max = piece(3);
        count = piece(4);
        at = piece(5);
        received_max = piece(6);
        segment_sum = piece(7);
        segment_count = piece(8);
        s.max_edges = int(x.edges);
        const auto of_edges = [&](std::int64_t n) {
            return place(r, Array(x.shares, p.H, n, 1), Element::i64, x.edges > 0);
        };
        s.edges = reinterpret_cast<headscope::Edge*>((edge = of_edges(4 * x.edges))->data());
        s.edge_counts = reinterpret_cast<std::int64_t*>((edge_counts = of_edges(1))->data());
        s.edge_threshold =
            reinterpret_cast<std::atomic<double>*>(place(r, Array(1, p.H, 1, 1), Element::f64, x.edges > 0)->data());
        if (x.edges > 0) std::uninitialized_fill_n(s.edge_threshold, p.H, -1.0);
    }

    // The edges of a head: where each is, and how large. What shares keep beside depends on what others had found by
    // then.
    static constexpr std::size_t OF_EDGES = 3;  // the last of `out`
    std::vector<std::tuple<double, std::int64_t, std::int64_t, std::int64_t>> largest(std::int64_t heads,
                                                                                      std::int64_t h) const {
        std::vector<std::tuple<double, std::int64_t, std::int64_t, std::int64_t>> all;
        for (std::int64_t n = h; s.max_edges && n < s.partitions * heads; n += heads)
            for (const headscope::Edge* e = s.edges + n * s.max_edges; e < s.edges + n * s.max_edges + s.edge_counts[n];
                 e++)
                all.emplace_back(-e->p, e->b, e->i, e->j);
        std::sort(all.begin(), all.end());
        all.resize(std::min(all.size(), std::size_t(s.max_edges)));
        return all;
    }

private:
    void place_columns(Random& r, headscope::ColumnStatistics& to, std::int64_t shares, const Problem& p,
                       const Observation& x, std::int64_t lines) {
        const Array keys(shares, p.H, p.K, 1), cells(shares, p.H, lines, x.bins),
            places(shares, p.H, lines * x.bins, 3);
        const auto numbers = [&](const Array& a, bool asked) {
            return reinterpret_cast<double*>(place(r, a, Element::f64, asked)->data());
        };
        const auto whole = [&](const Array& a, bool asked) {
            return reinterpret_cast<std::int64_t*>(place(r, a, Element::i64, asked)->data());
        };
        to.received = numbers(keys, x.received);
        to.eligible = whole(keys, x.received);
        to.sum = numbers(cells, x.bins > 0);
        to.max = numbers(cells, x.bins > 0);
        to.count = whole(cells, x.bins > 0);
        to.largest = reinterpret_cast<std::int32_t*>(place(r, places, Element::i32, x.bins > 0)->data());
        to.received_max = numbers(keys, x.received_max);
        to.segment_sum = numbers(Array(shares, p.H, x.segments, x.segments), x.segments > 0);
        to.segment_count = whole(Array(shares, p.H, x.segments, 1), x.segments > 0);
    }
    Placed* place(Random& r, const Array& shape, Element e, bool asked = true) {
        out.push_back(std::make_unique<Placed>(r, asked ? shape : Array(), e, true, true));
        return out.back().get();
    }
};

// What dropout leaves of each weight, found by asking: with all logits 0, no mask, and V the identity, `out` is the
// weights.
Array kept_weights(const Target& target, const Problem& p, Random& r) {
    Problem ask = p;
    ask.dtype = Dtype::f32;
    ask.Dv = p.K;
    ask.q = Array(p.B, p.H, p.Q, p.D);
    ask.k = Array(p.B, p.Hkv, p.K, p.D);
    ask.v = Array(1, 1, p.K, p.K);
    for (std::int64_t j = 0; j < p.K; j++) ask.v(0, 0, j, j) = 1;
    ask.bias = {};
    ask.spans = {};
    ask.rules.clear();
    ask.sinks.clear();
    Call call(r, ask);
    Placed out(r, Array(p.B, p.H, p.Q, p.K), Element::f32, true);
    call.f.out = out.data();
    strides(out, call.f.out_stride);
    run(target, call.f, r);
    Array factors = out.read();
    for (double& x : factors.x) x = x > 0 ? 1 / (1 - p.dropout) : 0;
    return factors;
}

// ---------------------------------------------------------------- comparing

// Errors are counted in roundings: of the sizes of the terms that a number is the sum of, once in the dtype of the
// inputs, and in the arithmetic's as often as the logits are large. The rule is that of tests/support/tolerance.py: at
// most twice the error of a plain computation in the same dtype, which on few numbers can be exact by luck: some
// roundings are allowed in any case.
constexpr double ROUNDINGS = 4;
// On the average there is less room: half types must gain by float arithmetic what the plain computation loses.
constexpr double MEAN[] = {1.5, 1.5, 1, 1};
constexpr std::int64_t ENOUGH = 40;  // calls, for an average

struct Worst {
    double share = 0, ours = 0, theirs = 0;  // of what is allowed; sums of the largest errors of each call
    std::int64_t calls = 0;
    std::string where;
};

class Check {
public:
    Check(const Problem& problem, Worst* worst_of_dtypes) : p(problem), worst(worst_of_dtypes[int(problem.dtype)]) {}
    bool good = true;
    std::string observation;  // if there is one

    // `own_dtype`: the dtype that the terms are rounded to.
    void compare(const char* name, const Placed& got, const Array& exact, const Array& plain, const Array& size,
                 double logits, Dtype own_dtype) {
        guard(name, got);
        const Array x = got.read();
        const double own = epsilon(own_dtype), wide = p.dtype == Dtype::f64 ? epsilon(Dtype::f64) : epsilon(Dtype::f32);
        double ours = 0, theirs = 0;
        for (std::size_t n = 0; n < x.x.size(); n++) {
            if (!std::isfinite(exact.x[n]) || !std::isfinite(x.x[n])) {
                if (!(exact.x[n] == x.x[n])) return fail(name, "got %g, wanted %g", x.x[n], exact.x[n]);
                continue;
            }
            const double rounding = size.x[n] * (own + wide * logits) + least();
            ours = std::max(ours, std::fabs(x.x[n] - exact.x[n]) / rounding);
            theirs = std::max(theirs, std::fabs(plain.x[n] - exact.x[n]) / rounding);
        }
        const double allowed = 2 * theirs + ROUNDINGS;
        if (ours > allowed) fail(name, "error of %.3g roundings, allowed %.3g", ours, allowed);
        worst.ours += ours;
        worst.theirs += theirs;
        if (ours > worst.share * allowed) {
            worst.share = ours / allowed;
            worst.where = name;
        }
    }
    void guard(const char* name, const Placed& x) {
        if (!x.untouched_around()) fail(name, "bytes around it were written", 0, 0);
    }
    // At most so many roundings of `size` apart. Where shares are added up into the first, `exact` has that alone.
    void near(const char* name, const Placed& got, const Array& exact, const Array& size, double roundings) {
        guard(name, got);
        const Array x = got.read();
        const double unit = roundings * (p.dtype == Dtype::f64 ? epsilon(Dtype::f64) : epsilon(Dtype::f32));
        for (std::size_t n = 0; n < exact.x.size(); n++) {
            if (std::fabs(exact.x[n]) > 1 / small()) continue;
            const double allowed = size.x[n] * unit + small(), off = std::fabs(x.x[n] - exact.x[n]);
            if (std::isnan(exact.x[n]) ? !std::isnan(x.x[n]) : !(off <= allowed))
                return fail(name, "got %.9g, wanted %.9g", x.x[n], exact.x[n]);
            if (off > worst.share * allowed) {
                worst.share = off / allowed;
                worst.where = name;
            }
        }
    }
    void near(const char* name, double got, double exact, double roundings) {
        const double unit = roundings * (p.dtype == Dtype::f64 ? epsilon(Dtype::f64) : epsilon(Dtype::f32));
        if (!(std::fabs(got - exact) <= exact * unit + small())) fail(name, "got %.9g, wanted %.9g", got, exact);
    }
    void equal(const char* name, const Placed& got, const Array& exact) {
        guard(name, got);
        const Array x = got.read();
        for (std::size_t n = 0; n < exact.x.size(); n++)
            if (x.x[n] != exact.x[n]) return fail(name, "got %g, wanted %g", x.x[n], exact.x[n]);
    }
    void same(const char* name, const Placed& x, const Placed& y) {
        if (!x.same(y)) fail(name, "a second run gave other bits", 0, 0);
    }
    void fail(const char* name, const char* text, double a, double b) {
        std::printf("wrong: %s of %s%s: ", name, p.describe().c_str(), observation.c_str());
        std::printf(text, a, b);
        std::printf("\n");
        good = false;
    }

private:
    // Where the dtype's numbers end, and exp2 flushes to 0.
    double least() const { return p.dtype == Dtype::f64 ? 0x1p-1000 : p.dtype == Dtype::f16 ? 0x1p-24 : 0x1p-100; }
    double small() const {
        return p.dtype == Dtype::f64 ? 0x1p-900 : 0x1p-80;
    }  // of numbers in the arithmetic's type; times a distance

    const Problem& p;
    Worst& worst;
};

// ---------------------------------------------------------------- one call

// Where a row sees a NaN, it is NaN. (What it does not see may also mark_nonfinite it here: then `nonfinite` says so,
// and the caller mends it.)
bool nan_reaches(const Problem& p, const Array& out, const Array& lse) {
    for (std::int64_t b = 0; b < p.B; b++)
        for (std::int64_t h = 0; h < p.H; h++)
            for (std::int64_t i = 0; i < p.Q; i++) {
                for (std::int64_t j = 0; j < p.K; j++) {
                    if (!p.seen(b, h, i, j)) continue;
                    double dot = 0;
                    for (std::int64_t d = 0; d < p.D; d++) dot += p.q(b, h, i, d) * p.k(b, h / p.group(), j, d);
                    bool reached = !(std::isnan(dot) && lse.present) || std::isnan(lse(b, h, i, 0));
                    for (std::int64_t c = 0; c < p.Dv; c++)
                        reached &= !std::isnan(dot + p.v(b, h / p.group(), j, c)) || std::isnan(out(b, h, i, c));
                    if (reached) continue;
                    std::printf("wrong: a NaN does not reach row (%d, %d, %d): %s\n", int(b), int(h), int(i),
                                p.describe().c_str());
                    return false;
                }
            }
    return true;
}

bool check_forward(const Target& target, const Problem& p, Call& call, Random& r, Placed& out, Placed& lse,
                   bool with_lse) {
    Forward& f = call.f;
    std::atomic<bool> nonfinite{false};
    f.out = out.data();
    strides(out, f.out_stride);
    f.lse = with_lse ? lse.data() : nullptr;
    f.nonfinite = &nonfinite;
    run(target, f, r);
    f.nonfinite = nullptr;
    bool finite = true;
    for (const Array got = out.read(); double x : got.x) finite = finite && std::isfinite(x);
    // With a NaN hidden from all rows `nonfinite` may be set for nothing.
    const bool told = finite ? p.nonfinite || !nonfinite : nonfinite.load();
    if (!told)
        std::printf("wrong: nonfinite is %d, out is %sfinite: %s\n", int(nonfinite), finite ? "" : "not ",
                    p.describe().c_str());
    return told && (!p.nonfinite || nan_reaches(p, out.read(), with_lse ? lse.read() : Array()));
}

struct Gradients {
    Placed dq, dk, dv, dbias, dsinks;
    void into(Backward& g, bool bias, bool sinks) {
        g.dq = dq.data();
        g.dk = dk.data();
        g.dv = dv.data();
        g.dbias = bias ? dbias.data() : nullptr;
        strides(dq, g.dq_stride);
        strides(dk, g.dk_stride);
        strides(dv, g.dv_stride);
        std::copy(dbias.stride, dbias.stride + 4, g.dbias_stride);
        if (g.dbias) dbias.zero();
        g.dsinks = sinks ? dsinks.data() : nullptr;
    }
    Gradients again() const { return {dq.again(), dk.again(), dv.again(), dbias.again(), dsinks.again()}; }
};

// ---------------------------------------------------------------- one observation

const char* const NAMES[QUANTITIES] = {
    "lse",        "max_logit", "entropy",      "normalized_entropy", "max_weight", "effective_keys", "mass",
    "first",      "distance",  "self",         "previous",           "next",       "duplicate",      "induction",
    "value_norm", "chance",    "second_weight"};

// What the `most`-th largest weight of each row, if there are so many, has for a logit times log2(e), and somewhat
// less.
Array floors(const Observation& x, const Measured& m) {
    Array floor(m.counted.n[0], m.counted.n[1], x.R, 1, -INF);
    for (std::size_t n = 0; n < floor.x.size(); n++) {
        const std::int64_t K = m.weights.n[3];
        std::vector<double> row(m.weights.x.begin() + std::int64_t(n) * K,
                                m.weights.x.begin() + std::int64_t(n + 1) * K);
        std::sort(row.begin(), row.end(), std::greater<>());
        if (x.most > K || !(row[std::size_t(x.most - 1)] > 0)) continue;
        const double logit =
            (std::log(row[std::size_t(x.most - 1)]) + m.value[headscope::LSE].x[n]) * 1.4426950408889634;
        floor.x[n] = float(logit - 1e-3 * (1 + std::fabs(logit)));
    }
    return floor;
}
void check_most(Check& check, const ObservationBuffers& got, const Observation& x, const Measured& m,
                double roundings) {
    check.guard("most_weight", *got.top_weight);
    check.guard("most_key", *got.top_key);
    const Array weights = got.top_weight->read(), keys = got.top_key->read();
    const std::int64_t K = m.weights.n[3];
    Array wanted = weights, there = weights;
    for (std::size_t n = 0; n < m.counted.x.size(); n++) {
        std::vector<double> row(m.weights.x.begin() + std::int64_t(n) * K,
                                m.weights.x.begin() + std::int64_t(n + 1) * K),
            best = row;
        std::sort(best.begin(), best.end(), std::greater<>());
        for (std::int64_t k = 0; k < x.most; k++) {
            const std::size_t at = n * std::size_t(x.most) + std::size_t(k);
            const bool has = k < K && best[std::size_t(k)] >= 0;
            wanted.x[at] = there.x[at] = has ? best[std::size_t(k)] : NOT;
            const double j = keys.x[at];
            if (has != (j >= 0) || (!has && j != -1)) return check.fail("most_key", "got %g at place %g", j, double(k));
            if (has) {
                there.x[at] = row[std::size_t(j)];
                row[std::size_t(j)] = -1;
            }  // a second time it would be wrong
        }
    }
    check.near("most_weight", *got.top_weight, wanted, wanted, roundings);
    check.near("most_key's weight", *got.top_weight, there, wanted, roundings);
}
void check_map(Check& check, const ObservationBuffers& got, const Observation& x, const Measured& m, const Problem& p,
               double roundings, double of_sums) {
    check.near("map sum", *got.sum, m.map_sum, m.map_sum, of_sums);
    check.near("map max", *got.max, m.map_max, m.map_max, roundings);
    check.equal("map count", *got.count, m.map_count);
    check.guard("map at", *got.at);
    const Array at = got.at->read();
    Array largest = m.map_max;
    for (std::int64_t h = 0; h < p.H; h++)
        for (std::int64_t cell = 0; cell < x.bins * x.bins; cell++) {
            const auto place = [&](int n) { return std::int64_t(at(0, h, cell, n)); };
            double& most = largest.x[std::size_t(h * x.bins * x.bins + cell)];
            if (std::isnan(most) ? place(0) != -1 || place(1) != -1 || place(2) != -1
                                 : place(0) < 0 || place(0) >= p.B || place(2) < 0 || place(2) >= p.K ||
                                       bin_of(x.first_query + place(1), x.bins, x.total_queries) != cell / x.bins ||
                                       bin_of(place(2), x.bins, x.total_keys) != cell % x.bins)
                return check.fail("map at", "nothing of the kind is at query %g, key %g", double(place(1)),
                                  double(place(2)));
            if (std::isnan(most)) continue;
            most = -1;  // a query may have been picked more than once
            for (std::int64_t r = 0; r < x.R; r++)
                if (x.query(place(0), h, r) == place(1)) most = std::max(most, m.weights(place(0), h, r, place(2)));
        }
    check.near("map at", *got.max, largest, m.map_max, roundings);
}
// Of each head the largest, over all shares, and each where it says.
void check_edges(Check& check, const ObservationBuffers& got, const Observation& x, const Measured& m, const Problem& p,
                 double roundings) {
    check.guard("edges", *got.edge);
    check.guard("edges_found", *got.edge_counts);
    for (std::int64_t h = 0; h < p.H; h++) {
        std::vector<double> native_weights, wanted;
        for (std::int64_t share = 0; share < x.shares; share++) {
            const std::int64_t n = share * p.H + h, count = got.s.edge_counts[n];
            if (count < 0 || count > x.edges)
                return check.fail("edges_found", "got %g of %g", double(count), double(x.edges));
            for (const headscope::Edge* e = got.s.edges + n * x.edges; e < got.s.edges + n * x.edges + count; e++) {
                if (e->b < 0 || e->b >= p.B || e->j < 0 || e->j >= p.K)
                    return check.fail("edges", "at batch entry %g, key %g", double(e->b), double(e->j));
                double there = -1;
                for (std::int64_t r = 0; r < x.R; r++)
                    if (x.query(e->b, h, r) == e->i) there = std::max(there, m.weights(e->b, h, r, e->j));
                if (there < 0)
                    return check.fail("edges", "nothing is seen at query %g, key %g", double(e->i), double(e->j));
                check.near("edges", e->p, there, roundings);
                native_weights.push_back(e->p);
            }
        }
        for (std::int64_t b = 0; b < p.B; b++)
            for (std::int64_t r = 0; r < x.R; r++)
                for (std::int64_t j = 0; j < p.K; j++)
                    if (m.weights(b, h, r, j) >= 0) wanted.push_back(m.weights(b, h, r, j));
        std::sort(native_weights.begin(), native_weights.end(), std::greater<>());
        std::sort(wanted.begin(), wanted.end(), std::greater<>());
        const std::size_t least = std::min(wanted.size(), std::size_t(x.edges));
        if (native_weights.size() < least || native_weights.size() > wanted.size())
            return check.fail("edges", "got %g of %g", double(native_weights.size()), double(wanted.size()));
        for (std::size_t n = 0; n < least; n++) check.near("edges", native_weights[n], wanted[n], roundings);
    }
}
void check_numbers(Check& check, const ObservationBuffers& got, const Problem& p, const Observation& x,
                   const Measured& m, double roundings) {
    for (int n = 0; n < QUANTITIES; n++)
        if (got.s.value[n]) check.near(NAMES[n], *got.value[n], m.value[n], m.size[n], roundings);
    for (int n = 0; n < got.s.window_count; n++) {
        if (got.s.window[n]) check.near("window", *got.window[n], m.window[n], m.window[n], roundings);
        if (got.s.streaming[n]) check.near("streaming", *got.streaming[n], m.streaming[n], m.streaming[n], roundings);
    }
    check.equal("counted", *got.counted, m.counted);
    // Equal weights, one after the other, round the same way; where the arithmetic is that of the sums, this shows.
    const double of_sums = p.dtype == Dtype::f64 ? roundings + double(p.B * x.R) / 8 : roundings;
    if (x.received) {
        check.near("received", *got.received, m.received, m.received, of_sums);
        check.equal("eligible", *got.eligible, m.eligible);
    }
    if (x.received_max) check.near("received max", *got.received_max, m.received_max, m.received_max, roundings);
    if (x.segments) {
        check.near("segment sum", *got.segment_sum, m.segment_sum, m.segment_sum, of_sums);
        check.equal("segment count", *got.segment_count, m.segment_count);
    }
    if (x.bins) check_map(check, got, x, m, p, roundings, of_sums);
    if (x.edges) check_edges(check, got, x, m, p, roundings);
    if (x.most) check_most(check, got, x, m, roundings);
}
// A row that sees a NaN is told of.
bool sees_nan(const Problem& p, const Observation& x) {
    for (std::int64_t b = 0; b < p.B; b++)
        for (std::int64_t h = 0; h < p.H; h++)
            for (std::int64_t r = 0; r < x.R; r++)
                for (std::int64_t j = 0; j < p.K; j++)
                    if (p.seen(b, h, x.query(b, h, r), j)) {
                        double all = x.norms.present ? x.norms(b, h / p.group(), j, 0) : 0;
                        for (std::int64_t d = 0; d < p.D; d++)
                            all += p.q(b, h, x.query(b, h, r), d) * p.k(b, h / p.group(), j, d);
                        if (std::isnan(all)) return true;
                    }
    return false;
}

// `out` and `lse` are what attending alone gave, `exact` is the lse by the definition.
void check_observation(const Target& target, const Problem& p, Call& call, Random& r, const Placed& out,
                       const Placed& lse, const Array& exact, double logits, Check& check) {
    const Observation x = draw_observation(r, p, exact);
    check.observation = x.describe();
    const double rounding = p.dtype == Dtype::f64 ? 1e-12 : 1e-5;
    const bool wide = p.dtype == Dtype::f64;
    const Measured m = p.nonfinite ? Measured()
                       : wide      ? measured<long double>(p, x, rounding)
                                   : measured<double>(p, x, rounding);
    const Array floor = x.floor && x.most && !p.nonfinite ? floors(x, m) : Array();
    Random again = r;
    ObservationBuffers got(r, p, x, floor, rounding, call);
    Forward f = call.f;
    Array queries = x.queries;
    const Placed& rows = call.place(r, queries, Element::i64, true);
    f.row_queries = reinterpret_cast<const std::int64_t*>(rows.data());
    f.row_queries_stride[0] = rows.stride[0];
    f.row_queries_stride[1] = rows.stride[1];
    f.queries = x.R;
    f.dropout = 0;
    f.statistics = &got.s;
    f.nonfinite = &got.nonfinite;
    f.out = nullptr;
    f.lse = nullptr;
    Placed own = out.again(), own_lse = lse.again();
    if (x.attends) {
        f.out = own.data();
        strides(own, f.out_stride);
        f.lse = own_lse.data();
    } else
        f.v_head_dim = 0;
    run_observation_tasks(target, f, r);
    if (x.attends && p.dropout == 0 && target.key_splits(f) == 1) {
        check.same("out, observed or not", own, out);
        check.same("lse, observed or not", own_lse, lse);
    }
    if (p.nonfinite) {
        for (const auto& each : got.out) check.guard("what is measured", *each);
        if (sees_nan(p, x) && !got.nonfinite) check.fail("spoilt", "got %g, wanted %g", 0, 1);
        return;
    }
    if (got.nonfinite) check.fail("spoilt", "got %g, wanted %g", 1, 0);
    check_numbers(check, got, p, x, m, 4 + 2 * logits);
    if (!r.one_in(8)) return;  // the same bits whatever the order of the tasks
    ObservationBuffers second(again, p, x, floor, rounding, call);
    f.statistics = &second.s;
    f.nonfinite = &second.nonfinite;
    run_observation_tasks(target, f, r);
    for (std::size_t n = 0; n + got.OF_EDGES < got.out.size(); n++)
        check.same("what is measured", *got.out[n], *second.out[n]);
    for (std::int64_t h = 0; h < p.H; h++)
        if (got.largest(p.H, h) != second.largest(p.H, h)) check.fail("edges", "a second run gave others", 0, 0);
}

bool check(const Target& target, Random& r, Worst* worst) {
    Problem p = draw(r);
    if (p.dropout > 0) p.dropout_factors = kept_weights(target, p, r);
    const Element e = element(p.dtype), wide = arithmetic(p.dtype);
    Call call(r, p);
    Placed out(r, Array(p.B, p.H, p.Q, p.Dv), e, true), lse(r, Array(p.B, p.H, p.Q, 1), wide, true, true);
    Check check(p, worst);
    if (r.one_in(4)) {  // lse is not always asked for
        Placed alone = out.again();
        check.good = check_forward(target, p, call, r, alone, lse, false);
        check.guard("lse that was not asked for", lse.again());
        check.good &= check_forward(target, p, call, r, out, lse, true);
        check.same("out with and without lse", alone, out);
    } else {
        check.good = check_forward(target, p, call, r, out, lse, true);
    }
    worst[int(p.dtype)].calls++;
    if (p.nonfinite) {
        check.guard("out", out);
        check.guard("lse", lse);
        if (p.Q && p.K) check_observation(target, p, call, r, out, lse, Array(p.B, p.H, p.Q, 1), 0, check);
        return check.good;
    }
    const Results truth = exact(p), near = plain(p);
    Results size = sizes(p, truth);
    const double logits =
        1 + size.lse.largest() + truth.lse.largest();  // the backward pass takes the difference from lse
    for (double& x : size.lse.x) x = 1;
    check.compare("out", out, truth.out, near.out, size.out, logits, p.dtype);
    check.compare("lse", lse, truth.lse, near.lse, size.lse, logits, p.dtype == Dtype::f64 ? Dtype::f64 : Dtype::f32);
    if (p.Q && p.K && r.one_in(2)) {
        check_observation(target, p, call, r, out, lse, truth.lse, logits, check);
        check.observation.clear();
    }

    Backward g{};
    g.forward = call.f;
    g.out = out.tensor(p.dtype);
    g.grad_out = call.place(r, p.grad_out, e).tensor(p.dtype);
    g.grad_lse = call.place(r, p.grad_lse, wide, true).data();
    Array entropy_delta;
    if (p.grad_entropy.present) {
        entropy_delta = truth.excess;
        for (std::size_t n = 0; n < entropy_delta.x.size(); n++) entropy_delta.x[n] *= p.grad_entropy.x[n];
        g.grad_entropy = call.place(r, p.grad_entropy, wide, true).data();
        g.entropy_delta = call.place(r, entropy_delta, wide, true).data();
    }
    Array like_bias = p.bias;
    Gradients made{{r, truth.dq, e, true},
                   {r, truth.dk, e, true},
                   {r, truth.dv, e, true},
                   {r, like_bias, wide, true, false, false},
                   {r, truth.dsinks, wide, true, true}};
    const bool bias = p.bias.present && !r.one_in(3), sinks = !p.sinks.empty();
    made.into(g, bias, sinks);
    run(target, g, r);
    check.compare("dq", made.dq, truth.dq, near.dq, size.dq, logits, p.dtype);
    check.compare("dk", made.dk, truth.dk, near.dk, size.dk, logits, p.dtype);
    check.compare("dv", made.dv, truth.dv, near.dv, size.dv, logits, p.dtype);
    if (bias) check.compare("dbias", made.dbias, truth.dbias, near.dbias, size.dbias, logits, p.dtype);
    if (sinks) check.compare("dsinks", made.dsinks, truth.dsinks, near.dsinks, size.dsinks, logits, p.dtype);
    if (r.one_in(8)) {  // the same bits whatever the order of the tasks
        Gradients second = made.again();
        second.into(g, bias, sinks);
        run(target, g, r);
        check.same("dq", made.dq, second.dq);
        check.same("dk", made.dk, second.dk);
        check.same("dv", made.dv, second.dv);
        if (bias) check.same("dbias", made.dbias, second.dbias);
        if (sinks) check.same("dsinks", made.dsinks, second.dsinks);
    }
    return check.good;
}

const Target* find(const char* name) {
    int count = 0;
    const Target* const* all = headscope::all_targets(&count);
    for (int n = 0; n < count; n++)
        if (!std::strcmp(all[n]->name, name)) return all[n];
    return nullptr;
}

}  // namespace

int main(int count, char** arguments) {
    if (count != 4 && count != 5) {
        std::fprintf(stderr, "usage: %s TARGET CALLS SEED [FIRST]\n", arguments[0]);
        return 2;
    }
    const Target* target = find(arguments[1]);
    if (!target) {
        std::fprintf(stderr, "target: got '%s', which this architecture does not have\n", arguments[1]);
        return 77;
    }
    if (!target->runs_here()) {
        std::fprintf(stderr, "target: this CPU has no %s\n", arguments[1]);
        return 77;
    }
    const std::int64_t calls = std::atoll(arguments[2]), seed = std::atoll(arguments[3]),
                       first = count > 4 ? std::atoll(arguments[4]) : 0;
    Worst worst[4];
    std::int64_t wrong = 0;
    for (std::int64_t n = first; n < first + calls && wrong < 20; n++) {
        Random r{std::uint64_t(seed) * 0x2545f4914f6cdd1du + std::uint64_t(n)};  // a call can be had again by itself
        r.bits();
        const bool right = check(*target, r, worst);
        if ((n % 4 || check_linear(*target, r)) && right) continue;
        wrong++;
        std::printf("  that was call %lld of seed %lld\n", static_cast<long long>(n), static_cast<long long>(seed));
    }
    static const char* const names[] = {"float32", "float64", "bfloat16", "float16"};
    for (int n = 0; n < 4; n++) {
        const double mean = worst[n].theirs > 0 ? worst[n].ours / worst[n].theirs : 0;
        std::printf(
            "%s %s: %lld calls, at worst %.2f of what is allowed (%s), mean error %.2f of a plain computation's\n",
            target->name, names[n], static_cast<long long>(worst[n].calls), worst[n].share, worst[n].where.c_str(),
            mean);
        if (worst[n].calls < ENOUGH || mean <= MEAN[n]) continue;
        std::printf("wrong: that mean is above %.1f\n", MEAN[n]);
        wrong++;
    }
    std::printf("%lld wrong\n", static_cast<long long>(wrong));
    return wrong ? 1 : 0;
}

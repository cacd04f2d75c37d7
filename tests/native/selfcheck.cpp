// Random calls of one target against the definition, without Python: every option, forward and backward, guards around
// every buffer. `selfcheck TARGET CALLS SEED [FIRST]`, FIRST to begin with a later call; exit code 1 where a result is wrong,
// 77 where this CPU lacks the target.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "memory.h"
#include "problem.h"
#include "reference.h"

using namespace selfcheck;
using headscope::Backward;
using headscope::Forward;
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
    const std::int64_t shares = target.shares(f), tasks = target.tasks(f);
    const std::size_t prepared = target.prepared(f);
    Memory scratch(target.scratch(f)), partial(target.partial(f), 0xff), paired_v(prepared, 0xff);
    f.partial = partial.data(), f.paired_v = prepared ? paired_v.data() : nullptr;
    if (prepared) for (std::int64_t task : shuffled(r, target.prepare_tasks(f))) target.prepare(f, task);
    for (std::int64_t task : shuffled(r, tasks)) {
        scratch.fill(r.one_in(2) ? 0xff : 0x3f);
        target.run(f, task, scratch.data());
    }
    if (shares > 1) for (std::int64_t block : shuffled(r, tasks / shares)) {
        scratch.fill(0xff);
        target.merge(f, block, scratch.data());
    }
    f.partial = f.paired_v = nullptr;
}
void run(const Target& target, const Backward& g, Random& r) {
    const Forward& f = g.forward;
    const std::int64_t heads = f.batch * f.kv_heads, tasks = heads * g.shares;
    const std::size_t sum = target.sums(f);
    Memory scratch(target.gradient_scratch(g)), sums(sum * std::size_t(tasks));
    for (std::int64_t task : shuffled(r, tasks)) {
        scratch.fill(0xff);
        target.run_gradient(g, task, scratch.data(), sums.data() + sum * std::size_t(task));
    }
    for (std::int64_t head : shuffled(r, heads)) target.gather(g, head, sums.data());
    if (!g.dbias) return;
    for (std::int64_t task : shuffled(r, target.bias_tasks(g))) {
        scratch.fill(0xff);
        target.run_bias_gradient(g, task, scratch.data());
    }
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
        f.batch = p.B, f.heads = p.H, f.kv_heads = p.Hkv, f.queries = p.Q, f.keys = p.K, f.head_dim = p.D, f.v_head_dim = p.Dv;
        f.q = place(r, p.q, e).tensor(p.dtype), f.k = place(r, p.k, e).tensor(p.dtype), f.v = place(r, p.v, e).tensor(p.dtype);
        f.bias = place(r, p.bias, wide, false, false).tensor(p.dtype);
        if (!p.sinks.empty()) {
            Array sinks(1, 1, 1, p.H);
            sinks.x = p.sinks;
            f.sinks = place(r, sinks, wide, true).data();
        }
        if (p.spans.given) f.visible.spans = reach(r, p.spans);
        if (!p.rules.empty()) add(r, p.rules[0]);
        f.scale = p.scale, f.softcap = p.softcap, f.dropout = p.dropout, f.seed = p.seed;
    }
    headscope::Spans reach(Random& r, const Array& spans) {
        const Placed& at = place(r, spans, Element::i32, true);
        return {reinterpret_cast<const std::int32_t*>(at.data()), at.stride[0], at.stride[2], std::int32_t(spans.n[3] / 2)};
    }
    void add(Random& r, const Node& node) {  // in postfix order
        for (const Node& part : node.parts) add(r, part);
        Rule& rule = f.visible.rules[f.visible.count++];
        rule = {node.kind, {}, {}, {}};
        if (node.kind == Rule::spans) rule.reach = reach(r, node.first);
        if (node.kind == Rule::bytes) rule.q = place(r, node.first, Element::u8, false, false).tensor(Dtype::f32);
        if (node.kind == Rule::same_id) rule.q = ids(r, node.first), rule.k = ids(r, node.second);
    }
    headscope::Tensor4 ids(Random& r, const Array& x) {
        const Placed& at = place(r, x, Element::i64, false, false);
        return {at.data(), {at.stride[0], at.stride[3], 0, 0}, Dtype::f32};
    }
};

void strides(const Placed& x, std::int64_t* three) { std::copy(x.stride, x.stride + 3, three); }

// What dropout leaves of each weight, found by asking: with all logits 0, no mask, and V the identity, `out` is the weights.
Array kept_weights(const Target& target, const Problem& p, Random& r) {
    Problem ask = p;
    ask.dtype = Dtype::f32, ask.Dv = p.K;
    ask.q = Array(p.B, p.H, p.Q, p.D), ask.k = Array(p.B, p.Hkv, p.K, p.D), ask.v = Array(1, 1, p.K, p.K);
    for (std::int64_t j = 0; j < p.K; j++) ask.v(0, 0, j, j) = 1;
    ask.bias = {}, ask.spans = {}, ask.rules.clear(), ask.sinks.clear();
    Call call(r, ask);
    Placed out(r, Array(p.B, p.H, p.Q, p.K), Element::f32, true);
    call.f.out = out.data(), strides(out, call.f.out_stride);
    run(target, call.f, r);
    Array kept = out.read();
    for (double& x : kept.x) x = x > 0 ? 1 / (1 - p.dropout) : 0;
    return kept;
}

// ---------------------------------------------------------------- comparing

// Errors are counted in roundings: of the sizes of the terms that a number is the sum of, once in the dtype of the inputs, and in
// the arithmetic's as often as the logits are large. The rule is that of tests/tolerance.py: at most twice the error of a plain
// computation in the same dtype, which on few numbers can be exact by luck: some roundings are allowed in any case.
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
    Check(const Problem& problem, Worst* found) : p(problem), worst(found[int(problem.dtype)]) {}
    bool good = true;

    // `own_dtype`: the dtype that the terms are rounded to.
    void compare(const char* name, const Placed& got, const Array& exact, const Array& plain, const Array& size, double logits,
                 Dtype own_dtype) {
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
        worst.ours += ours, worst.theirs += theirs;
        if (ours > worst.share * allowed) worst.share = ours / allowed, worst.where = name;
    }
    void guard(const char* name, const Placed& x) {
        if (!x.untouched_around()) fail(name, "bytes around it were written", 0, 0);
    }
    void same(const char* name, const Placed& x, const Placed& y) {
        if (!x.same(y)) fail(name, "a second run gave other bits", 0, 0);
    }
    void fail(const char* name, const char* text, double a, double b) {
        std::printf("wrong: %s of %s: ", name, p.describe().c_str());
        std::printf(text, a, b);
        std::printf("\n");
        good = false;
    }

private:
    // Where the dtype's numbers end, and exp2 flushes to 0.
    double least() const { return p.dtype == Dtype::f64 ? 0x1p-1000 : p.dtype == Dtype::f16 ? 0x1p-24 : 0x1p-100; }

    const Problem& p;
    Worst& worst;
};

// ---------------------------------------------------------------- one call

// Where a row sees a NaN, it is NaN. (What it does not see may also spoil it here: then `spoilt` says so, and the caller mends it.)
bool nan_reaches(const Problem& p, const Array& out, const Array& lse) {
    for (std::int64_t b = 0; b < p.B; b++) for (std::int64_t h = 0; h < p.H; h++) for (std::int64_t i = 0; i < p.Q; i++) {
        for (std::int64_t j = 0; j < p.K; j++) {
            if (!p.seen(b, h, i, j)) continue;
            double dot = 0;
            for (std::int64_t d = 0; d < p.D; d++) dot += p.q(b, h, i, d) * p.k(b, h / p.group(), j, d);
            bool reached = !(std::isnan(dot) && lse.given) || std::isnan(lse(b, h, i, 0));
            for (std::int64_t c = 0; c < p.Dv; c++)
                reached &= !std::isnan(dot + p.v(b, h / p.group(), j, c)) || std::isnan(out(b, h, i, c));
            if (reached) continue;
            std::printf("wrong: a NaN does not reach row (%d, %d, %d): %s\n", int(b), int(h), int(i), p.describe().c_str());
            return false;
        }
    }
    return true;
}

bool check_forward(const Target& target, const Problem& p, Call& call, Random& r, Placed& out, Placed& lse, bool with_lse) {
    Forward& f = call.f;
    std::atomic<bool> spoilt{false};
    f.out = out.data(), strides(out, f.out_stride), f.lse = with_lse ? lse.data() : nullptr, f.spoilt = &spoilt;
    run(target, f, r);
    f.spoilt = nullptr;
    bool finite = true;
    for (const Array got = out.read(); double x : got.x) finite = finite && std::isfinite(x);
    // With a NaN hidden from all rows `spoilt` may be set for nothing.
    const bool told = finite ? p.spoilt || !spoilt : spoilt.load();
    if (!told) std::printf("wrong: spoilt is %d, out is %sfinite: %s\n", int(spoilt), finite ? "" : "not ", p.describe().c_str());
    return told && (!p.spoilt || nan_reaches(p, out.read(), with_lse ? lse.read() : Array()));
}

struct Gradients {
    Placed dq, dk, dv, dbias;
    void into(Backward& g, bool bias) {
        g.dq = dq.data(), g.dk = dk.data(), g.dv = dv.data(), g.dbias = bias ? dbias.data() : nullptr;
        strides(dq, g.dq_stride), strides(dk, g.dk_stride), strides(dv, g.dv_stride);
        std::copy(dbias.stride, dbias.stride + 4, g.dbias_stride);
        if (g.dbias) dbias.zero();
    }
    Gradients again() const { return {dq.again(), dk.again(), dv.again(), dbias.again()}; }
};

bool check(const Target& target, Random& r, Worst* worst) {
    Problem p = draw(r);
    if (p.dropout > 0) p.kept = kept_weights(target, p, r);
    const Element e = element(p.dtype), wide = arithmetic(p.dtype);
    Call call(r, p);
    Placed out(r, Array(p.B, p.H, p.Q, p.Dv), e, true), lse(r, Array(p.B, p.H, p.Q, 1), wide, true, true);
    Check found(p, worst);
    if (r.one_in(4)) {  // lse is not always asked for
        Placed alone = out.again();
        found.good = check_forward(target, p, call, r, alone, lse, false);
        found.guard("lse that was not asked for", lse.again());
        found.good &= check_forward(target, p, call, r, out, lse, true);
        found.same("out with and without lse", alone, out);
    } else {
        found.good = check_forward(target, p, call, r, out, lse, true);
    }
    worst[int(p.dtype)].calls++;
    if (p.spoilt) {
        found.guard("out", out), found.guard("lse", lse);
        return found.good;
    }
    const Results truth = exact(p), near = plain(p);
    Results size = sizes(p, truth);
    const double logits = 1 + size.lse.largest() + truth.lse.largest();  // the backward pass takes the difference from lse
    for (double& x : size.lse.x) x = 1;
    found.compare("out", out, truth.out, near.out, size.out, logits, p.dtype);
    found.compare("lse", lse, truth.lse, near.lse, size.lse, logits, p.dtype == Dtype::f64 ? Dtype::f64 : Dtype::f32);

    Backward g{};
    g.forward = call.f;
    g.out = out.tensor(p.dtype), g.grad_out = call.place(r, p.grad_out, e).tensor(p.dtype);
    g.grad_lse = call.place(r, p.grad_lse, wide, true).data();
    g.shares = int(r.range(1, 8));
    Array like_bias = p.bias;
    Gradients made{{r, truth.dq, e, true}, {r, truth.dk, e, true}, {r, truth.dv, e, true}, {r, like_bias, wide, true, false, false}};
    const bool bias = p.bias.given && !r.one_in(3);
    made.into(g, bias);
    run(target, g, r);
    found.compare("dq", made.dq, truth.dq, near.dq, size.dq, logits, p.dtype);
    found.compare("dk", made.dk, truth.dk, near.dk, size.dk, logits, p.dtype);
    found.compare("dv", made.dv, truth.dv, near.dv, size.dv, logits, p.dtype);
    if (bias) found.compare("dbias", made.dbias, truth.dbias, near.dbias, size.dbias, logits, p.dtype);
    if (r.one_in(8)) {  // the same bits whatever the order of the tasks
        Gradients second = made.again();
        second.into(g, bias);
        run(target, g, r);
        found.same("dq", made.dq, second.dq), found.same("dk", made.dk, second.dk), found.same("dv", made.dv, second.dv);
        if (bias) found.same("dbias", made.dbias, second.dbias);
    }
    return found.good;
}

const Target* find(const char* name) {
    int count = 0;
    const Target* const* all = headscope::targets(&count);
    for (int n = 0; n < count; n++) if (!std::strcmp(all[n]->name, name)) return all[n];
    return nullptr;
}

}  // namespace

int main(int count, char** said) {
    if (count != 4 && count != 5) return std::fprintf(stderr, "usage: %s TARGET CALLS SEED [FIRST]\n", said[0]), 2;
    const Target* target = find(said[1]);
    if (!target) return std::fprintf(stderr, "target: got '%s', which this architecture does not have\n", said[1]), 77;
    if (!target->runs_here()) return std::fprintf(stderr, "target: this CPU has no %s\n", said[1]), 77;
    const std::int64_t calls = std::atoll(said[2]), seed = std::atoll(said[3]), first = count > 4 ? std::atoll(said[4]) : 0;
    Worst worst[4];
    std::int64_t wrong = 0;
    for (std::int64_t n = first; n < first + calls && wrong < 20; n++) {
        Random r{std::uint64_t(seed) * 0x2545f4914f6cdd1du + std::uint64_t(n)};  // a call can be had again by itself
        r.bits();
        if (check(*target, r, worst)) continue;
        wrong++;
        std::printf("  that was call %lld of seed %lld\n", static_cast<long long>(n), static_cast<long long>(seed));
    }
    static const char* const names[] = {"float32", "float64", "bfloat16", "float16"};
    for (int n = 0; n < 4; n++) {
        const double mean = worst[n].theirs > 0 ? worst[n].ours / worst[n].theirs : 0;
        std::printf("%s %s: %lld calls, at worst %.2f of what is allowed (%s), mean error %.2f of a plain computation's\n", target->name,
                    names[n], static_cast<long long>(worst[n].calls), worst[n].share, worst[n].where.c_str(), mean);
        if (worst[n].calls < ENOUGH || mean <= MEAN[n]) continue;
        std::printf("wrong: that mean is above %.1f\n", MEAN[n]);
        wrong++;
    }
    std::printf("%lld wrong\n", static_cast<long long>(wrong));
    return wrong ? 1 : 0;
}

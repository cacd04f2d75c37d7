// The Python side: pointers, shapes and strides in; threads here.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/tuple.h>

#include <omp.h>
#include <pthread.h>
#include <time.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "attention.h"

namespace nb = nanobind;
using namespace headscope;

namespace {

std::atomic<bool> forked{false};  // libgomp's pool does not survive a fork: a child runs single-threaded

// Ctrl-C. Python runs its signal handlers on its main thread, between bytecodes: a long call would hold them up. Where the main
// thread is the one that entered, it asks for them every 50 ms; if a handler raises, all threads leave what is left of the call.
std::atomic<pthread_t> main_thread{};

class Signals : public Watch {
public:
    Signals() : Watch{ask}, entered_by_main(pthread_equal(pthread_self(), main_thread)), asked(entered_by_main ? now() : 0) {}

    // To be called where all threads have left, without the GIL.
    void raise() const {
        if (!raised) return;
        nb::gil_scoped_acquire locked;
        throw nb::python_error();
    }

private:
    static constexpr std::int64_t PATIENCE = 50'000'000;  // ns

    static bool ask(Watch* watch) {
        Signals& self = *static_cast<Signals*>(watch);
        if (!self.entered_by_main || self.raised.load(std::memory_order_relaxed)) return self.raised;
        if (!pthread_equal(pthread_self(), main_thread) || now() - self.asked < PATIENCE) return false;
        {
            nb::gil_scoped_acquire locked;
            if (PyErr_CheckSignals()) self.raised = true;  // the error stays with the thread until `raise`
        }
        self.asked = now();
        return self.raised;
    }
    static std::int64_t now() {
#if defined(CLOCK_MONOTONIC_COARSE)
        constexpr clockid_t clock = CLOCK_MONOTONIC_COARSE;  // some ns a look, and exact to some ms
#else
        constexpr clockid_t clock = CLOCK_MONOTONIC;
#endif
        timespec time;
        clock_gettime(clock, &time);
        return std::int64_t(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
    }

    const bool entered_by_main;
    std::atomic<bool> raised{false};
    std::int64_t asked;  // the main thread's own
};

struct Free { void operator()(void* p) const { std::free(p); } };
using Memory = std::unique_ptr<void, Free>;

Memory allocate(std::size_t bytes) {
    void* p = std::aligned_alloc(64, (bytes + 127) / 64 * 64);
    if (!p) throw std::bad_alloc();
    return Memory(p);
}

// Scratch for one call. What a thread used last it keeps for its next call, if it is not much: to ask for it anew would cost a
// short call a tenth of its time. Within a call there may be another, by a signal handler: it finds nothing kept.
class Scratch {
public:
    explicit Scratch(std::size_t bytes) : memory(std::move(kept)), size(std::exchange(kept_size, 0)) {
        if (size < bytes) memory = nullptr, memory = allocate(bytes), size = bytes;
    }
    ~Scratch() {
        if (size <= MOST_KEPT && size > kept_size) kept = std::move(memory), kept_size = size;
    }
    char* at(std::size_t offset) const { return static_cast<char*>(memory.get()) + offset; }

private:
    static constexpr std::size_t MOST_KEPT = 4 << 20;
    static thread_local Memory kept;
    static thread_local std::size_t kept_size;
    Memory memory;
    std::size_t size;
};
thread_local Memory Scratch::kept;
thread_local std::size_t Scratch::kept_size = 0;

using Axes = std::array<std::int64_t, 4>;

Tensor4 tensor(std::uintptr_t data, const Axes& stride, int dtype) {
    Tensor4 x;
    x.data = reinterpret_cast<const void*>(data);
    for (int n = 0; n < 4; n++) x.stride[n] = stride[n];
    x.dtype = static_cast<Dtype>(dtype);
    return x;
}

// Runs body(n, thread) for n = 0 .. count, in any order, on up to `threads` threads, each of which takes some at a time. Bodies
// neither throw nor allocate.
template <class Body> void each(Watch& watch, std::int64_t count, int threads, const Body& body, int some = 1) {
    if (threads <= 1) {
        for (std::int64_t n = 0; n < count && !watch.stops(&watch); n++) body(n, 0);
        return;
    }
#pragma omp parallel for schedule(dynamic, some) num_threads(threads)
    for (std::int64_t n = 0; n < count; n++)
        if (!watch.stops(&watch)) body(n, omp_get_thread_num());
}

int usable(int threads, std::int64_t tasks) {
    if (forked || threads < 1) return 1;
    return threads < tasks ? threads : int(tasks < 1 ? 1 : tasks);
}

// Short tasks are taken several at a time, so that threads meet less often and each finds neighbours in its cache.
int at_a_time(const Forward& f, std::int64_t tasks, int threads) {
    constexpr double enough = 1e6;  // operations: some microseconds
    const double all = 2.0 * double(f.batch * f.heads) * double(f.queries * f.keys) * double(f.head_dim + f.v_head_dim);
    const double some = enough * double(tasks) / (all + 1), most = double(tasks) / (8.0 * threads);
    return std::max(1, int(std::min(some, most)));
}

Spans reach(std::uintptr_t data, const std::array<std::int64_t, 3>& at) {
    return {reinterpret_cast<const std::int32_t*>(data), at[0], at[1], std::int32_t(at[2])};
}

// Kind, and up to two tensors, each as its address and its strides.
using RuleIn = std::tuple<int, std::uintptr_t, Axes, std::uintptr_t, Axes>;

void run(Forward& f, int threads) {
    Signals signals;
    f.watch = &signals;
    const Target* target = chosen();
    const std::int64_t tasks = target->tasks(f), shares = target->shares(f);
    threads = usable(threads, tasks);
    const std::size_t own = (target->scratch(f) + 127) / 64 * 64;
    const Scratch scratch(own * std::size_t(threads));
    Memory partial;
    if (shares > 1) partial = allocate(target->partial(f));
    f.partial = partial.get();
    Memory paired_v;
    if (const std::size_t bytes = target->prepared(f)) {
        paired_v = allocate(bytes);
        f.paired_v = paired_v.get();
        const std::int64_t parts = target->prepare_tasks(f);
        each(signals, parts, usable(threads, parts), [&](std::int64_t n, int) { target->prepare(f, n); });
    }
    each(signals, tasks, threads, [&](std::int64_t n, int thread) {
        target->run(f, n, scratch.at(own * std::size_t(thread)));
    }, at_a_time(f, tasks, threads));
    signals.raise();
    if (shares == 1) return;
    each(signals, tasks / shares, usable(threads, tasks / shares), [&](std::int64_t n, int thread) {
        target->merge(f, n, scratch.at(own * std::size_t(thread)));
    });
    signals.raise();
}

void run(Backward& g, int threads) {
    Signals signals;
    g.forward.watch = &signals;
    const Target* target = chosen();
    const Forward& f = g.forward;
    const std::int64_t heads = f.batch * f.kv_heads, tasks = heads * g.shares;
    const int used = usable(threads, tasks);
    const std::size_t own = (target->gradient_scratch(g) + 127) / 64 * 64, sum = target->sums(f);
    const Scratch scratch(own * std::size_t(used) + sum * std::size_t(tasks));
    char* const sums = scratch.at(own * std::size_t(used));
    each(signals, tasks, used, [&](std::int64_t n, int thread) {
        char* mine = sums + sum * std::size_t(n);
        std::memset(mine, 0, sum);
        target->run_gradient(g, n, scratch.at(own * std::size_t(thread)), mine);
    });
    each(signals, heads, usable(threads, heads), [&](std::int64_t n, int) { target->gather(g, n, sums); });
    signals.raise();
    if (!g.dbias) return;
    const std::int64_t bias_tasks = target->bias_tasks(g);
    const int busy = usable(used, bias_tasks);  // no more than have scratch
    each(signals, bias_tasks, busy, [&](std::int64_t n, int thread) {
        target->run_bias_gradient(g, n, scratch.at(own * std::size_t(thread)));
    });
    signals.raise();
}

}  // namespace

NB_MODULE(_native, m) {
    main_thread = pthread_t(nb::cast<unsigned long>(nb::module_::import_("threading").attr("main_thread")().attr("ident")));
    pthread_atfork(nullptr, nullptr, [] { forked = true, main_thread = pthread_self(); });
    m.def("target", [] { return std::string(chosen()->name); });
    m.def("targets", [] {
        int count = 0;
        const Target* const* all = targets(&count);
        std::vector<std::string> names;
        for (int n = 0; n < count; n++) if (all[n]->runs_here()) names.emplace_back(all[n]->name);
        return names;
    });
    // (B, H, Hkv, Q, K, D, Dv), dtype of q, k, v; each tensor as its address and its strides in elements; 0 = none
    nb::class_<Forward>(m, "Call").def("__init__", [](Forward* f, std::array<std::int64_t, 7> sizes, int dtype,
                        std::uintptr_t q, Axes q_stride, std::uintptr_t k, Axes k_stride, std::uintptr_t v, Axes v_stride,
                        std::uintptr_t bias, Axes bias_stride, std::uintptr_t sinks,
                        std::uintptr_t spans, std::array<std::int64_t, 3> spans_at, const std::vector<RuleIn>& rules,
                        double scale, double softcap, double dropout, std::uint64_t seed, Axes out_stride) {
        new (f) Forward();
        f->batch = sizes[0], f->heads = sizes[1], f->kv_heads = sizes[2], f->queries = sizes[3], f->keys = sizes[4];
        f->head_dim = sizes[5], f->v_head_dim = sizes[6];
        f->q = tensor(q, q_stride, dtype), f->k = tensor(k, k_stride, dtype), f->v = tensor(v, v_stride, dtype);
        f->bias = tensor(bias, bias_stride, dtype);
        f->sinks = reinterpret_cast<const void*>(sinks);
        f->visible.spans = reach(spans, spans_at);
        if (rules.size() > MOST_RULES) throw std::invalid_argument("mask: more than 32 parts");
        for (const auto& [kind, first, stride, second, second_stride] : rules) {
            Rule& rule = f->visible.rules[f->visible.count++];
            rule.kind = static_cast<Rule::Kind>(kind);
            if (rule.kind == Rule::spans) rule.reach = reach(first, {stride[0], stride[1], stride[2]});
            rule.q = tensor(first, stride, 0), rule.k = tensor(second, second_stride, 0);
        }
        for (int n = 0; n < 3; n++) f->out_stride[n] = out_stride[n];
        f->scale = scale, f->softcap = softcap, f->dropout = dropout, f->seed = seed;
    });
    m.def("forward", [](const Forward& call, std::uintptr_t out, std::uintptr_t lse, int threads) {
        Forward f = call;
        f.out = reinterpret_cast<void*>(out);
        f.lse = reinterpret_cast<void*>(lse);
        nb::gil_scoped_release unlocked;
        run(f, threads);
    });
    // A call whose tensors keep their strides: only the addresses change; 0 = none. True where all of out is finite.
    m.def("repeat", [](const Forward& call, std::uintptr_t q, std::uintptr_t k, std::uintptr_t v, std::uintptr_t bias,
                       std::uintptr_t sinks, std::uintptr_t out, std::uintptr_t lse, int threads) {
        Forward f = call;  // several threads may repeat one call
        f.q.data = reinterpret_cast<const void*>(q), f.k.data = reinterpret_cast<const void*>(k);
        f.v.data = reinterpret_cast<const void*>(v), f.out = reinterpret_cast<void*>(out);
        f.bias.data = reinterpret_cast<const void*>(bias), f.sinks = reinterpret_cast<const void*>(sinks);
        f.lse = reinterpret_cast<void*>(lse);
        std::atomic<bool> spoilt{false};
        f.spoilt = &spoilt;
        nb::gil_scoped_release unlocked;
        run(f, threads);
        return !spoilt.load();
    });
    m.def("backward", [](const Forward& f, std::uintptr_t out, Axes out_stride, std::uintptr_t lse, std::uintptr_t grad_out,
                         Axes grad_out_stride, std::uintptr_t grad_lse, std::uintptr_t dq, Axes dq_stride, std::uintptr_t dk,
                         Axes dk_stride, std::uintptr_t dv, Axes dv_stride, std::uintptr_t dbias, Axes dbias_stride,
                         int shares, int threads) {
        Backward g;
        g.forward = f;
        g.forward.lse = reinterpret_cast<void*>(lse);
        const int dtype = int(f.q.dtype);
        g.out = tensor(out, out_stride, dtype), g.grad_out = tensor(grad_out, grad_out_stride, dtype);
        g.grad_lse = reinterpret_cast<const void*>(grad_lse);
        g.dq = reinterpret_cast<void*>(dq), g.dk = reinterpret_cast<void*>(dk), g.dv = reinterpret_cast<void*>(dv);
        for (int n = 0; n < 3; n++) g.dq_stride[n] = dq_stride[n], g.dk_stride[n] = dk_stride[n], g.dv_stride[n] = dv_stride[n];
        g.dbias = reinterpret_cast<void*>(dbias);
        for (int n = 0; n < 4; n++) g.dbias_stride[n] = dbias_stride[n];
        g.shares = shares;
        nb::gil_scoped_release unlocked;
        run(g, threads);
    });
}

// The Python side: pointers, shapes and strides in; threads here.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/tuple.h>

#include <array>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../interface/attention.h"
#include "../runtime/observe.h"
#include "../runtime/threads.h"

namespace nb = nanobind;
using namespace headscope;

namespace {

using Axes = std::array<std::int64_t, 4>;

Tensor4 tensor(std::uintptr_t data, const Axes& stride, int dtype) {
    Tensor4 x;
    x.data = reinterpret_cast<const void*>(data);
    for (int n = 0; n < 4; n++) x.stride[n] = stride[n];
    x.dtype = static_cast<Dtype>(dtype);
    return x;
}

Spans reach(std::uintptr_t data, const std::array<std::int64_t, 3>& at) {
    return {reinterpret_cast<const std::int32_t*>(data), at[0], at[1], std::int32_t(at[2])};
}

void wants_memory(const char* name, const void* data, std::int64_t count) {
    if (!data && count)
        throw std::invalid_argument(std::string(name) + ": its memory is gone: its storage holds nothing");
}
void wants_memory(const Forward& f) {
    wants_memory("q", f.q.data, f.batch * f.heads * f.queries);
    wants_memory("k", f.k.data, f.batch * f.kv_heads * f.keys);
    wants_memory("v", f.v.data, f.batch * f.kv_heads * f.keys * f.v_head_dim);
}

// Kind, and up to two tensors, each as its address and its strides.
using RuleIn = std::tuple<int, std::uintptr_t, Axes, std::uintptr_t, Axes>;

void run(Forward& f, int threads) {
    Signals signals;
    f.watch = &signals;
    const Target* target = chosen();
    const std::int64_t tasks = target->tasks(f), shares = target->shares(f);
    threads = usable(threads, tasks);
    const std::size_t own = room_of_own(target->scratch(f));
    const Scratch<> scratch(own * std::size_t(threads));
    Memory partial;
    if (shares > 1) partial = allocate(target->partial(f));
    f.partial = partial.get();
    Preparation preparation(*target, f, threads);
    expect_pages(f.out, bytes_of(f.batch * f.heads * f.queries * f.v_head_dim, f.q.dtype));
    Step attending(tasks, threads, at_a_time(f, tasks, threads)), merging(shares > 1 ? tasks / shares : 0, threads);
    parallel_region(threads, [&](int thread) {
        char* const own_scratch = scratch.at(own * std::size_t(thread));
        preparation.run(signals, thread);
        attending.run(signals, thread, [&](std::int64_t n, int) { target->run(f, n, own_scratch); });
        if (shares == 1) return;
        attending.wait(signals);
        merging.run(signals, thread, [&](std::int64_t n, int) { target->merge(f, n, own_scratch); });
    });
    signals.raise();
}

void run(Backward& g, int threads) {
    Signals signals;
    g.forward.watch = &signals;
    const Target* target = chosen();
    const Forward& f = g.forward;
    const std::int64_t heads = f.batch * f.kv_heads, groups = target->groups(f);
    const int used = usable(threads, heads * groups);
    const std::size_t own = room_of_own(target->gradient_scratch(g)), sum = room_of_own(target->sums(f));
    expect_pages(g.dq, bytes_of(f.batch * f.heads * f.queries * f.head_dim, f.q.dtype));
    expect_pages(g.dk, bytes_of(heads * f.keys * f.head_dim, f.q.dtype));
    expect_pages(g.dv, bytes_of(heads * f.keys * f.v_head_dim, f.q.dtype));
    const Scratch<> scratch((own + sum) * std::size_t(used));
    const auto scratch_of = [&](int thread) { return scratch.at((own + sum) * std::size_t(thread)); };
    Chains chains(heads, groups, used);
    Step bias_gradient(g.dbias ? target->bias_tasks(g) : 0, used);  // it reads nothing that the chains write
    parallel_region(used, [&](int thread) {
        chains.run(signals, thread, [&](const Chains::Link& link, int) {
            target->run_gradient(g, link.chain, link.number, scratch_of(thread), scratch_of(link.owner) + own,
                                 link.passed);
        });
        bias_gradient.run(signals, thread,
                          [&](std::int64_t n, int) { target->run_bias_gradient(g, n, scratch_of(thread)); });
    });
    signals.raise();
}

// Turned weights are kept only some at a time, so that memory does not grow with them.
void multiply(const Target* target, const Linear& f, int threads, Signals& signals) {
    constexpr std::size_t TURNED = 3 << 20;
    const std::size_t size = target->panel_size(f);
    const std::int64_t panels = target->panels(f), chunks = (f.rows + LINEAR_ROWS - 1) / LINEAR_ROWS;
    const std::int64_t room = std::clamp(std::int64_t(TURNED / size), std::int64_t(1), panels),
                       parts = (panels + room - 1) / room;
    const std::int64_t most = (panels + parts - 1) / parts;  // the last ones are not left to one thread
    const Scratch<> turned(size * std::size_t(most));
    const auto at = [&](std::int64_t n) { return turned.at(std::size_t(n) * size); };
    threads = usable(threads, most * chunks);
    std::vector<std::unique_ptr<Step>> turning, multiplying;  // of each part
    for (std::int64_t from = 0; from < panels; from += most) {
        const std::int64_t some = std::min(most, panels - from);
        turning.push_back(std::make_unique<Step>(some, threads));
        multiplying.push_back(std::make_unique<Step>(some * chunks, threads));
    }
    parallel_region(threads, [&](int thread) {
        for (std::size_t part = 0; part < turning.size(); part++) {
            const std::int64_t from = std::int64_t(part) * most, some = std::min(most, panels - from);
            const std::int64_t owners =
                usable(threads, some);  // who turns panels multiplies by them: all rows, some at a time, by each
            const auto first_of = [&](std::int64_t owner) { return some * owner / owners; };
            if (part) multiplying[part - 1]->wait(signals);  // its panels lie where these will
            turning[part]->run(signals, thread, [&](std::int64_t n, int) { target->turn(f, from + n, at(n)); });
            turning[part]->wait(signals);
            multiplying[part]->run(signals, thread, [&](std::int64_t n, int) {
                std::int64_t owner = n * owners / (some * chunks);
                while (n < first_of(owner) * chunks) owner--;
                while (n >= first_of(owner + 1) * chunks) owner++;
                const std::int64_t begin = first_of(owner), own = first_of(owner + 1) - begin,
                                   place = n - begin * chunks;
                const std::int64_t panel = begin + place % own, row = place / own * LINEAR_ROWS;
                target->multiply(f, from + panel, at(panel), row, std::min(LINEAR_ROWS, f.rows - row));
            });
        }
    });
    signals.raise();
}

// Of rows of x that lie across: each task lays some of them lengthwise and turns what it multiplies them by, a part of
// the depth at a time, so that nobody waits for anybody.
void multiply_across(const Target* target, const Linear& f, int threads, Signals& signals) {
    constexpr std::int64_t AT_ONCE = 512, TASKS = 2;  // as many of a thread, at least
    Linear part = f;
    part.width = std::min(AT_ONCE, f.width);
    const std::size_t laid = std::size_t(LINEAR_ROWS * part.width) * sizeof(float),
                      own = room_of_own(laid + target->panel_size(part));
    const std::int64_t panels = target->panels(f), chunks = (f.rows + LINEAR_ROWS - 1) / LINEAR_ROWS;
    const std::int64_t groups = std::clamp((TASKS * threads + chunks - 1) / chunks, std::int64_t(1), panels);
    const int used = usable(threads, chunks * groups);
    const Scratch<> scratch(own * std::size_t(used));
    each(signals, chunks * groups, used, [&](std::int64_t n, int thread) {
        const std::int64_t first = n / groups * LINEAR_ROWS, group = n % groups;
        char* const room = scratch.at(own * std::size_t(thread));
        float* const x = reinterpret_cast<float*>(room);
        Linear some = f;
        some.rows = std::min(LINEAR_ROWS, f.rows - first);
        some.y = static_cast<float*>(f.y) + first * f.y_stride[2];
        for (std::int64_t from = 0; from < f.width && !signals.stops(&signals); from += AT_ONCE) {
            some.width = std::min(AT_ONCE, f.width - from);
            some.adds = f.adds || from;
            if (from) some.bias = nullptr;
            some.x = static_cast<const float*>(f.x) + first + from * f.x_stride[1];
            some.w = static_cast<const float*>(f.w) + from * f.w_stride[1];
            some.x_stride[0] = 1;
            some.x_stride[1] = f.x_stride[1];
            target->lengthwise(some, 0, some.rows, x, some.width);
            some.x = x;
            some.x_stride[0] = some.width;
            some.x_stride[1] = 1;
            for (std::int64_t panel = panels * group / groups; panel < panels * (group + 1) / groups; panel++) {
                target->turn(some, panel, room + laid);
                target->multiply(some, panel, room + laid, 0, some.rows);
            }
        }
    });
    signals.raise();
}

void run(const Linear& f, int threads) {
    Signals signals;
    const Target* target = chosen();
    if (!target->multiplies(f)) throw std::invalid_argument("linear: not of this dtype, width or strides");
    expect_pages(f.y, bytes_of(f.rows * f.outs, f.dtype));
    if (f.x_stride[1] == 1)
        multiply(target, f, threads, signals);
    else
        multiply_across(target, f, threads, signals);
}

// An observation of calls that differ in nothing but where their tensors lie. What it finds lies in one piece of memory
// of the caller's, each at an offset; what it only needs on the way lies in scratch, as if that followed. -1: not asked
// for.
enum Place {
    COUNTED,
    VALUES,
    MOST_WEIGHT,
    MOST_KEY,
    RECEIVED,
    ELIGIBLE,
    MAP_SUM,
    MAP_MAX,
    MAP_COUNT,
    MAP_AT,
    EDGE_P,
    EDGE_AT,
    MOMENTS_WHOLE,
    MOMENTS_NUMBERS,
    PLACES
};
using Places = std::array<std::int64_t, PLACES>;

struct Observation {
    Forward call;
    RowStats stats;
    std::int64_t rows;
    std::array<std::int64_t, QUANTITIES> value_at;  // in the list of row quantities; -1: not asked for
    std::array<std::int64_t, MOST_WINDOWS> window_at, streaming_at;
    int edges;
    std::int64_t maxima, max_logits;  // in that list, where edges are looked for in a pass of their own; else -1
    std::int64_t names;               // of row quantities
    const void* borders;              // of their histograms, [names, borders_of_each]
    std::int64_t borders_of_each;
    Places places;
    std::int64_t size, room;  // bytes of what it finds, and of what is needed on the way
};

// One of them, placed.
class Placed {
public:
    Forward call;
    RowStats stats;

    Placed(const Observation& observation, char* outputs, char* scratch)
        : call(observation.call), stats(observation.stats), all(observation), memory(outputs), room(scratch) {
        RowStats& s = stats;
        at(s.counted, COUNTED);
        at(s.most_weight, MOST_WEIGHT);
        at(s.most_key, MOST_KEY);
        at(s.whole.received, RECEIVED);
        at(s.whole.eligible, ELIGIBLE);
        at(s.whole.sum, MAP_SUM);
        at(s.whole.max, MAP_MAX);
        at(s.whole.count, MAP_COUNT);
        at(s.whole.largest, MAP_AT);
        for (int n = 0; n < QUANTITIES; n++) s.value[n] = quantity(all.value_at[std::size_t(n)]);
        for (int n = 0; n < s.windows; n++) {
            s.window[n] = quantity(all.window_at[std::size_t(n)]);
            s.streaming[n] = quantity(all.streaming_at[std::size_t(n)]);
        }
    }
    void* quantity(std::int64_t n) const {
        const std::int64_t size = call.batch * call.heads * all.rows * (call.q.dtype == Dtype::f64 ? 8 : 4);
        return n < 0 ? nullptr : where(VALUES) + n * size;
    }
    EdgeList edge_list() const {
        EdgeList list{all.edges, nullptr, nullptr, quantity(all.maxima), quantity(all.max_logits)};
        at(list.p, EDGE_P);
        at(list.at, EDGE_AT);
        return list;
    }
    // What rows come to: the counts [names, H] and the histograms [names, H, bins] in one place, the numbers [4, names,
    // H] in another.
    Moments moments() const {
        return moments_at(all, reinterpret_cast<std::int64_t*>(where(MOMENTS_WHOLE)),
                          reinterpret_cast<double*>(where(MOMENTS_NUMBERS)));
    }
    static Moments moments_at(const Observation& x, std::int64_t* whole, double* number) {
        const std::int64_t n = x.names * x.call.heads;
        return {x.names, x.call.batch, x.call.heads, x.rows,     x.borders,      x.borders_of_each,
                whole,   whole + n,    number,       number + n, number + 2 * n, number + 3 * n};
    }

private:
    const Observation& all;
    char *const memory, *const room;

    char* where(Place place) const {
        const std::int64_t n = all.places[place];
        return n < 0 ? nullptr : n < all.size ? memory + n : room + (n - all.size);
    }
    template <class T>
    void at(T*& to, Place place) const {
        to = reinterpret_cast<T*>(where(place));
    }
};

}  // namespace

NB_MODULE(_native, m) {
    main_thread =
        pthread_t(nb::cast<unsigned long>(nb::module_::import_("threading").attr("main_thread")().attr("ident")));
    pthread_atfork(nullptr, nullptr, [] {
        forked = true;
        main_thread = pthread_self();
    });
    m.def("target", [] { return std::string(chosen()->name); });
    m.def("targets", [] {
        int count = 0;
        const Target* const* all = targets(&count);
        std::vector<std::string> names;
        for (int n = 0; n < count; n++)
            if (all[n]->runs_here()) names.emplace_back(all[n]->name);
        return names;
    });
    // (B, H, Hkv, Q, K, D, Dv), dtype of q, k, v; each tensor as its address and its strides in elements; 0 = none
    nb::class_<Forward>(m, "Call").def(
        "__init__",
        [](Forward* f, std::array<std::int64_t, 7> sizes, int dtype, std::uintptr_t q, Axes q_stride, std::uintptr_t k,
           Axes k_stride, std::uintptr_t v, Axes v_stride, std::uintptr_t bias, Axes bias_stride, std::uintptr_t sinks,
           std::uintptr_t spans, std::array<std::int64_t, 3> spans_at, const std::vector<RuleIn>& rules, double scale,
           double softcap, double dropout, std::uint64_t seed, Axes out_stride) {
            new (f) Forward();
            f->batch = sizes[0];
            f->heads = sizes[1];
            f->kv_heads = sizes[2];
            f->queries = sizes[3];
            f->keys = sizes[4];
            f->head_dim = sizes[5];
            f->v_head_dim = sizes[6];
            f->q = tensor(q, q_stride, dtype);
            f->k = tensor(k, k_stride, dtype);
            f->v = tensor(v, v_stride, dtype);
            f->bias = tensor(bias, bias_stride, dtype);
            f->sinks = reinterpret_cast<const void*>(sinks);
            f->visible.spans = reach(spans, spans_at);
            if (rules.size() > MOST_RULES) throw std::invalid_argument("mask: more parts than there is room for");
            for (const auto& [kind, first, stride, second, second_stride] : rules) {
                Rule& rule = f->visible.rules[f->visible.count++];
                rule.kind = static_cast<Rule::Kind>(kind);
                if (rule.kind == Rule::spans) rule.reach = reach(first, {stride[0], stride[1], stride[2]});
                rule.q = tensor(first, stride, 0);
                rule.k = tensor(second, second_stride, 0);
            }
            for (int n = 0; n < 3; n++) f->out_stride[n] = out_stride[n];
            f->scale = scale;
            f->softcap = softcap;
            f->dropout = dropout;
            f->seed = seed;
        });
    // True where all of out is finite.
    m.def("forward", [](const Forward& call, std::uintptr_t out, std::uintptr_t lse, int threads) {
        Forward f = call;
        f.out = reinterpret_cast<void*>(out);
        f.lse = reinterpret_cast<void*>(lse);
        wants_memory(f);
        std::atomic<bool> spoilt{false};
        f.spoilt = &spoilt;
        nb::gil_scoped_release unlocked;
        run(f, threads);
        return !spoilt.load();
    });
    // The same of a call whose tensors keep their strides: only the addresses change; 0 = none.
    m.def("repeat", [](const Forward& call, std::uintptr_t q, std::uintptr_t k, std::uintptr_t v, std::uintptr_t bias,
                       std::uintptr_t sinks, std::uintptr_t out, std::uintptr_t lse, int threads) {
        Forward f = call;  // several threads may repeat one call
        f.q.data = reinterpret_cast<const void*>(q);
        f.k.data = reinterpret_cast<const void*>(k);
        f.v.data = reinterpret_cast<const void*>(v);
        f.out = reinterpret_cast<void*>(out);
        f.bias.data = reinterpret_cast<const void*>(bias);
        f.sinks = reinterpret_cast<const void*>(sinks);
        wants_memory(f);
        f.lse = reinterpret_cast<void*>(lse);
        std::atomic<bool> spoilt{false};
        f.spoilt = &spoilt;
        nb::gil_scoped_release unlocked;
        run(f, threads);
        return !spoilt.load();
    });
    // True where all of dq, dk and dv is finite.
    m.def("backward", [](const Forward& f, std::uintptr_t out, Axes out_stride, std::uintptr_t lse,
                         std::uintptr_t grad_out, Axes grad_out_stride, std::uintptr_t grad_lse, std::uintptr_t dq,
                         Axes dq_stride, std::uintptr_t dk, Axes dk_stride, std::uintptr_t dv, Axes dv_stride,
                         std::uintptr_t dbias, Axes dbias_stride, bool wide_dbias, int threads) {
        Backward g;
        g.forward = f;
        g.forward.lse = reinterpret_cast<void*>(lse);
        const int dtype = int(f.q.dtype);
        g.out = tensor(out, out_stride, dtype);
        g.grad_out = tensor(grad_out, grad_out_stride, dtype);
        g.grad_lse = reinterpret_cast<const void*>(grad_lse);
        const std::int64_t rows = f.batch * f.heads * f.queries;
        wants_memory(f);
        wants_memory("lse", g.forward.lse, rows);
        wants_memory("out", g.out.data, rows * f.v_head_dim);
        wants_memory("grad_out", g.grad_out.data, rows * f.v_head_dim);
        g.dq = reinterpret_cast<void*>(dq);
        g.dk = reinterpret_cast<void*>(dk);
        g.dv = reinterpret_cast<void*>(dv);
        for (int n = 0; n < 3; n++) {
            g.dq_stride[n] = dq_stride[n];
            g.dk_stride[n] = dk_stride[n];
            g.dv_stride[n] = dv_stride[n];
        }
        g.dbias = reinterpret_cast<void*>(dbias);
        g.wide_dbias = wide_dbias;
        for (int n = 0; n < 4; n++) g.dbias_stride[n] = dbias_stride[n];
        std::atomic<bool> spoilt{false};
        g.spoilt = &spoilt;
        nb::gil_scoped_release unlocked;
        run(g, threads);
        return !spoilt.load();
    });
    // Whether `linear` takes this dtype and width.
    m.def("multiplies", [](int dtype, std::int64_t width) {
        Linear f{};
        f.width = width;
        f.dtype = static_cast<Dtype>(dtype);
        f.x_stride[1] = f.w_stride[1] = 1;
        return chosen()->multiplies(f);
    });
    // (rows, width, outputs), dtype; x [rows, width] and w [outputs, width], each with its strides in elements, of
    // which one is 1; bias [outputs] or 0; y [batch, heads, rows of a batch entry, width of a head] with those of its
    // first three axes.
    m.def("linear",
          [](std::array<std::int64_t, 3> sizes, int dtype, std::uintptr_t x, std::array<std::int64_t, 2> x_stride,
             std::uintptr_t w, std::array<std::int64_t, 2> w_stride, std::uintptr_t bias, std::uintptr_t y,
             std::int64_t batch_rows, std::int64_t head_width, std::array<std::int64_t, 3> y_stride, int threads) {
              if (sizes[0] < 1 || sizes[2] < 1) return;
              if (sizes[1] < 1) throw std::invalid_argument("linear: rows of no width");
              if (batch_rows < 1 || head_width < 1 || (head_width % 16 && head_width != sizes[2]))
                  throw std::invalid_argument("linear: heads of that width");
              if ((x_stride[0] != 1 && x_stride[1] != 1) || (w_stride[0] != 1 && w_stride[1] != 1))
                  throw std::invalid_argument("linear: strides of which none is 1");
              if (x_stride[1] != 1 && batch_rows < sizes[0])
                  throw std::invalid_argument("linear: rows that lie across, of several batch entries");
              const Linear f{sizes[0],
                             sizes[1],
                             sizes[2],
                             reinterpret_cast<const void*>(x),
                             reinterpret_cast<const void*>(w),
                             reinterpret_cast<const void*>(bias),
                             reinterpret_cast<void*>(y),
                             {x_stride[0], x_stride[1]},
                             {w_stride[0], w_stride[1]},
                             static_cast<Dtype>(dtype),
                             batch_rows,
                             head_width,
                             {y_stride[0], y_stride[1], y_stride[2]},
                             false};
              nb::gil_scoped_release unlocked;
              run(f, threads);
          });
    // Observing; see _observe_native.py. Each argument of several numbers is told there.
    using Address = std::uintptr_t;
    using Windows = std::vector<std::tuple<double, std::int64_t, std::int64_t>>;
    nb::class_<Observation>(m, "Observation")
        .def("__init__",
             [](Observation* x, const Forward& call, std::array<std::int64_t, 2> rows,
                const std::array<std::int64_t, QUANTITIES>& values, const Windows& windows, std::array<Address, 2> line,
                std::array<Address, 2> own, Address ids, std::array<Address, 3> first, std::array<Address, 4> may_count,
                Address other_lse, double rounding, int most, std::int64_t bins, std::array<std::int64_t, 3> edges,
                std::array<Address, 3> borders, const Places& places, std::int64_t size, std::int64_t room) {
                 new (x) Observation{call,
                                     {},
                                     rows[0],
                                     values,
                                     {},
                                     {},
                                     int(edges[0]),
                                     edges[1],
                                     edges[2],
                                     std::int64_t(borders[0]),
                                     reinterpret_cast<const void*>(borders[1]),
                                     std::int64_t(borders[2]),
                                     places,
                                     size,
                                     room};
                 RowStats& s = x->stats;
                 s.all_queries = call.queries;
                 s.bins = bins;
                 s.most = most;
                 x->call.queries = rows[0];
                 x->call.rows = reinterpret_cast<const std::int64_t*>(rows[1]);
                 if (windows.size() > MOST_WINDOWS || first[2] > MOST_FIRST)
                     throw std::invalid_argument("Observation: too many windows or first keys");
                 for (const auto& [reach, window, streaming] : windows) {
                     s.reach[s.windows] = reach;
                     x->window_at[s.windows] = window;
                     x->streaming_at[s.windows++] = streaming;
                 }
                 s.line = reinterpret_cast<const std::int64_t*>(line[0]);
                 s.line_stride = std::int64_t(line[1]);
                 s.own = reinterpret_cast<const std::int64_t*>(own[0]);
                 s.own_stride = std::int64_t(own[1]);
                 s.ids = reinterpret_cast<const std::int32_t*>(ids);
                 s.first = reinterpret_cast<const std::int64_t*>(first[0]);
                 s.first_stride = std::int64_t(first[1]);
                 s.firsts = int(first[2]);
                 s.may_count = reinterpret_cast<const std::uint8_t*>(may_count[0]);
                 for (int n = 0; n < 3; n++) s.may_count_stride[n] = std::int64_t(may_count[n + 1]);
                 s.other_lse = reinterpret_cast<const void*>(other_lse);
                 s.rounding = rounding;
             });
    // Measures, and attends beside if there is a place for out and lse. True where every row that sees keys is finite.
    m.def("look", [](const Observation& observation, Address q, Address k, Address v, Address out, Address lse,
                     Address outputs, int threads) {
        nb::gil_scoped_release unlocked;
        const Scratch<1 << 24> room(std::size_t(observation.room));
        Placed x(observation, reinterpret_cast<char*>(outputs), room.at(0));
        Forward& f = x.call;
        f.q.data = reinterpret_cast<const void*>(q);
        f.k.data = reinterpret_cast<const void*>(k);
        f.v.data = reinterpret_cast<const void*>(v);
        f.out = reinterpret_cast<void*>(out);
        f.lse = reinterpret_cast<void*>(lse);
        wants_memory(f);
        const Forward whole = f;
        std::atomic<bool> spoilt{false};
        if (f.out && chosen()->shares(f) > 1) {  // by itself, so that it is to the bit what it is when nobody looks
            f.spoilt = &spoilt;
            run(f, threads);
            f.out = f.lse = f.partial = f.paired_v = nullptr;
        }
        const EdgeList list = x.edge_list();
        const bool later = observation.maxima >= 0;
        const Moments pooled = observation.borders ? x.moments() : Moments{};
        const EdgeList* const on_the_way = list.k && !later ? &list : nullptr;
        if (!look(f, x.stats, on_the_way, observation.borders ? &pooled : nullptr, x.quantity(0), threads) || spoilt)
            return false;
        if (later) edges(whole, x.stats, list, threads);
        return true;
    });
    // What `look` makes of row quantities, of any numbers [names, B, H, rows], so that it can be tested with such as
    // are rare.
    m.def("moments", [](Address values, bool wide, std::array<std::int64_t, 4> sizes, std::array<Address, 2> borders,
                        Address whole, Address numbers, int threads) {
        Observation x{};
        x.names = sizes[0];
        x.call.batch = sizes[1];
        x.call.heads = sizes[2];
        x.rows = sizes[3];
        x.borders = reinterpret_cast<const void*>(borders[0]);
        x.borders_of_each = std::int64_t(borders[1]);
        auto* const counts = reinterpret_cast<std::int64_t*>(whole);
        nb::gil_scoped_release unlocked;
        moments(Placed::moments_at(x, counts, reinterpret_cast<double*>(numbers)),
                reinterpret_cast<const void*>(values), wide, threads);
    });
}

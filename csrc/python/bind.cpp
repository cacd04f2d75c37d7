// The functions of the module `_native`.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "../runtime/launch.h"
#include "arguments.h"
#include "observation.h"

namespace nb = nanobind;
using namespace headscope;

namespace {

void bind_targets(nb::module_& m) {
    main_thread =
        pthread_t(nb::cast<unsigned long>(nb::module_::import_("threading").attr("main_thread")().attr("ident")));
    pthread_atfork(nullptr, nullptr, [] {
        forked = true;
        main_thread = pthread_self();
    });
    m.def("target", [] { return std::string(selected_target()->name); });
    m.def("targets", [] {
        int count = 0;
        const Target* const* all = all_targets(&count);
        std::vector<std::string> names;
        for (int n = 0; n < count; n++)
            if (all[n]->runs_here()) names.emplace_back(all[n]->name);
        return names;
    });
}

// Calls of up to so many operations, some 20 us, keep the GIL: to release it and take it again costs 2 % of a short
// call.
constexpr double MAX_LOCKED_OPERATIONS = 4e6;

void bind_attention(nb::module_& m) {
    // (B, H, Hkv, Q, K, D, Dv), dtype of q, k, v; each tensor as its address and its strides in elements; 0 = none
    nb::class_<Forward>(m, "Forward")
        .def("__init__",
             [](Forward* f, std::array<std::int64_t, 7> sizes, int dtype, std::uintptr_t q, Axes q_stride,
                std::uintptr_t k, Axes k_stride, std::uintptr_t v, Axes v_stride, std::uintptr_t bias, Axes bias_stride,
                std::uintptr_t sinks, std::uintptr_t spans, std::array<std::int64_t, 3> spans_at,
                const std::vector<RuleArguments>& rules, double scale, double softcap, double dropout,
                std::uint64_t seed, std::array<std::int64_t, 5> dropout_place, Axes out_stride, bool uniform,
                std::uintptr_t needed_queries, std::int64_t needed_ranges) {
                 new (f) Forward();
                 f->batch = sizes[0];
                 f->heads = sizes[1];
                 f->kv_heads = sizes[2];
                 f->queries = sizes[3];
                 f->keys = sizes[4];
                 f->head_dim = sizes[5];
                 f->v_head_dim = sizes[6];
                 f->q = make_tensor(q, q_stride, dtype);
                 f->k = make_tensor(k, k_stride, dtype);
                 f->v = make_tensor(v, v_stride, dtype);
                 f->bias = make_tensor(bias, bias_stride, dtype);  // its numbers are of the accumulation type
                 f->sinks = reinterpret_cast<const void*>(sinks);
                 f->mask.spans = make_spans(spans, spans_at);
                 if (rules.size() > MAX_RULES) throw std::invalid_argument("mask: more parts than there is room for");
                 for (const auto& [kind, first, stride, second, second_stride] : rules) {
                     Rule& rule = f->mask.rules[f->mask.rule_count++];
                     rule.kind = static_cast<Rule::Kind>(kind);
                     if (rule.kind == Rule::spans)
                         rule.key_spans = make_spans(first, {stride[0], stride[1], stride[2]});
                     rule.q = make_tensor(first, stride, 0);
                     rule.k = make_tensor(second, second_stride, 0);
                 }
                 for (int n = 0; n < 3; n++) f->out_stride[n] = out_stride[n];
                 f->scale = scale;
                 f->softcap = softcap;
                 f->dropout = dropout;
                 f->seed = seed;
                 f->dropout_place = {dropout_place[0], dropout_place[1], dropout_place[2], dropout_place[3],
                                     dropout_place[4]};
                 f->uniform = uniform;
                 f->needed_queries = reinterpret_cast<const std::int64_t*>(needed_queries);
                 f->needed_ranges = needed_ranges;
             });
    // Returns whether all of out is finite.
    m.def("forward", [](const Forward& call, std::uintptr_t out, std::uintptr_t lse, int threads) {
        Forward f = call;
        f.out = reinterpret_cast<void*>(out);
        f.lse = reinterpret_cast<void*>(lse);
        check_memory(f);
        std::atomic<bool> nonfinite{false};
        f.nonfinite = &nonfinite;
        nb::gil_scoped_release unlocked;
        launch(f, threads);
        return !nonfinite.load();
    });
    // The same for other tensors of the same strides, as addresses; 0 = none.
    m.def("repeat", [](const Forward& call, std::uintptr_t q, std::uintptr_t k, std::uintptr_t v, std::uintptr_t bias,
                       std::uintptr_t sinks, std::uintptr_t out, std::uintptr_t lse, int threads) {
        Forward f = call;  // several threads may repeat one call
        f.q.data = reinterpret_cast<const void*>(q);
        f.k.data = reinterpret_cast<const void*>(k);
        f.v.data = reinterpret_cast<const void*>(v);
        f.out = reinterpret_cast<void*>(out);
        f.bias.data = reinterpret_cast<const void*>(bias);
        f.sinks = reinterpret_cast<const void*>(sinks);
        check_memory(f);
        f.lse = reinterpret_cast<void*>(lse);
        std::atomic<bool> nonfinite{false};
        f.nonfinite = &nonfinite;
        std::optional<nb::gil_scoped_release> unlocked;
        if (operations(f) > MAX_LOCKED_OPERATIONS) unlocked.emplace();
        launch(f, threads);
        return !nonfinite.load();
    });
    // Returns whether all of dq, dk and dv is finite.
    m.def("backward", [](const Forward& f, std::uintptr_t out, Axes out_stride, std::uintptr_t lse,
                         std::uintptr_t grad_out, Axes grad_out_stride, std::uintptr_t grad_lse, std::uintptr_t dq,
                         Axes dq_stride, std::uintptr_t dk, Axes dk_stride, std::uintptr_t dv, Axes dv_stride,
                         std::uintptr_t dbias, Axes dbias_stride, bool double_dbias, std::uintptr_t dsinks,
                         std::uintptr_t grad_entropy, std::uintptr_t entropy_delta, int threads) {
        Backward g;
        g.forward = f;
        g.forward.lse = reinterpret_cast<void*>(lse);
        const int dtype = int(f.q.dtype);
        g.out = make_tensor(out, out_stride, dtype);
        g.grad_out = make_tensor(grad_out, grad_out_stride, dtype);
        g.grad_lse = reinterpret_cast<const void*>(grad_lse);
        g.grad_entropy = reinterpret_cast<const void*>(grad_entropy);
        g.entropy_delta = reinterpret_cast<const void*>(entropy_delta);
        const std::int64_t rows = f.batch * f.heads * f.queries;
        check_memory(f);
        check_memory("lse", g.forward.lse, rows);
        check_memory("out", g.out.data, rows * f.v_head_dim);
        check_memory("grad_out", g.grad_out.data, rows * f.v_head_dim);
        g.dq = reinterpret_cast<void*>(dq);
        g.dk = reinterpret_cast<void*>(dk);
        g.dv = reinterpret_cast<void*>(dv);
        for (int n = 0; n < 3; n++) {
            g.dq_stride[n] = dq_stride[n];
            g.dk_stride[n] = dk_stride[n];
            g.dv_stride[n] = dv_stride[n];
        }
        g.dbias = reinterpret_cast<void*>(dbias);
        g.double_dbias = double_dbias;
        g.dsinks = reinterpret_cast<void*>(dsinks);
        for (int n = 0; n < 4; n++) g.dbias_stride[n] = dbias_stride[n];
        std::atomic<bool> nonfinite{false};
        g.nonfinite = &nonfinite;
        nb::gil_scoped_release unlocked;
        launch(g, threads);
        return !nonfinite.load();
    });
}

void bind_linear(nb::module_& m) {
    // Whether `linear` supports this dtype and width.
    m.def("supports_linear", [](int dtype, std::int64_t width) {
        Linear f{};
        f.in_features = width;
        f.dtype = static_cast<Dtype>(dtype);
        f.x_stride[1] = f.w_stride[1] = 1;
        return selected_target()->supports_linear(f);
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
              launch(f, threads);
          });
}

void bind_observation(nb::module_& m) {
    // src/headscope/_observe/native_observer.py documents the arguments that hold several numbers.
    using Address = std::uintptr_t;
    using Windows = std::vector<std::tuple<double, std::int64_t, std::int64_t>>;
    nb::class_<Observation>(m, "Observation")
        .def("__init__",
             [](Observation* x, const Forward& call, std::array<std::int64_t, 2> rows,
                const std::array<std::int64_t, QUANTITIES>& values, const Windows& windows,
                std::array<Address, 2> position, std::array<Address, 2> own_key, Address ids,
                std::array<Address, 3> first, std::array<Address, 4> may_count, Address external_lse, double rounding,
                int top_k, std::int64_t bins, std::array<std::int64_t, 3> edges, std::array<Address, 3> borders,
                const Places& places, std::int64_t size, std::int64_t scratch_size, std::array<Address, 6> segments,
                std::array<std::int64_t, 3> whole) {
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
                                     scratch_size,
                                     {}};
                 Statistics& s = x->stats;
                 s.first_query = whole[0];
                 s.total_queries = whole[1];
                 s.total_keys = whole[2];
                 s.bins = bins;
                 s.top_k = top_k;
                 x->call.queries = rows[0];
                 x->call.row_queries = reinterpret_cast<const std::int64_t*>(rows[1]);
                 if (windows.size() > MAX_WINDOWS || first[2] > MAX_FIRST_KEYS)
                     throw std::invalid_argument("Observation: too many windows or first keys");
                 for (const auto& [radius, window, streaming] : windows) {
                     s.window_radius[s.window_count] = radius;
                     x->window_at[s.window_count] = window;
                     x->streaming_at[s.window_count++] = streaming;
                 }
                 s.position = reinterpret_cast<const std::int64_t*>(position[0]);
                 s.position_stride = std::int64_t(position[1]);
                 s.own_key = reinterpret_cast<const std::int64_t*>(own_key[0]);
                 s.own_key_stride = std::int64_t(own_key[1]);
                 s.token_ids = reinterpret_cast<const std::int32_t*>(ids);
                 s.first_keys = reinterpret_cast<const std::int64_t*>(first[0]);
                 s.first_stride = std::int64_t(first[1]);
                 s.first_count = int(first[2]);
                 s.may_count = reinterpret_cast<const std::uint8_t*>(may_count[0]);
                 for (int n = 0; n < 3; n++) s.may_count_stride[n] = std::int64_t(may_count[n + 1]);
                 s.external_lse = reinterpret_cast<const void*>(external_lse);
                 s.lse_tolerance = rounding;
                 s.segments = std::int64_t(segments[0]);
                 s.key_segments = reinterpret_cast<const std::int8_t*>(segments[1]);
                 s.segment_ends = reinterpret_cast<const std::int32_t*>(segments[2]);
                 s.key_segment_stride = std::int64_t(segments[3]);
                 s.row_segments = reinterpret_cast<const std::int8_t*>(segments[4]);
                 s.row_segment_stride = std::int64_t(segments[5]);
             })
        .def("sum_exchanges",
             [](Observation& x, const std::array<std::int64_t, 9>& exchange) {
                 x.exchange.factor = reinterpret_cast<const std::int64_t*>(exchange[0]);
                 x.exchange.mean = reinterpret_cast<const double*>(exchange[1]);
                 x.exchange.spread = reinterpret_cast<const double*>(exchange[2]);
                 x.exchange.factor_stride = exchange[3];
                 x.exchange.batch_stride = exchange[4];
                 x.exchange.head_stride = exchange[5];
                 x.exchange.mass = exchange[6];
                 x.exchange.chance = exchange[7];
                 x.exchange.effective_keys = exchange[8];
             })
        .def("sum_between_segments", [](Observation& x, const std::array<std::int64_t, 7>& between) {
            SegmentExchange& to = x.exchange.between;
            to.segments = between[0];
            to.keys = reinterpret_cast<const std::int32_t*>(between[1]);
            to.batch_stride = between[2];
            to.head_stride = between[3];
            to.row_stride = between[4];
            to.rows = reinterpret_cast<const std::int8_t*>(between[5]);
            to.rows_stride = between[6];
        });
    // Computes statistics, and out and lse unless they are 0. Returns whether every row with a visible key is finite.
    m.def("observe_into", [](const Observation& observation, Address q, Address k, Address v, Address out, Address lse,
                             Address outputs, int threads) {
        nb::gil_scoped_release unlocked;
        const Scratch<1 << 24> scratch(std::size_t(observation.scratch_size));
        PlacedObservation x(observation, reinterpret_cast<char*>(outputs), scratch.at(0));
        Forward& f = x.call;
        f.q.data = reinterpret_cast<const void*>(q);
        f.k.data = reinterpret_cast<const void*>(k);
        f.v.data = reinterpret_cast<const void*>(v);
        f.out = reinterpret_cast<void*>(out);
        f.lse = reinterpret_cast<void*>(lse);
        check_memory(f);
        const Forward with_values = f;
        std::atomic<bool> nonfinite{false};
        // With key splits attention runs separately, so that out is the same to the bit as without statistics.
        if (f.out && selected_target()->key_splits(f) > 1) {
            f.nonfinite = &nonfinite;
            launch(f, threads);
            f.out = f.lse = f.partial_results = f.paired_v = nullptr;
        }
        const EdgeList list = x.edge_list();
        const bool separate_edges = observation.maxima >= 0;
        const Moments moments = observation.borders ? x.moments() : Moments{};
        const EdgeList* const map_edges = list.k && !separate_edges ? &list : nullptr;
        if (!run_observation_tasks(f, x.stats, map_edges, observation.borders ? &moments : nullptr, x.quantity(0),
                                   threads) ||
            nonfinite)
            return false;
        if (separate_edges) find_edges(with_values, x.stats, list, threads);
        return true;
    });
    // Writes the results of several calls together to the memory of those of one with as many keys as any of them.
    m.def("pool_into", [](const Observation& together, Address into,
                          const std::vector<std::tuple<const Observation*, Address>>& several) {
        nb::gil_scoped_release unlocked;
        std::vector<Results> results;
        for (const auto& [observation, memory] : several)
            results.push_back(results_in(*observation, reinterpret_cast<char*>(memory)));
        pool_results(results_in(together, reinterpret_cast<char*>(into)), results);
    });
    // The moments that `observe_into` computes of row quantities, of any values [names, B, H, rows]; for tests.
    m.def("moments", [](Address values, bool wide, std::array<std::int64_t, 4> sizes, std::array<Address, 2> borders,
                        Address counts, Address numbers, int threads) {
        Observation x{};
        x.names = sizes[0];
        x.call.batch = sizes[1];
        x.call.heads = sizes[2];
        x.rows = sizes[3];
        x.borders = reinterpret_cast<const void*>(borders[0]);
        x.borders_per_name = std::int64_t(borders[1]);
        auto* const whole = reinterpret_cast<std::int64_t*>(counts);
        nb::gil_scoped_release unlocked;
        compute_moments(moments_at(x, whole, reinterpret_cast<double*>(numbers)), reinterpret_cast<const void*>(values),
                        wide, threads);
    });
}

}  // namespace

NB_MODULE(_native, m) {
    nb::set_leak_warnings(false);  // at exit, Python does not destroy what a patched class of torch, say, still holds
    bind_targets(m);
    bind_attention(m);
    bind_linear(m);
    bind_observation(m);
}

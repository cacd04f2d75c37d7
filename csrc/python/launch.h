// A call on threads: its scratch memory, its tasks, and who runs them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <vector>

#include "../interface/attention.h"
#include "../runtime/threads.h"

namespace headscope {

inline void run(Forward& f, int threads) {
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

inline void run(Backward& g, int threads) {
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
inline void multiply(const Target* target, const Linear& f, int threads, Signals& signals) {
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
inline void multiply_across(const Target* target, const Linear& f, int threads, Signals& signals) {
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

inline void run(const Linear& f, int threads) {
    Signals signals;
    const Target* target = chosen();
    if (!target->multiplies(f)) throw std::invalid_argument("linear: not of this dtype, width or strides");
    expect_pages(f.y, bytes_of(f.rows * f.outs, f.dtype));
    if (f.x_stride[1] == 1)
        multiply(target, f, threads, signals);
    else
        multiply_across(target, f, threads, signals);
}

}  // namespace headscope

// Runs the tasks of a call on threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <vector>

#include "../interface/attention.h"
#include "paired_values.h"
#include "threads.h"

namespace headscope {

inline void launch(Forward& f, int threads) {
    Signals signals;
    f.cancellation = &signals;
    const Target* target = selected_target();
    const std::int64_t tasks = target->forward_tasks(f), splits = target->key_splits(f);
    threads = usable_threads(threads, tasks);
    const std::size_t scratch_bytes = padded_scratch_bytes(target->forward_scratch(f));
    const Scratch<> scratch(scratch_bytes * std::size_t(threads));
    Memory partial;
    if (splits > 1) partial = allocate(target->partial_bytes(f));
    f.partial_results = partial.get();
    PairedValues paired_values(*target, f, threads);
    advise_huge_pages(f.out, bytes_of(f.batch * f.heads * f.queries * f.v_head_dim, f.q.dtype));
    ParallelStep attending(tasks, threads, tasks_at_once(f, tasks, threads)),
        merging(splits > 1 ? tasks / splits : 0, threads);
    parallel_region(threads, [&](int thread) {
        char* const thread_scratch = scratch.at(scratch_bytes * std::size_t(thread));
        paired_values.run(signals, thread);
        attending.run(signals, thread, [&](std::int64_t n, int) { target->run_forward(f, n, thread_scratch); });
        if (splits == 1) return;
        attending.wait(signals);
        merging.run(signals, thread, [&](std::int64_t n, int) { target->merge_splits(f, n, thread_scratch); });
    });
    signals.raise();
}

inline void launch(Backward& g, int threads) {
    Signals signals;
    g.forward.cancellation = &signals;
    const Target* target = selected_target();
    const Forward& f = g.forward;
    const std::int64_t heads = f.batch * f.kv_heads, groups = target->gradient_groups(f);
    const int thread_count = usable_threads(threads, heads * groups);
    const std::size_t scratch_bytes = padded_scratch_bytes(target->gradient_scratch(g)),
                      sum = padded_scratch_bytes(target->gradient_sums_bytes(f));
    advise_huge_pages(g.dq, bytes_of(f.batch * f.heads * f.queries * f.head_dim, f.q.dtype));
    advise_huge_pages(g.dk, bytes_of(heads * f.keys * f.head_dim, f.q.dtype));
    advise_huge_pages(g.dv, bytes_of(heads * f.keys * f.v_head_dim, f.q.dtype));
    const Scratch<> scratch((scratch_bytes + sum) * std::size_t(thread_count));
    const auto scratch_of = [&](int thread) { return scratch.at((scratch_bytes + sum) * std::size_t(thread)); };
    TaskChains chains(heads, groups, thread_count);
    ParallelStep bias_gradient(g.dbias ? target->bias_tasks(g) : 0,
                               thread_count);  // independent of the chains
    parallel_region(thread_count, [&](int thread) {
        chains.run(signals, thread, [&](const TaskChains::Link& link, int) {
            target->run_gradient(g, link.chain, link.number, scratch_of(thread), scratch_of(link.owner) + scratch_bytes,
                                 link.passed);
        });
        bias_gradient.run(signals, thread,
                          [&](std::int64_t n, int) { target->run_bias_gradient(g, n, scratch_of(thread)); });
    });
    signals.raise();
}

// y = x wᵀ for contiguous rows of x. Panels are packed and multiplied a chunk at a time, so that packed weights take
// about PACKED_BYTES, whatever the number of output features. A thread first multiplies by the panels that it packed
// itself.
inline void multiply_contiguous(const Target* target, const Linear& f, int threads, Signals& signals) {
    constexpr std::size_t PACKED_BYTES = 3 << 20;
    const std::size_t panel_bytes = target->panel_bytes(f);
    const std::int64_t panels = target->linear_panels(f);
    const std::int64_t row_blocks = (f.rows + LINEAR_ROW_BLOCK - 1) / LINEAR_ROW_BLOCK;
    const std::int64_t max_panels = std::clamp(std::int64_t(PACKED_BYTES / panel_bytes), std::int64_t(1), panels);
    const std::int64_t chunks = (panels + max_panels - 1) / max_panels;
    const std::int64_t chunk_panels = (panels + chunks - 1) / chunks;  // equal chunks: none is left to one thread
    const Scratch<> packed(panel_bytes * std::size_t(chunk_panels));
    const auto packed_panel = [&](std::int64_t n) { return packed.at(std::size_t(n) * panel_bytes); };
    threads = usable_threads(threads, chunk_panels * row_blocks);
    std::vector<std::unique_ptr<ParallelStep>> packing, multiplying;  // one of each for a chunk
    for (std::int64_t from = 0; from < panels; from += chunk_panels) {
        const std::int64_t count = std::min(chunk_panels, panels - from);
        packing.push_back(std::make_unique<ParallelStep>(count, threads));
        multiplying.push_back(std::make_unique<ParallelStep>(count * row_blocks, threads));
    }
    parallel_region(threads, [&](int thread) {
        for (std::size_t chunk = 0; chunk < packing.size(); chunk++) {
            const std::int64_t from = std::int64_t(chunk) * chunk_panels, count = std::min(chunk_panels, panels - from);
            const std::int64_t owners = usable_threads(threads, count);
            const auto first_of = [&](std::int64_t owner) { return count * owner / owners; };
            if (chunk) multiplying[chunk - 1]->wait(signals);  // it reads the buffer that this chunk overwrites
            packing[chunk]->run(signals, thread,
                                [&](std::int64_t n, int) { target->pack_panel(f, from + n, packed_panel(n)); });
            packing[chunk]->wait(signals);
            multiplying[chunk]->run(signals, thread, [&](std::int64_t n, int) {
                std::int64_t owner = n * owners / (count * row_blocks);
                while (n < first_of(owner) * row_blocks) owner--;
                while (n >= first_of(owner + 1) * row_blocks) owner++;
                const std::int64_t begin = first_of(owner), owned = first_of(owner + 1) - begin;
                const std::int64_t index = n - begin * row_blocks;
                const std::int64_t panel = begin + index % owned, row = index / owned * LINEAR_ROW_BLOCK;
                target->multiply_panel(f, from + panel, packed_panel(panel), row,
                                       std::min(LINEAR_ROW_BLOCK, f.rows - row));
            });
        }
    });
    signals.raise();
}

// The same for an x that is contiguous down its columns. Each task transposes its rows and packs its own panels,
// MAX_DEPTH input features at a time, so that no thread waits for another.
inline void multiply_transposed(const Target* target, const Linear& f, int threads, Signals& signals) {
    constexpr std::int64_t MAX_DEPTH = 512, TASKS_PER_THREAD = 2;
    Linear slice = f;
    slice.in_features = std::min(MAX_DEPTH, f.in_features);
    const std::size_t input_bytes = std::size_t(LINEAR_ROW_BLOCK * slice.in_features) * sizeof(float);
    const std::size_t scratch_bytes = padded_scratch_bytes(input_bytes + target->panel_bytes(slice));
    const std::int64_t panels = target->linear_panels(f);
    const std::int64_t row_blocks = (f.rows + LINEAR_ROW_BLOCK - 1) / LINEAR_ROW_BLOCK;
    const std::int64_t groups =
        std::clamp((TASKS_PER_THREAD * threads + row_blocks - 1) / row_blocks, std::int64_t(1), panels);
    const int thread_count = usable_threads(threads, row_blocks * groups);
    const Scratch<> scratch(scratch_bytes * std::size_t(thread_count));
    parallel_for(signals, row_blocks * groups, thread_count, [&](std::int64_t n, int thread) {
        const std::int64_t first = n / groups * LINEAR_ROW_BLOCK, group = n % groups;
        char* const thread_scratch = scratch.at(scratch_bytes * std::size_t(thread));
        float* const x = reinterpret_cast<float*>(thread_scratch);
        char* const packed = thread_scratch + input_bytes;
        Linear part = f;
        part.rows = std::min(LINEAR_ROW_BLOCK, f.rows - first);
        part.y = static_cast<float*>(f.y) + first * f.y_stride[2];
        for (std::int64_t from = 0; from < f.in_features && !signals.requested(&signals); from += MAX_DEPTH) {
            part.in_features = std::min(MAX_DEPTH, f.in_features - from);
            part.accumulates = f.accumulates || from;
            if (from) part.bias = nullptr;
            part.x = static_cast<const float*>(f.x) + first + from * f.x_stride[1];
            part.w = static_cast<const float*>(f.w) + from * f.w_stride[1];
            part.x_stride[0] = 1;
            part.x_stride[1] = f.x_stride[1];
            target->transpose_input(part, 0, part.rows, x, part.in_features);
            part.x = x;
            part.x_stride[0] = part.in_features;
            part.x_stride[1] = 1;
            for (std::int64_t panel = panels * group / groups; panel < panels * (group + 1) / groups; panel++) {
                target->pack_panel(part, panel, packed);
                target->multiply_panel(part, panel, packed, 0, part.rows);
            }
        }
    });
    signals.raise();
}

inline void launch(const Linear& f, int threads) {
    Signals signals;
    const Target* target = selected_target();
    if (!target->supports_linear(f))
        throw std::invalid_argument("linear: expected a dtype, width and strides that the target supports");
    advise_huge_pages(f.y, bytes_of(f.rows * f.out_features, f.dtype));
    if (f.x_stride[1] == 1)
        multiply_contiguous(target, f, threads, signals);
    else
        multiply_transposed(target, f, threads, signals);
}

}  // namespace headscope

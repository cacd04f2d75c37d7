// Values laid out in pairs of rows, for targets that multiply pairs of bf16.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../interface/attention.h"
#include "threads.h"

namespace headscope {

// Memory and tasks of paired_v, which a target may need before the tasks of a call. f.paired_v points into it.
class PairedValues {
public:
    PairedValues(const Target& target, Forward& f, int threads)
        : target(target), f(f), memory(allocate_for(target, f)), step(memory ? target.pairing_tasks(f) : 0, threads) {}

    // To be called by all threads of a region before the tasks of the call.
    void run(Cancellation& cancellation, int thread) {
        if (!memory) return;
        step.run(cancellation, thread, [&](std::int64_t n, int) { target.pair_values(f, n); });
        step.wait(cancellation);
    }

private:
    const Target& target;
    const Forward& f;
    const Memory memory;
    ParallelStep step;

    static Memory allocate_for(const Target& target, Forward& f) {
        if (!target.paired_v_bytes(f)) return nullptr;
        find_visible_range(f);
        const std::size_t bytes = target.paired_v_bytes(f);
        if (!bytes) return nullptr;
        Memory memory = allocate(bytes);
        f.paired_v = memory.get();
        return memory;
    }
};

}  // namespace headscope

// Threads, memory and Ctrl-C, for what calls the targets.
#pragma once

#include <nanobind/nanobind.h>

#include <omp.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <utility>

#include "../interface/attention.h"

namespace headscope {

namespace nb = nanobind;

inline std::atomic<bool> forked{false};  // libgomp's pool does not survive a fork: a child runs single-threaded

// Ctrl-C. Python runs its signal handlers on its main thread, between bytecodes: a long call would hold them up. Where
// the main thread is the one that entered, it asks for them every 50 ms; if a handler raises, all threads leave what is
// left of the call.
inline std::atomic<pthread_t> main_thread{};

class Signals : public Cancellation {
public:
    Signals()
        : Cancellation{poll},
          on_main_thread(pthread_equal(pthread_self(), main_thread)),
          last_poll(on_main_thread ? now() : 0) {}

    // To be called where all threads have left, without the GIL.
    void raise() const {
        if (!raised) return;
        nb::gil_scoped_acquire locked;
        throw nb::python_error();
    }

private:
    static constexpr std::int64_t POLL_INTERVAL = 50'000'000;  // ns

    static bool poll(Cancellation* cancellation) {
        Signals& self = *static_cast<Signals*>(cancellation);
        if (!self.on_main_thread || self.raised.load(std::memory_order_relaxed)) return self.raised;
        if (!pthread_equal(pthread_self(), main_thread) || now() - self.last_poll < POLL_INTERVAL) return false;
        {
            nb::gil_scoped_acquire locked;
            if (PyErr_CheckSignals()) self.raised = true;  // the error stays with the thread until `raise`
        }
        self.last_poll = now();
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

    const bool on_main_thread;
    std::atomic<bool> raised{false};
    std::int64_t last_poll;  // the main thread's own
};

struct FreeDeleter {
    void operator()(void* p) const { std::free(p); }
};
using Memory = std::unique_ptr<void, FreeDeleter>;

// Asks for large pages where much will be written. New memory is mapped as it is first touched, a page at a time: by 4
// KiB that takes a twentieth of a pass. Where the system knows no others, or lets nobody poll, nothing changes.
inline void advise_huge_pages(void* data, std::size_t bytes) {
#if defined(MADV_HUGEPAGE)
    constexpr std::size_t MIN_BYTES = 4 << 20;
    constexpr std::uintptr_t page = 4096;
    if (bytes < MIN_BYTES) return;
    const std::uintptr_t begin = (reinterpret_cast<std::uintptr_t>(data) + page - 1) / page * page;
    const std::uintptr_t end = (reinterpret_cast<std::uintptr_t>(data) + bytes) / page * page;
    const int error = errno;
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
    errno = error;
#else
    (void)data;
    (void)bytes;
#endif
}
inline Memory allocate(std::size_t bytes) {
    void* p = std::aligned_alloc(64, (bytes + 127) / 64 * 64);
    if (!p) throw std::bad_alloc();
    advise_huge_pages(p, bytes);
    return Memory(p);
}

// Of as many numbers.
inline std::size_t bytes_of(std::int64_t count, Dtype dtype) {
    return std::size_t(count) * (dtype == Dtype::f64 ? 8 : dtype == Dtype::f32 ? 4 : 2);
}

// How much room a thread gets of so many bytes: what a CPU fetches ahead for one must not be what another writes.
inline std::size_t padded_scratch_bytes(std::size_t bytes) {
    constexpr std::size_t page = 4096;
    return (bytes + 2 * page - 1) / page * page;
}

// Scratch for one call. What a thread used last it keeps for its next call, if it is not much: to ask for it anew would
// cost a short call a tenth of its time. Within a call there may be another, by a signal handler or for another
// purpose: it finds nothing kept, or what is kept with another limit.
template <std::size_t MAX_CACHED = 4 << 20>
class Scratch {
public:
    explicit Scratch(std::size_t bytes) : memory(std::move(cached)), size(std::exchange(cached_size, 0)) {
        if (size < bytes) {
            memory = nullptr;
            memory = allocate(bytes);
            size = bytes;
        }
    }
    ~Scratch() {
        if (size <= MAX_CACHED && size > cached_size) {
            cached = std::move(memory);
            cached_size = size;
        }
    }
    char* at(std::size_t offset) const { return static_cast<char*>(memory.get()) + offset; }

private:
    inline static thread_local Memory cached;
    inline static thread_local std::size_t cached_size = 0;
    Memory memory;
    std::size_t size;
};

// Deals out 0 .. count to threads, to each from a part of its own, and where nothing of it is left from that of which
// most is left. So whoever made something in one pass finds it in its cache in the next; what two threads both read or
// write, which some CPUs are slow to carry from core to core, is little.
class TaskDistributor {
public:
    TaskDistributor(std::int64_t count, int threads)
        : number(threads),
          heap_parts(threads > INLINE_PARTS ? new Part[std::size_t(threads)] : nullptr),
          parts(heap_parts ? heap_parts.get() : inline_parts) {
        for (int t = 0; t < threads; t++) {
            parts[t].next = count * t / threads;
            parts[t].end = count * (t + 1) / threads;
        }
    }
    // Up to `some` for this thread, from `first` to `end`; false where none is left.
    bool take(int thread, int most, std::int64_t& first, std::int64_t& end) {
        const auto take_from = [&](Part& part) {
            first = part.next.fetch_add(most, std::memory_order_relaxed);
            end = std::min(first + most, part.end);
            return first < end;
        };
        if (take_from(parts[thread])) return true;
        for (;;) {
            std::int64_t most_left = 0;
            Part* longest = nullptr;
            for (int t = 0; t < number; t++) {
                const std::int64_t left = parts[t].end - parts[t].next.load(std::memory_order_relaxed);
                if (left > most_left) {
                    most_left = left;
                    longest = &parts[t];
                }
            }
            if (!longest) return false;
            if (take_from(*longest)) return true;
        }
    }

private:
    struct alignas(128) Part {  // none shares what is fetched at once with another
        std::atomic<std::int64_t> next;
        std::int64_t end;
    };
    static constexpr int INLINE_PARTS =
        4;  // parts that need no allocation: three of these take a tenth of the shortest call
    const int number;
    Part inline_parts[INLINE_PARTS];
    const std::unique_ptr<Part[]> heap_parts;
    Part* const parts;
};

// Runs body(thread) on `threads` threads, as one parallel region. A call opens one region, whatever it does: under load
// each region may wait a scheduler slice for a thread whose core serves another process.
template <class Body>
void parallel_region(int threads, const Body& body) {
    if (threads <= 1) return body(0);
#pragma omp parallel num_threads(threads)
    body(omp_get_thread_num());
}

// Tells the CPU, and after a while the scheduler, that this thread waits for another one.
class SpinWait {
public:
    void pause() {
        if (++spins > SPINS) return (void)sched_yield();
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }

private:
    static constexpr int SPINS = 1 << 10;  // some 20 to 40 us
    int spins = 0;
};

// One step of a call: tasks 0 .. count, in any order. All threads of a region go through the same steps. What follows a
// step may begin when its tasks have ended: a thread that comes late finds them done, and nobody waits for it.
class ParallelStep {
public:
    ParallelStep(std::int64_t tasks, int threads, int at_once = 1)
        : count(tasks), batch(at_once), distributor(tasks, threads) {}

    // body(n, thread), until no task is left to take. Bodies neither throw nor allocate; after a signal they are left
    // out.
    template <class Body>
    void run(Cancellation& cancellation, int thread, const Body& body) {
        for (std::int64_t n, end; distributor.take(thread, batch, n, end);) {
            const std::int64_t taken = end - n;
            for (; n < end; n++)
                if (!cancellation.requested(&cancellation)) body(n, thread);
            ended.fetch_add(taken, std::memory_order_release);
        }
    }
    void wait(Cancellation& cancellation) const {
        for (SpinWait waiting; ended.load(std::memory_order_acquire) < count; waiting.pause())
            cancellation.requested(&cancellation);
    }

private:
    const std::int64_t count;
    const int batch;
    TaskDistributor distributor;
    alignas(128) std::atomic<std::int64_t> ended{0};
};

// A step that is a region of its own, on up to `threads` threads.
template <class Body>
void parallel_for(Cancellation& cancellation, std::int64_t count, int threads, const Body& body, int at_once = 1) {
    if (threads <= 1) {
        for (std::int64_t n = 0; n < count && !cancellation.requested(&cancellation); n++) body(n, 0);
        return;
    }
    ParallelStep step(count, threads, at_once);
    parallel_region(threads, [&](int thread) { step.run(cancellation, thread, body); });
}

// TaskChains of links: of a chain each link may begin when those before it have begun. A thread goes through a chain of
// its own, for what one link has read the next one finds in the cache; where no chain is left it helps with the one
// that has most left.
class TaskChains {
public:
    struct Link {
        std::int64_t chain, number;
        int owner;  // the thread that opened the chain; it opens no other before this one has ended
        std::atomic<std::int64_t>*
            passed;  // a number for each link of the chain, at first 0: what it tells those that follow
    };
    TaskChains(std::int64_t chains, std::int64_t links, int threads)
        : count(chains),
          length(links),
          all(new Chain[std::size_t(chains)]),
          passed(new std::atomic<std::int64_t>[std::size_t(chains * links)]()),
          unopened(chains, threads) {}

    // By each thread of a region: body(link, thread), which neither throws nor allocates, until all links have begun.
    template <class Body>
    void run(Cancellation& cancellation, int thread, const Body& body) {
        const auto next = [&](std::int64_t n) {
            if (cancellation.requested(&cancellation)) return false;
            const std::int64_t number = all[n].begun.fetch_add(1, std::memory_order_acquire);
            if (number >= length) return false;
            body(Link{n, number, all[n].owner, passed.get() + n * length}, thread);
            return true;
        };
        for (std::int64_t n, end; unopened.take(thread, 1, n, end);) {
            all[n].owner = thread;
            all[n].begun.store(0, std::memory_order_release);
            while (next(n)) {
            }
        }
        while (!cancellation.requested(&cancellation)) {
            std::int64_t longest = -1, fewest_begun = length;
            for (std::int64_t n = 0; n < count; n++) {
                const std::int64_t begun = all[n].begun.load(std::memory_order_relaxed);
                if (begun >= 0 && begun < fewest_begun) {
                    longest = n;
                    fewest_begun = begun;
                }
            }
            if (longest < 0) return;
            next(longest);
        }
    }

private:
    struct Chain {
        std::atomic<std::int64_t> begun{-1};  // so many links; -1: it is not open
        int owner = 0;
    };
    const std::int64_t count, length;
    const std::unique_ptr<Chain[]> all;
    const std::unique_ptr<std::atomic<std::int64_t>[]> passed;
    TaskDistributor unopened;
};

inline int usable_threads(int threads, std::int64_t tasks) {
    if (forked || threads < 1) return 1;
    return threads < tasks ? threads : int(tasks < 1 ? 1 : tasks);
}

// What a target makes of a call before its tasks; to be kept as long as these run. The call says where it lies.
class Preparation {
public:
    Preparation(const Target& target, Forward& f, int threads)
        : target(target), f(f), memory(allocate_for(target, f)), step(memory ? target.pairing_tasks(f) : 0, threads) {}

    // By all threads of a region, before the tasks.
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

// Short tasks are taken several at a time, so that threads meet less often and each finds neighbours in its cache.
inline int tasks_at_once(const Forward& f, std::int64_t tasks, int threads) {
    constexpr double batch_operations = 1e6;  // operations: some microseconds
    const double all = 2.0 * double(f.batch * f.heads) * double(f.queries * f.keys) * double(f.head_dim + f.v_head_dim);
    const double batch = batch_operations * double(tasks) / (all + 1), most = double(tasks) / (8.0 * threads);
    return std::max(1, int(std::min(batch, most)));
}

}  // namespace headscope

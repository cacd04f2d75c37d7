// Threads, scratch memory and Ctrl-C for the code that calls the targets.
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

// Set by the binding. Python runs its signal handlers on the main thread, between bytecodes.
inline std::atomic<pthread_t> main_thread{};

// Runs Python's signal handlers during a call, so that Ctrl-C does not wait for its end. If the main thread made the
// call, it runs them every 50 ms; if a handler raises, the call is cancelled.

class Signals : public Cancellation {
public:
    Signals()
        : Cancellation{poll},
          on_main_thread(pthread_equal(pthread_self(), main_thread)),
          last_poll(on_main_thread ? now() : 0) {}

    // Rethrows the handler's error. To be called without the GIL, after all threads have finished.
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
        constexpr clockid_t clock = CLOCK_MONOTONIC_COARSE;  // takes some ns; precise to some ms
#else
        constexpr clockid_t clock = CLOCK_MONOTONIC;
#endif
        timespec time;
        clock_gettime(clock, &time);
        return std::int64_t(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
    }

    const bool on_main_thread;
    std::atomic<bool> raised{false};
    std::int64_t last_poll;  // read and written by the main thread only
};

struct FreeDeleter {
    void operator()(void* p) const { std::free(p); }
};
using Memory = std::unique_ptr<void, FreeDeleter>;

// Advises huge pages for large outputs. New memory is mapped at the first write to each page; with pages of 4 KiB the
// page faults take 5 % of a forward pass. Without MADV_HUGEPAGE, or if the system refuses, nothing changes.
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

inline std::size_t bytes_of(std::int64_t count, Dtype dtype) {
    return std::size_t(count) * (dtype == Dtype::f64 ? 8 : dtype == Dtype::f32 ? 4 : 2);
}

// The distance between the scratch memory of two threads: whole pages, and at least one page between them, so that the
// hardware prefetcher of one core does not read lines that another writes.
inline std::size_t padded_scratch_bytes(std::size_t bytes) {
    constexpr std::size_t page = 4096;
    return (bytes + 2 * page - 1) / page * page;
}

// Scratch memory of one call. Up to MAX_CACHED bytes are cached by the calling thread for its next call, since
// allocation takes 10 % of a short call. A nested call (from a signal handler, say) finds the cache empty and allocates
// its own. Each MAX_CACHED has its own cache.
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

// Distributes tasks 0 .. count with work stealing. Each thread takes tasks from its own contiguous part, then from the
// part with the most tasks left. So a thread finds what it wrote in one step in its own cache in the next, and cores
// transfer few cache lines.
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
    // Takes up to `most` tasks, [first, end). False if none is left.
    bool take(int thread, int most, std::int64_t& first, std::int64_t& end) {
        const auto take_from = [&](Part& part) __attribute__((always_inline)) {
            if (number == 1) {  // without a locked instruction, which waits for the stores of the last task
                first = part.next.load(std::memory_order_relaxed);
                part.next.store(first + most, std::memory_order_relaxed);
            } else {
                first = part.next.fetch_add(most, std::memory_order_relaxed);
            }
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
    struct alignas(128) Part {  // two cache lines: the adjacent-line prefetcher reads pairs
        std::atomic<std::int64_t> next;
        std::int64_t end;
    };
    static constexpr int INLINE_PARTS = 4;  // stored without allocation, of which three take 10 % of the shortest call
    const int number;
    Part inline_parts[INLINE_PARTS];
    const std::unique_ptr<Part[]> heap_parts;
    Part* const parts;
};

// Runs body(thread) on `threads` threads, as one OpenMP region. A call opens a single region for all of its steps: on a
// loaded machine each region may wait a scheduler time slice for a thread.
template <class Body>
void parallel_region(int threads, const Body& body) {
    if (threads <= 1) return body(0);
#pragma omp parallel num_threads(threads)
    body(omp_get_thread_num());
}

// Waits for another thread: pauses the core at first, then yields to the scheduler.
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

// One step of a call: tasks 0 .. count, in any order. All threads of a region run the same steps. `wait` returns when
// all tasks have ended, even if some thread has not started the step yet.
class ParallelStep {
public:
    ParallelStep(std::int64_t tasks, int threads, int at_once = 1)
        : count(tasks), batch(at_once), distributor(tasks, threads) {}

    // Calls body(n, thread) until no task is left; not after a cancellation. Bodies neither throw nor allocate.
    template <class Body>
    void run(Cancellation& cancellation, int thread, const Body& body) {
        std::int64_t taken = 0;
        for (std::int64_t n, end; distributor.take(thread, batch, n, end);) {
            taken += end - n;
            for (; n < end; n++)
                if (!cancellation.requested(&cancellation)) body(n, thread);
        }
        if (taken) ended.fetch_add(taken, std::memory_order_release);
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

// Calls body(n, thread) for n = 0 .. count in a region of its own.
template <class Body>
void parallel_for(Cancellation& cancellation, std::int64_t count, int threads, const Body& body, int at_once = 1) {
    if (threads <= 1) {
        for (std::int64_t n = 0; n < count && !cancellation.requested(&cancellation); n++) body(n, 0);
        return;
    }
    ParallelStep step(count, threads, at_once);
    parallel_region(threads, [&](int thread) { step.run(cancellation, thread, body); });
}

// Chains of links: a link may begin when those before it in its chain have begun. A thread opens a chain and runs its
// links, which share data in the cache. When all chains are open, it joins the one with the most links left.
class TaskChains {
public:
    struct Link {
        std::int64_t chain, number;
        int owner;  // the thread that opened the chain; it opens no other before all links have begun
        std::atomic<std::int64_t>* passed;  // the progress of each link of the chain, at first 0
    };
    TaskChains(std::int64_t chains, std::int64_t links, int threads)
        : count(chains),
          length(links),
          all(new Chain[std::size_t(chains)]),
          passed(new std::atomic<std::int64_t>[std::size_t(chains * links)]()),
          unopened(chains, threads) {}

    // To be called by each thread of a region. Calls body(link, thread), which neither throws nor allocates, until all
    // links have begun.
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
        std::atomic<std::int64_t> begun{-1};  // number of links; -1: the chain is not open
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

// The additions and multiplications of the two products.
inline double operations(const Forward& f) {
    return 2.0 * double(f.batch * f.heads) * double(f.queries * f.keys) * double(f.head_dim + f.v_head_dim);
}

// The number of tasks that a thread takes at once. Several short ones reduce contention and share data in the cache.
inline int tasks_at_once(const Forward& f, std::int64_t tasks, int threads) {
    constexpr double batch_operations = 1e6;  // some microseconds
    const double batch = batch_operations * double(tasks) / (operations(f) + 1);
    const double max_batch = double(tasks) / (8.0 * threads);
    return std::max(1, int(std::min(batch, max_batch)));
}

}  // namespace headscope

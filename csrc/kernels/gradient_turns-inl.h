// Whose turn it is to add to dK and dV, among the groups of a backward pass: sums are made in order.
//
// Tasks start in the order of their groups (TaskChains in runtime/threads.h), so a group that another one waits for is
// running or done.

// D or Dv, rounded up to whole vectors.
template <class T>
int padded_width(std::int64_t width) {
    return int((width + LANES<T> - 1) / LANES<T> * LANES<T>);
}

// Lets the groups of a head add to dK and dV in turn (add_key_gradients adds). dk and dv are sums, [K][k_width or
// v_width]; the first group zeroes them, the last one stores the results.
template <class T>
struct GradientTurns {
    const Backward& g;
    std::int64_t head, group, groups;
    T *dk, *dv;
    int k_width, v_width;
    std::atomic<std::int64_t>* passed;    // for each group: it has added to all keys before this one
    std::int64_t first_unfinished = 0;    // all groups before this one have added to all keys
    std::int64_t zeroed = 0, stored = 0;  // the first group has zeroed, the last one stored, all keys before

    // Waits until the groups before have added to all keys before `end`. False if the call was cancelled.
    bool wait_for_turn(std::int64_t end) {
        const std::int64_t all = g.forward.keys;
        for (std::int64_t n = first_unfinished; n < group; n++) {
            const auto progress = [&] { return passed[n].load(std::memory_order_acquire); };
            for (int polls = 0; progress() < end; polls++) {
                if (is_cancelled(g.forward)) return false;
                if (polls > 100) sched_yield();
            }
            if (n == first_unfinished && progress() == all) first_unfinished++;
        }
        if (group == 0) zero_sums(end);
        return true;
    }
    // Lets the next group add to the keys before `end`.
    void end_turn(std::int64_t end) {
        if (group == groups - 1) store_gradients(end);
        passed[group].store(end, std::memory_order_release);
    }
    void finish() {
        if ((group == 0 || group == groups - 1) && !wait_for_turn(g.forward.keys)) return;
        end_turn(g.forward.keys);
    }

private:
    void zero_sums(std::int64_t end) {
        for (T* sum = dk + zeroed * k_width; sum < dk + end * k_width; sum += LANES<T>) store(sum, V<T>{});
        for (T* sum = dv + zeroed * v_width; sum < dv + end * v_width; sum += LANES<T>) store(sum, V<T>{});
        zeroed = end;
    }
    void store_gradients(std::int64_t end) {
        const Forward& f = g.forward;
        const std::int64_t b = head / f.kv_heads, h = head % f.kv_heads, size = is_half(f) ? 2 : sizeof(T);
        const auto store_rows = [&](const T* from, int padded, std::int64_t width, T factor, void* to,
                                    const std::int64_t* stride) {
            constexpr int PREFETCH_ROWS = 16;  // rows are not in the cache, and may be far apart
            V<T> nan_probe{};
            char* row = static_cast<char*>(to) + (b * stride[0] + h * stride[1] + stored * stride[2]) * size;
            for (std::int64_t j = stored; j < end; j++, row += stride[2] * size)
                for (std::int64_t d = 0; d < width; d += LANES<T>) {
                    if (d * size % 64 == 0 && j + PREFETCH_ROWS < f.keys)
                        __builtin_prefetch(row + PREFETCH_ROWS * stride[2] * size + d * size, 1);
                    const V<T> x = load(from + j * padded + d) * factor;
                    nan_probe += x * T(0);  // NaN or infinity times 0 is NaN
                    store_elements<T>(row, d, x, width, f.q.dtype);
                }
            if (any<T>(nan_probe != nan_probe)) g.mark_nonfinite();
        };
        store_rows(dk, k_width, f.head_dim, T(f.scale), g.dk, g.dk_stride);
        store_rows(dv, v_width, f.v_head_dim, T(1), g.dv, g.dv_stride);
        stored = end;
    }
};

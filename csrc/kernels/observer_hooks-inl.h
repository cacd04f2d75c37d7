// The hooks that the forward pass of a block of rows calls, in the order of their calls. NoObserver compiles to
// nothing; StatisticsObserver is in row_quantities-inl.h.

struct NoObserver {
    static constexpr bool OBSERVES = false;
    struct Sums {
        INLINE explicit Sums(const NoObserver&) {}
        template <class X>
        INLINE void add(int, int, X, X) {}
    };
    INLINE void allocate(const Forward&, Arena&) {}
    template <class Block>
    INLINE void start(const Block&, std::int64_t, std::int64_t) {}
    INLINE std::nullptr_t logits_buffer(std::int64_t) { return nullptr; }
    template <class Block>
    INLINE void observe_logits(const Block&, std::int64_t, int) {}
    template <class X>
    INLINE void rescale(const X*, const X*, const X*) {}
    template <class Block, class X>
    INLINE void add_sums(const Block&, std::int64_t, int, const X*, const Sums&) {}
    template <class Block>
    INLINE void observe_weights(const Block&, std::int64_t, int) {}
    template <class Block>
    INLINE void finish(const Block&) {}
};

// Sums over a block of keys, computed in the loop that exponentiates its logits. `rest` sums the weights below 1; `gap`
// the weights times (top - logit); `distance` and `value_norm` the weights times a number of each key, [keys].
template <class T, int QV>
struct RowSums {
    V<T> rest[QV], gap[QV], squares[QV], distance[QV], value_norm[QV];
    const T *key_distances, *norms;
    template <class Observer>
    INLINE explicit RowSums(const Observer& observer)
        : key_distances(observer.key_distances), norms(observer.block_norms) {
        UNROLL_FOR(v, QV) rest[v] = gap[v] = squares[v] = distance[v] = value_norm[v] = V<T>{};
    }
    INLINE void add(int j, int v, V<T> below, V<T> x) {  // `below` = logit - top, finite: 0 * -inf would be NaN
        rest[v] = below < 0 ? rest[v] + x : rest[v];
        gap[v] -= x * below;
        squares[v] += x * x;
        distance[v] += x * key_distances[j];
        value_norm[v] += x * norms[j];
    }
};

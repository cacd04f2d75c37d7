// The hooks that the forward pass of a block of rows calls, in the order of their calls. NoObserver compiles to
// nothing; StatisticsObserver is in statistics_observer-inl.h.

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

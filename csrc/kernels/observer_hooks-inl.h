// What rides along while a block of rows is attended: nothing, or what row_statistics-inl.h measures.

// Where nothing is measured.
struct Alone {
    static constexpr bool LOOKS = false;
    struct Sums {
        INLINE explicit Sums(const Alone&) {}
        template <class X>
        INLINE void add(int, int, X, X) {}
    };
    INLINE void take(const Forward&, Arena&) {}
    template <class Block>
    INLINE void start(const Block&, std::int64_t, std::int64_t) {}
    INLINE std::nullptr_t place_for(std::int64_t) { return nullptr; }
    template <class Block>
    INLINE void before(const Block&, std::int64_t, int) {}
    template <class X>
    INLINE void move(const X*, const X*, const X*) {}
    template <class Block, class X>
    INLINE void add(const Block&, std::int64_t, int, const X*, const Sums&) {}
    template <class Block>
    INLINE void after(const Block&, std::int64_t, int) {}
    template <class Block>
    INLINE void finish(const Block&) {}
};

// What the loop that makes the weights of a block of keys sums for it, beside these. `far` and `length` are sums over
// keys of weights times what a key has, [keys].
template <class T, int QV>
struct RowSums {
    V<T> beside[QV], depth[QV], squares[QV], far[QV], length[QV];
    const T *steps, *norms;
    template <class Rider>
    INLINE explicit RowSums(const Rider& rider) : steps(rider.steps), norms(rider.block_norms) {
        UNROLL_FOR(v, QV) beside[v] = depth[v] = squares[v] = far[v] = length[v] = V<T>{};
    }
    INLINE void add(int j, int v, V<T> below, V<T> x) {  // finite, for 0 times -inf is no number
        beside[v] = below < 0 ? beside[v] + x : beside[v];
        depth[v] -= x * below;
        squares[v] += x * x;
        far[v] += x * steps[j];
        length[v] += x * norms[j];
    }
};

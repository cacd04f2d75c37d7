// The multiply-adds of the matrix products, and the scratch memory of a task.
inline bool is_half(const Forward& f) { return f.q.dtype == Dtype::bf16 || f.q.dtype == Dtype::f16; }
inline bool is_double(const Forward& f) { return f.q.dtype == Dtype::f64; }
inline bool is_cancelled(const Forward& f) { return f.cancellation && f.cancellation->requested(f.cancellation); }

// Calls body.operator()<T>() with the accumulation type.
template <class Body>
decltype(auto) with_accumulation_type(const Forward& f, const Body& body) {
    if (is_double(f)) return body.template operator()<double>();
    return body.template operator()<float>();
}

constexpr double LOG2E = 1.4426950408889634, LN2 = 0.6931471805599453;
constexpr double LOG2E_ERROR = 2.0355273740931033e-17;  // log2(e) - LOG2E

INLINE const char* element_address(const Tensor4& x, std::int64_t a, std::int64_t b, std::int64_t c, int size) {
    return static_cast<const char*>(x.data) + (a * x.stride[0] + b * x.stride[1] + c * x.stride[2]) * size;
}

// A multiply-add of a matrix product: sum += x * y, where the word x (of a key, say) is broadcast and y holds the words
// of a vector of rows. Fma multiplies numbers of the accumulation type.
template <class T>
struct Fma {
    using Word = T;
    static constexpr int PER_WORD = 1;  // numbers in a word
    static constexpr int KEYS = 64;     // in a block of keys
    typedef T Unaligned __attribute__((may_alias));
    INLINE static V<T> multiply_add(V<T> sum, Word x, const Word* y) { return sum + splat(x) * load(y); }
};
#if defined(BF16_DOT)
// Words of two neighbouring bf16 numbers: one instruction multiplies both pairs and adds both products to a float.
struct Bf16Dot {
    using Word = std::uint32_t;
    static constexpr int PER_WORD = 2;
    static constexpr int KEYS = 128;
    typedef std::uint32_t Unaligned __attribute__((aligned(2), may_alias));
    INLINE static V<float> multiply_add(V<float> sum, Word x, const Word* y) {
        return BF16_DOT(sum, (I<float>{} + Int<float>(x)), load_int<float>(reinterpret_cast<const Int<float>*>(y)));
    }
};
#endif

// Rows of words that lie `stride` bytes apart.
struct StridedRows {
    const char* data;
    std::int64_t stride;
};
template <class Op>
INLINE typename Op::Word load_word(const char* row, std::int64_t n) {
    return reinterpret_cast<const typename Op::Unaligned*>(row)[n];
}
// Keys, or value columns, of a tile of QV vectors of rows: their sums fill REGISTER_TILE registers.
template <int QV>
constexpr int TILE_COLUMNS = REGISTER_TILE / QV < 16 ? REGISTER_TILE / QV : 16;
// Allocates the buffers of a task one after the other. Started at address 0, `next` is the size needed. Behind each
// buffer of a page or more it leaves a gap of five cache lines: buffers whose sizes are multiples of 4096 bytes would
// otherwise compete for the same L1 sets, and stores to one would block loads from another (4K aliasing).
struct Arena {
    static constexpr std::size_t PAGE = 4096, GAP = 5 * 64;
    std::uintptr_t next;
    template <class X>
    X* allocate(std::int64_t count) {
        X* const buffer = reinterpret_cast<X*>(next);
        const std::size_t size = std::size_t(count) * sizeof(X);
        next += (size + 63) / 64 * 64 + (size >= PAGE ? GAP : 0);
        return buffer;
    }
};

// The end of the keys visible to any row, and the number of words of two keys that hold all visible keys.
inline std::int64_t visible_end_of(const Forward& f) { return f.visible_end < f.keys ? f.visible_end : f.keys; }
inline std::int64_t visible_pairs(const Forward& f) { return (visible_end_of(f) + 1) / 2 - f.visible_begin / 2; }

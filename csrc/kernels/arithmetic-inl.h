// What the products multiply and how memory of a task is laid out, for every target and every pass.
inline bool is_half(const Forward& f) { return f.q.dtype == Dtype::bf16 || f.q.dtype == Dtype::f16; }
inline bool is_cancelled(const Forward& f) { return f.cancellation && f.cancellation->requested(f.cancellation); }

constexpr double LOG2E = 1.4426950408889634, LN2 = 0.6931471805599453;

INLINE const char* element_address(const Tensor4& x, std::int64_t a, std::int64_t b, std::int64_t c, int size) {
    return static_cast<const char*>(x.data) + (a * x.stride[0] + b * x.stride[1] + c * x.stride[2]) * size;
}

// What the products multiply. A Word of a key is broadcast and multiplied with the words of a vector of rows.
template <class T>
struct Fma {
    using Word = T;
    static constexpr int PER_WORD = 1;  // numbers in a word
    static constexpr int KEYS = 64;     // keys in one softmax block
    typedef T Unaligned __attribute__((may_alias));
    INLINE static V<T> multiply_add(V<T> sum, Word x, const Word* y) { return sum + splat(x) * load(y); }
};
#if defined(BF16_DOT)
// Two neighbouring numbers of bf16: their products are added by one instruction. Sums are float.
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
INLINE typename Op::Word load_word(const char* line, std::int64_t n) {
    return reinterpret_cast<const typename Op::Unaligned*>(line)[n];
}
// Keys, or value columns, that a tile of QV vectors of rows takes at a time.
template <int QV>
constexpr int TILE_COLUMNS = REGISTER_TILE / QV < 16 ? REGISTER_TILE / QV : 16;
// Memory for a task, cut off piece by piece; beginning at 0, the end says how much is needed. Pieces are whole pages
// often enough: a gap keeps what is read and written side by side from the same lines of the first cache, where some
// CPUs take one for another.
struct Arena {
    static constexpr std::size_t PAGE = 4096, GAP = 5 * 64;
    std::uintptr_t next;
    template <class X>
    X* allocate(std::int64_t count) {
        X* const piece = reinterpret_cast<X*>(next);
        const std::size_t size = std::size_t(count) * sizeof(X);
        next += (size + 63) / 64 * 64 + (size >= PAGE ? GAP : 0);
        return piece;
    }
};

// The last key + 1 that any row may see, and how many words of two keys hold all that may be seen.
inline std::int64_t visible_end_of(const Forward& f) { return f.visible_end < f.keys ? f.visible_end : f.keys; }
inline std::int64_t visible_pairs(const Forward& f) { return (visible_end_of(f) + 1) / 2 - f.visible_begin / 2; }

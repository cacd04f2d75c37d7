// Arrays in memory with any layout. Between and around what belongs to an array lies something that must not be read
// (NaN, numbers far out) or must not be written.
#pragma once

#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "problem.h"

namespace selfcheck {

inline std::uint16_t half_bits(double x) {  // of a number that float16 has
    const std::uint16_t sign = std::signbit(x) ? 0x8000 : 0;
    const double size = std::fabs(x);
    if (std::isinf(x)) return sign | 0x7c00;
    if (size < 0x1p-14) return std::uint16_t(sign | int(std::ldexp(size, 24)));
    int e;
    std::frexp(size, &e);
    return std::uint16_t(sign | ((e + 14) << 10) | (int(std::ldexp(size, 11 - e)) - 1024));
}
inline double half_value(std::uint16_t bits) {
    const int e = bits >> 10 & 31, m = bits & 1023;
    const double size = e == 31 ? (m ? NOT : INF) : e ? std::ldexp(1024 + m, e - 25) : std::ldexp(m, -24);
    return bits & 0x8000 ? -size : size;
}

template <class To>
void put(char* at, To x) {
    std::memcpy(at, &x, sizeof x);
}
template <class From>
From get(const char* at) {
    From x;
    std::memcpy(&x, at, sizeof x);
    return x;
}
inline void encode(char* at, double x, Element e) {
    if (std::isnan(x)) {  // the NaN with all bits set: one whose payload is 0 forgives more
        std::memset(at, 0xff, std::size_t(bytes_of(e)));
        return;
    }
    switch (e) {
        case Element::f32:
            return put(at, float(x));
        case Element::f64:
            return put(at, x);
        case Element::bf16: {
            const float wide = float(x);
            return put(at, std::uint16_t(get<std::uint32_t>(reinterpret_cast<const char*>(&wide)) >> 16));
        }
        case Element::f16:
            return put(at, half_bits(x));
        case Element::i32:
            return put(at, std::int32_t(x));
        case Element::i64:
            return put(at, std::int64_t(x));
        case Element::i8:
            return put(at, std::int8_t(x));
        default:
            return put(at, std::uint8_t(x));
    }
}
inline double decode(const char* at, Element e) {
    switch (e) {
        case Element::f32:
            return get<float>(at);
        case Element::f64:
            return get<double>(at);
        case Element::bf16: {
            const std::uint32_t wide = std::uint32_t(get<std::uint16_t>(at)) << 16;
            return get<float>(reinterpret_cast<const char*>(&wide));
        }
        case Element::f16:
            return half_value(get<std::uint16_t>(at));
        case Element::i32:
            return get<std::int32_t>(at);
        case Element::i64:
            return double(get<std::int64_t>(at));
        case Element::i8:
            return get<std::int8_t>(at);
        default:
            return get<std::uint8_t>(at);
    }
}

// Exactly so many bytes, so that AddressSanitizer sees a step beyond them.
class Memory {
public:
    explicit Memory(std::size_t bytes, int filled = 0) : size(bytes) {
        at.reset(static_cast<char*>(::operator new(bytes ? bytes : 1, ALIGNMENT)));
        fill(filled);
    }
    void fill(int byte) { std::memset(at.get(), byte, size); }
    char* data() const { return at.get(); }
    const std::size_t size;

private:
    static constexpr std::align_val_t ALIGNMENT{64};
    struct Free {
        void operator()(char* p) const { ::operator delete(p, ALIGNMENT); }
    };
    std::unique_ptr<char, Free> at;
};

// One array's place in memory: its own elements, strides, and what surrounds them.
class Placed {
public:
    static constexpr int PATTERN = 0xa5;
    std::int64_t stride[4] = {0, 0, 0, 0};

    // `tight`: contiguous in the order of the axes. `unit`: the last stride is 1.
    Placed(Random& r, const Array& x, Element e, bool output, bool tight = false, bool unit = true)
        : shape{x.n[0], x.n[1], x.n[2], x.n[3]}, kind(e) {
        if (!x.present) return;
        const std::int64_t elements = lay_out(r, tight, unit);
        const std::int64_t before = r.one_in(3) ? 0 : r.range(0, 67), after = r.one_in(3) ? 0 : r.range(0, 67);
        const int size = bytes_of(e);
        memory = std::make_unique<Memory>(std::size_t((before + elements + after) * size), PATTERN);
        first = memory->data() + before * size;
        if (!output) {
            for (std::size_t n = 0; n + std::size_t(size) <= memory->size; n += std::size_t(size))
                encode(memory->data() + n, strange(), kind);
            each(x, [&](std::size_t from, char* to) { encode(to, x.x[from], kind); });
        }
    }
    char* data() const { return first; }

    Array read() const {
        Array x(shape[0], shape[1], shape[2], shape[3]);
        each(x, [&](std::size_t to, const char* from) { x.x[to] = decode(from, kind); });
        return x;
    }
    // Whether all but the array's own elements still holds the pattern.
    bool untouched_around() const {
        if (!memory) return true;
        std::vector<char> own(memory->size);
        each(Array(shape[0], shape[1], shape[2], shape[3]), [&](std::size_t, const char* at) {
            std::memset(own.data() + (at - memory->data()), 1, std::size_t(bytes_of(kind)));
        });
        for (std::size_t n = 0; n < own.size(); n++)
            if (!own[n] && static_cast<unsigned char>(memory->data()[n]) != PATTERN) return false;
        return true;
    }
    bool same(const Placed& other) const {
        return !memory || !std::memcmp(memory->data(), other.memory->data(), memory->size);
    }
    // The same layout again, with the pattern everywhere.
    Placed again() const {
        Placed copy(*this, 0);
        return copy;
    }
    void write(const Array& x) {
        each(x, [&](std::size_t from, char* to) { encode(to, x.x[from], kind); });
    }
    void zero() {
        each(Array(shape[0], shape[1], shape[2], shape[3]),
             [&](std::size_t, char* at) { std::memset(at, 0, std::size_t(bytes_of(kind))); });
    }
    headscope::Tensor4 tensor(Dtype dtype) const {
        return {first, {stride[0], stride[1], stride[2], stride[3]}, dtype};
    }

private:
    Placed(const Placed& other, int)
        : shape{other.shape[0], other.shape[1], other.shape[2], other.shape[3]}, kind(other.kind) {
        std::copy(other.stride, other.stride + 4, stride);
        if (!other.memory) return;
        memory = std::make_unique<Memory>(other.memory->size, PATTERN);
        first = memory->data() + (other.first - other.memory->data());
    }
    double strange() const {
        const bool is_byte = kind == Element::u8 || kind == Element::i8;
        return kind == Element::i32 ? 1e9 : kind == Element::i64 ? 0 : is_byte ? 1 : NOT;
    }
    template <class Visit>
    void each(const Array& x, const Visit& visit) const {
        for (std::int64_t a = 0; a < shape[0]; a++)
            for (std::int64_t b = 0; b < shape[1]; b++)
                for (std::int64_t c = 0; c < shape[2]; c++)
                    for (std::int64_t d = 0; d < shape[3]; d++)
                        visit(x.where(a, b, c, d),
                              first + (a * stride[0] + b * stride[1] + c * stride[2] + d * stride[3]) * bytes_of(kind));
    }
    // Strides with the axes in a random order and gaps between; 0 where an axis repeats. Returns how many elements that
    // spans.
    std::int64_t lay_out(Random& r, bool tight, bool unit) {
        int order[4] = {3, 2, 1, 0};  // fastest first
        if (!tight)
            for (int n = unit ? 1 : 0; n < 3; n++) std::swap(order[n], order[r.range(n, 3)]);
        const bool gaps = !tight && r.one_in(2);
        std::int64_t step = !unit && gaps ? r.range(1, 3) : 1, elements = 1;
        for (int axis : order) {
            const std::int64_t n = shape[axis];
            stride[axis] = n == 1 && (axis != 3 || !unit) ? 0 : step;
            if (n == 0) elements = 0;
            elements += n > 0 ? (n - 1) * stride[axis] : 0;
            step = step * (n > 0 ? n : 1) + (gaps && r.one_in(2) ? r.range(0, 9) : 0);
        }
        return elements;
    }

    std::int64_t shape[4];
    Element kind;
    std::unique_ptr<Memory> memory;
    char* first = nullptr;
};

}  // namespace selfcheck

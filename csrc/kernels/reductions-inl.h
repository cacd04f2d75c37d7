// What many numbers come to, of which some are NaN and count for nothing. They are float or double, sums are double.

template <class T>
struct Pooling {
    static constexpr int L = LANES<T>, PARTS = int(sizeof(double) / sizeof(T));

    // body(vector) for all of them, the last one filled up with NaN.
    template <class Body>
    INLINE static void each(const T* x, std::int64_t count, const Body& body) {
        std::int64_t n = 0;
        for (; n + L <= count; n += L) body(load_anywhere(x + n));
        if (n == count) return;
        V<T> last = splat(std::numeric_limits<T>::quiet_NaN());
        for (int lane = 0; n + lane < count; lane++) last[lane] = x[n + lane];
        body(last);
    }
    INLINE static V<double> part(V<T> x, int n) {
        typedef T Part __attribute__((vector_size(VECTOR_BYTES / PARTS)));  // as many as a vector has doubles
        Part some;
        __builtin_memcpy(&some, reinterpret_cast<const char*>(&x) + n * sizeof(Part), sizeof(Part));
        return __builtin_convertvector(some, V<double>);
    }
    INLINE static double whole(const V<double>* x) {
        double total = 0;
        for (int n = 0; n < PARTS; n++)
            for (int lane = 0; lane < LANES<double>; lane++) total += x[n][lane];
        return total;
    }
    static void pool(const T* x, std::int64_t count, Pool& to) {
        constexpr T far = std::numeric_limits<T>::infinity();
        V<double> sum[PARTS] = {};
        V<T> least = splat(far), largest = splat(-far);
        I<T> there{};
        each(x, count, [&](V<T> some) __attribute__((always_inline)) {
            there -= some == some;
            largest = greater<T>(some, largest);
            least = -greater<T>(-some, -least);
            UNROLL_FOR(k, PARTS) {
                const V<double> y = part(some, k);
                sum[k] += y == y ? y : V<double>{};
            }
        });
        to.sum += whole(sum);
        for (int lane = 0; lane < L; lane++) {
            to.count += there[lane];
            if (least[lane] < to.least) to.least = double(least[lane]);
            if (largest[lane] > to.largest) to.largest = double(largest[lane]);
        }
    }
    static double squares(const T* x, std::int64_t count, double mean) {
        V<double> sum[PARTS] = {};
        each(x, count, [&](V<T> some) __attribute__((always_inline)) {
            UNROLL_FOR(k, PARTS) {
                const V<double> y = part(some, k), off = y - mean;
                sum[k] += y == y ? off * off : V<double>{};
            }
        });
        return whole(sum);
    }
    // reached[k] += how many are not below border k; from the first that is NaN on, there are no borders.
    static void reach(const T* x, std::int64_t count, const T* borders, std::int64_t bins, std::int64_t* reached) {
        constexpr int AT_ONCE = 8;
        for (std::int64_t from = 0; from < bins && borders[from] == borders[from]; from += AT_ONCE) {
            V<T> border[AT_ONCE];
            I<T> counts[AT_ONCE];
            UNROLL_FOR(k, AT_ONCE) {
                border[k] = splat(from + k < bins ? borders[from + k] : std::numeric_limits<T>::quiet_NaN());
                counts[k] = I<T>{};
            }
            each(x, count, [&](V<T> some) __attribute__((always_inline)) {
                UNROLL_FOR(k, AT_ONCE) counts[k] = some >= border[k] ? counts[k] + 1 : counts[k];
            });
            for (int k = 0; k < AT_ONCE && from + k < bins; k++) {
                Int<T> lanes[L] __attribute__((aligned(64))), all = 0;
                store_int<T>(lanes, counts[k]);
                for (int lane = 0; lane < L; lane++) all += lanes[lane];
                reached[from + k] += all;
            }
        }
    }
};
void pool(const void* x, bool wide, std::int64_t count, Pool& to) {
    if (wide) return Pooling<double>::pool(static_cast<const double*>(x), count, to);
    Pooling<float>::pool(static_cast<const float*>(x), count, to);
}
double squares(const void* x, bool wide, std::int64_t count, double mean) {
    if (wide) return Pooling<double>::squares(static_cast<const double*>(x), count, mean);
    return Pooling<float>::squares(static_cast<const float*>(x), count, mean);
}
void reach(const void* x, bool wide, std::int64_t count, const void* borders, std::int64_t bins,
           std::int64_t* reached) {
    if (wide)
        return Pooling<double>::reach(static_cast<const double*>(x), count, static_cast<const double*>(borders), bins,
                                      reached);
    Pooling<float>::reach(static_cast<const float*>(x), count, static_cast<const float*>(borders), bins, reached);
}

// The lengths of the values of a key/value head of a batch entry, [K]. E is what they are made of.
template <class T, class E>
void lengths_of(const Forward& f, const char* from, T* to) {
    constexpr int L = LANES<T>;
    const int width = int(f.v_head_dim), whole = width / L * L;
    const std::int64_t line = f.v.stride[2] * std::int64_t(sizeof(E));
    for (std::int64_t j = 0; j < f.keys; j += L) {
        const int keys = int(f.keys - j < L ? f.keys - j : L);
        V<T> squares[L];
        for (int r = 0; r < L; r++) {
            const E* x = reinterpret_cast<const E*>(from + (j + (r < keys ? r : 0)) * line);
            V<T> sum{}, last{};
            for (int c = 0; c < whole; c += L) sum += load_wide<T>(x + c) * load_wide<T>(x + c);
            for (int c = whole; c < width; c++) {
                if constexpr (sizeof(E) == 2)
                    last[c - whole] = widen(__builtin_bit_cast(std::uint16_t, x[c]), f.v.dtype);
                else
                    last[c - whole] = x[c];
            }
            squares[r] = sum + last * last;
        }
        T length[L] __attribute__((aligned(64)));
        store(length, sums<T>(squares));
        for (int k = 0; k < L; k++) length[k] = std::sqrt(length[k]);
        for (int k = 0; k < keys; k++) to[j + k] = length[k];
    }
}
void lengths(const Forward& f, std::int64_t head, void* to) {
    const std::int64_t b = head / f.kv_heads, h = head % f.kv_heads;
    const auto of = [&]<class T, class E>(T* into, const E*) {
        lengths_of<T, E>(f, at(f.v, b, h, 0, sizeof(E)), into + head * f.keys);
    };
    const auto single = static_cast<float*>(to);
    if (is_double(f))
        of(static_cast<double*>(to), static_cast<const double*>(nullptr));
    else if (f.v.dtype == Dtype::bf16)
        of(single, static_cast<const BFloat16*>(nullptr));
    else if (f.v.dtype == Dtype::f16)
        of(single, static_cast<const Float16*>(nullptr));
    else
        of(single, static_cast<const float*>(nullptr));
}

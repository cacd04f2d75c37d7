// Reductions of many float or double numbers, sums in double. NaN is skipped.

template <class T>
struct Reduction {
    static constexpr int L = LANES<T>, PARTS = int(sizeof(double) / sizeof(T));

    // Calls body(vector) for all numbers; the last vector of each run is padded with NaN.
    template <class Body>
    INLINE static void for_each_vector(const NumberRuns& x, const Body& body) {
        const T* at = static_cast<const T*>(x.first);
        for (std::int64_t run = 0; run < x.runs; run++, at += x.stride) {
            std::int64_t n = 0;
            for (; n + L <= x.count; n += L) body(load_unaligned(at + n));
            if (n == x.count) continue;
            V<T> last = splat(std::numeric_limits<T>::quiet_NaN());
            for (int lane = 0; n + lane < x.count; lane++) last[lane] = at[n + lane];
            body(last);
        }
    }
    INLINE static V<double> convert_part(V<T> x, int n) {
        typedef T Part
            __attribute__((vector_size(VECTOR_BYTES / PARTS)));  // as many numbers as a vector of doubles has lanes
        Part values;
        __builtin_memcpy(&values, reinterpret_cast<const char*>(&x) + n * sizeof(Part), sizeof(Part));
        return __builtin_convertvector(values, V<double>);
    }
    // The reduction of all lanes, pair by pair.
    template <class N, class Combine>
    INLINE static N reduce(V<N> x, const Combine& combine) {
        N lanes[LANES<N>] __attribute__((aligned(64)));
        store(lanes, x);
        UNROLL_RANGE(round, 1, LANES<N>, round)
            for (int lane = 0; lane < LANES<N>; lane += 2 * round)
                lanes[lane] = combine(lanes[lane], lanes[lane + round]);
        return lanes[0];
    }
    INLINE static double sum_parts(const V<double>* x) {
        return reduce<double>(PARTS == 2 ? x[0] + x[PARTS - 1] : x[0], [](double a, double b) { return a + b; });
    }
    static Summary summarize(const NumberRuns& x, const T* borders, std::int64_t bins, std::int64_t* histogram) {
        constexpr T infinity = std::numeric_limits<T>::infinity();
        constexpr double none = std::numeric_limits<double>::quiet_NaN();
        V<double> sum[PARTS] = {};
        V<T> min = splat(infinity), max = splat(-infinity);
        std::int64_t count = 0;
        for_each_vector(x, [&](V<T> values) __attribute__((always_inline)) {
            count += __builtin_popcount(lane_bits<T>(values == values));
            max = maximum<T>(values, max);
            min = -maximum<T>(-values, -min);
            UNROLL_FOR(k, PARTS) {
                const V<double> y = convert_part(values, k);
                sum[k] += y == y ? y : V<double>{};
            }
        });
        if (!count) {
            std::fill_n(histogram, bins, 0);
            return {0, none, none, none, none};
        }
        const T least = reduce<T>(min, [](T a, T b) { return a < b ? a : b; }),
                most = reduce<T>(max, [](T a, T b) { return a > b ? a : b; });
        const double mean = sum_parts(sum) / double(count);
        const std::int64_t first = count_at_most(borders, bins, least), last = count_at_most(borders, bins, most);
        std::fill_n(histogram, first, count);
        count_at_least(x, borders + first, last - first, histogram + first);
        std::fill_n(histogram + last, bins - last, 0);
        for (std::int64_t k = 0; k + 1 < bins; k++) histogram[k] -= histogram[k + 1];
        return {count, mean, sum_squared_deviations(x, mean), double(least), double(most)};
    }
    // The number of borders up to a number.
    INLINE static std::int64_t count_at_most(const T* borders, std::int64_t bins, T most) {
        std::int64_t count = 0;
        for_each_vector({borders, sizeof(T) == 8, 1, bins, bins}, [&](V<T> x) __attribute__((always_inline)) {
            count += __builtin_popcount(lane_bits<T>(x <= most));
        });
        return count;
    }
    INLINE static double sum_squared_deviations(const NumberRuns& x, double mean) {
        V<double> sum[PARTS] = {};
        for_each_vector(x, [&](V<T> values) __attribute__((always_inline)) {
            UNROLL_FOR(k, PARTS) {
                const V<double> y = convert_part(values, k), deviation = y - mean;
                sum[k] += y == y ? deviation * deviation : V<double>{};
            }
        });
        return sum_parts(sum);
    }
    // counts[k] = the number of values >= border k.
    INLINE static void count_at_least(const NumberRuns& x, const T* borders, std::int64_t bins, std::int64_t* counts) {
        constexpr int AT_ONCE = 8;
        for (std::int64_t from = 0; from < bins; from += AT_ONCE) {
            V<T> border[AT_ONCE];
            I<T> lane_counts[AT_ONCE];
            UNROLL_FOR(k, AT_ONCE) {
                border[k] = splat(borders[from + k < bins ? from + k : bins - 1]);
                lane_counts[k] = I<T>{};
            }
            for_each_vector(x, [&](V<T> values) __attribute__((always_inline)) {
                UNROLL_FOR(k, AT_ONCE) lane_counts[k] = values >= border[k] ? lane_counts[k] + 1 : lane_counts[k];
            });
            for (int k = 0; k < AT_ONCE && from + k < bins; k++) {
                Int<T> lanes[L] __attribute__((aligned(64))), all = 0;
                store_int<T>(lanes, lane_counts[k]);
                for (int lane = 0; lane < L; lane++) all += lanes[lane];
                counts[from + k] = all;
            }
        }
    }
};
// Calls body(values as float or double).
template <class Body>
decltype(auto) with_values(const void* x, bool wide, const Body& body) {
    if (wide) return body(static_cast<const double*>(x));
    return body(static_cast<const float*>(x));
}
Summary summarize(const NumberRuns& x, const void* borders, std::int64_t bins, std::int64_t* histogram) {
    return with_values(borders, x.wide,
                       [&]<class T>(const T* each) { return Reduction<T>::summarize(x, each, bins, histogram); });
}

// What chance gives if the keys of rows are exchanged; src/headscope/_observe/exchange.py defines it.
template <class T>
struct ExchangeSums {
    static constexpr int L = LANES<double>;
    typedef T Part __attribute__((vector_size(L * sizeof(T))));

    INLINE static V<double> load_converted(const T* x) {
        Part values;
        __builtin_memcpy(&values, x, sizeof values);
        return __builtin_convertvector(values, V<double>);
    }
    static void prepare(const T* mass, const T* chance, const T* effective_keys, std::int64_t count,
                        const ExchangeRows& to) {
        constexpr double EVEN = 1e-6;  // as in exchange.py
        const auto at = [&](std::int64_t n, V<double> sum, V<double> even,
                            V<double> keys) __attribute__((always_inline)) {
            sum = sum == sum ? sum : V<double>{};
            even = even == even ? even : V<double>{};
            const V<double> squares = 1 / keys, difference = squares - sum * sum * even;
            store(to.mass + n, sum);
            store(to.even + n, even);
            store(to.uneven + n, difference > EVEN * squares ? difference : V<double>{});  // 0 for NaN: Σp² is denormal
        };
        std::int64_t n = 0;
        for (; n + L <= count; n += L)
            at(n, load_converted(mass + n), load_converted(chance + n), load_converted(effective_keys + n));
        if (n == count) return;
        V<double> last[3] = {};
        for (int lane = 0; n + lane < count; lane++) {
            last[0][lane] = double(mass[n + lane]);
            last[1][lane] = double(chance[n + lane]);
            last[2][lane] = double(effective_keys[n + lane]);
        }
        at(n, last[0], last[1], last[2]);
    }
    static void sum(const T* values, std::int64_t count, const ExchangeRows& rows, const double* mean,
                    const double* spread, double* sums) {
        V<double> means{}, variances{};
        std::int64_t n = 0;
        for (; n + L <= count; n += L) {
            const V<double> y = load_converted(values + n);
            means += y == y ? load(rows.mass + n) * load_unaligned(mean + n) : V<double>{};
            variances += y == y ? load(rows.uneven + n) * load_unaligned(spread + n) : V<double>{};
        }
        for (int lane = 0; lane < L; lane++) {
            sums[0] += means[lane];
            sums[1] += variances[lane];
        }
        for (; n < count; n++)
            if (values[n] == values[n]) {
                sums[0] += rows.mass[n] * mean[n];
                sums[1] += rows.uneven[n] * spread[n];
            }
    }
};
void prepare_exchange(const void* mass, const void* chance, const void* effective_keys, bool wide, std::int64_t count,
                      const ExchangeRows& to) {
    with_values(mass, wide, [&]<class T>(const T* masses) {
        ExchangeSums<T>::prepare(masses, static_cast<const T*>(chance), static_cast<const T*>(effective_keys), count,
                                 to);
    });
}
void sum_exchange(const void* values, bool wide, std::int64_t count, const ExchangeRows& rows, const double* mean,
                  const double* spread, double* sums) {
    with_values(values, wide, [&]<class T>(const T* x) { ExchangeSums<T>::sum(x, count, rows, mean, spread, sums); });
}

// The Euclidean norms of the values of one head, [K]. E is their element type.
template <class T, class E>
void value_norms_of(const Forward& f, const char* from, T* to) {
    constexpr int L = LANES<T>;
    const int width = int(f.v_head_dim), full_width = width / L * L;
    const std::int64_t line = f.v.stride[2] * std::int64_t(sizeof(E));
    for (std::int64_t j = 0; j < f.keys; j += L) {
        const int keys = int(f.keys - j < L ? f.keys - j : L);
        V<T> squares[L];
        for (int r = 0; r < L; r++) {
            const E* x = reinterpret_cast<const E*>(from + (j + (r < keys ? r : 0)) * line);
            V<T> sum{}, last{};
            for (int c = 0; c < full_width; c += L) sum += load_widened<T>(x + c) * load_widened<T>(x + c);
            for (int c = full_width; c < width; c++) {
                if constexpr (sizeof(E) == 2)
                    last[c - full_width] = widen(__builtin_bit_cast(std::uint16_t, x[c]), f.v.dtype);
                else
                    last[c - full_width] = x[c];
            }
            squares[r] = sum + last * last;
        }
        T norms[L] __attribute__((aligned(64)));
        store(norms, reduce_sums<T>(squares));
        for (int k = 0; k < L; k++) norms[k] = std::sqrt(norms[k]);
        for (int k = 0; k < keys; k++) to[j + k] = norms[k];
    }
}
void compute_value_norms(const Forward& f, std::int64_t head, void* to) {
    const std::int64_t b = head / f.kv_heads, h = head % f.kv_heads;
    const auto compute = [&]<class T, class E>(T* into, const E*) {
        value_norms_of<T, E>(f, element_address(f.v, b, h, 0, sizeof(E)), into + head * f.keys);
    };
    const auto single = static_cast<float*>(to);
    if (is_double(f))
        compute(static_cast<double*>(to), static_cast<const double*>(nullptr));
    else if (f.v.dtype == Dtype::bf16)
        compute(single, static_cast<const BFloat16*>(nullptr));
    else if (f.v.dtype == Dtype::f16)
        compute(single, static_cast<const Float16*>(nullptr));
    else
        compute(single, static_cast<const float*>(nullptr));
}

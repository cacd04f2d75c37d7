// Sums of many numbers of which some are NaN, and count for nothing. They are float or double, sums are double.

template <class T> struct Pooling {
    static constexpr int L = LANES<T>, PARTS = int(sizeof(double) / sizeof(T));
    typedef T Part __attribute__((vector_size(VECTOR_BYTES / PARTS), aligned(sizeof(T)), may_alias));  // as many as a vector has doubles

    INLINE static V<double> part(const T* at, int n) {
        return __builtin_convertvector(reinterpret_cast<const Part*>(at)[n], V<double>);
    }
    INLINE static double whole(const V<double>* x) {
        double total = 0;
        for (int n = 0; n < PARTS; n++) for (int lane = 0; lane < LANES<double>; lane++) total += x[n][lane];
        return total;
    }
    static void pool(const T* x, std::int64_t count, Pool& to) {
        constexpr T far = std::numeric_limits<T>::infinity();
        V<double> sum[PARTS] = {};
        V<T> least = splat(far), largest = splat(-far);
        I<T> there{};
        std::int64_t n = 0;
        for (; n + L <= count; n += L) {
            const V<T> some = load_anywhere(x + n);
            there -= some == some;
            largest = greater<T>(some, largest), least = -greater<T>(-some, -least);
            UNROLL for (int k = 0; k < PARTS; k++) {
                const V<double> y = part(x + n, k);
                sum[k] += y == y ? y : V<double>{};
            }
        }
        to.sum += whole(sum);
        const auto reach = [&](T low, T high) {
            if (low < to.least) to.least = double(low);
            if (high > to.largest) to.largest = double(high);
        };
        for (int lane = 0; lane < L; lane++) to.count += there[lane], reach(least[lane], largest[lane]);
        for (; n < count; n++) if (x[n] == x[n]) to.count++, to.sum += double(x[n]), reach(x[n], x[n]);
    }
    static double squares(const T* x, std::int64_t count, double mean) {
        V<double> sum[PARTS] = {};
        std::int64_t n = 0;
        for (; n + L <= count; n += L) UNROLL for (int k = 0; k < PARTS; k++) {
            const V<double> y = part(x + n, k), off = y - mean;
            sum[k] += y == y ? off * off : V<double>{};
        }
        double total = whole(sum);
        for (; n < count; n++) if (x[n] == x[n]) total += (double(x[n]) - mean) * (double(x[n]) - mean);
        return total;
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

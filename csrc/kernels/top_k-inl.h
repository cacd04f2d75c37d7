// The largest numbers of each row, and where they stand: a heap for each, in the lanes. The least comes first, of equal
// ones the last.
template <class T, int QV>
struct Largest {
    static constexpr int L = LANES<T>, ROWS = QV * L;
    T* x;  // [size][ROWS]
    Int<T>* key;
    int size;

    void take(Arena& memory, int count) {
        size = count;
        x = memory.take<T>(size * ROWS);
        key = memory.take<Int<T>>(size * ROWS);
    }
    // above(row): what is not above it is not wanted
    template <class Above>
    void start(const Above& above) {
        for (int n = 0; n < size * ROWS; n++) {
            x[n] = above(n % ROWS);
            key[n] = -1;
        }
    }
    // Those of the keys from j0 on, [keys][ROWS].
    void put(const T* p, std::int64_t j0, int keys) {
        for (int j = 0; j < keys; j += 8) {
            const int end = j + 8 < keys ? j + 8 : keys;
            I<T> some{};
            for (int n = j; n < end; n++)
                UNROLL_FOR(v, QV) some |= load(p + n * ROWS + v * L) > load(x + v * L);
            if (!any<T>(some)) continue;
            for (int r = 0; r < ROWS; r++)
                for (int n = j; n < end; n++)
                    if (p[n * ROWS + r] > x[r]) sift(r, size, p[n * ROWS + r], Int<T>(j0 + n));
        }
    }
    // Row r, the largest first.
    void sort(int r) {
        for (int left = size - 1; left > 0; left--) {  // the least to the end, until the largest is the first
            const int last = left * ROWS + r;
            const T least = x[last];
            const Int<T> of = key[last];
            x[last] = x[r];
            key[last] = key[r];
            sift(r, left, least, of);
        }
    }

private:
    // Puts a number for the first of a row's heap.
    void sift(int r, int count, T value, Int<T> of) {
        const auto before = [](T a, Int<T> i, T b, Int<T> j) { return a < b || (a == b && i > j); };
        int at = r;
        for (int n = 1; n < count; n = 2 * n + 1) {
            int down = n * ROWS + r;
            if (n + 1 < count && before(x[down + ROWS], key[down + ROWS], x[down], key[down])) {
                n++;
                down += ROWS;
            }
            if (!before(x[down], key[down], value, of)) break;
            x[at] = x[down];
            key[at] = key[down];
            at = down;
        }
        x[at] = value;
        key[at] = of;
    }
};

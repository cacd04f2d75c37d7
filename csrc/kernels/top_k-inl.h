// The largest numbers of each row and their keys: a min-heap for each row, interleaved so that rows lie in the lanes.
// The root is the smallest number; of equal ones, that of the largest key.
template <class T, int QV>
struct TopK {
    static constexpr int L = LANES<T>, ROWS = QV * L;
    T* value;  // [size][ROWS]
    Int<T>* key;
    int size;

    void allocate(Arena& memory, int count) {
        size = count;
        value = memory.allocate<T>(size * ROWS);
        key = memory.allocate<Int<T>>(size * ROWS);
    }
    // Fills the heaps with threshold(row): only larger numbers enter.
    template <class Threshold>
    void start(const Threshold& threshold) {
        for (int n = 0; n < size * ROWS; n++) {
            value[n] = threshold(n % ROWS);
            key[n] = -1;
        }
    }
    // Inserts the numbers p [keys][ROWS] of keys j0 .. j0 + keys. Eight keys at a time are compared with the roots.
    void insert(const T* p, std::int64_t j0, int keys) {
        for (int j = 0; j < keys; j += 8) {
            const int end = j + 8 < keys ? j + 8 : keys;
            I<T> exceeds{};
            for (int n = j; n < end; n++)
                UNROLL_FOR(v, QV) exceeds |= load(p + n * ROWS + v * L) > load(value + v * L);
            if (!any<T>(exceeds)) continue;
            for (int r = 0; r < ROWS; r++)
                for (int n = j; n < end; n++)
                    if (p[n * ROWS + r] > value[r]) sift_down(r, size, p[n * ROWS + r], Int<T>(j0 + n));
        }
    }
    // Sorts the heap of row r in descending order.
    void sort(int r) {
        for (int left = size - 1; left > 0; left--) {  // heapsort: swaps the root behind the rest
            const int last = left * ROWS + r;
            const T smallest = value[last];
            const Int<T> smallest_key = key[last];
            value[last] = value[r];
            key[last] = key[r];
            sift_down(r, left, smallest, smallest_key);
        }
    }

private:
    // Replaces the root of a row's heap and restores the heap.
    void sift_down(int r, int count, T new_value, Int<T> new_key) {
        const auto precedes = [](T a, Int<T> i, T b, Int<T> j) { return a < b || (a == b && i > j); };
        int hole = r;
        for (int n = 1; n < count; n = 2 * n + 1) {
            int child = n * ROWS + r;
            if (n + 1 < count && precedes(value[child + ROWS], key[child + ROWS], value[child], key[child])) {
                n++;
                child += ROWS;
            }
            if (!precedes(value[child], key[child], new_value, new_key)) break;
            value[hole] = value[child];
            key[hole] = key[child];
            hole = child;
        }
        value[hole] = new_value;
        key[hole] = new_key;
    }
};

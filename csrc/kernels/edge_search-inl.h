// The largest weights of each head, found in the cells of the map.

template <class T, int QV>
struct EdgeSearch : StoredWeights<T, QV> {
    using Base = StoredWeights<T, QV>;
    using Base::L, Base::ROWS, Base::s, Base::stored, Base::tops, Base::there, Base::wanted, Base::cell_most,
        Base::column_edge, Base::begin, Base::end, Base::part_of, Base::bits_of, Base::of_bits;
    // The largest weights of each head, looked for in the cells whose largest is above the least of those that there
    // are.
    template <class Block>
    void keep_edges(const Block& block, const T* scales) {
        Int<T> least[ROWS] __attribute__((aligned(64)));
        for (int r = 0; r < ROWS; r++) {
            if (r < block.count && scales[r] != 0) {
                if (r > 0 && block.group == 1 && scales[r - 1] != 0)
                    least[r] = least[r - 1];
                else
                    least[r] = least_of(block, part_of(block, r));
            } else
                least[r] = std::numeric_limits<Int<T>>::max();
        }
        const std::int64_t words = (s->bins + 63) / 64;
        for (std::int64_t n = 0; n < ROWS * words; n++) wanted[n] = 0;
        for (std::int64_t x = 0; x < s->bins; x++)
            UNROLL_FOR(v, QV)
                for (unsigned some =
                         lanes_of<T>(load_int<T>(cell_most + x * ROWS + v * L) > load_int<T>(least + v * L));
                     some; some &= some - 1)
                    wanted[(v * L + __builtin_ctz(some)) * words + x / 64] |= std::uint64_t(1) << x % 64;
        for (int r = 0; r < block.count; r++) {
            const ShareOfHead part = part_of(block, r);
            for (std::int64_t word = 0; word < words; word++)
                for (std::uint64_t some = wanted[r * words + word]; some; some &= some - 1)
                    keep_edges_of_cell(block, r, word * 64 + __builtin_ctzll(some), least[r], part.edges(),
                                       part.edges_found());
            if (part.edges_found() == s->edges) raise(part.edge_least(), part.edges()[0].p);
        }
    }
    static void raise(std::atomic<double>& least, double to) {
        double now = least.load(std::memory_order_relaxed);
        while (now < to && !least.compare_exchange_weak(now, to, std::memory_order_relaxed)) {
        }
    }
    // What a weight of the block has to be above. Of one that is as large as the least of another share's, the place
    // decides.
    template <class Block>
    Int<T> least_of(const Block& block, const ShareOfHead& part) const {
        const double elsewhere = part.edge_least().load(std::memory_order_relaxed);
        const Int<T> least = elsewhere > 0 ? bits_of(T(elsewhere)) - 1 : -1;
        if (part.edges_found() == s->edges) {
            const Int<T> here = bits_of(T(part.edges()[0].p));
            return here > least ? here : least;
        }
        if (least >= 0 || block.group > 1 || block.count < s->edges) return least;
        // as many rows as there are to be edges have weights that are not below
        Int<T> highest_of[ROWS] __attribute__((aligned(64)));
        for (int v = 0; v < QV; v++) {
            I<T> high = I<T>{} - 1;
            for (std::int64_t x = 0; x < s->bins; x++) {
                const I<T> here = load_int<T>(cell_most + x * ROWS + v * L);
                high = here > high ? here : high;
            }
            store_int<T>(highest_of + v * L, high);
        }
        for (int r = 0; r < block.count; r++) {
            int before = 0;
            for (int n = 0; n < block.count; n++)
                before += highest_of[n] > highest_of[r] || (highest_of[n] == highest_of[r] && n < r);
            if (before == s->edges - 1) return highest_of[r] > 0 ? highest_of[r] - 1 : -1;
        }
        return -1;
    }
    template <class Block>
    void keep_edges_of_cell(const Block& block, int r, std::int64_t x, Int<T> least, Edge* edges,
                            std::int64_t& edge_count) const {
        const double below = of_bits(least);
        const auto above = [&](double p) { return p > below && (edge_count < s->edges || p > edges[0].p); };
        if (!above(of_bits(cell_most[x * ROWS + r]))) return;
        const std::int64_t first = column_edge[x] > begin ? column_edge[x] : begin,
                           last = column_edge[x + 1] < end ? column_edge[x + 1] : end;
        for (std::int64_t j = first, n; j < last; j++) {
            if (n = (j - begin) / Block::KEYS; !there[n]) continue;
            const double p = of_bits(bits_of(stored[(j - begin) * ROWS + r] * tops[n * ROWS + r]));
            if (above(p)) put_edge(edges, edge_count, {p, block.b, block.query(r), j});
        }
    }
    // Into a heap, of which the least is the first, of equal ones the last.
    void put_edge(Edge* edges, std::int64_t& edge_count, const Edge& x) const {
        const auto before = [](const Edge& a, const Edge& z) {
            return a.p != z.p ? a.p < z.p : a.b != z.b ? a.b > z.b : a.i != z.i ? a.i > z.i : a.j > z.j;
        };
        std::int64_t at = 0;
        if (edge_count < s->edges) {
            for (at = edge_count++; at > 0 && before(x, edges[(at - 1) / 2]); at = (at - 1) / 2)
                edges[at] = edges[(at - 1) / 2];
        } else
            for (std::int64_t n = 1; n < edge_count; n = 2 * at + 1) {
                if (n + 1 < edge_count && before(edges[n + 1], edges[n])) n++;
                if (!before(edges[n], x)) break;
                edges[at] = edges[n];
                at = n;
            }
        edges[at] = x;
    }
};

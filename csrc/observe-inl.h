// What is measured of the weights while they are attended, or on its own. docs/statistics.md defines every number.

// The row of the map that a query belongs to.
INLINE std::int64_t row_bin(const RowStats& s, std::int64_t query) { return ((query + 1) * s.bins - 1) / s.all_queries; }

// Where a share of the row blocks adds up what it has of a query head. Blocks follow each other, and so do their rows of the map:
// all but the first are the share's alone, so that these lie in the whole. Where rows are picked, each may be in any.
std::int64_t lines_apart(const Forward& f) { return !f.look->bins ? 0 : f.rows ? f.look->bins : 1; }
struct ShareOfHead {
    const Forward& f;
    const std::int64_t share, head, apart;
    const std::int64_t first_line;  // of the map; the share before may have it too

    ShareOfHead(const Forward& call, std::int64_t share_number, std::int64_t head_number, std::int64_t first)
        : f(call), share(share_number), head(head_number), apart((share - 1) * f.heads + head), first_line(first) {}
    double* received() const { return share ? f.look->apart.received + apart * f.keys : f.look->whole.received + head * f.keys; }
    std::int64_t* eligible() const { return share ? f.look->apart.eligible + apart * f.keys : f.look->whole.eligible + head * f.keys; }
    bool is_apart(std::int64_t line) const { return share && (f.rows || line == first_line); }
    Columns map_line(std::int64_t line) const {
        const RowStats& s = *f.look;
        return is_apart(line) ? line_of(s.apart, apart * lines_apart(f) + (f.rows ? line : 0)) : line_of(s.whole, head * s.bins + line);
    }
    Edge* edges() const { return f.look->edge + (share * f.heads + head) * f.look->edges; }
    std::int64_t& edges_found() const { return f.look->edges_found[share * f.heads + head]; }

private:
    Columns line_of(const Columns& all, std::int64_t n) const {
        n *= f.look->bins;
        return {nullptr, nullptr, all.sum + n, all.max + n, all.count + n, all.largest + 4 * n};
    }
};

// The quantities of a block of rows, and what it adds to those of keys and of the map. Sums over weights are kept relative to
// the running maximum, as the output is, and block by block, so that long rows do not add small numbers to large ones.
//
// Nothing may cancel on peaked rows. So the weights that are exactly 1, those of the largest logits, are counted apart from the
// rest, and the entropy is Σ p (top - s) + mass (lse - top): sums of what is never negative.
//
// Keys and map need the weights normalised, which they are once the whole row is known. So where these are asked for, the block's
// weights are kept for all keys, as they were relative to the maximum of the time, and swept through once more at the end: no
// product and no exp is taken twice. This is ROWS numbers a key for each thread.
template <class T, int QV> struct Look {
    static constexpr bool LOOKS = true;
    static constexpr int L = LANES<T>, ROWS = QV * L;
    enum { ONES, BESIDE, DEPTH, SQUARES, REACH, LENGTH, COPIES, FOLLOWERS, WITHIN, SUMS = WITHIN + MOST_WINDOWS };
    enum { AT_SELF, AT_PREVIOUS, AT_NEXT, AT_FIRST, PICKED = AT_FIRST + MOST_FIRST };

    const RowStats* s;
    T* sum;                      // [SUMS][ROWS]
    T* picked;                   // [PICKED][ROWS]: logits of single keys; -inf: not seen
    T *highest, *place;          // [ROWS]: the largest logit where there are sinks; the position
    Int<T>*line, *seen, *own, *token;  // [ROWS]: the position; how many keys are seen; the own key and its token
    Int<T>*copies, *followers;   // [ROWS]: whether such a key is seen
    Largest<T, QV> most;
    std::int64_t lowest_line, highest_line;
    bool counts;                 // keys that are seen are counted one by one
    const T* norms;
    const std::int32_t* ids;

    static constexpr int MOST_KEYS = 128;  // of a block of keys
    T* kept;                     // [K][ROWS]; with a map, -0 where a key is not seen
    T* tops;                     // [blocks of keys][ROWS]: what its weights are relative to
    bool* there;                 // [blocks of keys]: it has any that is seen
    T* column;                   // [MOST_KEYS][L]
    Int<T>* hidden;              // [MOST_KEYS][ROWS]: the sign bit where a key is not seen
    std::int64_t* column_edge;   // [bins + 1]: the first key of each column of the map
    T* cell_sum;                 // [bins][ROWS]: of each row
    Int<T>*cell_most, *cell_key, *pairs;  // the same: the largest weight, as a whole number, and its key; how many keys are seen
    V<T> block_mass[QV];         // of the last block of keys
    std::int64_t begin, end, blocks, share = 0, first_line = 0;
    int step;

    using Sums = RowSums<T, QV>;

    void take(const Forward& f, Arena& memory) {
        s = f.look;
        sum = memory.take<T>(SUMS * ROWS), picked = memory.take<T>(PICKED * ROWS);
        highest = memory.take<T>(ROWS), place = memory.take<T>(ROWS);
        for (Int<T>** to : {&line, &seen, &own, &token, &copies, &followers}) *to = memory.take<Int<T>>(ROWS);
        most.take(memory, s->most);
        const std::int64_t keys = s->columns() ? f.keys + 2 * MOST_KEYS : 0;
        kept = memory.take<T>(keys * ROWS), tops = memory.take<T>(keys / 64 * ROWS), there = memory.take<bool>(keys / 64);
        column = memory.take<T>(keys ? MOST_KEYS * L : 0), hidden = memory.take<Int<T>>(s->bins ? MOST_KEYS * ROWS : 0);
        column_edge = memory.take<std::int64_t>(s->bins + 1), cell_sum = memory.take<T>(s->bins * ROWS);
        for (Int<T>** to : {&cell_most, &cell_key, &pairs}) *to = memory.take<Int<T>>(s->bins * ROWS);
    }

    template <class Block> void start(const Block& block, std::int64_t first_key, std::int64_t end_of_keys) {
        const Forward& f = block.f;
        begin = first_key, end = end_of_keys, blocks = 0, step = Block::KEYS;
        for (std::int64_t n = 0; s->bins && n <= s->bins; n++) column_edge[n] = n * f.keys / s->bins;
        for (std::int64_t n = 0; n < s->bins * ROWS; n++) cell_sum[n] = 0, cell_most[n] = -1, pairs[n] = 0;
        constexpr T never = -std::numeric_limits<T>::infinity();
        for (int n = 0; n < SUMS * ROWS; n++) sum[n] = 0;
        for (int n = 0; n < PICKED * ROWS; n++) picked[n] = never;
        most.start([&](int r) { return s->floor ? static_cast<const T*>(s->floor)[block.row(r < block.count ? r : 0)] : never; });
        for (int r = 0; r < ROWS; r++) highest[r] = never, seen[r] = copies[r] = followers[r] = 0;
        counts = f.visible.count || f.bias.data;
        norms = s->norms ? static_cast<const T*>(s->norms) + (block.b * f.kv_heads + block.kv_head) * f.keys : nullptr;
        ids = s->ids ? s->ids + block.b * f.keys : nullptr;
        if (!s->line) return;
        lowest_line = std::numeric_limits<std::int64_t>::max(), highest_line = std::numeric_limits<std::int64_t>::min();
        for (int r = 0; r < ROWS; r++) {
            const std::int64_t at = block.place(r < block.count ? r : block.count - 1);
            const std::int64_t here = s->line[block.b * s->line_stride + at];
            line[r] = Int<T>(here), place[r] = T(here);
            if (here < lowest_line) lowest_line = here;
            if (here > highest_line) highest_line = here;
            if (!ids) continue;
            own[r] = Int<T>(s->own[block.b * s->own_stride + at]);
            token[r] = own[r] < 0 ? 0 : ids[own[r]];
        }
    }

    // Where the logits of the keys from j on belong, if they are kept.
    T* place_for(std::int64_t j) {
        if (!s->columns()) return nullptr;
        for (; begin + blocks * step <= j; blocks++) there[blocks] = false;
        return kept + (j - begin) * ROWS;
    }

    // Of a block of logits.
    template <class Block> void before(const Block& block, std::int64_t j0, int keys) {
        const T* p = block.p;
        if (s->line) for (int n = 0; n < 3; n++) {
            const std::int64_t step = n == AT_SELF ? 0 : n == AT_PREVIOUS ? -1 : 1;
            if (highest_line + step < j0 || lowest_line + step >= j0 + keys) continue;
            for (int r = 0; r < ROWS; r++) {
                const std::int64_t j = line[r] + step - j0;
                if (j >= 0 && j < keys) picked[n * ROWS + r] = p[j * ROWS + r];
            }
        }
        for (int n = 0; n < s->firsts; n++) {
            const std::int64_t j = s->first[block.b * s->first_stride + n] - j0;
            if (j < 0 || j >= keys) continue;
            UNROLL for (int v = 0; v < QV; v++) store(picked + (AT_FIRST + n) * ROWS + v * L, load(p + j * ROWS + v * L));
        }
        if (block.f.sinks) UNROLL for (int v = 0; v < QV; v++) {
            V<T> x = load(highest + v * L);
            for (int j = 0; j < keys; j++) x = greater<T>(load(p + j * ROWS + v * L), x);
            store(highest + v * L, x);
        }
        if (counts) count(block, j0, keys);
        if (s->bins && !block.all_seen) for (int j = 0; j < keys; j++) UNROLL for (int v = 0; v < QV; v++)
            store_int<T>(hidden + j * ROWS + v * L, is_seen(p, j, v) ? I<T>{} : I<T>{} + std::numeric_limits<Int<T>>::min());
        if (ids) look_for_tokens(p, j0, keys);
        if (s->most) most.put(p, j0, keys);
    }
    INLINE static I<T> is_seen(const T* p, int j, int v) {
        return load(p + j * ROWS + v * L) != -std::numeric_limits<T>::infinity();
    }
    // Keys that are seen, of each row, of each row and bin, and rows that see each key.
    template <class Block> void count(const Block& block, std::int64_t j0, int keys) {
        for (int j = 0; j < keys; j++) {
            Int<T>* cell = s->bins ? pairs + column_bin(block.f, j0 + j) * ROWS : nullptr;
            UNROLL for (int v = 0; v < QV; v++) {
                const I<T> x = is_seen(block.p, j, v);
                store_int<T>(seen + v * L, load_int<T>(seen + v * L) - x);
                if (cell) store_int<T>(cell + v * L, load_int<T>(cell + v * L) - x);
            }
        }
        if (!s->whole.received) return;
        for (int r = 0; r < block.count; r++) {
            if (!may_count(block, r)) continue;
            std::int64_t* eligible = part_of(block, r).eligible() + j0;
            for (int j = 0; j < keys; j++) eligible[j] += block.p[j * ROWS + r] != -std::numeric_limits<T>::infinity();
        }
    }
    std::int64_t column_bin(const Forward& f, std::int64_t j) const { return ((j + 1) * s->bins - 1) / f.keys; }
    template <class Block> ShareOfHead part_of(const Block& block, int r) const { return {block.f, share, block.head(r), first_line}; }

    // Which rows have the token of key j for their own.
    INLINE I<T> matches(std::int64_t j, int v) const {
        return (load_int<T>(token + v * L) == Int<T>(ids[j])) & (load_int<T>(own + v * L) >= 0);
    }
    INLINE I<T> copy(std::int64_t j, int v) const { return matches(j, v) & (load_int<T>(own + v * L) != Int<T>(j)); }
    void look_for_tokens(const T* p, std::int64_t j0, int keys) {
        UNROLL for (int v = 0; v < QV; v++) {
            I<T> same = load_int<T>(copies + v * L), after = load_int<T>(followers + v * L);
            for (int j = 0; j < keys; j++) {
                const I<T> there = is_seen(p, j, v);
                same |= there & copy(j0 + j, v);
                if (j0 + j > 0) after |= there & matches(j0 + j - 1, v);
            }
            store_int<T>(copies + v * L, same), store_int<T>(followers + v * L, after);
        }
    }

    // The maximum moves.
    void move(const V<T>* from, const V<T>* to, const V<T>* shrink) {
        UNROLL for (int v = 0; v < QV; v++) {
            T* at = sum + v * L;
            const I<T> moved = to[v] > from[v];
            const V<T> ones = load(at + ONES * ROWS), beside = load(at + BESIDE * ROWS);
            store(at + ONES * ROWS, moved ? V<T>{} : ones);
            store(at + BESIDE * ROWS, moved ? (ones + beside) * shrink[v] : beside);
            const V<T> depth = (load(at + DEPTH * ROWS) + (to[v] - from[v]) * (ones + beside)) * shrink[v];
            store(at + DEPTH * ROWS, shrink[v] == 0 ? V<T>{} : depth);  // for infinity times 0 is no number
            store(at + SQUARES * ROWS, load(at + SQUARES * ROWS) * shrink[v] * shrink[v]);
            for (int n = REACH; n < WITHIN + s->windows; n++) store(at + n * ROWS, load(at + n * ROWS) * shrink[v]);
        }
    }
    INLINE void add(const V<T>* mass, const Sums& x) {
        UNROLL for (int v = 0; v < QV; v++) {
            block_mass[v] = mass[v];
            plus(ONES, v, whole_number(mass[v] - x.beside[v])), plus(BESIDE, v, x.beside[v]);
            plus(DEPTH, v, x.depth[v]), plus(SQUARES, v, x.squares[v]);
        }
    }
    INLINE static V<T> whole_number(V<T> x) {  // the nearest, of what is small
        const V<T> magic = splat(T(sizeof(T) == 4 ? 12582912.0 : 6755399441055744.0));  // 1.5 * 2**23 or 2**52
        return x + magic - magic;
    }
    INLINE void plus(int n, int v, V<T> x) { store(sum + n * ROWS + v * L, load(sum + n * ROWS + v * L) + x); }

    // Of the block's weights.
    template <class Block> void after(const Block& block, std::int64_t j0, int keys) {
        T* p = block.p;
        if (s->columns()) {
            const std::int64_t n = (j0 - begin) / Block::KEYS;
            there[n] = true;
            UNROLL for (int v = 0; v < QV; v++) store(tops + n * ROWS + v * L, block.top[v]);
            if (s->bins && !block.all_seen) for (int k = 0; k < keys * ROWS; k += L)
                store(p + k, (V<T>)((I<T>)load(p + k) | load_int<T>(hidden + k)));
        }
        const bool far = s->line && s->value[DISTANCE];
        if (far && norms) reach<true, true>(p, j0, keys);
        else if (far) reach<true, false>(p, j0, keys);
        else if (norms) reach<false, true>(p, j0, keys);
        for (int n = 0; n < s->windows; n++) within(n, p, j0, keys);
        if (ids) UNROLL for (int v = 0; v < QV; v++) {
            V<T> same{}, after{};
            for (int j = 0; j < keys; j++) {
                const V<T> x = load(p + j * ROWS + v * L);
                same += copy(j0 + j, v) ? x : V<T>{};
                if (j0 + j > 0) after += matches(j0 + j - 1, v) ? x : V<T>{};
            }
            plus(COPIES, v, same), plus(FOLLOWERS, v, after);
        }
    }
    // Distances and value lengths. Where all keys are on one side of all rows, a distance is that to the nearest key of the block
    // and, from there, a number below the block's size: two sums of what is never negative.
    template <bool REACHES, bool WEIGHS> void reach(const T* p, std::int64_t j0, int keys) {
        const std::int64_t j1 = j0 + keys - 1;
        if (!REACHES) return reach_from<0, WEIGHS>(p, j0, keys);
        if (lowest_line >= j1) reach_from<1, WEIGHS>(p, j0, keys);
        else if (highest_line <= j0) reach_from<-1, WEIGHS>(p, j0, keys);
        else reach_from<2, WEIGHS>(p, j0, keys);
    }
    template <int SIDE, bool WEIGHS> void reach_from(const T* p, std::int64_t j0, int keys) {  // 1: rows after, -1: before, 2: among
        V<T> far[QV], length[QV], at[QV];
        UNROLL for (int v = 0; v < QV; v++) far[v] = length[v] = V<T>{}, at[v] = load(place + v * L);
        for (int j = 0; j < keys; j++) UNROLL for (int v = 0; v < QV; v++) {
            const V<T> x = load(p + j * ROWS + v * L);
            if constexpr (SIDE == 2) {
                const V<T> gap = at[v] - T(j0 + j);
                far[v] += x * greater<T>(gap, -gap);
            } else if constexpr (SIDE != 0) {
                far[v] += x * T(SIDE == 1 ? keys - 1 - j : j);
            }
            if constexpr (WEIGHS) length[v] += x * norms[j0 + j];
        }
        UNROLL for (int v = 0; v < QV; v++) {
            if constexpr (SIDE == 1) far[v] += block_mass[v] * (at[v] - T(j0 + keys - 1));
            if constexpr (SIDE == -1) far[v] += block_mass[v] * (T(j0) - at[v]);
            plus(REACH, v, far[v]), plus(LENGTH, v, length[v]);
        }
    }
    T reach_of(int n) const { return T(std::floor(s->reach[n])); }  // distances are whole; in float 2.9999999999 would be 3
    void within(int n, const T* p, std::int64_t j0, int keys) {
        const T w = reach_of(n);
        if (T(j0) - T(highest_line) > w || T(lowest_line) - T(j0 + keys - 1) > w) return;
        UNROLL for (int v = 0; v < QV; v++) {
            const V<T> at = load(place + v * L);
            V<T> near{};
            for (int j = 0; j < keys; j++) {
                const V<T> gap = at - T(j0 + j);
                near += greater<T>(gap, -gap) <= w ? load(p + j * ROWS + v * L) : V<T>{};
            }
            plus(WITHIN + n, v, near);
        }
    }

    // How many keys row r may see.
    template <class Block> std::int64_t choices(const Block& block, int r) const {
        if (counts) return seen[r];
        if (!block.f.visible.spans.data) return block.f.keys;
        const auto& span = block.span;
        const Int<T> one = span[1][r] - span[0][r], two = span[3][r] - span[2][r];
        return (one > 0 ? one : 0) + (two > 0 ? two : 0);
    }
    template <class Block> bool may_count(const Block& block, int r) const {
        const std::int64_t* stride = s->may_count_stride;
        return !s->may_count || s->may_count[block.b * stride[0] + block.head(r) * stride[1] + block.place(r) * stride[2]];
    }

    // What comes of the sums, row by row in the lanes.
    struct Rows {
        std::int64_t at[ROWS];                              // in [B, H, Q]
        T top[ROWS] __attribute__((aligned(64)));
        T norm[ROWS] __attribute__((aligned(64)));          // lse - top, in nats
        T scale[ROWS] __attribute__((aligned(64))) = {};    // what a weight relative to top is multiplied by; 0: does not count
        T choices[ROWS] __attribute__((aligned(64)));       // how many keys it may see
        Int<T> counted[ROWS] __attribute__((aligned(64))) = {};  // -1 where it counts
        int count;
    };
    template <class Block> void finish(const Block& block) {
        Rows rows;
        rows.count = block.count;
        UNROLL for (int v = 0; v < QV; v++) {
            store(rows.top + v * L, block.top[v]);
            for (int n = 0; n < AT_FIRST + s->firsts; n++)  // logits to weights before they are normalised; -1: not seen
                store(picked + n * ROWS + v * L, weight_of(load(picked + n * ROWS + v * L), block.top[v]));
            if (!block.f.sinks) store(highest + v * L, block.top[v]);
        }
        for (int r = 0; r < block.count; r++) finish_row(block, r, rows);
        for (int r = block.count; r < ROWS; r++) rows.norm[r] = 0, rows.choices[r] = 1;
        say_all(block, rows);
        if (s->most) for (int r = 0; r < block.count; r++) put_list(rows, r);
        if (s->columns()) sweep(block, rows.scale);
    }
    INLINE static V<T> weight_of(V<T> logit, V<T> top) {
        return logit == -std::numeric_limits<T>::infinity() ? splat(T(-1)) : exp2(logit - top);
    }
    // How to normalise a row, and whether it counts.
    template <class Block> void finish_row(const Block& block, int r, Rows& rows) const {
        const std::int64_t n = choices(block, r);
        rows.at[r] = block.row(r), rows.choices[r] = T(n);
        T scale;
        normal(block, r, rows.at[r], rows.top[r], rows.norm[r], scale);
        const T all = rows.norm[r] + scale + of(DEPTH, r) + of(LENGTH, r) + highest[r] + rows.top[r];  // a sink may be the top
        const bool finite = std::isfinite(all) && highest[r] > -std::numeric_limits<T>::max();
        const bool counted = n > 0 && finite && may_count(block, r);
        if (n > 0 && !finite) s->spoilt->store(true, std::memory_order_relaxed);
        s->counted[rows.at[r]] = counted;
        if (!counted) return;
        rows.counted[r] = -1, rows.scale[r] = scale;
        if (s->columns() && !counts) count_spans(block, r);
    }
    // body(v) gives the quantity of a vector of rows. It is NaN where a row does not count.
    template <class Body> INLINE void say(const Rows& rows, void* to, const Body& body) const {
        if (!to) return;
        T x[ROWS] __attribute__((aligned(64)));
        UNROLL for (int v = 0; v < QV; v++)
            store(x + v * L, load_int<T>(rows.counted + v * L) != 0 ? body(v) : splat(std::numeric_limits<T>::quiet_NaN()));
        for (int r = 0; r < rows.count; r++) static_cast<T*>(to)[rows.at[r]] = x[r];
    }
    template <class Block> void say_all(const Block& block, const Rows& rows) const {
        const V<T> none = splat(std::numeric_limits<T>::quiet_NaN());
        const auto of = [&](int n, int v) __attribute__((always_inline)) { return load(sum + n * ROWS + v * L); };
        const auto scale = [&](int v) __attribute__((always_inline)) { return load(rows.scale + v * L); };
        const auto norm = [&](int v) __attribute__((always_inline)) { return load(rows.norm + v * L); };
        const auto mass = [&](int v) __attribute__((always_inline)) { return (of(ONES, v) + of(BESIDE, v)) * scale(v); };
        const auto entropy = [&](int v) __attribute__((always_inline)) {
            return greater<T>(mass(v) * norm(v) + of(DEPTH, v) * T(LN2) * scale(v), V<T>{});
        };
        // the weight of a single key, 0 where it is not seen
        const auto weight = [&](int n, int v) __attribute__((always_inline)) { return greater<T>(load(picked + n * ROWS + v * L), V<T>{}) * scale(v); };
        const auto choices_of = [&](int v) __attribute__((always_inline)) { return load(rows.choices + v * L); };
        say(rows, s->value[LSE], [&](int v) { return load(rows.top + v * L) * T(LN2) + norm(v); });
        say(rows, s->value[MAX_LOGIT], [&](int v) { return load(highest + v * L) * T(LN2); });
        say(rows, s->value[ENTROPY], entropy);
        if (s->value[NORMALIZED_ENTROPY]) {
            T logs[ROWS] __attribute__((aligned(64)));
            for (int r = 0; r < ROWS; r++) logs[r] = r && rows.choices[r] == rows.choices[r - 1] ? logs[r - 1] : std::log(rows.choices[r]);
            say(rows, s->value[NORMALIZED_ENTROPY], [&](int v) { return choices_of(v) >= 2 ? entropy(v) / load(logs + v * L) : none; });
        }
        say(rows, s->value[MAX_WEIGHT], [&](int v) { return exp2(load(highest + v * L) - load(rows.top + v * L)) * scale(v); });
        say(rows, s->value[EFFECTIVE_KEYS], [&](int v) {
            const V<T> squares = of(SQUARES, v) * scale(v) * scale(v);
            return squares > 0 ? 1 / squares : none;
        });
        say(rows, s->value[MASS], mass);
        say(rows, s->value[CHANCE], [&](int v) { return 1 / choices_of(v); });
        say(rows, s->value[FIRST], [&](int v) {
            V<T> x{};
            for (int n = 0; n < s->firsts; n++) x += weight(AT_FIRST + n, v);
            return x;
        });
        if (norms) say(rows, s->value[VALUE_NORM], [&](int v) { return of(LENGTH, v) * scale(v); });
        if (!s->line) return;
        say(rows, s->value[DISTANCE], [&](int v) { return of(REACH, v) * scale(v); });
        for (int n = 0; n < 3; n++)
            say(rows, s->value[SELF + n], [&](int v) {
                const V<T> x = load(picked + n * ROWS + v * L);
                return x >= 0 ? x * scale(v) : none;
            });
        for (int k = 0; k < s->windows; k++) {
            say(rows, s->window[k], [&](int v) { return of(WITHIN + k, v) * scale(v); });
            say(rows, s->streaming[k], [&](int v) {
                V<T> x = of(WITHIN + k, v) * scale(v);
                for (int n = 0; n < s->firsts; n++) {  // and the first keys, where they are not within
                    const V<T> gap = load(place + v * L) - T(s->first[block.b * s->first_stride + n]);
                    x += greater<T>(gap, -gap) > reach_of(k) ? weight(AT_FIRST + n, v) : V<T>{};
                }
                return x;
            });
        }
        if (!ids) return;
        say(rows, s->value[DUPLICATE], [&](int v) { return load_int<T>(copies + v * L) != 0 ? of(COPIES, v) * scale(v) : none; });
        say(rows, s->value[INDUCTION], [&](int v) { return load_int<T>(followers + v * L) != 0 ? of(FOLLOWERS, v) * scale(v) : none; });
    }
    T of(int n, int r) const { return sum[n * ROWS + r]; }

    // lse - top in nats, and what a weight relative to top is multiplied by.
    template <class Block> void normal(const Block& block, int r, std::int64_t row, T top, T& norm, T& scale) const {
        T rest = of(BESIDE, r);  // the sum of the row less 1: the 1 of a peaked row would swallow it
        const T ones = of(ONES, r);
        if (ones > 0) {
            rest += ones - 1;
            if (block.f.sinks) rest += std::exp2(static_cast<const T*>(block.f.sinks)[block.head(r)] * T(LOG2E) - top);
        }
        norm = std::log1p(rest), scale = 1 / (1 + rest);
        if (!s->given) return;
        const double given = double(static_cast<const T*>(s->given)[row]) - double(top) * LN2;
        const double size = std::abs(double(norm) + double(top) * LN2), off = std::abs(given - double(norm));
        if (off <= s->rounding * (size > 1 ? size : 1)) return;
        norm = T(given), scale = T(std::exp(-given));
    }
    void put_list(const Rows& rows, int r) {
        most.sort(r);
        for (int k = 0; k < s->most; k++) {
            const bool known = rows.counted[r] && most.key[k * ROWS + r] >= 0;
            const T weight = std::exp2(most.x[k * ROWS + r] - rows.top[r]) * rows.scale[r];
            static_cast<T*>(s->most_weight)[rows.at[r] * s->most + k] = known ? weight : std::numeric_limits<T>::quiet_NaN();
            s->most_key[rows.at[r] * s->most + k] = known ? most.key[k * ROWS + r] : -1;
        }
    }

    // The pairs of a row that counts, where spans say all. What keys are eligible for is kept as its differences until the end.
    template <class Block> void count_spans(const Block& block, int r) const {
        const Forward& f = block.f;
        const ShareOfHead part = part_of(block, r);
        const std::int64_t all[2] = {0, f.keys};
        for (int n = 0; n < (f.visible.spans.data ? 4 : 2); n += 2) {
            const std::int64_t low = f.visible.spans.data ? block.span[n][r] : all[n], high = f.visible.spans.data ? block.span[n + 1][r] : all[n + 1];
            if (low >= high) continue;
            if (s->whole.received) {
                part.eligible()[low]++;
                if (high < f.keys) part.eligible()[high]--;
            }
            if (!s->bins) continue;
            std::int64_t* cell = part.map_line(row_bin(*s, block.query(r))).count;
            const std::int64_t x = column_bin(f, low), last = column_bin(f, high - 1);
            for (std::int64_t y = x; y <= last; y++) cell[y] += column_edge[y + 1] - column_edge[y];
            cell[x] -= low - column_edge[x], cell[last] -= column_edge[last + 1] - high;
        }
    }

    // Through all weights of the block again, now that it is known how to normalise them.
    template <class Block> void sweep(const Block& block, const T* scales) {
        const Forward& f = block.f;
        V<T> top[QV], scale[QV];
        bool some = false;
        UNROLL for (int v = 0; v < QV; v++) top[v] = block.top[v], scale[v] = load(scales + v * L);
        for (int r = 0; r < ROWS; r++) some |= scales[r] != 0;
        if (!some) return;
        for (std::int64_t n = 0; n < blocks; n++) {
            if (!there[n]) continue;
            const std::int64_t j0 = begin + n * Block::KEYS;
            const int keys = int(end - j0 < Block::KEYS ? end - j0 : Block::KEYS);
            T* factor = tops + n * ROWS;
            UNROLL for (int v = 0; v < QV; v++) store(factor + v * L, exp2(load(factor + v * L) - top[v]) * scale[v]);
            if (s->bins) normalise<true>(f, j0, keys, factor);
            else normalise<false>(f, j0, keys, factor);
            if (s->whole.received) receive(block, j0, keys, factor);
        }
        if (s->edges) keep_edges(block, scales);
        if (s->bins) for (int v = 0; v < QV && v * L < block.count; v++) fold(block, v, scales);
    }
    template <bool MAP> void normalise(const Forward& f, std::int64_t j0, int keys, const T* factors) {
        const T* p = kept + (j0 - begin) * ROWS;
        V<T> factor[QV];
        UNROLL for (int v = 0; v < QV; v++) factor[v] = load(factors + v * L);
        std::int64_t bin = MAP ? column_bin(f, j0) : 0;
        for (int n = 0, last; n < keys; n = last, bin++) {
            V<T> total[QV];
            I<T> high[QV], key[QV];
            if (MAP) while (column_edge[bin + 1] <= j0 + n) bin++;  // some are empty where there are more bins than keys
            const std::int64_t limit = MAP ? column_edge[bin + 1] - j0 : keys;
            last = int(limit < keys ? limit : keys);
            if constexpr (MAP) UNROLL for (int v = 0; v < QV; v++)
                total[v] = V<T>{}, high[v] = load_int<T>(cell_most + bin * ROWS + v * L), key[v] = load_int<T>(cell_key + bin * ROWS + v * L);
            for (int j = n; j < last; j++) {
                V<T> received{};
                UNROLL for (int v = 0; v < QV; v++) {
                    const V<T> x = load(p + j * ROWS + v * L) * factor[v];
                    received += x;
                    if constexpr (MAP) {
                        total[v] += x;
                        const I<T> more = (I<T>)x > high[v];  // as numbers that are not negative compare
                        high[v] = more ? (I<T>)x : high[v], key[v] = more ? I<T>{} + Int<T>(j0 + j) : key[v];
                    }
                }
                store(column + j * L, received);
            }
            if constexpr (MAP) UNROLL for (int v = 0; v < QV; v++)
                store(cell_sum + bin * ROWS + v * L, load(cell_sum + bin * ROWS + v * L) + total[v]),
                store_int<T>(cell_most + bin * ROWS + v * L, high[v]), store_int<T>(cell_key + bin * ROWS + v * L, key[v]);
        }
    }
    template <class Block> void receive(const Block& block, std::int64_t j0, int keys, const T* factor) const {
        const auto line_of = [&](int r) { return part_of(block, r).received() + j0; };
        const int group = int(block.group);
        if (L % group == 0 && block.first % group == 0) {  // a lane is of the same head in every vector
            for (int n = 0; n < keys; n += L) {
                const int width = keys - n < L ? keys - n : L;
                V<T> x[L];
                UNROLL for (int k = 0; k < L; k++) x[k] = load(column + (n + k) * L);  // beyond the last key: whatever is there
                if (group == 1) {
                    add_line(line_of(0) + n, sums<T>(x), width);
                    continue;
                }
                transpose<T>(x);  // keys in the lanes
                for (int g = 0; g < group; g++) {
                    V<T> all = x[g];
                    for (int r = g + group; r < L; r += group) all += x[r];
                    add_line(line_of(g) + n, all, width);
                }
            }
        } else {
            const T* p = kept + (j0 - begin) * ROWS;
            for (int r = 0; r < block.count; r++) {
                double* to = line_of(r);
                for (int j = 0; j < keys; j++) to[j] += double(p[j * ROWS + r] * factor[r]);
            }
        }
    }

    static void add_line(double* to, V<T> x, int width) {
        T line[L] __attribute__((aligned(64)));
        store(line, x);
        for (int k = 0; k < width; k++) to[k] += double(line[k]);
    }

    // What each row of a vector has in each bin goes to the map.
    template <class Block> void fold(const Block& block, int v, const T* scales) {
        const int from = v * L, rows = block.count - from < L ? block.count - from : L;
        for (int r = 0; r < L; r++) if (scales[from + r] == 0)  // does not count
            for (std::int64_t x = 0; x < s->bins; x++) cell_most[x * ROWS + from + r] = -1, pairs[x * ROWS + from + r] = 0;
        std::int64_t line[L];  // of the map
        bool together = block.group == 1;
        for (int r = 0; r < rows; r++) line[r] = row_bin(*s, block.query(from + r)), together &= line[r] == line[0];
        for (std::int64_t x = 0; x < s->bins; x += L) {
            const int width = int(s->bins - x < L ? s->bins - x : L);
            if (together) fold_together(block, from, rows, line[0], x, width);
            else fold_apart(block, from, rows, line, x, width);
        }
    }
    // Of a vector of cells from x on, where they lie. Beyond the last cell: some cell.
    template <class Read> INLINE void read_cells(std::int64_t x, int width, V<T>* to, const Read& read) const {
        for (int k = 0; k < L; k++) to[k] = read((x + (k < width ? k : 0)) * ROWS);
    }
    // All rows of the vector go to one line.
    template <class Block> void fold_together(const Block& block, int from, int rows, std::int64_t line, std::int64_t x, int width) const {
        V<T> some[L], most_of[L];
        read_cells(x, width, some, [&](std::int64_t at) { return load(cell_sum + at + from); });
        read_cells(x, width, most_of, [&](std::int64_t at) { return (V<T>)load_int<T>(cell_most + at + from); });
        Cells cells;
        store(cells.sum, sums<T>(some)), store_int<T>(cells.most, largest<T>(most_of));
        for (int k = 0; k < width; k++) {
            const std::int64_t at = (x + k) * ROWS + from;
            const int r = first_lane<T>(load_int<T>(cell_most + at) == cells.most[k]);
            cells.row[k] = from + r, cells.key[k] = cell_key[at + r], cells.count[k] = 0;
            if (counts) for (int n = 0; n < rows; n++) cells.count[k] += pairs[at + n];
        }
        add_to_map(block, part_of(block, from).map_line(line), x, width, cells);
    }
    // Bins in the lanes: one vector for each row.
    template <class Block> void fold_apart(const Block& block, int from, int rows, const std::int64_t* line, std::int64_t x, int width) const {
        V<T> some[L], most_of[L], key[L], seen_of[L];
        read_cells(x, width, some, [&](std::int64_t at) { return load(cell_sum + at + from); }), transpose<T>(some);
        read_cells(x, width, most_of, [&](std::int64_t at) { return (V<T>)load_int<T>(cell_most + at + from); }), transpose<T>(most_of);
        read_cells(x, width, key, [&](std::int64_t at) { return (V<T>)load_int<T>(cell_key + at + from); }), transpose<T>(key);
        if (counts) read_cells(x, width, seen_of, [&](std::int64_t at) { return (V<T>)load_int<T>(pairs + at + from); }), transpose<T>(seen_of);
        bool done[L] = {};
        for (int r = 0; r < rows; r++) {
            if (done[r]) continue;
            V<T> total{};
            I<T> best = I<T>{} - 1, of{}, row{}, count{};
            for (int n = r; n < rows; n++) {
                if (line[n] != line[r] || block.head(from + n) != block.head(from + r)) continue;
                done[n] = true;
                const I<T> more = (I<T>)most_of[n] > best;
                total += some[n], best = more ? (I<T>)most_of[n] : best, of = more ? (I<T>)key[n] : of;
                row = more ? I<T>{} + Int<T>(from + n) : row;
                if (counts) count += (I<T>)seen_of[n];
            }
            Cells cells;
            store(cells.sum, total), store_int<T>(cells.most, best), store_int<T>(cells.key, of);
            store_int<T>(cells.row, row), store_int<T>(cells.count, count);
            add_to_map(block, part_of(block, from + r).map_line(line[r]), x, width, cells);
        }
    }
    struct Cells {
        T sum[L] __attribute__((aligned(64)));
        Int<T> most[L] __attribute__((aligned(64)));  // the largest weight, as a whole number; -1: nothing is seen
        Int<T> key[L] __attribute__((aligned(64)));   // its key, and which row of the block
        Int<T> row[L] __attribute__((aligned(64)));
        Int<T> count[L] __attribute__((aligned(64)));
    };
    template <class Block> void add_to_map(const Block& block, const Columns& to, std::int64_t x, int width, const Cells& cells) const {
        for (int k = 0; k < width; k++) to.sum[x + k] += double(cells.sum[k]);
        if (counts) for (int k = 0; k < width; k++) to.count[x + k] += cells.count[k];
        for (int k = 0; k < width; k++) {
            const double p = of_bits(cells.most[k]);
            if (!(p > to.max[x + k])) continue;
            to.max[x + k] = p;
            std::int64_t* at = to.largest + 4 * (x + k);
            at[0] = 0, at[1] = block.b, at[2] = block.query(int(cells.row[k])), at[3] = cells.key[k];
        }
    }

    // The largest weights of each head, looked for in the cells whose largest is above the least of those that there are.
    template <class Block> void keep_edges(const Block& block, const T* scales) const {
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
            if (scales[r] == 0) continue;
            const ShareOfHead part = part_of(block, r);
            Edge* const edges = part.edges();
            std::int64_t& found = part.edges_found();
            const auto wanted = [&](double p) { return p > (found < s->edges ? -1 : edges[0].p); };
            if (!wanted(of_bits(highest_of[r]))) continue;
            for (std::int64_t x = 0; x < s->bins; x++) {
                if (!wanted(of_bits(cell_most[x * ROWS + r]))) continue;
                const std::int64_t first = column_edge[x] > begin ? column_edge[x] : begin, last = column_edge[x + 1] < end ? column_edge[x + 1] : end;
                for (std::int64_t j = first, n; j < last; j++) {
                    if (n = (j - begin) / Block::KEYS; !there[n]) continue;
                    const double p = of_bits(bits_of(kept[(j - begin) * ROWS + r] * tops[n * ROWS + r]));
                    if (wanted(p)) put_edge(edges, found, {p, block.b, block.query(r), j});
                }
            }
        }
    }
    // Into a heap, of which the least is the first, of equal ones the last.
    void put_edge(Edge* edges, std::int64_t& found, const Edge& x) const {
        const auto before = [](const Edge& a, const Edge& z) {
            return a.p != z.p ? a.p < z.p : a.b != z.b ? a.b > z.b : a.i != z.i ? a.i > z.i : a.j > z.j;
        };
        std::int64_t at = 0;
        if (found < s->edges) {
            for (at = found++; at > 0 && before(x, edges[(at - 1) / 2]); at = (at - 1) / 2) edges[at] = edges[(at - 1) / 2];
        } else for (std::int64_t n = 1; n < found; n = 2 * at + 1) {
            if (n + 1 < found && before(edges[n + 1], edges[n])) n++;
            if (!before(edges[n], x)) break;
            edges[at] = edges[n], at = n;
        }
        edges[at] = x;
    }
    static Int<T> bits_of(T x) {
        Int<T> bits;
        __builtin_memcpy(&bits, &x, sizeof(T));
        return bits;
    }
    static double of_bits(Int<T> bits) {  // -infinity where nothing is seen
        T x;
        __builtin_memcpy(&x, &bits, sizeof(T));
        return bits < 0 ? -std::numeric_limits<double>::infinity() : double(x);
    }
};

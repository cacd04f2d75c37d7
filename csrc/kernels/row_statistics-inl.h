// What is measured of the weights while they are attended, or on its own. docs/statistics.md defines every number.

// The quantities of a block of rows. Sums over weights are kept relative to the running maximum, as the output is, and
// block by block, so that long rows do not add small numbers to large ones.
//
// Nothing may cancel on peaked rows. So the weights that are exactly 1, those of the largest logits, are counted apart
// from the rest, and the entropy is Σ p (top - s) + mass (lse - top): sums of what is never negative.
template <class T, int QV>
struct Look : Sweep<T, QV> {
    using Base = Sweep<T, QV>;
    using Base::L, Base::ROWS, Base::s, Base::counts, Base::pairs, Base::hidden, Base::column_bin, Base::part_of,
        Base::may_count;
    static constexpr bool LOOKS = true;
    enum { ONES, BESIDE, DEPTH, SQUARES, REACH, LENGTH, COPIES, FOLLOWERS, WITHIN, SUMS = WITHIN + MOST_WINDOWS };
    enum { AT_SELF, AT_PREVIOUS, AT_NEXT, AT_FIRST, PICKED = AT_FIRST + MOST_FIRST };

    T* sum;                            // [SUMS][ROWS]
    T* picked;                         // [PICKED][ROWS]: logits of single keys; -inf: not seen
    T *highest, *place;                // [ROWS]: the largest logit where there are sinks; the position
    T *largest, *second;               // [ROWS]: the two largest logits, where the second is measured
    Int<T>*line, *seen, *own, *token;  // [ROWS]: the position; how many keys are seen; the own key and its token
    Int<T>*copies, *followers;         // [ROWS]: whether such a key is seen
    Largest<T, QV> most;
    std::int64_t lowest_line, highest_line;
    const T* norms;
    const std::int32_t* ids;

    // Of a block of keys: how far each is from the last of them, or from the first, where all rows are on that side;
    // and the lengths of their values. 0 where it is not asked for, and at one key more.
    T *steps, *block_norms;                   // [MOST_KEYS + 1]
    enum Side { AFTER, BEFORE, AMONG } side;  // where all rows are

    using Sums = RowSums<T, QV>;

    void take(const Forward& f, Arena& memory) {
        Base::take(f, memory);
        sum = memory.take<T>(SUMS * ROWS);
        picked = memory.take<T>(PICKED * ROWS);
        highest = memory.take<T>(ROWS);
        place = memory.take<T>(ROWS);
        largest = memory.take<T>(ROWS);
        second = memory.take<T>(ROWS);
        for (T** to : {&steps, &block_norms}) *to = memory.take<T>(Base::MOST_KEYS + 1);
        for (Int<T>** to : {&line, &seen, &own, &token, &copies, &followers}) *to = memory.take<Int<T>>(ROWS);
        most.take(memory, s->most);
    }

    template <class Block>
    void start(const Block& block, std::int64_t first_key, std::int64_t end_of_keys) {
        const Forward& f = block.f;
        Base::start(block, first_key, end_of_keys);
        constexpr T never = -std::numeric_limits<T>::infinity();
        for (int n = 0; n < SUMS * ROWS; n++) sum[n] = 0;
        for (int n = 0; n < PICKED * ROWS; n++) picked[n] = never;
        most.start([&](int r) {
            return s->floor ? static_cast<const T*>(s->floor)[block.row(r < block.count ? r : 0)] : never;
        });
        for (int r = 0; r < ROWS; r++) {
            highest[r] = largest[r] = second[r] = never;
            seen[r] = copies[r] = followers[r] = 0;
        }
        norms = s->norms ? static_cast<const T*>(s->norms) + (block.b * f.kv_heads + block.kv_head) * f.keys : nullptr;
        ids = s->ids ? s->ids + block.b * f.keys : nullptr;
        for (int j = 0; j <= Base::MOST_KEYS; j++) steps[j] = block_norms[j] = 0;
        if (!s->line) return;
        lowest_line = std::numeric_limits<std::int64_t>::max();
        highest_line = std::numeric_limits<std::int64_t>::min();
        for (int r = 0; r < ROWS; r++) {
            const std::int64_t at = block.place(r < block.count ? r : block.count - 1);
            const std::int64_t here = s->line[block.b * s->line_stride + at];
            line[r] = Int<T>(here);
            place[r] = T(here);
            if (here < lowest_line) lowest_line = here;
            if (here > highest_line) highest_line = here;
            if (!ids) continue;
            own[r] = Int<T>(s->own[block.b * s->own_stride + at]);
            token[r] = own[r] < 0 ? 0 : ids[own[r]];
        }
    }

    // Of a block of logits.
    template <class Block>
    void before(const Block& block, std::int64_t j0, int keys) {
        const T* p = block.p;
        if (norms)
            for (int j = 0; j < keys; j++) block_norms[j] = norms[j0 + j];
        if (norms) block_norms[keys] = 0;
        if (measures_distance()) {
            side = lowest_line >= j0 + keys - 1 ? AFTER : highest_line <= j0 ? BEFORE : AMONG;
            for (int j = 0; j < keys; j++) steps[j] = side == AFTER ? T(keys - 1 - j) : side == BEFORE ? T(j) : T(0);
            steps[keys] = 0;
        }
        if (s->line)
            for (int n = 0; n < 3; n++) {
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
            UNROLL_FOR(v, QV) store(picked + (AT_FIRST + n) * ROWS + v * L, load(p + j * ROWS + v * L));
        }
        if (block.f.sinks)
            UNROLL_FOR(v, QV) {
                V<T> x = load(highest + v * L);
                for (int j = 0; j < keys; j++) x = greater<T>(load(p + j * ROWS + v * L), x);
                store(highest + v * L, x);
            }
        if (s->value[SECOND_WEIGHT]) find_second(p, keys);
        if (counts) count(block, j0, keys);
        if (s->bins && !block.all_seen)
            for (int j = 0; j < keys; j++)
                UNROLL_FOR(v, QV)
                    store_int<T>(hidden + j * ROWS + v * L,
                                 is_seen(p, j, v) ? I<T>{} : I<T>{} + std::numeric_limits<Int<T>>::min());
        if (ids) look_for_tokens(p, j0, keys);
        if (s->most) most.put(p, j0, keys);
    }
    INLINE static I<T> is_seen(const T* p, int j, int v) {
        return load(p + j * ROWS + v * L) != -std::numeric_limits<T>::infinity();
    }
    // The two largest logits of each row; of equal ones both.
    void find_second(const T* p, int keys) {
        UNROLL_FOR(v, QV) {
            V<T> one = load(largest + v * L), two = load(second + v * L);
            for (int j = 0; j < keys; j++) {
                const V<T> x = load(p + j * ROWS + v * L);
                two = greater<T>(x > one ? one : x, two);
                one = greater<T>(x, one);
            }
            store(largest + v * L, one);
            store(second + v * L, two);
        }
    }
    // Keys that are seen, of each row, of each row and bin, and rows that see each key.
    template <class Block>
    void count(const Block& block, std::int64_t j0, int keys) {
        for (int j = 0; j < keys; j++) {
            Int<T>* cell = s->bins ? pairs + column_bin(block.f, j0 + j) * ROWS : nullptr;
            UNROLL_FOR(v, QV) {
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
    // Which rows have the token of key j for their own.
    INLINE I<T> matches(std::int64_t j, int v) const {
        return (load_int<T>(token + v * L) == Int<T>(ids[j])) & (load_int<T>(own + v * L) >= 0);
    }
    INLINE I<T> copy(std::int64_t j, int v) const { return matches(j, v) & (load_int<T>(own + v * L) != Int<T>(j)); }
    void look_for_tokens(const T* p, std::int64_t j0, int keys) {
        UNROLL_FOR(v, QV) {
            I<T> same = load_int<T>(copies + v * L), after = load_int<T>(followers + v * L);
            for (int j = 0; j < keys; j++) {
                const I<T> there = is_seen(p, j, v);
                same |= there & copy(j0 + j, v);
                if (j0 + j > 0) after |= there & matches(j0 + j - 1, v);
            }
            store_int<T>(copies + v * L, same);
            store_int<T>(followers + v * L, after);
        }
    }

    // The maximum moves.
    void move(const V<T>* from, const V<T>* to, const V<T>* shrink) {
        UNROLL_FOR(v, QV) {
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
    // Where all keys are on one side of all rows, a distance is that to the nearest key of the block and, from there, a
    // number below the block's size: two sums of what is never negative.
    template <class Block>
    INLINE void add(const Block&, std::int64_t j0, int keys, const V<T>* mass, const Sums& x) {
        UNROLL_FOR(v, QV) {
            plus(ONES, v, whole_number(mass[v] - x.beside[v]));
            plus(BESIDE, v, x.beside[v]);
            plus(DEPTH, v, x.depth[v]);
            plus(SQUARES, v, x.squares[v]);
            plus(LENGTH, v, x.length[v]);
            if (!measures_distance() || side == AMONG) continue;
            const V<T> at = load(place + v * L), gap = side == AFTER ? at - T(j0 + keys - 1) : T(j0) - at;
            plus(REACH, v, x.far[v] + mass[v] * gap);
        }
    }
    bool measures_distance() const { return s->line && s->value[DISTANCE]; }
    INLINE static V<T> whole_number(V<T> x) {                                           // the nearest, of what is small
        const V<T> magic = splat(T(sizeof(T) == 4 ? 12582912.0 : 6755399441055744.0));  // 1.5 * 2**23 or 2**52
        return x + magic - magic;
    }
    INLINE void plus(int n, int v, V<T> x) { store(sum + n * ROWS + v * L, load(sum + n * ROWS + v * L) + x); }

    // Of the block's weights.
    template <class Block>
    void after(const Block& block, std::int64_t j0, int keys) {
        T* p = block.p;
        if (s->columns()) Base::keep(block, j0, keys);
        if (measures_distance() && side == AMONG) reach(p, j0, keys);
        for (int n = 0; n < s->windows; n++) within(n, p, j0, keys);
        if (ids)
            UNROLL_FOR(v, QV) {
                V<T> same{}, after{};
                for (int j = 0; j < keys; j++) {
                    const V<T> x = load(p + j * ROWS + v * L);
                    same += copy(j0 + j, v) ? x : V<T>{};
                    if (j0 + j > 0) after += matches(j0 + j - 1, v) ? x : V<T>{};
                }
                plus(COPIES, v, same);
                plus(FOLLOWERS, v, after);
            }
    }
    // Distances, where there are keys on both sides of rows.
    void reach(const T* p, std::int64_t j0, int keys) {
        V<T> far[QV], at[QV];
        UNROLL_FOR(v, QV) {
            far[v] = V<T>{};
            at[v] = load(place + v * L);
        }
        for (int j = 0; j < keys; j++)
            UNROLL_FOR(v, QV) {
                const V<T> gap = at[v] - T(j0 + j);
                far[v] += load(p + j * ROWS + v * L) * greater<T>(gap, -gap);
            }
        UNROLL_FOR(v, QV) plus(REACH, v, far[v]);
    }
    T reach_of(int n) const {
        return T(std::floor(s->reach[n]));
    }  // distances are whole; in float 2.9999999999 would be 3
    // How far a vector of rows stands behind a key; not the difference of two numbers, which a float rounds from 2^24
    // on.
    INLINE V<T> behind(std::int64_t key, int v) const {
        return __builtin_convertvector(load_int<T>(line + v * L) - Int<T>(key), V<T>);
    }
    void within(int n, const T* p, std::int64_t j0, int keys) {
        const T w = reach_of(n);
        if (T(j0 - highest_line) > w || T(lowest_line - (j0 + keys - 1)) > w) return;
        UNROLL_FOR(v, QV) {
            const V<T> at = behind(j0, v);
            V<T> near{};
            for (int j = 0; j < keys; j++) {
                const V<T> gap = at - T(j);
                near += greater<T>(gap, -gap) <= w ? load(p + j * ROWS + v * L) : V<T>{};
            }
            plus(WITHIN + n, v, near);
        }
    }

    // How many keys row r may see.
    template <class Block>
    std::int64_t choices(const Block& block, int r) const {
        if (counts) return seen[r];
        if (!block.f.visible.spans.data) return block.f.keys;
        const auto& span = block.span;
        const Int<T> one = span[1][r] - span[0][r], two = span[3][r] - span[2][r];
        return (one > 0 ? one : 0) + (two > 0 ? two : 0);
    }
    // What comes of the sums, row by row in the lanes.
    struct Rows {
        std::int64_t at[ROWS];  // in [B, H, Q]
        bool follow;            // each other, there
        int count;
        T top[ROWS] __attribute__((aligned(64)));
        T norm[ROWS] __attribute__((aligned(64)));  // lse - top, in nats
        T scale[ROWS]
            __attribute__((aligned(64)));  // what a weight relative to top is multiplied by; 0: does not count
        T choices[ROWS] __attribute__((aligned(64)));       // how many keys it may see
        Int<T> counted[ROWS] __attribute__((aligned(64)));  // -1 where it counts
    };
    template <class Block>
    void finish(const Block& block) {
        Rows rows;
        rows.count = block.count;
        rows.follow = block.group == 1;
        UNROLL_FOR(v, QV) {
            store(rows.top + v * L, block.top[v]);
            for (int n = 0; n < AT_FIRST + s->firsts;
                 n++)  // logits to weights before they are normalised; -1: not seen
                store(picked + n * ROWS + v * L, weight_of(load(picked + n * ROWS + v * L), block.top[v]));
            if (!block.f.sinks) store(highest + v * L, block.top[v]);
        }
        normal(block, rows);
        judge(block, rows);
        say_all(block, rows);
        if (s->most)
            for (int r = 0; r < block.count; r++) put_list(rows, r);
        if (s->columns()) Base::sweep(block, rows.scale);
    }
    INLINE static V<T> weight_of(V<T> logit, V<T> top) {
        return logit == -std::numeric_limits<T>::infinity() ? splat(T(-1)) : exp2(logit - top);
    }
    // How to normalise rows.
    template <class Block>
    void normal(const Block& block, Rows& rows) const {
        T sink[ROWS] __attribute__((aligned(64)));
        for (int r = 0; r < ROWS; r++)
            sink[r] = block.f.sinks
                          ? static_cast<const T*>(block.f.sinks)[block.head(r < rows.count ? r : 0)] * T(LOG2E)
                          : -std::numeric_limits<T>::infinity();
        UNROLL_FOR(v, QV) {
            const V<T> ones = load(sum + ONES * ROWS + v * L);
            V<T> rest =
                load(sum + BESIDE * ROWS + v * L);  // the sum of the row less 1: the 1 of a peaked row would swallow it
            rest += ones > 0 ? ones - 1 + exp2(load(sink + v * L) - block.top[v]) : V<T>{};
            store(rows.norm + v * L, log1p(rest));
            store(rows.scale + v * L, 1 / (1 + rest));
        }
        if (!s->given) return;
        for (int r = 0; r < rows.count; r++) {
            const double given = double(static_cast<const T*>(s->given)[block.row(r)]) - double(rows.top[r]) * LN2;
            const double size = std::abs(double(rows.norm[r]) + double(rows.top[r]) * LN2),
                         off = std::abs(given - double(rows.norm[r]));
            if (off <= s->rounding * (size > 1 ? size : 1)) continue;
            rows.norm[r] = T(given);
            // at least the smallest normal number: 0 is the scale of a row that does not count
            rows.scale[r] = std::max(T(std::exp(-given)), std::numeric_limits<T>::min());
        }
    }
    // Which of them count.
    template <class Block>
    void judge(const Block& block, Rows& rows) const {
        Int<T> finite[ROWS] __attribute__((aligned(64)));
        UNROLL_FOR(v, QV) {
            const V<T> most = load(highest + v * L);  // a sink may be the top
            const V<T> all = load(rows.norm + v * L) + load(rows.scale + v * L) + load(sum + DEPTH * ROWS + v * L) +
                             load(sum + LENGTH * ROWS + v * L) + most + block.top[v];
            store_int<T>(finite + v * L, (all * T(0) == 0) & (most > -std::numeric_limits<T>::max()));
        }
        for (int r = 0; r < rows.count; r++) {
            const std::int64_t n = choices(block, r);
            const bool counts = n > 0 && finite[r] && may_count(block, r);
            if (n > 0 && !finite[r]) s->spoilt->store(true, std::memory_order_relaxed);
            rows.at[r] = block.row(r);
            rows.choices[r] = T(n);
            rows.counted[r] = counts ? -1 : 0;
            s->counted[rows.at[r]] = counts;
            if (!counts)
                rows.scale[r] = 0;
            else if (s->columns() && !this->counts)
                Base::count_spans(block, r);
        }
        for (int r = rows.count; r < ROWS; r++) {
            rows.choices[r] = 1;
            rows.scale[r] = rows.counted[r] = 0;
        }
    }
    // body(v) gives the quantity of a vector of rows. It is NaN where a row does not count.
    template <class Body>
    INLINE void say(const Rows& rows, void* to, const Body& body) const {
        if (!to) return;
        T x[ROWS] __attribute__((aligned(64)));
        UNROLL_FOR(v, QV)
            store(x + v * L,
                  load_int<T>(rows.counted + v * L) != 0 ? body(v) : splat(std::numeric_limits<T>::quiet_NaN()));
        T* const all = static_cast<T*>(to);
        if (rows.follow)
            for (int r = 0; r < rows.count; r++) all[rows.at[0] + r] = x[r];
        else
            for (int r = 0; r < rows.count; r++) all[rows.at[r]] = x[r];
    }
    template <class Block>
    void say_all(const Block& block, const Rows& rows) const {
        const V<T> none = splat(std::numeric_limits<T>::quiet_NaN());
        const auto of = [&](int n, int v) __attribute__((always_inline)) { return load(sum + n * ROWS + v * L); };
        const auto scale = [&](int v) __attribute__((always_inline)) { return load(rows.scale + v * L); };
        const auto norm = [&](int v) __attribute__((always_inline)) { return load(rows.norm + v * L); };
        const auto mass = [&](int v)
                              __attribute__((always_inline)) { return (of(ONES, v) + of(BESIDE, v)) * scale(v); };
        const auto entropy = [&](int v) __attribute__((always_inline)) {
            return greater<T>(mass(v) * norm(v) + of(DEPTH, v) * T(LN2) * scale(v), V<T>{});
        };
        // the weight of a single key, 0 where it is not seen
        const auto weight = [&](int n, int v) __attribute__((always_inline)) {
            return greater<T>(load(picked + n * ROWS + v * L), V<T>{}) * scale(v);
        };
        const auto choices_of = [&](int v) __attribute__((always_inline)) { return load(rows.choices + v * L); };
        say(rows, s->value[LSE], [&](int v) { return load(rows.top + v * L) * T(LN2) + norm(v); });
        say(rows, s->value[MAX_LOGIT], [&](int v) { return load(highest + v * L) * T(LN2); });
        say(rows, s->value[ENTROPY], entropy);
        say(rows, s->value[NORMALIZED_ENTROPY],
            [&](int v) { return choices_of(v) >= 2 ? entropy(v) / log1p(choices_of(v) - 1) : none; });
        say(rows, s->value[MAX_WEIGHT],
            [&](int v) { return exp2(load(highest + v * L) - load(rows.top + v * L)) * scale(v); });
        say(rows, s->value[SECOND_WEIGHT], [&](int v) {
            return greater<T>(weight_of(load(second + v * L), load(rows.top + v * L)), V<T>{}) * scale(v);
        });
        say(rows, s->value[EFFECTIVE_KEYS], [&](int v) {
            const V<T> squares = of(SQUARES, v) * scale(v) * scale(v);
            return squares >= std::numeric_limits<T>::min() ? 1 / squares
                                                            : none;  // what is less may have infinity for its inverse
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
                    const V<T> gap = behind(s->first[block.b * s->first_stride + n], v);
                    x += greater<T>(gap, -gap) > reach_of(k) ? weight(AT_FIRST + n, v) : V<T>{};
                }
                return x;
            });
        }
        if (!ids) return;
        say(rows, s->value[DUPLICATE],
            [&](int v) { return load_int<T>(copies + v * L) != 0 ? of(COPIES, v) * scale(v) : none; });
        say(rows, s->value[INDUCTION],
            [&](int v) { return load_int<T>(followers + v * L) != 0 ? of(FOLLOWERS, v) * scale(v) : none; });
    }
    void put_list(const Rows& rows, int r) {
        most.sort(r);
        for (int k = 0; k < s->most; k++) {
            const bool known = rows.counted[r] && most.key[k * ROWS + r] >= 0;
            const T weight = std::exp2(most.x[k * ROWS + r] - rows.top[r]) * rows.scale[r];
            static_cast<T*>(s->most_weight)[rows.at[r] * s->most + k] =
                known ? weight : std::numeric_limits<T>::quiet_NaN();
            s->most_key[rows.at[r] * s->most + k] = known ? most.key[k * ROWS + r] : -1;
        }
    }
};

// The sums that the row statistics of docs/concepts/statistics.md need; statistics_observer-inl.h computes these from
// them.

// Sums over the weights of a row, and keys whose logits are stored.
enum RowSum {
    SUM_ONES,
    SUM_REST,
    SUM_GAP,
    SUM_SQUARES,
    SUM_DISTANCE,
    SUM_VALUE_NORM,
    SUM_DUPLICATE,
    SUM_INDUCTION,
    SUM_WINDOW,
    SUMS = SUM_WINDOW + MAX_WINDOWS
};
enum SingleKey { KEY_SELF, KEY_PREVIOUS, KEY_NEXT, KEY_FIRST, SINGLE_KEYS = KEY_FIRST + MAX_FIRST_KEYS };

// Sums over a block of keys, computed in the loop that exponentiates its logits. `rest` sums the weights below 1; `gap`
// the weights times (top - logit); `distance` and `value_norm` the weights times a number of each key, [keys].
template <class T, int QV>
struct BlockSums {
    V<T> rest[QV], gap[QV], squares[QV], distance[QV], value_norm[QV];
    const T *key_distances, *norms;
    template <class Observer>
    INLINE explicit BlockSums(const Observer& observer)
        : key_distances(observer.key_distances), norms(observer.block_norms) {
        UNROLL_FOR(v, QV) rest[v] = gap[v] = squares[v] = distance[v] = value_norm[v] = V<T>{};
    }
    INLINE void add(int j, int v, V<T> below, V<T> x) {  // `below` = logit - top, finite: 0 * -inf would be NaN
        rest[v] = below < 0 ? rest[v] + x : rest[v];
        gap[v] -= x * below;
        squares[v] += x * x;
        distance[v] += x * key_distances[j];
        value_norm[v] += x * norms[j];
    }
};

// The hooks of the observer that run for each block of keys. Sums over weights are relative to the running maximum,
// as the output is. The weights of a block of keys are summed first and then added to the row's sum: in one chain over
// a long row the rounding of a large sum would exceed a small weight.
//
// No sum may cancel on a peaked row, where one weight is close to 1. So weights that are exactly 1 (those of the
// largest logit) are summed separately from the rest, and the entropy is computed as Σ p (top - s) + mass (lse - top),
// whose terms are never negative.
template <class T, int QV>
struct RowSumsObserver : KeyStatistics<T, QV> {
    using Base = KeyStatistics<T, QV>;
    using Base::L, Base::ROWS, Base::s, Base::counts_single_pairs, Base::cell_pairs, Base::mask_signs, Base::map_column,
        Base::partition_of, Base::may_count;
    T* sum;                     // [SUMS][ROWS]
    T* key_logits;              // [SINGLE_KEYS][ROWS]: logits of single keys; -inf: masked
    T *max_logit, *position;    // [ROWS]: the largest logit, without the sink; the position
    T *first_max, *second_max;  // [ROWS]: the two largest logits, for SECOND_WEIGHT
    // [ROWS]: the position as an integer; the number of visible keys; the key at that position and its token; whether
    // a key that counts for DUPLICATE or INDUCTION is visible (-1: yes)
    Int<T>*whole_position, *visible_count, *own_key, *own_token, *has_duplicate, *has_induction;
    TopK<T, QV> top;
    std::int64_t min_position, max_position;
    bool consecutive;  // the rows are at consecutive positions
    const T* value_norms;
    const std::int32_t* token_ids;

    // For each key of the block: its distance from the last key if `side` is AFTER, from the first if it is BEFORE; and
    // the norm of its value. 0 if no statistic needs it, and in the extra element, which a pair of bf16 may read.
    T *key_distances, *block_norms;           // [MAX_KEYS + 1]
    enum Side { AFTER, BEFORE, AMONG } side;  // the positions of all rows relative to the block of keys

    using Sums = BlockSums<T, QV>;

    void allocate(const Forward& f, Arena& memory) {
        Base::allocate(f, memory);
        sum = memory.allocate<T>(SUMS * ROWS);
        key_logits = memory.allocate<T>(SINGLE_KEYS * ROWS);
        max_logit = memory.allocate<T>(ROWS);
        position = memory.allocate<T>(ROWS);
        first_max = memory.allocate<T>(ROWS);
        second_max = memory.allocate<T>(ROWS);
        for (T** to : {&key_distances, &block_norms}) *to = memory.allocate<T>(Base::MAX_KEYS + 1);
        for (Int<T>** to : {&whole_position, &visible_count, &own_key, &own_token, &has_duplicate, &has_induction})
            *to = memory.allocate<Int<T>>(ROWS);
        top.allocate(memory, s->top_k);
    }

    template <class Block>
    void start(const Block& block, std::int64_t first_key, std::int64_t end_of_keys) {
        const Forward& f = block.f;
        Base::start(block, first_key, end_of_keys);
        constexpr T minus_infinity = -std::numeric_limits<T>::infinity();
        std::fill_n(sum, (SUM_WINDOW + s->window_count) * ROWS, T(0));
        std::fill_n(key_logits, (KEY_FIRST + s->first_count) * ROWS, minus_infinity);
        top.start([&](int r) {
            return s->logit_threshold
                       ? static_cast<const T*>(s->logit_threshold)[block.flat_row(r < block.count ? r : 0)]
                       : minus_infinity;
        });
        for (int r = 0; r < ROWS; r++) {
            max_logit[r] = first_max[r] = second_max[r] = minus_infinity;
            visible_count[r] = has_duplicate[r] = has_induction[r] = 0;
        }
        value_norms = s->value_norms
                          ? static_cast<const T*>(s->value_norms) + (block.b * f.kv_heads + block.kv_head) * f.keys
                          : nullptr;
        token_ids = s->token_ids ? s->token_ids + block.b * f.keys : nullptr;
        for (int j = 0; j <= Base::MAX_KEYS; j++) key_distances[j] = block_norms[j] = 0;
        if (!s->position) return;
        load_positions(block);
        if (!token_ids) return;
        for (int r = 0; r < ROWS; r++) {
            own_key[r] = Int<T>(s->own_key[block.b * s->own_key_stride + query_of_lane(block, r)]);
            own_token[r] = own_key[r] < 0 ? 0 : token_ids[own_key[r]];
        }
    }
    // The index of the query of row r; lanes beyond the last row have its query.
    template <class Block>
    INLINE static std::int64_t query_of_lane(const Block& block, int r) {
        return block.query_index(r < block.count ? r : block.count - 1);
    }
    template <class Block>
    void load_positions(const Block& block) {
        const std::int64_t* const all = s->position + block.b * s->position_stride;
        const std::int64_t first = all[query_of_lane(block, 0)];
        consecutive = block.group == 1;
        for (int r = 0; r < ROWS; r++) whole_position[r] = Int<T>(all[query_of_lane(block, r)]);
        min_position = max_position = first;
        for (int r = 0; r < ROWS; r++) {
            const std::int64_t at = whole_position[r];
            position[r] = T(at);
            min_position = std::min(min_position, at);
            max_position = std::max(max_position, at);
            consecutive &= r >= block.count || at == first + r;
        }
    }

    // Reads the logits of keys j0 .. j0 + keys.
    template <class Block>
    void observe_logits(const Block& block, std::int64_t j0, int keys) {
        const T* p = block.p;
        if (value_norms)
            for (int j = 0; j < keys; j++) block_norms[j] = value_norms[j0 + j];
        if (value_norms) block_norms[keys] = 0;
        if (measures_distance()) {
            side = min_position >= j0 + keys - 1 ? AFTER : max_position <= j0 ? BEFORE : AMONG;
            for (int j = 0; j < keys; j++)
                key_distances[j] = side == AFTER ? T(keys - 1 - j) : side == BEFORE ? T(j) : T(0);
            key_distances[keys] = 0;
        }
        if (s->position)
            for (int n = 0; n < 3; n++) {
                const std::int64_t step = n == KEY_SELF ? 0 : n == KEY_PREVIOUS ? -1 : 1;
                if (max_position + step < j0 || min_position + step >= j0 + keys) continue;
                T* const logits = key_logits + n * ROWS;
                if (consecutive) {
                    const std::int64_t row0 = min_position + step - j0,  // the key of row 0
                        end = std::min<std::int64_t>(block.count, keys - row0);
                    for (std::int64_t r = std::max<std::int64_t>(0, -row0); r < end; r++)
                        logits[r] = p[(row0 + r) * ROWS + r];
                    continue;
                }
                for (int r = 0; r < ROWS; r++) {
                    const std::int64_t j = whole_position[r] + step - j0;
                    if (j >= 0 && j < keys) logits[r] = p[j * ROWS + r];
                }
            }
        for (int n = 0; n < s->first_count; n++) {
            const std::int64_t j = s->first_keys[block.b * s->first_stride + n] - j0;
            if (j < 0 || j >= keys) continue;
            UNROLL_FOR(v, QV) store(key_logits + (KEY_FIRST + n) * ROWS + v * L, load(p + j * ROWS + v * L));
        }
        if (block.f.sinks)
            UNROLL_FOR(v, QV) {
                V<T> x = load(max_logit + v * L);
                for (int j = 0; j < keys; j++) x = maximum<T>(load(p + j * ROWS + v * L), x);
                store(max_logit + v * L, x);
            }
        if (s->value[SECOND_WEIGHT]) find_second(p, keys);
        if (counts_single_pairs) count_visible_pairs(block, j0, keys);
        if (s->bins && !block.all_visible)
            for (int j = 0; j < keys; j++)
                UNROLL_FOR(v, QV)
                    store_int<T>(mask_signs + j * ROWS + v * L,
                                 is_visible(p, j, v) ? I<T>{} : I<T>{} + std::numeric_limits<Int<T>>::min());
        if (token_ids) match_tokens(p, j0, keys);
        if (s->top_k) top.insert(p, j0, keys);
    }
    INLINE static I<T> is_visible(const T* p, int j, int v) {
        return load(p + j * ROWS + v * L) != -std::numeric_limits<T>::infinity();
    }
    // Updates the two largest logits of each row. If the largest occurs twice, both are equal.
    void find_second(const T* p, int keys) {
        UNROLL_FOR(v, QV) {
            V<T> largest = load(first_max + v * L), second = load(second_max + v * L);
            for (int j = 0; j < keys; j++) {
                const V<T> x = load(p + j * ROWS + v * L);
                second = maximum<T>(x > largest ? largest : x, second);
                largest = maximum<T>(x, largest);
            }
            store(first_max + v * L, largest);
            store(second_max + v * L, second);
        }
    }
    // Counts the visible keys of each row, in each bin of the map, and the rows to which each key is visible.
    template <class Block>
    void count_visible_pairs(const Block& block, std::int64_t j0, int keys) {
        for (int j = 0; j < keys; j++) {
            Int<T>* cell = s->bins ? cell_pairs + map_column(j0 + j) * ROWS : nullptr;
            UNROLL_FOR(v, QV) {
                const I<T> x = is_visible(block.p, j, v);
                store_int<T>(visible_count + v * L, load_int<T>(visible_count + v * L) - x);
                if (cell) store_int<T>(cell + v * L, load_int<T>(cell + v * L) - x);
            }
        }
        if (!s->total.received) return;
        for (int r = 0; r < block.count; r++) {
            if (!may_count(block, r)) continue;
            std::int64_t* eligible = partition_of(block, r).eligible() + j0;
            for (int j = 0; j < keys; j++) eligible[j] += block.p[j * ROWS + r] != -std::numeric_limits<T>::infinity();
        }
    }
    // Lanes whose row has the token of key j.
    INLINE I<T> has_own_token(std::int64_t j, int v) const {
        return (load_int<T>(own_token + v * L) == Int<T>(token_ids[j])) & (load_int<T>(own_key + v * L) >= 0);
    }
    INLINE I<T> is_duplicate(std::int64_t j, int v) const {
        return has_own_token(j, v) & (load_int<T>(own_key + v * L) != Int<T>(j));
    }
    void match_tokens(const T* p, std::int64_t j0, int keys) {
        UNROLL_FOR(v, QV) {
            I<T> duplicate = load_int<T>(has_duplicate + v * L), induction = load_int<T>(has_induction + v * L);
            for (int j = 0; j < keys; j++) {
                const I<T> visible = is_visible(p, j, v);
                duplicate |= visible & is_duplicate(j0 + j, v);
                if (j0 + j > 0) induction |= visible & has_own_token(j0 + j - 1, v);
            }
            store_int<T>(has_duplicate + v * L, duplicate);
            store_int<T>(has_induction + v * L, induction);
        }
    }

    // Rescales the sums from one running maximum to the next. Where it rises, no weight is exactly 1 any more.
    void rescale(const V<T>* from, const V<T>* to, const V<T>* rescaling) {
        UNROLL_FOR(v, QV) {
            T* at = sum + v * L;
            const I<T> rises = to[v] > from[v];
            const V<T> ones = load(at + SUM_ONES * ROWS), rest = load(at + SUM_REST * ROWS);
            store(at + SUM_ONES * ROWS, rises ? V<T>{} : ones);
            store(at + SUM_REST * ROWS, rises ? (ones + rest) * rescaling[v] : rest);
            const V<T> gap = (load(at + SUM_GAP * ROWS) + (to[v] - from[v]) * (ones + rest)) * rescaling[v];
            store(at + SUM_GAP * ROWS, rescaling[v] == 0 ? V<T>{} : gap);  // infinity * 0 would be NaN
            store(at + SUM_SQUARES * ROWS, load(at + SUM_SQUARES * ROWS) * rescaling[v] * rescaling[v]);
            for (int n = SUM_DISTANCE; n < SUM_WINDOW + s->window_count; n++)
                store(at + n * ROWS, load(at + n * ROWS) * rescaling[v]);
        }
    }
    // Adds the sums of a block of keys. With all keys on one side of all rows, a distance is the sum of that to the
    // nearest key of the block and of one below the block's size. Neither is negative, so nothing cancels.
    template <class Block>
    INLINE void add_sums(const Block&, std::int64_t j0, int keys, const V<T>* mass, const Sums& x) {
        UNROLL_FOR(v, QV) {
            add_to_sum(SUM_ONES, v, round_to_integer(mass[v] - x.rest[v]));
            add_to_sum(SUM_REST, v, x.rest[v]);
            add_to_sum(SUM_GAP, v, x.gap[v]);
            add_to_sum(SUM_SQUARES, v, x.squares[v]);
            add_to_sum(SUM_VALUE_NORM, v, x.value_norm[v]);
            if (!measures_distance() || side == AMONG) continue;
            const V<T> at = load(position + v * L), gap = side == AFTER ? at - T(j0 + keys - 1) : T(j0) - at;
            add_to_sum(SUM_DISTANCE, v, x.distance[v] + mass[v] * gap);
        }
    }
    bool measures_distance() const { return s->position && s->value[DISTANCE]; }
    // For |x| < 2**22 (float) or 2**51 (double): adding 1.5 * 2**23 or 1.5 * 2**52 rounds to an integer.
    INLINE static V<T> round_to_integer(V<T> x) {
        const V<T> magic = splat(T(sizeof(T) == 4 ? 12582912.0 : 6755399441055744.0));
        return x + magic - magic;
    }
    INLINE void add_to_sum(int n, int v, V<T> x) { store(sum + n * ROWS + v * L, load(sum + n * ROWS + v * L) + x); }

    // Reads the weights of keys j0 .. j0 + keys, relative to the running maximum.
    template <class Block>
    void observe_weights(const Block& block, std::int64_t j0, int keys) {
        T* p = block.p;
        if (s->has_column_statistics()) Base::store_weights(block, j0, keys);
        if (measures_distance() && side == AMONG) add_distances(p, j0, keys);
        for (int n = 0; n < s->window_count; n++) add_window(n, p, j0, keys);
        if (token_ids)
            UNROLL_FOR(v, QV) {
                V<T> duplicate{}, induction{};
                for (int j = 0; j < keys; j++) {
                    const V<T> x = load(p + j * ROWS + v * L);
                    duplicate += is_duplicate(j0 + j, v) ? x : V<T>{};
                    if (j0 + j > 0) induction += has_own_token(j0 + j - 1, v) ? x : V<T>{};
                }
                add_to_sum(SUM_DUPLICATE, v, duplicate);
                add_to_sum(SUM_INDUCTION, v, induction);
            }
    }
    // Adds the weighted distances of a block that has keys on both sides of some row.
    void add_distances(const T* p, std::int64_t j0, int keys) {
        V<T> distance[QV], at[QV];
        UNROLL_FOR(v, QV) {
            distance[v] = V<T>{};
            at[v] = load(position + v * L);
        }
        for (int j = 0; j < keys; j++)
            UNROLL_FOR(v, QV) {
                const V<T> gap = at[v] - T(j0 + j);
                distance[v] += load(p + j * ROWS + v * L) * maximum<T>(gap, -gap);
            }
        UNROLL_FOR(v, QV) add_to_sum(SUM_DISTANCE, v, distance[v]);
    }
    // Rounded down, since distances are integers: 2.9999999999 would be 3 in float.
    T radius_of(int n) const { return T(std::floor(s->window_radius[n])); }
    // The positions of a vector of rows minus that of a key. Subtracted as integers: a float rounds positions from
    // 2**24 on.
    INLINE V<T> distance_from(std::int64_t key, int v) const {
        return __builtin_convertvector(load_int<T>(whole_position + v * L) - Int<T>(key), V<T>);
    }
    void add_window(int n, const T* p, std::int64_t j0, int keys) {
        const T w = radius_of(n);
        if (T(j0 - max_position) > w || T(min_position - (j0 + keys - 1)) > w) return;
        UNROLL_FOR(v, QV) {
            const V<T> at = distance_from(j0, v);
            V<T> mass{};
            for (int j = 0; j < keys; j++) {
                const V<T> gap = at - T(j);
                mass += maximum<T>(gap, -gap) <= w ? load(p + j * ROWS + v * L) : V<T>{};
            }
            add_to_sum(SUM_WINDOW + n, v, mass);
        }
    }
};

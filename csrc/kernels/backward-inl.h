// The backward pass. The weights are computed again from q, k and lse; with dP = V dOᵀ (transposed, as everything
// here),
//
//     dS = P ∘ (dP - δ),  δ_i = out_i · dout_i - dlse_i,   dV = Pᵀ dO,  dQ = scale dS K,  dK = scale dSᵀ Q.
//
// A task is a group of row blocks of one key/value head. Its dQ is its own; to dK and dV it adds, block of keys by
// block of keys, after the groups before it: what a key gets is summed in one order, whichever threads are how fast.

// The most row blocks of a group. Each block of keys meets all of them: dK and dV of long sequences are then read and
// written seldom.
constexpr int TOGETHER = 4;

// A group among those of its head: whose turn it is at which keys. dK and dV are sums, [K][whole vectors], which the
// first group finds uninitialised, and of which the last one makes the result.
template <class T>
struct Turns {
    const Backward& g;
    std::int64_t head, group, groups;
    T *dk, *dv;
    int k_width, v_width;
    std::atomic<std::int64_t>* passed;     // of each group, to which key it has been
    std::int64_t waiting = 0;              // the groups before have been everywhere
    std::int64_t begun = 0, finished = 0;  // keys before are, where this is the first group, or the last

    // To be called before what the keys before `end` get is added to; false where nobody wants the result any more.
    bool enter(std::int64_t end) {
        const std::int64_t all = g.forward.keys;
        for (std::int64_t n = waiting; n < group; n++) {
            const auto gone = [&] { return passed[n].load(std::memory_order_acquire); };
            for (int looks = 0; gone() < end; looks++) {
                if (stops(g.forward)) return false;
                if (looks > 100) sched_yield();
            }
            if (n == waiting && gone() == all) waiting++;
        }
        if (group == 0) begin_at(end);
        return true;
    }
    // And after.
    void leave(std::int64_t end) {
        if (group == groups - 1) finish_at(end);
        passed[group].store(end, std::memory_order_release);
    }
    void leave_all() {
        if ((group == 0 || group == groups - 1) && !enter(g.forward.keys)) return;
        leave(g.forward.keys);
    }

private:
    void begin_at(std::int64_t end) {
        for (T* sum = dk + begun * k_width; sum < dk + end * k_width; sum += LANES<T>) store(sum, V<T>{});
        for (T* sum = dv + begun * v_width; sum < dv + end * v_width; sum += LANES<T>) store(sum, V<T>{});
        begun = end;
    }
    void finish_at(std::int64_t end) {
        const Forward& f = g.forward;
        const std::int64_t b = head / f.kv_heads, h = head % f.kv_heads, size = is_half(f) ? 2 : sizeof(T);
        const auto rows = [&](const T* from, int padded, std::int64_t width, T factor, void* to,
                              const std::int64_t* stride) {
            constexpr int AHEAD = 16;  // rows that are asked for early: they are far, and far from each other
            V<T> zero{};
            char* row = static_cast<char*>(to) + (b * stride[0] + h * stride[1] + finished * stride[2]) * size;
            for (std::int64_t j = finished; j < end; j++, row += stride[2] * size)
                for (std::int64_t d = 0; d < width; d += LANES<T>) {
                    if (d * size % 64 == 0 && j + AHEAD < f.keys)
                        __builtin_prefetch(row + AHEAD * stride[2] * size + d * size, 1);
                    const V<T> x = load(from + j * padded + d) * factor;
                    zero += x * T(0);  // NaN or infinity times 0 is NaN
                    put_numbers<T>(row, d, x, width, f.q.dtype);
                }
            if (any<T>(zero != zero)) g.spoil();
        };
        rows(dk, k_width, f.head_dim, T(f.scale), g.dk, g.dk_stride);
        rows(dv, v_width, f.v_head_dim, T(1), g.dv, g.dv_stride);
        finished = end;
    }
};

template <class T, int QV, class Op = Plain<T>>
struct Gradient : Logits<T, QV, Op> {
    using Base = Logits<T, QV, Op>;
    using Base::f, Base::p, Base::count, Base::L, Base::ROWS, Base::KEYS, Base::PAIRS, Base::head, Base::query,
        Base::row, Base::b;
    using Outer = OuterTile<T, QV, Op>;
    using Word = typename Op::Word;

    const Backward& g;
    int k_width, v_width;                // D and Dv, rounded up to whole vectors
    T *dots, *dropout_factors, *slopes;  // [KEYS][ROWS]
    Word* dout;                          // [Dv / PER_WORD][ROWS]
    T* dq;                               // [D][ROWS]
    Word *q_rows, *dout_rows;            // k_width and v_width columns in panels, see Tile
    Word *weight_rows, *by_rows,
        *by_keys;  // the weights and dS as they are multiplied: [KEYS][ROWS / PER_WORD], [KEYS / PER_WORD][ROWS]
    V<T> lse[QV], delta[QV];
    V<T> top[QV];  // if it is apart from lse: the largest logit
    bool top_apart = false;
    std::int64_t begin, end;  // the keys that any row may see
    std::int64_t from, to;    // of those met last
    struct Made {
        std::int64_t from;
        int keys;
    };
    Made* shared;  // which keys wide_k holds by pairs

    static int whole(std::int64_t n) { return int((n + L - 1) / L * L); }
    static std::size_t scratch(const Backward& g) {
        Arena memory{0};
        Gradient(g, 0, 0, memory);
        return memory.next;
    }

    Gradient(const Backward& call, std::int64_t batch, std::int64_t head, Arena& memory)
        : Base(call.forward, batch, head, memory), g(call), k_width(whole(f.head_dim)), v_width(whole(f.v_head_dim)) {
        shared = memory.take<Made>(1);
        dots = memory.take<T>(KEYS * ROWS);
        dropout_factors = memory.take<T>(KEYS * ROWS);
        slopes = memory.take<T>(f.softcap > 0 ? KEYS * ROWS : 0);
        dout = memory.take<Word>(f.v_head_dim * ROWS);
        dq = memory.take<T>(f.head_dim * ROWS);
        q_rows = memory.take<Word>(k_width * Outer::LINE);
        dout_rows = memory.take<Word>(v_width * Outer::LINE);
        if constexpr (PAIRS)
            for (Word** to : {&weight_rows, &by_rows, &by_keys}) *to = memory.take<Word>(KEYS * ROWS / 2);
        else {
            weight_rows = dropout_factors;
            by_rows = by_keys = this->p;
        }
    }

    // What lies here until all who meet a block of keys have met it stays; the rest may be another's, who works in
    // turn.
    void share(const Gradient& other) {
        this->wide_k = other.wide_k;
        this->wide_v = other.wide_v;
        this->line = other.line;
        dots = other.dots;
        slopes = other.slopes;
        shared = other.shared;
        if constexpr (PAIRS) {
            p = other.p;
            dropout_factors = other.dropout_factors;
            by_keys = other.by_keys;
        }
    }
    void start(std::int64_t first, int rows) {
        open(first, rows);
        copy_rows(f.q, int(f.head_dim), k_width, q_rows);
        copy_rows(g.grad_out, int(f.v_head_dim), v_width, dout_rows);
        for (int n = 0; n < f.head_dim * QV; n++) store(dq + n * L, V<T>{});
        *shared = {-1, 0};
    }
    // Meets the block of keys from j on: what of it these rows may see, from `from` to `to`, of which they add to dq;
    // and whether there is any.
    bool meet(std::int64_t j) {
        from = j > begin ? j : begin;
        to = j + KEYS < end ? j + KEYS : end;
        if (from >= to) return false;
        const int keys = int(to - from);
        if (!logits(from, keys)) return false;
        logit_gradient(from, keys, f.softcap > 0);
        PvTile<T, QV, Op>::mixes(by_keys, keys_across(from, keys), (keys + Op::PER_WORD - 1) / Op::PER_WORD,
                                 int(f.head_dim), dq, false);
        return true;
    }
    // By pairs they are made once for all who share them; others have been widened for the logits.
    Lines keys_across(std::int64_t j, int keys) {
        const int depth = int(f.head_dim);
        const bool there =
            PAIRS ? shared->from == j && shared->keys == keys : sizeof(T) == 4 && f.k.dtype != Dtype::f32;
        if (there) return {reinterpret_cast<const char*>(this->wide_k), depth * std::int64_t(sizeof(Word))};
        *shared = {j, keys};
        return this->across(f.k, j, keys, depth, this->wide_k);
    }
    // What some who have met the same keys add to dK and dV.
    static void add(Gradient* const* some, int number, const Turns<T>& to) {
        typename Outer::Part weights[TOGETHER], changes[TOGETHER];
        for (int n = 0; n < number; n++) {
            const Gradient& x = *some[n];
            const int words = (x.count + Op::PER_WORD - 1) / Op::PER_WORD;
            weights[n] = {x.weight_rows, x.dout_rows, words};
            changes[n] = {x.by_rows, x.q_rows, words};
        }
        const Gradient& x = *some[0];
        const int keys = int(x.to - x.from);
        Outer::outer_all(weights, number, keys, x.v_width, to.dv + x.from * x.v_width);
        Outer::outer_all(changes, number, keys, x.k_width, to.dk + x.from * x.k_width);
    }
    void finish() {
        V<T> scale[QV];
        UNROLL_FOR(v, QV) scale[v] = splat(T(f.scale));
        if (!this->put_rows(dq, int(f.head_dim), scale, g.dq, g.dq_stride)) g.spoil();
    }

    // The logits, less lse where the product can take it away.
    bool logits(std::int64_t j, int keys) {
        return Base::logits(j, keys, slopes, nullptr, top_apart || f.softcap > 0 ? nullptr : lse);
    }
    // From them: the weights that met the values, and dS, of the logits as they were before the cap if `uncapped`.
    void logit_gradient(std::int64_t j, int keys, bool uncapped) {
        const int width = int(f.v_head_dim);
        const bool drops = f.dropout > 0;
        if (top_apart || f.softcap > 0)
            for (int n = 0; n < keys; n++)
                UNROLL_FOR(v, QV)
                    store(p + n * ROWS + v * L,
                          (top_apart ? load(p + n * ROWS + v * L) - top[v] : load(p + n * ROWS + v * L)) - lse[v]);
        const Lines values = this->natural(f.v, j, keys, width, this->wide_v);
        QkTile<T, QV, Op>::dots(dout, values, keys, width / Op::PER_WORD, T(1), dots, this->in_pieces(width),
                                drops ? Also::nothing : Also::less, delta);
        if (drops) this->keep(j, keys, dropout_factors);
        if (drops || uncapped)
            weights_and_gradients<true>(keys, drops, uncapped);
        else
            weights_and_gradients<false>(keys, false, false);
    }
    template <bool OPTIONS>
    void weights_and_gradients(int keys, bool drops, bool uncapped) {
        V<T> less[QV];  // in registers: what is stored below might be it for all that the compiler knows
        T *const p = this->p, *const dots = this->dots, *const dropout_factors = this->dropout_factors,
                 *const slopes = this->slopes;
        Word *const weight_rows = this->weight_rows, *const by_rows = this->by_rows, *const by_keys = this->by_keys;
        UNROLL_FOR(v, QV) less[v] = delta[v];
        const auto change_of = [&](int at_tile, int v, V<T>& weight) __attribute__((always_inline)) {
            V<T> factor = splat(T(1)), slope = factor;
            if (OPTIONS && drops) factor = load(dropout_factors + at_tile);
            if (OPTIONS && uncapped) slope = load(slopes + at_tile);
            V<T> change = weight * (OPTIONS && drops ? load(dots + at_tile) * factor - less[v] : load(dots + at_tile));
            if (OPTIONS) {
                change *= slope;
                weight *= factor;
            }
            return change;
        };
        constexpr int N = QV * Op::PER_WORD;  // weights of a word of keys
        for (int n = 0; n < keys; n += Op::PER_WORD) {
            V<T> weights[N];
            UNROLL_FOR(m, N) weights[m] = load_exponent(p + (n + m % Op::PER_WORD) * ROWS + m / Op::PER_WORD * L);
            exp2_each<N>(weights);
            UNROLL_FOR(v, QV) {
                V<T>*const weight = weights + v * Op::PER_WORD, change[Op::PER_WORD];
                UNROLL_FOR(w, Op::PER_WORD) change[w] = change_of((n + w) * ROWS + v * L, v, weight[w]);
                if constexpr (PAIRS) {
                    if (n + 1 == keys) change[1] = V<T>{};  // of no key
                    const auto apart = [&](Word* to, auto both) __attribute__((always_inline)) {
                        auto* const key = reinterpret_cast<std::uint16_t*>(to) + n * ROWS + v * L;
                        store_apart(key, key + ROWS, both);
                    };
                    const auto changes = narrowed(change[0], change[1]);
                    apart(weight_rows, narrowed(weight[0], weight[1]));
                    apart(by_rows, changes);
                    store_words_of(by_keys + n / 2 * ROWS + v * L, changes);
                } else {
                    store(dropout_factors + n * ROWS + v * L, weight[0]);
                    store(p + n * ROWS + v * L, change[0]);
                }
            }
        }
    }

    // Sets up a block for `logit_gradient`.
    void open(std::int64_t first, int rows) {
        this->first = first;
        count = rows;
        this->load_queries();
        this->load_spans();
        this->load_words(g.grad_out, int(f.v_head_dim), T(1), dout);
        this->reach(begin, end);
        load_row_sums();
        const T border = coarse();
        I<T> beyond{};
        UNROLL_FOR(v, QV) beyond |= (lse[v] > border) | (lse[v] < -border);
        top_apart = any<T>(beyond) || count <= MOST_FEW<T> || this->in_pieces(f.head_dim);
        if (top_apart) sum_again();
    }
    // The forward pass adds up the products of few rows in another order than this one does, so that the rounding of
    // lse and that of the logits here would not cancel: dV erred three times as much as torch's at 8 queries. Such rows
    // take their sums again; and so do rows whose products are summed in pieces, where the rounding of lse, of about
    // 10 * 2**-24, would be the largest error.
    //
    // A number as large as this has lost of a sum of weights what comes after the 17th bit, or the twelfth, where the
    // weights are rounded to bf16; and the largest has lost all. Where products over D are short, they err so little
    // that the 20 bits of 16 show in dV.
    T coarse() const {
        if (sizeof(T) == 8) return T(std::int64_t(1) << 36);
        if (PAIRS) return T(1 << 12);
        return T(f.q.dtype == Dtype::f32 && f.head_dim < 64 ? 1 << 4 : 1 << 7);
    }
    // The largest logit of each row and, in lse, the logarithm of the sum: from the logits.
    APART void sum_again() {
        V<T> sum[QV];
        this->start_sums(top, sum, true);
        for (std::int64_t j = begin; j < end; j += KEYS) {
            const int keys = int(end - j < KEYS ? end - j : KEYS);
            if (!Base::logits(j, keys)) continue;
            for (int v = 0; v < QV; v++) add_block(p + v * L, keys, top[v], sum[v]);
        }
        for (int v = 0; v < QV; v++)
            for (int r = 0; r < L; r++) lse[v][r] = sum[v][r] > 0 ? std::log2(sum[v][r]) : sum[v][r];
    }

    // A vector of rows' logits of a block of keys, [keys][ROWS], to its running maximum and sum.
    static void add_block(const T* logits, int keys, V<T>& top, V<T>& sum) {
        constexpr int CHAINS = 4;  // a maximum, or a sum, waits 4 cycles for the one before it
        V<T> maxima[CHAINS], totals[CHAINS];
        UNROLL_FOR(c, CHAINS) {
            maxima[c] = top;
            totals[c] = V<T>{};
        }
        const int whole = keys / CHAINS * CHAINS;
        for (int n = 0; n < whole; n += CHAINS)
            UNROLL_FOR(c, CHAINS) maxima[c] = greater<T>(load(logits + (n + c) * ROWS), maxima[c]);
        for (int n = whole; n < keys; n++) maxima[0] = greater<T>(load(logits + n * ROWS), maxima[0]);
        const V<T> most = greater<T>(greater<T>(maxima[0], maxima[1]), greater<T>(maxima[2], maxima[3]));
        for (int n = 0; n < whole; n += CHAINS) {
            V<T> weights[CHAINS];
            UNROLL_FOR(c, CHAINS) weights[c] = load_exponent(logits + (n + c) * ROWS) - most;
            exp2_each<CHAINS>(weights);
            UNROLL_FOR(c, CHAINS) totals[c] += weights[c];
        }
        for (int n = whole; n < keys; n++) totals[0] += exp2(load(logits + n * ROWS) - most);
        sum = sum * exp2(top - most) + ((totals[0] + totals[1]) + (totals[2] + totals[3]));
        top = most;
    }

    // Adds dS to the gradient of the bias, which may repeat along any axis.
    void add_to_bias(std::int64_t first, int rows) {
        if (g.wide_dbias)
            add_to_bias<double>(first, rows);
        else
            add_to_bias<T>(first, rows);
    }
    template <class Sum>
    void add_to_bias(std::int64_t first, int rows) {
        open(first, rows);
        Sum* to = static_cast<Sum*>(g.dbias) + b * g.dbias_stride[0];
        const bool one_row = g.dbias_stride[1] == 0 && g.dbias_stride[2] == 0;
        for (std::int64_t j = begin; j < end; j += KEYS) {
            const int keys = int(end - j < KEYS ? end - j : KEYS);
            if (!logits(j, keys)) continue;
            logit_gradient(j, keys, false);
            for (int n = 0; n < keys; n++) {
                Sum* key = to + (j + n) * g.dbias_stride[3];
                Sum total = 0;
                for (int r = 0; r < count; r++) {
                    if (one_row)
                        total += p[n * ROWS + r];
                    else
                        key[head(r) * g.dbias_stride[1] + query(r) * g.dbias_stride[2]] += p[n * ROWS + r];
                }
                if (one_row) *key += total;
            }
        }
    }

    // The block's rows in panels, as words of two rows by pairs; padded with zeros to whole vectors.
    void copy_rows(const Tensor4& x, int depth, int width, Word* to) {
        Outer::panels(width, [&](int c, auto vectors) {
            constexpr int panel = decltype(vectors)::value * L;
            const int real = depth - c < panel ? depth - c : panel;
            Word* row_to = to + c * Outer::LINE;
            if constexpr (PAIRS) {
                pair_rows(count, real, panel, row_to,
                          [&](int r) { return reinterpret_cast<const std::uint16_t*>(this->address_of(x, r)) + c; });
            } else
                for (int r = 0; r < count; r++, row_to += panel) {
                    const T* from = this->row_of(x, r, depth, this->line) + c;
                    for (int d = 0; d < real; d++) row_to[d] = from[d];
                    for (int d = real; d < panel; d++) row_to[d] = 0;
                }
        });
    }

    void load_row_sums() {
        const T* logs = static_cast<const T*>(f.lse);
        for (int v = 0; v < QV; v++) {
            T log[L] __attribute__((aligned(64))), less[L] __attribute__((aligned(64)));
            V<T> products[L];
            for (int r = 0; r < L; r++) {
                const int real = v * L + r < count ? v * L + r : count - 1;
                const std::int64_t at_row = row(real);
                log[r] = logs[at_row] == -std::numeric_limits<T>::infinity()
                             ? T(0)
                             : logs[at_row] * T(LOG2E);  // weights will be 0
                less[r] = g.grad_lse ? static_cast<const T*>(g.grad_lse)[at_row] : T(0);
                products[r] = out_times_gradient(real);
            }
            lse[v] = load(log);
            delta[v] = sums<T>(products) - load(less);
        }
    }
    // Of one row, still to be summed over the lanes.
    V<T> out_times_gradient(int r) const {
        const auto product = [&](auto number) __attribute__((always_inline)) {
            using E = decltype(number);
            const E *x = reinterpret_cast<const E*>(this->address_of(g.out, r)),
                    *y = reinterpret_cast<const E*>(this->address_of(g.grad_out, r));
            V<T> lanes{};
            int d = 0;
            for (; d + L <= f.v_head_dim; d += L) lanes += load_wide<T>(x + d) * load_wide<T>(y + d);
            if (d == f.v_head_dim) return lanes;
            E rest[2][L]{};
            for (int n = 0; d + n < f.v_head_dim; n++) {
                rest[0][n] = x[d + n];
                rest[1][n] = y[d + n];
            }
            return lanes + load_wide<T>(rest[0]) * load_wide<T>(rest[1]);
        };
        if constexpr (sizeof(T) == 4) {
            if (f.q.dtype == Dtype::bf16) return product(BFloat16{});
            if (f.q.dtype == Dtype::f16) return product(Float16{});
        }
        return product(T{});
    }
};

// The forward pass of a block of rows: softmax over blocks of keys with a running maximum. With G > 0 there are at most G
// rows, and the products are those of Few. What is measured of the rows on the way is the Rider's (see observe-inl.h).

template <class T, int QV, int G = 0, class Op = Plain<T>, class Rider = Alone> struct Attend : Scores<T, QV, Op> {
    using Base = Scores<T, QV, Op>;
    using Base::f, Base::p, Base::q, Base::count, Base::L, Base::ROWS, Base::KEYS, Base::PAIRS, Base::head, Base::query, Base::row,
        Base::b;
    using Products = typename Base::Products;
    using Word = typename Op::Word;
    using FewProducts = typename FewOf<T, G ? G : 1, Op>::Type;

    int k_width, v_width;   // D and Dv, rounded up to what Few multiplies at once
    T* o;                   // [Dv][ROWS]; with G the rows are [G][v_width] until the end
    T* kept;                // [KEYS][ROWS], with dropout
    Word* weights;          // [KEYS / PER_WORD][ROWS]; plain ones are p
    Word* few_q;            // [G][k_width / PER_WORD]
    T* few_o;               // [G][v_width]
    V<T> top[QV], sum[QV];
    Rider rider;

    static int whole(std::int64_t n) { return int((n + FewProducts::STEP - 1) / FewProducts::STEP * FewProducts::STEP); }
    static std::size_t scratch(const Forward& f) {
        Arena memory{0};
        Attend(f, 0, 0, memory);
        return memory.next;
    }

    Attend(const Forward& call, std::int64_t batch, std::int64_t head, Arena& memory)
        : Base(call, batch, head, memory), k_width(whole(f.head_dim)), v_width(whole(f.v_head_dim)) {
        o = memory.take<T>(f.v_head_dim * ROWS);
        kept = memory.take<T>(f.dropout > 0 ? KEYS * ROWS : 0);
        if constexpr (PAIRS) weights = memory.take<Word>(KEYS / 2 * ROWS);
        else weights = p;
        few_q = memory.take<Word>(G * k_width / Op::PER_WORD);
        few_o = memory.take<T>(G * v_width);
        rider.take(f, memory);
    }

    // Share `share` of `shares` of the keys that the rows may see.
    void run(std::int64_t first, int rows, std::int64_t share, std::int64_t shares, void* partial) {
        this->first = first, count = rows;
        if constexpr (G > 0) load_few_queries();
        else this->load_queries();
        this->load_spans();
        start(share == 0);
        bool fresh = true;
        std::int64_t begin, end;
        this->reach(begin, end);
        if (PAIRS) begin -= begin % 2;  // as the words of two keys lie
        rider.start(*this, begin, end);
        if (shares > 1) {
            const std::int64_t each = ((end - begin) / shares + KEYS) / KEYS * KEYS;
            begin += share * each;
            if (end > begin + each) end = begin + each;
        }
        for (std::int64_t j = begin; j < end; j += KEYS) {
            const int keys = int(end - j < KEYS ? end - j : KEYS);
            if (T* to = rider.place_for(j, p)) {
                p = to;
                if constexpr (!PAIRS) weights = p;
            }
            if (!logits(j, keys)) continue;
            if (f.dropout > 0) this->keep(j, keys, kept);
            rider.before(*this, j, keys);
            weigh(keys, fresh);
            mix(j, keys, fresh);
            rider.after(*this, j, keys);
            fresh = false;
        }
        if constexpr (G > 0) if (!fresh) spread();
        if (fresh) for (int n = 0; n < f.v_head_dim * QV; n++) store(o + n * L, V<T>{});
        if (shares > 1) return leave(static_cast<T*>(partial));
        finish();
    }

    bool logits(std::int64_t j, int keys) {
        if constexpr (G > 0) {
            bool whole;
            if (!this->visible(j, keys, whole)) return false;
            const int depth = int(f.head_dim), width = int(f.v_head_dim);
            if constexpr (PAIRS) {
                const auto* k = reinterpret_cast<const BFloat16*>(at(f.k, b, this->kv_head, j, 2));
                FewProducts::dots(few_q, k_width / 2, k, f.k.stride[2], keys, depth, this->query_factor(), p, ahead(k, f.v, j, width));
            } else {
                of_dtype(f.k, j, [&](auto* k) { FewProducts::dots(few_q, k_width, k, f.k.stride[2], keys, depth, p, ahead(k, f.v, j, width)); });
            }
            this->adjust(j, keys, whole);
            return true;
        }
        return Base::logits(j, keys);
    }
    void mix(std::int64_t j, int keys, bool fresh) {
        const int width = int(f.v_head_dim);
        if constexpr (G > 0 && PAIRS) {
            const auto* v = reinterpret_cast<const BFloat16*>(at(f.v, b, this->kv_head, j, 2));
            FewProducts::mixes(weights, v, f.v.stride[2], keys, width, few_o, v_width, fresh, ahead(v, f.k, j + keys, int(f.head_dim)));
        } else if constexpr (G > 0)
            of_dtype(f.v, j, [&](auto* v) {
                FewProducts::mixes(p, v, f.v.stride[2], keys, width, few_o, v_width, fresh, ahead(v, f.k, j + keys, int(f.head_dim)));
            });
        else
            Products::mixes(weights, values(j, keys), (keys + Op::PER_WORD - 1) / Op::PER_WORD, width, o, fresh);
    }
    Lines values(std::int64_t j, int keys) const {
        const int width = int(f.v_head_dim);
        if (PAIRS && f.paired_v) {
            const std::int64_t pairs = (f.keys + 1) / 2, line = width * 4;
            return {static_cast<const char*>(f.paired_v) + ((b * f.kv_heads + this->kv_head) * pairs + j / 2) * line, line};
        }
        return this->across(f.v, j, keys, width, this->wide_v);
    }
    // Rows from j on of the other tensor, of the same dtype.
    template <class E> auto ahead(const E*, const Tensor4& x, std::int64_t j, int width) const {
        return Ahead<E, G>{reinterpret_cast<const E*>(at(x, b, this->kv_head, j, sizeof(E))), x.stride[2], width};
    }
    // body(row j of a tensor [B, Hkv, K, .] as what it is)
    template <class Body> INLINE void of_dtype(const Tensor4& x, std::int64_t j, const Body& body) const {
        if constexpr (sizeof(T) == 8) body(reinterpret_cast<const T*>(at(x, b, this->kv_head, j, 8)));
        else if (x.dtype == Dtype::bf16) body(reinterpret_cast<const BFloat16*>(at(x, b, this->kv_head, j, 2)));
        else if (x.dtype == Dtype::f16) body(reinterpret_cast<const Float16*>(at(x, b, this->kv_head, j, 2)));
        else body(reinterpret_cast<const T*>(at(x, b, this->kv_head, j, 4)));
    }

    void load_few_queries() {
        for (int n = 0; n < KEYS * ROWS; n += L) store(p + n, V<T>{});  // rows beyond G stay finite
        for (int g = 0; g < G; g++) {
            if constexpr (PAIRS) {
                auto* to = reinterpret_cast<std::uint16_t*>(few_q) + g * k_width;
                const auto* from = reinterpret_cast<const std::uint16_t*>(this->address_of(f.q, g));
                for (int d = 0; d < k_width; d++) to[d] = d < f.head_dim ? from[d] : 0;
            } else {
                const T* from = this->row_of(f.q, g, int(f.head_dim), this->line);
                for (int d = 0; d < k_width; d++) few_q[g * k_width + d] = d < f.head_dim ? from[d] * this->query_factor() : T(0);
            }
        }
    }
    // The rows of few_o into the lanes of o.
    void spread() {
        for (int c = 0; c < f.v_head_dim; c++) {
            store(o + c * ROWS, V<T>{});
            for (int g = 0; g < G; g++) o[c * ROWS + g] = few_o[g * v_width + FewProducts::column(c)];
        }
    }

    void start(bool with_sinks) {
        UNROLL for (int v = 0; v < QV; v++) top[v] = splat(-std::numeric_limits<T>::max()), sum[v] = V<T>{};
        if (!f.sinks || !with_sinks) return;
        for (int r = 0; r < ROWS; r++) {
            const T sink = static_cast<const T*>(f.sinks)[head(r < count ? r : count - 1)] * T(LOG2E);
            if (sink == -std::numeric_limits<T>::infinity()) continue;
            top[r / L][r % L] = sink, sum[r / L][r % L] = 1;
        }
    }

    // Scores to weights relative to the running maximum: p = exp2(s - top); the output so far moves along with it.
    void weigh(int keys, bool fresh) {
        V<T> m[QV];
        UNROLL for (int v = 0; v < QV; v++) m[v] = top[v];
        for (int j = 0; j < keys; j++)
            UNROLL for (int v = 0; v < QV; v++) m[v] = greater<T>(load(p + j * ROWS + v * L), m[v]);
        I<T> moved{};
        UNROLL for (int v = 0; v < QV; v++) moved |= m[v] > top[v];
        if (any<T>(moved)) {
            V<T> shrink[QV];
            UNROLL for (int v = 0; v < QV; v++) shrink[v] = exp2(top[v] - m[v]), sum[v] *= shrink[v];
            rider.move(top, m, shrink);
            UNROLL for (int v = 0; v < QV; v++) top[v] = m[v];
            if (!fresh) scale_output(shrink);
        }
        V<T> total[QV];  // in registers: what is stored below might be `sum` for all that the compiler knows
        UNROLL for (int v = 0; v < QV; v++) total[v] = sum[v];
        const bool drops = f.dropout > 0;
        typename Rider::Sums seen;
        const auto weight = [&](int j, int v) __attribute__((always_inline)) {
            const V<T> depth = at_floor(load(p + j * ROWS + v * L) - m[v]), x = exp2_from_floor(depth);
            total[v] += x;
            seen.add(v, depth, x);
            if constexpr (Rider::LOOKS && PAIRS) store(p + j * ROWS + v * L, x);
            return drops ? x * load(kept + j * ROWS + v * L) : x;
        };
        if constexpr (PAIRS) {
            if (keys % 2) UNROLL for (int v = 0; v < QV; v++) {
                store(p + keys * ROWS + v * L, splat(-std::numeric_limits<T>::infinity()));
                if (drops) store(kept + keys * ROWS + v * L, V<T>{});
            }
            for (int j = 0; j < keys; j += 2) UNROLL for (int v = 0; v < QV; v++) {
                const V<T> x = weight(j, v), y = weight(j + 1, v);
                store_pair(weights + j / 2 * ROWS + v * L, x, y);
            }
        } else if constexpr (Rider::LOOKS) {  // its sums are too many to go through all vectors at once
            UNROLL for (int v = 0; v < QV; v++) for (int j = 0; j < keys; j++) store(p + j * ROWS + v * L, weight(j, v));
        } else {
            for (int j = 0; j < keys; j++) UNROLL for (int v = 0; v < QV; v++) store(p + j * ROWS + v * L, weight(j, v));
        }
        UNROLL for (int v = 0; v < QV; v++) sum[v] = total[v];
        rider.add(seen);
    }

    void scale_output(const V<T>* factor) {
        if constexpr (G > 0) {
            for (int g = 0; g < G; g++) for (int c = 0; c < v_width; c += L)
                store(few_o + g * v_width + c, load(few_o + g * v_width + c) * factor[0][g]);
        } else {
            for (int c = 0; c < f.v_head_dim; c++) UNROLL for (int v = 0; v < QV; v++)
                store(o + c * ROWS + v * L, load(o + c * ROWS + v * L) * factor[v]);
        }
    }

    // What a share of the keys leaves: o, top and sum; and from these the whole.
    void leave(T* partial) const {
        for (int n = 0; n < f.v_head_dim * QV; n++) store(partial + n * L, load(o + n * L));
        partial += f.v_head_dim * ROWS;
        UNROLL for (int v = 0; v < QV; v++) store(partial + v * L, top[v]), store(partial + ROWS + v * L, sum[v]);
    }
    void merge(std::int64_t first, int rows, std::int64_t shares, const T* partial, std::int64_t size) {
        this->first = first, count = rows;
        const std::int64_t tops = f.v_head_dim * ROWS;
        UNROLL for (int v = 0; v < QV; v++) top[v] = splat(-std::numeric_limits<T>::max()), sum[v] = V<T>{};
        for (std::int64_t n = 0; n < shares; n++)
            UNROLL for (int v = 0; v < QV; v++) top[v] = greater<T>(load(partial + n * size + tops + v * L), top[v]);
        for (std::int64_t n = 0; n < shares; n++) {
            const T* from = partial + n * size;
            V<T> factor[QV];
            UNROLL for (int v = 0; v < QV; v++) {
                factor[v] = exp2(load(from + tops + v * L) - top[v]);
                sum[v] += load(from + tops + ROWS + v * L) * factor[v];
            }
            for (int c = 0; c < f.v_head_dim; c++) UNROLL for (int v = 0; v < QV; v++) {
                T* to = o + c * ROWS + v * L;
                const V<T> x = load(from + c * ROWS + v * L) * factor[v];
                store(to, n ? load(to) + x : x);
            }
        }
        finish();
    }

    bool all_finite(const V<T>* inverse) const {
        V<T> zero{};
        for (int c = 0; c < f.v_head_dim; c++) UNROLL for (int v = 0; v < QV; v++)
            zero += load(o + c * ROWS + v * L) * inverse[v] * T(0);  // NaN or infinity times 0 is NaN
        return !any<T>(zero != zero);
    }

    void finish() {
        V<T> inverse[QV];
        UNROLL for (int v = 0; v < QV; v++) inverse[v] = sum[v] == 0 ? V<T>{} : 1 / sum[v];
        this->put_rows(o, int(f.v_head_dim), inverse, f.out, f.out_stride);
        rider.finish(*this);
        if (f.spoilt && !all_finite(inverse)) f.spoilt->store(true, std::memory_order_relaxed);
        if (!f.lse) return;
        for (int r = 0; r < count; r++) {
            const T total = sum[r / L][r % L];
            const T most = top[r / L][r % L], least = -std::numeric_limits<T>::max();
            const T value = most == least ? least : (most + std::log2(total)) * T(LN2);  // of a row of the smallest biases
            static_cast<T*>(f.lse)[row(r)] = total == 0 ? -std::numeric_limits<T>::infinity() : value;
        }
    }
};

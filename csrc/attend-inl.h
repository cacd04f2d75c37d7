// The forward pass of a block of rows: softmax over blocks of keys with a running maximum.

template <class T, int QV> struct Attend : Scores<T, QV> {
    using Base = Scores<T, QV>;
    using Base::f, Base::p, Base::count, Base::L, Base::ROWS, Base::head, Base::query, Base::row, Base::b;
    using Products = typename Base::Products;

    T* o;     // [Dv][ROWS]
    T* kept;  // [KEYS][ROWS], with dropout
    V<T> top[QV], sum[QV];

    static std::size_t scratch(const Forward& f) {
        return sizeof(T) * (Base::scratch(f) + (f.v_head_dim + (f.dropout > 0 ? KEYS : 0)) * ROWS);
    }

    Attend(const Forward& call, std::int64_t batch, std::int64_t head, void* memory) : Base(call, batch, head, memory) {
        o = static_cast<T*>(memory) + Base::scratch(f);
        kept = o + f.v_head_dim * ROWS;
    }

    void run(std::int64_t first, int rows) {
        this->first = first, count = rows;
        this->load_queries();
        this->load_spans();
        start();
        bool fresh = true;
        std::int64_t begin, end;
        this->reach(begin, end);
        for (std::int64_t j = begin; j < end; j += KEYS) {
            const int keys = int(end - j < KEYS ? end - j : KEYS);
            if (!this->logits(j, keys)) continue;
            weigh(keys, fresh);
            if (f.dropout > 0) {
                this->keep(j, keys, kept);
                for (int n = 0; n < keys * QV; n++) store(p + n * L, load(p + n * L) * load(kept + n * L));
            }
            const typename Base::Lines v = this->values_at(j, keys);
            Products::mixes(p, v.data, v.stride, keys, int(f.v_head_dim), o, fresh);
            fresh = false;
        }
        finish(fresh);
    }

    void start() {
        UNROLL for (int v = 0; v < QV; v++) top[v] = splat(-std::numeric_limits<T>::max()), sum[v] = V<T>{};
        if (!f.sinks) return;
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
            UNROLL for (int v = 0; v < QV; v++) shrink[v] = exp2(top[v] - m[v]), sum[v] *= shrink[v], top[v] = m[v];
            if (!fresh)
                for (int c = 0; c < f.v_head_dim; c++) UNROLL for (int v = 0; v < QV; v++)
                    store(o + c * ROWS + v * L, load(o + c * ROWS + v * L) * shrink[v]);
        }
        for (int j = 0; j < keys; j++) UNROLL for (int v = 0; v < QV; v++) {
            const V<T> x = exp2(load(p + j * ROWS + v * L) - m[v]);
            sum[v] += x;
            store(p + j * ROWS + v * L, x);
        }
    }

    bool all_finite(const V<T>* inverse) const {
        V<T> zero{};
        for (int c = 0; c < f.v_head_dim; c++) UNROLL for (int v = 0; v < QV; v++)
            zero += load(o + c * ROWS + v * L) * inverse[v] * T(0);  // NaN or infinity times 0 is NaN
        return !any<T>(zero != zero);
    }

    void finish(bool fresh) {
        if (fresh) for (int n = 0; n < f.v_head_dim * QV; n++) store(o + n * L, V<T>{});
        V<T> inverse[QV];
        UNROLL for (int v = 0; v < QV; v++) inverse[v] = sum[v] == 0 ? V<T>{} : 1 / sum[v];
        this->put_rows(o, int(f.v_head_dim), inverse, f.out, f.out_stride);
        if (f.spoilt && !all_finite(inverse)) f.spoilt->store(true, std::memory_order_relaxed);
        if (!f.lse) return;
        for (int r = 0; r < count; r++) {
            const T total = sum[r / L][r % L];
            const T value = (top[r / L][r % L] + std::log2(total)) * T(LN2);
            static_cast<T*>(f.lse)[row(r)] = total == 0 ? -std::numeric_limits<T>::infinity() : value;
        }
    }
};

// The backward pass. The weights are computed again from q, k and lse; with dP = V dOᵀ (transposed, as everything here),
//
//     dS = P ∘ (dP - δ),  δ_i = out_i · dout_i - dlse_i,   dV = Pᵀ dO,  dQ = scale dS K,  dK = scale dSᵀ Q.
//
// A task is a share of the row blocks of one key/value head. Its dQ is its own; dK and dV it sums into a buffer of its own,
// and the buffers of a head are added in a fixed order afterwards, so that the result does not depend on the threads.

template <class T, int QV, class Op = Plain<T>> struct Gradient : Scores<T, QV, Op> {
    using Base = Scores<T, QV, Op>;
    using Base::f, Base::p, Base::count, Base::L, Base::ROWS, Base::KEYS, Base::PAIRS, Base::head, Base::query, Base::row, Base::b;
    using Products = typename Base::Products;
    using Word = typename Op::Word;

    const Backward& g;
    int k_width, v_width;       // D and Dv, rounded up to whole vectors
    T *dots, *kept, *tangent;   // [KEYS][ROWS]
    Word* dout;                 // [Dv / PER_WORD][ROWS]
    T* dq;                      // [D][ROWS]
    Word *q_rows, *dout_rows;   // [ROWS / PER_WORD][k_width], [ROWS / PER_WORD][v_width]
    Word *by_rows, *by_keys;    // what is multiplied next: [KEYS][ROWS / PER_WORD], [KEYS / PER_WORD][ROWS]
    V<T> lse[QV], delta[QV];

    static int whole(std::int64_t n) { return int((n + L - 1) / L * L); }
    static std::size_t scratch(const Backward& g) {
        Arena memory{0};
        Gradient(g, 0, 0, memory);
        return memory.next;
    }

    Gradient(const Backward& call, std::int64_t batch, std::int64_t head, Arena& memory)
        : Base(call.forward, batch, head, memory), g(call), k_width(whole(f.head_dim)), v_width(whole(f.v_head_dim)) {
        dots = memory.take<T>(KEYS * ROWS);
        kept = memory.take<T>(KEYS * ROWS);
        tangent = memory.take<T>(f.softcap > 0 ? KEYS * ROWS : 0);
        dout = memory.take<Word>(f.v_head_dim * ROWS);
        dq = memory.take<T>(f.head_dim * ROWS);
        q_rows = memory.take<Word>(k_width * ROWS);
        dout_rows = memory.take<Word>(v_width * ROWS);
        by_rows = memory.take<Word>(PAIRS ? KEYS * ROWS / 2 : 0);
        by_keys = memory.take<Word>(PAIRS ? KEYS * ROWS / 2 : 0);
    }

    // dk [K][k_width] and dv [K][v_width] are added to.
    void run(std::int64_t first, int rows, T* dk, T* dv) {
        open(first, rows);
        copy_rows(f.q, int(f.head_dim), k_width, q_rows);
        copy_rows(g.grad_out, int(f.v_head_dim), v_width, dout_rows);
        for (int n = 0; n < f.head_dim * QV; n++) store(dq + n * L, V<T>{});
        std::int64_t begin, end;
        this->reach(begin, end);
        for (std::int64_t j = begin; j < end; j += KEYS) {
            const int keys = int(end - j < KEYS ? end - j : KEYS);
            if (this->logits(j, keys, tangent)) block(j, keys, dk + j * k_width, dv + j * v_width);
        }
        V<T> scale[QV];
        UNROLL for (int v = 0; v < QV; v++) scale[v] = splat(T(f.scale));
        this->put_rows(dq, int(f.head_dim), scale, g.dq, g.dq_stride);
    }

    void block(std::int64_t j, int keys, T* dk, T* dv) {
        const int words = (count + Op::PER_WORD - 1) / Op::PER_WORD, depth = int(f.head_dim);
        const T* weights = logit_gradient(j, keys);
        Products::outer_all(rows_of(weights, keys), dout_rows, keys, words, v_width, dv);
        uncap(keys);
        const Lines k = this->across(f.k, j, keys, depth, this->wide_k);
        Products::mixes(keys_of(p, keys), k, (keys + Op::PER_WORD - 1) / Op::PER_WORD, depth, dq, false);
        Products::outer_all(rows_of(p, keys), q_rows, keys, words, k_width, dk);
    }
    // [KEYS][ROWS] as words of two rows, and of two keys; plain as it is.
    const Word* rows_of(const T* x, int keys) {
        if constexpr (PAIRS) {
            for (int n = 0; n < keys * QV; n++) store_narrow(reinterpret_cast<std::uint16_t*>(by_rows) + n * L, load(x + n * L));
            return by_rows;
        } else {
            return x;
        }
    }
    const Word* keys_of(const T* x, int keys) {
        if constexpr (PAIRS) {
            for (int j = 0; j < keys; j += 2) UNROLL for (int v = 0; v < QV; v++)
                store_pair(by_keys + j / 2 * ROWS + v * L, load(x + j * ROWS + v * L),
                           j + 1 < keys ? load(x + (j + 1) * ROWS + v * L) : V<T>{});
            return by_keys;
        } else {
            return x;
        }
    }

    // Logits in p become their gradients dS; returns the weights that met the values.
    const T* logit_gradient(std::int64_t j, int keys) {
        const int width = int(f.v_head_dim);
        Products::dots(dout, this->natural(f.v, j, keys, width, this->wide_v), keys, width / Op::PER_WORD, T(1), dots);
        const bool drops = f.dropout > 0;
        if (drops) this->keep(j, keys, kept);
        for (int n = 0; n < keys; n++) UNROLL for (int v = 0; v < QV; v++) {
            const int at_tile = n * ROWS + v * L;
            const V<T> weight = exp2(load(p + at_tile) - lse[v]);
            const V<T> factor = drops ? load(kept + at_tile) : splat(T(1));
            store(kept + at_tile, weight * factor);
            store(p + at_tile, weight * (load(dots + at_tile) * factor - delta[v]));
        }
        return kept;
    }
    // From the gradient of the capped logits to that of the uncapped.
    void uncap(int keys) {
        if (f.softcap <= 0) return;
        for (int n = 0; n < keys * QV; n++) {
            const V<T> t = load(tangent + n * L);
            store(p + n * L, load(p + n * L) * (1 - t * t));
        }
    }

    // Sets up a block for `logit_gradient`.
    void open(std::int64_t first, int rows) {
        this->first = first, count = rows;
        this->load_queries();
        this->load_spans();
        this->load_words(g.grad_out, int(f.v_head_dim), T(1), dout);
        load_row_sums();
    }

    // Adds dS to the gradient of the bias, which may repeat along any axis.
    void add_to_bias(std::int64_t first, int rows) {
        open(first, rows);
        T* to = static_cast<T*>(g.dbias) + b * g.dbias_stride[0];
        const bool one_row = g.dbias_stride[1] == 0 && g.dbias_stride[2] == 0;
        std::int64_t begin, end;
        this->reach(begin, end);
        for (std::int64_t j = begin; j < end; j += KEYS) {
            const int keys = int(end - j < KEYS ? end - j : KEYS);
            if (!this->logits(j, keys, tangent)) continue;
            logit_gradient(j, keys);
            for (int n = 0; n < keys; n++) {
                T* key = to + (j + n) * g.dbias_stride[3];
                T total = 0;
                for (int r = 0; r < count; r++) {
                    if (one_row) total += p[n * ROWS + r];
                    else key[head(r) * g.dbias_stride[1] + query(r) * g.dbias_stride[2]] += p[n * ROWS + r];
                }
                if (one_row) *key += total;
            }
        }
    }

    // The block's rows as they lie, or as words of two rows; padded with zeros to whole vectors.
    void copy_rows(const Tensor4& x, int depth, int width, Word* to) {
        if constexpr (PAIRS) {
            pair_rows(count, depth, width, to, [&](int r) { return reinterpret_cast<const std::uint16_t*>(this->address_of(x, r)); });
            return;
        }
        for (int r = 0; r < count; r++, to += width) {
            const T* from = this->row_of(x, r, depth, this->line);
            for (int d = 0; d < depth; d++) to[d] = from[d];
            for (int d = depth; d < width; d++) to[d] = 0;
        }
    }

    void load_row_sums() {
        const int width = int(f.v_head_dim);
        for (int r = 0; r < ROWS; r++) {
            const int real = r < count ? r : count - 1;
            const T* out = this->row_of(g.out, real, width, this->line);
            const T* grad = this->row_of(g.grad_out, real, width, this->line + width);
            const std::int64_t at_row = row(real);
            const T value = static_cast<const T*>(f.lse)[at_row];
            lse[r / L][r % L] = value <= -std::numeric_limits<T>::max() ? T(0) : value * T(LOG2E);  // weights will be 0
            delta[r / L][r % L] = product(out, grad, width) - (g.grad_lse ? static_cast<const T*>(g.grad_lse)[at_row] : T(0));
        }
    }
    static T product(const T* x, const T* y, int width) {
        V<T> lanes{};
        int d = 0;
        for (; d + L <= width; d += L) lanes += load_anywhere(x + d) * load_anywhere(y + d);
        T sum = 0;
        for (; d < width; d++) sum += x[d] * y[d];
        for (int n = 0; n < L; n++) sum += lanes[n];
        return sum;
    }
};

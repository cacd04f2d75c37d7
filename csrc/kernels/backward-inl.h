// The backward pass. Weights are recomputed from q, k and lse. With dP = V dOᵀ (transposed, as all buffers here),
//
//     dS = P ∘ (dP - δ + dlse),  δ_i = out_i · dout_i,   dV = Pᵀ dO,  dQ = scale dS K,  dK = scale dSᵀ Q.
//
// Rows whose visible keys are in one block of keys sum the weights and δ there: δ_i = Σ_j P_ij dP_ij.
//
// A task is a group of row blocks of one key/value head. It owns its rows of dQ. To dK and dV it adds a block of keys
// at a time, after all groups before it have added theirs: the order of summation does not depend on the threads.

// The most row blocks of a group. A block of keys is processed for all of them before dK and dV are read and written
// once.
constexpr int MAX_GROUP_BLOCKS = 4;

template <class T, int QV, class Op = Fma<T>>
struct BackwardBlock : BackwardRowSums<T, QV, Op> {
    using Base = BackwardRowSums<T, QV, Op>;
    using Base::f, Base::p, Base::count, Base::L, Base::ROWS, Base::KEYS, Base::PAIRS, Base::head, Base::query,
        Base::flat_row, Base::b, Base::g, Base::dots, Base::dropout_factors, Base::top, Base::inverse_sum, Base::delta,
        Base::lse_gradient, Base::log2_sum;
    using Outer = OuterTile<T, QV, Op>;
    using Word = typename Op::Word;

    int k_width, v_width;            // D and Dv, rounded up to whole vectors
    T* slopes;                       // [KEYS][ROWS]
    Word* dout;                      // [Dv / PER_WORD][ROWS]
    T* dq;                           // [D][ROWS]
    Word *q_rows, *dout_rows;        // k_width and v_width columns in panels of OuterTile
    Word *weight_rows, *ds_rows;     // weights and dS for OuterTile, [KEYS][ROWS / PER_WORD]
    Word* ds_keys;                   // dS for PvTile, [KEYS / PER_WORD][ROWS]
    bool has_sums = false;           // top, inverse_sum and delta hold those of the rows
    bool recomputes_sums = false;    // top and inverse_sum come from recomputed logits instead of lse
    bool for_bias_gradient = false;  // in float32: a sum over few or no dS, in which the rounding of lse would show
    bool is_single_block = false;    // the keys processed last are all keys visible to the rows
    std::int64_t begin, end;         // the keys visible to any row
    std::int64_t from, to;           // the keys processed last
    struct PairedKeys {
        std::int64_t from;
        int keys;
    };
    PairedKeys* paired_keys;  // the keys that converted_k holds as pairs

    static std::size_t scratch(const Backward& g) {
        Arena memory{0};
        BackwardBlock(g, 0, 0, memory);
        return memory.next;
    }

    BackwardBlock(const Backward& call, std::int64_t batch, std::int64_t head, Arena& memory)
        : Base(call, batch, head, memory),
          k_width(padded_width<T>(f.head_dim)),
          v_width(padded_width<T>(f.v_head_dim)) {
        paired_keys = memory.allocate<PairedKeys>(1);
        dots = memory.allocate<T>(KEYS * ROWS);
        dropout_factors = memory.allocate<T>(KEYS * ROWS);
        slopes = memory.allocate<T>(f.softcap > 0 ? KEYS * ROWS : 0);
        dout = memory.allocate<Word>(f.v_head_dim * ROWS);
        dq = memory.allocate<T>(f.head_dim * ROWS);
        q_rows = memory.allocate<Word>(k_width * Outer::PANEL_ROWS);
        dout_rows = memory.allocate<Word>(v_width * Outer::PANEL_ROWS);
        if constexpr (PAIRS)
            for (Word** to : {&weight_rows, &ds_rows, &ds_keys}) *to = memory.allocate<Word>(KEYS * ROWS / 2);
        else {
            weight_rows = dropout_factors;
            ds_rows = ds_keys = this->p;
        }
    }

    // Shares the buffers that are only used within one step of process_keys with another block of the group. Buffers
    // that add_key_gradients reads stay separate.
    void share_buffers(const BackwardBlock& other) {
        this->converted_k = other.converted_k;
        this->converted_v = other.converted_v;
        this->row_buffer = other.row_buffer;
        dots = other.dots;
        slopes = other.slopes;
        paired_keys = other.paired_keys;
        if constexpr (PAIRS) {
            p = other.p;
            dropout_factors = other.dropout_factors;
            ds_keys = other.ds_keys;
        }
    }
    void start(std::int64_t first, int rows) {
        set_rows(first, rows);
        pack_rows(f.q, int(f.head_dim), k_width, q_rows);
        pack_rows(g.grad_out, int(f.v_head_dim), v_width, dout_rows);
        for (int n = 0; n < f.head_dim * QV; n++) store(dq + n * L, V<T>{});
        *paired_keys = {-1, 0};
    }
    // Processes the visible keys `from` .. `to` of the block of keys at j: adds to dq, and leaves the weights and dS
    // for add_key_gradients. False if no key is visible.
    bool process_keys(std::int64_t j) {
        from = j > begin ? j : begin;
        to = j + KEYS < end ? j + KEYS : end;
        if (from >= to) return false;
        const int keys = int(to - from);
        prepare_sums(from, to);
        if (!compute_block_logits(from, keys)) return false;
        compute_logit_gradient(from, keys, f.softcap > 0);
        PvTile<T, QV, Op>::accumulate_values(ds_keys, pv_keys(from, keys), (keys + Op::PER_WORD - 1) / Op::PER_WORD,
                                             int(f.head_dim), dq, false);
        return true;
    }
    // The keys as PvTile reads them. Pairs are interleaved once for all blocks that share the buffer; other half types
    // were already converted for the logits.
    StridedRows pv_keys(std::int64_t j, int keys) {
        const int depth = int(f.head_dim);
        const bool is_converted =
            PAIRS ? paired_keys->from == j && paired_keys->keys == keys : sizeof(T) == 4 && f.k.dtype != Dtype::f32;
        if (is_converted) return {reinterpret_cast<const char*>(this->converted_k), depth * std::int64_t(sizeof(Word))};
        *paired_keys = {j, keys};
        return this->pv_operand(f.k, j, keys, depth, this->converted_k);
    }
    // Adds the gradients of keys that all these blocks have processed to dK and dV.
    static void add_key_gradients(BackwardBlock* const* blocks, int block_count, const GradientTurns<T>& to) {
        typename Outer::Factors weights[MAX_GROUP_BLOCKS], gradients[MAX_GROUP_BLOCKS];
        for (int n = 0; n < block_count; n++) {
            const BackwardBlock& x = *blocks[n];
            const int words = (x.count + Op::PER_WORD - 1) / Op::PER_WORD;
            weights[n] = {x.weight_rows, x.dout_rows, words};
            gradients[n] = {x.ds_rows, x.q_rows, words};
        }
        const BackwardBlock& x = *blocks[0];
        const int keys = int(x.to - x.from);
        Outer::accumulate_all(weights, block_count, keys, x.v_width, to.dv + x.from * x.v_width);
        Outer::accumulate_all(gradients, block_count, keys, x.k_width, to.dk + x.from * x.k_width);
    }
    // The gradient of the sink of each row: -p δ, with p the weight of the sink.
    void store_dsinks() {
        if (!g.dsinks || !f.sinks) return;
        if (!has_sums) {  // no key is visible to any row
            V<T> sum[QV];
            this->initialize_sums(top, sum, true);
            this->invert_sums(sum);
            UNROLL_FOR(v, QV) delta[v] = V<T>{};
        }
        T* const to = static_cast<T*>(g.dsinks);
        for (int v = 0; v < QV; v++) {
            V<T> logits, factors;
            for (int r = 0; r < L; r++) {
                const auto sink = this->sink_of(v * L + r);
                logits[r] = sink.logit;
                factors[r] = sink.factor;
            }
            const V<T> gradients = exp2(logits - top[v]) * factors * inverse_sum[v] * (lse_gradient[v] - delta[v]);
            for (int r = 0; r < L && v * L + r < count; r++) to[flat_row(v * L + r)] = gradients[r];
        }
    }
    void store_dq() {
        V<T> scale[QV];
        UNROLL_FOR(v, QV) scale[v] = splat(T(f.scale));
        if (!this->store_rows(dq, int(f.head_dim), scale, g.dq, g.dq_stride)) g.mark_nonfinite();
    }

    // The logits, minus `top` if product_subtracts_top.
    bool compute_block_logits(std::int64_t j, int keys) {
        return Base::compute_logits(j, keys, slopes, nullptr, product_subtracts_top() ? top : nullptr);
    }
    // Whether `top` is subtracted from the logits in the epilogue of their product. A recomputed top is subtracted from
    // the rounded logit, as it was when the sum was computed.
    bool product_subtracts_top() const { return !is_single_block && !recomputes_sums && !(f.softcap > 0); }
    // The number of products in a block of a blocked sum of dP over Dv; 0: one chain. Logits of narrow heads are nearly
    // exact, so the rounding of dP would be the largest error of dQ and dK, unless it cancels (exponentiate_and_sum).
    int dp_sum_block_depth(int width) const {
        const bool is_narrow = f.q.dtype == Dtype::f32 && f.head_dim < 64 && width > 64;
        return is_narrow && !is_single_block ? Base::SHORT_SUM_BLOCK : this->sum_block_depth(width);
    }
    // Computes dP into `dots`, minus δ if the epilogue is to subtract.
    void multiply_values(std::int64_t j, int keys, Epilogue epilogue) {
        const int width = int(f.v_head_dim);
        const StridedRows values = this->qk_operand(f.v, j, keys, width, this->converted_v);
        QkTile<T, QV, Op>::multiply(dout, values, keys, width / Op::PER_WORD, T(1), dots, dp_sum_block_depth(width),
                                    epilogue, delta);
    }
    // Computes the weights after dropout, and dS: the gradient of the logits, before the softcap if `through_softcap`.
    void compute_logit_gradient(std::int64_t j, int keys, bool through_softcap) {
        const bool drops = f.dropout > 0;
        if (!is_single_block && !product_subtracts_top())
            for (int n = 0; n < keys; n++)
                UNROLL_FOR(v, QV) store(p + n * ROWS + v * L, load(p + n * ROWS + v * L) - top[v]);
        multiply_values(j, keys, drops || is_single_block ? Epilogue::none : Epilogue::subtract);
        if (g.grad_entropy) this->add_entropy_gradient(keys, is_single_block ? nullptr : top);
        if (drops) this->compute_dropout_factors(j, keys, dropout_factors);
        if (is_single_block) {
            this->exponentiate_and_sum(keys, drops);
            has_sums = true;
        }
        const bool has_options = drops || through_softcap || g.grad_lse;
        if (is_single_block && has_options)
            exponentiate_and_differentiate<true, true>(keys, drops, through_softcap);
        else if (is_single_block)
            exponentiate_and_differentiate<false, true>(keys, false, false);
        else if (has_options)
            exponentiate_and_differentiate<true, false>(keys, drops, through_softcap);
        else
            exponentiate_and_differentiate<false, false>(keys, false, false);
    }
    // IS_EXPONENTIATED: exponentiate_and_sum has replaced the logits by exponentials, and the caller subtracts delta.
    template <bool OPTIONS, bool IS_EXPONENTIATED>
    void exponentiate_and_differentiate(int keys, bool drops, bool through_softcap) {
        // Local copies stay in registers: members would be reloaded after each store, which may alias them.
        V<T> row_delta[QV], row_inverse[QV], row_lse_gradient[QV];
        T *const p = this->p, *const dots = this->dots, *const dropout_factors = this->dropout_factors,
                 *const slopes = this->slopes;
        Word *const weight_rows = this->weight_rows, *const ds_rows = this->ds_rows, *const ds_keys = this->ds_keys;
        UNROLL_FOR(v, QV) {
            row_delta[v] = delta[v];
            row_lse_gradient[v] = lse_gradient[v];
            row_inverse[v] = inverse_sum[v];
        }
        const auto logit_gradient_of = [&](int at_tile, int v, V<T>& weight) __attribute__((always_inline)) {
            V<T> factor = splat(T(1)), slope = factor;
            if (OPTIONS && drops) factor = load(dropout_factors + at_tile);
            if (OPTIONS && through_softcap) slope = load(slopes + at_tile);
            const bool subtracts_delta = IS_EXPONENTIATED || (OPTIONS && drops);
            V<T> deviation = subtracts_delta ? load(dots + at_tile) * factor - row_delta[v] : load(dots + at_tile);
            if (OPTIONS) deviation += row_lse_gradient[v];
            V<T> gradient = weight * deviation;
            if (OPTIONS) {
                gradient *= slope;
                weight *= factor;
            }
            return gradient;
        };
        constexpr int N = QV * Op::PER_WORD;  // weights of a word of keys
        for (int n = 0; n < keys; n += Op::PER_WORD) {
            V<T> weights[N];
            UNROLL_FOR(m, N) weights[m] = load_exponent(p + (n + m % Op::PER_WORD) * ROWS + m / Op::PER_WORD * L);
            if constexpr (!IS_EXPONENTIATED) exp2_in_place<N>(weights);
            UNROLL_FOR(m, N) weights[m] *= row_inverse[m / Op::PER_WORD];
            UNROLL_FOR(v, QV) {
                V<T>*const weight = weights + v * Op::PER_WORD, gradient[Op::PER_WORD];
                UNROLL_FOR(w, Op::PER_WORD) gradient[w] = logit_gradient_of((n + w) * ROWS + v * L, v, weight[w]);
                if constexpr (PAIRS) {
                    if (n + 1 == keys) gradient[1] = V<T>{};  // beyond the last key
                    const auto store_pair = [&](Word* to, auto both) __attribute__((always_inline)) {
                        auto* const key = reinterpret_cast<std::uint16_t*>(to) + n * ROWS + v * L;
                        store_halves(key, key + ROWS, both);
                    };
                    const auto gradients = round_to_bf16(gradient[0], gradient[1]);
                    store_pair(weight_rows, round_to_bf16(weight[0], weight[1]));
                    store_pair(ds_rows, gradients);
                    store_interleaved(ds_keys + n / 2 * ROWS + v * L, gradients);
                } else {
                    store(dropout_factors + n * ROWS + v * L, weight[0]);
                    store(p + n * ROWS + v * L, gradient[0]);
                }
            }
        }
    }

    // Selects the block's rows and loads their q and dout.
    void set_rows(std::int64_t first, int rows) {
        this->first = first;
        count = rows;
        this->load_queries();
        this->load_spans();
        this->load_transposed(g.grad_out, int(f.v_head_dim), T(1), dout);
        UNROLL_FOR(v, QV) lse_gradient[v] = g.grad_lse ? this->load_row_values(g.grad_lse, v) : V<T>{};
        if (g.grad_entropy) this->load_entropy_gradient();
        this->find_key_range(begin, end);
        has_sums = false;
    }
    // Loads `top`, `inverse_sum` and `delta` before the keys from .. to are processed, unless the block of keys has all
    // that are visible: compute_logit_gradient then computes them.
    void prepare_sums(std::int64_t from, std::int64_t to) {
        is_single_block = from == begin && to == end && !f.uniform;
        if (is_single_block || has_sums) return;
        load_sums();
        has_sums = true;
    }
    // The magnitude of lse above which its rounding would be a large part of the error of the weights exp2(s - lse): it
    // then has fewer than 17 bits after the binary point (12 if weights are rounded to bf16). It needs 20 where logits
    // are more precise: products over D < 64, and logits that are large because of a bias. The largest weight of such
    // a row is close to 1, and has nearly no error if it is computed from the maximum. Rows above the limit recompute
    // their maximum and sum from the logits.
    //
    // So do rows with few queries and rows whose products are summed in short blocks. For few rows the forward pass
    // sums products in another order, so the roundings of lse and of the logits do not cancel: at 8 queries the error
    // of dV would be three times torch's. In blocks the rounding of lse, about 10 * 2**-24, would be the largest error.
    T lse_limit() const {
        if (sizeof(T) == 8) return T(std::int64_t(1) << 36);
        if (g.grad_entropy) return T(1 << 4);  // ln P of a weight close to 1 has the absolute error of lse
        if (PAIRS) return T(1 << 12);
        return T(f.q.dtype == Dtype::f32 && (f.head_dim < 64 || f.bias.data) ? 1 << 4 : 1 << 7);
    }
    // Whether delta comes from the weights and dP, too, instead of the output. The gradient of a bias that is the same
    // for all keys is a sum of dS in which nearly everything cancels, if both are of the same weights. Logits of heads
    // of up to 16 numbers are nearly exact, so where one weight is close to 1 the rounding of the output would be the
    // largest error of dQ. Few rows compute their sums anyway; heads of up to four numbers have so little to multiply
    // that all rows do both.
    bool recomputes_delta() const {
        if (f.uniform || (for_bias_gradient && g.dbias_stride[3] == 0)) return true;
        if (f.q.dtype != Dtype::f32 || f.head_dim > 16) return false;
        return f.head_dim <= 4 || count <= MAX_DECODE_ROWS<T> || this->sums_in_short_blocks(f.head_dim);
    }
    // Computes, from the logits, `top` as the largest of each row, and the sum relative to it.
    NOINLINE void recompute_sums() {
        V<T> sum[QV];
        this->initialize_sums(top, sum, true);
        for (std::int64_t j = begin; j < end; j += KEYS) {
            const int keys = this->keys_of_block(j, end);
            if (!Base::compute_logits(j, keys)) continue;
            for (int v = 0; v < QV; v++) accumulate_sums(p + v * L, keys, top[v], sum[v]);
        }
        this->invert_sums(sum);
    }

    // The same, and delta from the weights and dP, whose rounding then cancels in dP - δ.
    NOINLINE void recompute_sums_and_delta() {
        const bool drops = f.dropout > 0;
        V<T> sum[QV], weighted_sum[QV];
        this->start_sums(sum, weighted_sum);
        for (std::int64_t j = begin; j < end; j += KEYS) {
            const int keys = this->keys_of_block(j, end);
            if (!Base::compute_logits(j, keys)) continue;
            multiply_values(j, keys, Epilogue::none);
            if (g.grad_entropy) this->add_entropy_gradient(keys, nullptr);
            if (drops) this->compute_dropout_factors(j, keys, dropout_factors);
            this->add_to_sums(keys, drops, sum, weighted_sum);
        }
        this->finish_sums(sum, weighted_sum);
    }

    // Adds the logits of a block of keys, [keys][ROWS], to the running maximum and sum of a vector of rows.
    static void accumulate_sums(const T* logits, int keys, V<T>& top, V<T>& sum) {
        constexpr int CHAINS = 4;  // a maximum or a sum has a latency of 4 cycles
        V<T> maxima[CHAINS], totals[CHAINS];
        UNROLL_FOR(c, CHAINS) {
            maxima[c] = top;
            totals[c] = V<T>{};
        }
        const int chained_keys = keys / CHAINS * CHAINS;
        for (int n = 0; n < chained_keys; n += CHAINS)
            UNROLL_FOR(c, CHAINS) maxima[c] = maximum<T>(load(logits + (n + c) * ROWS), maxima[c]);
        for (int n = chained_keys; n < keys; n++) maxima[0] = maximum<T>(load(logits + n * ROWS), maxima[0]);
        const V<T> new_top = maximum<T>(maximum<T>(maxima[0], maxima[1]), maximum<T>(maxima[2], maxima[3]));
        for (int n = 0; n < chained_keys; n += CHAINS) {
            V<T> weights[CHAINS];
            UNROLL_FOR(c, CHAINS) weights[c] = load_exponent(logits + (n + c) * ROWS) - new_top;
            exp2_in_place<CHAINS>(weights);
            UNROLL_FOR(c, CHAINS) totals[c] += weights[c];
        }
        for (int n = chained_keys; n < keys; n++) totals[0] += exp2(load(logits + n * ROWS) - new_top);
        sum = sum * exp2(top - new_top) + ((totals[0] + totals[1]) + (totals[2] + totals[3]));
        top = new_top;
    }

    // Adds dS to the gradient of the bias, which may be broadcast along any axis.
    void accumulate_bias_gradient(std::int64_t first, int rows) {
        if (g.double_dbias)
            accumulate_bias_gradient<double>(first, rows);
        else
            accumulate_bias_gradient<T>(first, rows);
    }
    template <class Sum>
    void accumulate_bias_gradient(std::int64_t first, int rows) {
        set_rows(first, rows);
        for_bias_gradient = f.q.dtype == Dtype::f32;
        Sum* to = static_cast<Sum*>(g.dbias) + b * g.dbias_stride[0];
        const bool one_row = g.dbias_stride[1] == 0 && g.dbias_stride[2] == 0;
        for (std::int64_t j = begin; j < end; j += KEYS) {
            const int keys = this->keys_of_block(j, end);
            prepare_sums(j, j + keys);
            if (!compute_block_logits(j, keys)) continue;
            compute_logit_gradient(j, keys, false);
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

    // Copies the block's rows of x into panels of OuterTile, padded with zeros; pairs are words of two rows.
    void pack_rows(const Tensor4& x, int depth, int width, Word* to) {
        Outer::for_each_panel(width, [&](int c, auto vectors) {
            constexpr int panel = decltype(vectors)::value * L;
            const int real = depth - c < panel ? depth - c : panel;
            Word* row_to = to + c * Outer::PANEL_ROWS;
            if constexpr (PAIRS) {
                interleave_rows(count, real, panel, row_to, [&](int r) {
                    return reinterpret_cast<const std::uint16_t*>(this->row_address(x, r)) + c;
                });
            } else
                for (int r = 0; r < count; r++, row_to += panel) {
                    const T* from = this->converted_row(x, r, depth, this->row_buffer) + c;
                    for (int d = 0; d < real; d++) row_to[d] = from[d];
                    for (int d = real; d < panel; d++) row_to[d] = 0;
                }
        });
    }

    // Computes `top` and `inverse_sum` from lse, or from the logits where lse is too imprecise, and delta from the
    // output.
    void load_sums() {
        if (recomputes_delta()) {
            recomputes_sums = true;
            return recompute_sums_and_delta();
        }
        const T limit = lse_limit();
        I<T> exceeds{};
        for (int v = 0; v < QV; v++) {
            V<T> products[L];
            for (int r = 0; r < L; r++)
                products[r] = multiply_out_by_gradient(v * L + r < count ? v * L + r : count - 1);
            delta[v] = reduce_sums<T>(products);
            if (g.grad_entropy) delta[v] += this->load_row_values(g.entropy_delta, v);
            const V<T> log2_sum = this->split_lse(this->load_row_values(f.lse, v), top[v], inverse_sum[v]);
            exceeds |= (log2_sum > limit) | (log2_sum < -limit);
        }
        // weights close to 1: the rounding of the output, or of the entropy, would be an error of dQ
        if ((f.bias.data || g.grad_entropy) && any<T>(exceeds)) {
            recomputes_sums = true;
            return recompute_sums_and_delta();
        }
        recomputes_sums = for_bias_gradient || any<T>(exceeds) || count <= MAX_DECODE_ROWS<T> ||
                          this->sums_in_short_blocks(f.head_dim);
        if (recomputes_sums) recompute_sums();
    }
    // The products out * dout of one row, to be summed over the lanes.
    V<T> multiply_out_by_gradient(int r) const {
        const auto product = [&](auto block_count) __attribute__((always_inline)) {
            using E = decltype(block_count);
            const E *x = reinterpret_cast<const E*>(this->row_address(g.out, r)),
                    *y = reinterpret_cast<const E*>(this->row_address(g.grad_out, r));
            V<T> lanes{};
            int d = 0;
            for (; d + L <= f.v_head_dim; d += L) lanes += load_widened<T>(x + d) * load_widened<T>(y + d);
            if (d == f.v_head_dim) return lanes;
            E padded[2][L]{};
            for (int n = 0; d + n < f.v_head_dim; n++) {
                padded[0][n] = x[d + n];
                padded[1][n] = y[d + n];
            }
            return lanes + load_widened<T>(padded[0]) * load_widened<T>(padded[1]);
        };
        if constexpr (sizeof(T) == 4) {
            if (f.q.dtype == Dtype::bf16) return product(BFloat16{});
            if (f.q.dtype == Dtype::f16) return product(Float16{});
        }
        return product(T{});
    }
};

// The least keys of a split of a row block.
template <class T>
std::int64_t min_split_keys(const Forward& f) {
    return f.queries * (f.heads / f.kv_heads) <= LANES<T> ? 1024 : 4096;
}

// The forward pass of a block of rows. With G > 0 the block has at most G rows, its output is stored row by row, and
// the product with the values is that of decode_products-inl.h; with G <= MAX_DECODE_ROWS the logits are, too. The
// observer's hooks are those of observer_hooks-inl.h.
template <class T, int QV, int G = 0, class Op = Fma<T>, class Observer = NoObserver>
struct ForwardBlock : SoftmaxBlock<T, QV, G, Op, Observer> {
    using Base = SoftmaxBlock<T, QV, G, Op, Observer>;
    using Base::f, Base::p, Base::q, Base::count, Base::L, Base::ROWS, Base::KEYS, Base::PAIRS, Base::DECODES,
        Base::head, Base::query, Base::flat_row, Base::b, Base::k_width, Base::v_width, Base::o, Base::dropout_factors,
        Base::weights, Base::decode_q, Base::top, Base::sum, Base::new_top, Base::rescaling, Base::top_moved,
        Base::packed, Base::observer, Base::output_size;
    using Base::SoftmaxBlock;
    using typename Base::Products;
    using typename Base::Word;
    static std::size_t scratch(const Forward& f) {
        Arena memory{0};
        ForwardBlock(f, 0, 0, memory);
        return memory.next;
    }
    // Runs split number `split` of the visible keys, of `splits`.
    void attend_rows(std::int64_t first, int rows, std::int64_t split, std::int64_t splits, void* partial) {
        this->first = first;
        count = rows;
        if constexpr (DECODES)
            load_decode_queries();
        else
            this->load_queries();
        this->load_spans();
        this->initialize_sums(top, sum, split == 0);
        bool fresh = true;
        std::int64_t begin, end;
        this->find_key_range(begin, end);
        if (PAIRS) begin -= begin % 2;  // words hold keys 2n and 2n + 1
        observer.start(*this, begin, end);
        if (splits > 1) {
            // of the keys that are visible, so that those beyond do not matter; some splits may remain empty
            const std::int64_t all = (end - begin) / min_split_keys<T>(f), used = all < 1        ? 1
                                                                                  : all < splits ? all
                                                                                                 : splits;
            const std::int64_t split_keys = ((end - begin) / used + KEYS) / KEYS * KEYS;
            begin += split * split_keys;
            if (end > begin + split_keys) end = begin + split_keys;
        }
        for (std::int64_t j = begin; j < end; j += KEYS) {
            const int keys = this->keys_of_block(j, end);
            if (T* to = observer.logits_buffer(j)) {
                p = to;
                if constexpr (!PAIRS) weights = p;
            }
            if (!compute_block_logits(j, keys)) continue;
            if (f.dropout > 0) this->compute_dropout_factors(j, keys, dropout_factors);
            observer.observe_logits(*this, j, keys);
            if (G == 0 && fresh && !this->all_vectors_begin_at(j)) {
                this->clear_output();
                fresh = false;
            }
            this->compute_weights(j, keys, fresh);
            accumulate_values(j, keys, fresh);
            observer.observe_weights(*this, j, keys);
            fresh = false;
        }
        if (fresh) this->clear_output();
        if (splits > 1) return store_partial(static_cast<T*>(partial));
        finish();
    }

    bool compute_block_logits(std::int64_t j, int keys) {
        UNROLL_FOR(v, QV) new_top[v] = top[v];
        if constexpr (DECODES) {
            bool fully_visible;
            if (!this->evaluate_mask(j, keys, fully_visible)) return false;
            const int depth = int(f.head_dim), width = int(f.v_head_dim);
            packed = !Observer::OBSERVES && fully_visible && !this->masked_by_rules && !f.bias.data &&
                     !(f.softcap > 0) && !(f.dropout > 0);
            if constexpr (PAIRS) {
                const auto* k = reinterpret_cast<const BFloat16*>(element_address(f.k, b, this->kv_head, j, 2));
                Products::dots(decode_q, k_width / 2, k, f.k.stride[2], keys, depth, this->query_factor(), p, packed,
                               prefetcher(k, f.v, j, width));
            } else {
                with_dtype(f.k, j, [&](auto* k) {
                    Products::dots(decode_q, k_width, k, f.k.stride[2], keys, depth, p, packed,
                                   prefetcher(k, f.v, j, width));
                });
            }
            if (!packed) this->finish_logits(j, keys, fully_visible);
            return true;
        }
        return Base::compute_logits(j, keys, nullptr, new_top);
    }
    void accumulate_values(std::int64_t j, int keys, bool fresh) {
        if constexpr (DECODES)
            accumulate_rows<G>(0, j, keys, fresh);
        else if constexpr (G > 0) {
            constexpr int half = MAX_DECODE_ROWS<T>;
            accumulate_rows<half>(0, j, keys, fresh);
            if (count <= half + 2)
                accumulate_rows<2>(half, j, keys, fresh);
            else if (count <= half + 4)
                accumulate_rows<4>(half, j, keys, fresh);
            else
                accumulate_rows<half>(half, j, keys, fresh);
        } else {
            const StridedRows v = value_operand(j, keys);
            V<T> factor[QV];  // 1 once a vector's output is rescaled
            UNROLL_FOR(u, QV) factor[u] = top_moved ? rescaling[u] : splat(T(1));
            this->for_each_key_range(
                j, keys, [&](auto from_vector, auto vectors, int from, int count) __attribute__((always_inline)) {
                    constexpr int u0 = decltype(from_vector)::value, number = decltype(vectors)::value;
                    const int word = from / Op::PER_WORD;
                    PvTile<T, number, Op, ROWS>::accumulate_values(
                        weights + word * ROWS + u0 * L, {v.data + word * v.stride, v.stride},
                        (count + Op::PER_WORD - 1) / Op::PER_WORD, int(f.v_head_dim), o + u0 * L, fresh && from == 0,
                        top_moved ? factor + u0 : nullptr);
                    UNROLL_RANGE(u, u0, u0 + number, 1) factor[u] = splat(T(1));
                });
        }
    }
    // Accumulates the outputs of N rows from `row` on.
    template <int N>
    void accumulate_rows(int row, std::int64_t j, int keys, bool fresh) {
        using Rows = typename DecodeProducts<T, N, Op>::Type;
        const int width = int(f.v_head_dim);
        const auto run = [&](auto* v) __attribute__((always_inline)) {
            using E = std::remove_const_t<std::remove_pointer_t<decltype(v)>>;
            const auto* next = reinterpret_cast<const E*>(element_address(f.k, b, this->kv_head, j + keys, sizeof(E)));
            const Prefetcher<E> prefetcher{next, f.k.stride[2], DECODES ? int(f.head_dim) : 0};
            Rows::accumulate_values(weights + row, packed ? G : ROWS, v, f.v.stride[2], keys, width, o + row * v_width,
                                    v_width, fresh, prefetcher);
        };
        if constexpr (PAIRS)
            run(reinterpret_cast<const BFloat16*>(element_address(f.v, b, this->kv_head, j, 2)));
        else
            with_dtype(f.v, j, run);
    }
    // The values of keys j .. j + keys as PvTile reads them.
    StridedRows value_operand(std::int64_t j, int keys) const {
        const int width = int(f.v_head_dim);
        if (PAIRS && f.paired_v) {
            const std::int64_t row_bytes = width * 4, pair = j / 2 - f.visible_begin / 2;
            return {static_cast<const char*>(f.paired_v) +
                        ((b * f.kv_heads + this->kv_head) * visible_pairs(f) + pair) * row_bytes,
                    row_bytes};
        }
        return this->pv_operand(f.v, j, keys, width, this->converted_v);
    }
    // A prefetcher of the rows from j on of tensor x, of the same dtype as the first argument.
    template <class E>
    auto prefetcher(const E*, const Tensor4& x, std::int64_t j, int width) const {
        return Prefetcher<E>{reinterpret_cast<const E*>(element_address(x, b, this->kv_head, j, sizeof(E))),
                             x.stride[2], width};
    }
    // Calls body(row j of a tensor [B, Hkv, K, .], as a pointer to its dtype).
    template <class Body>
    INLINE void with_dtype(const Tensor4& x, std::int64_t j, const Body& body) const {
        if constexpr (sizeof(T) == 8)
            body(reinterpret_cast<const T*>(element_address(x, b, this->kv_head, j, 8)));
        else if (x.dtype == Dtype::bf16)
            body(reinterpret_cast<const BFloat16*>(element_address(x, b, this->kv_head, j, 2)));
        else if (x.dtype == Dtype::f16)
            body(reinterpret_cast<const Float16*>(element_address(x, b, this->kv_head, j, 2)));
        else
            body(reinterpret_cast<const T*>(element_address(x, b, this->kv_head, j, 4)));
    }

    void load_decode_queries() {
        const int keys = f.keys < KEYS ? int(f.keys) : KEYS;
        for (int n = 0; n < keys * ROWS; n += L) store(p + n, V<T>{});  // rows beyond G stay finite
        for (int g = 0; g < G; g++) {
            if constexpr (PAIRS) {
                auto* to = reinterpret_cast<std::uint16_t*>(decode_q) + g * k_width;
                const auto* from = reinterpret_cast<const std::uint16_t*>(this->row_address(f.q, g));
                for (int d = 0; d < k_width; d++) to[d] = d < f.head_dim ? from[d] : 0;
            } else {
                const T* from = this->converted_row(f.q, g, int(f.head_dim), this->row_buffer);
                for (int d = 0; d < k_width; d++)
                    decode_q[g * k_width + d] = d < f.head_dim ? from[d] * this->query_factor() : T(0);
            }
        }
    }
    // The partial result of a split: output, top and sum. `merge_splits` combines those of all splits.
    void store_partial(T* partial) const {
        for (int n = 0; n < output_size(); n += L) store(partial + n, load(o + n));
        partial += output_size();
        UNROLL_FOR(v, QV) {
            store(partial + v * L, top[v]);
            store(partial + ROWS + v * L, sum[v]);
        }
    }
    void merge_splits(std::int64_t first, int rows, std::int64_t splits, const T* partial, std::int64_t size) {
        this->first = first;
        count = rows;
        const std::int64_t top_offset = output_size();
        UNROLL_FOR(v, QV) {
            top[v] = splat(-std::numeric_limits<T>::max());
            sum[v] = V<T>{};
        }
        for (std::int64_t n = 0; n < splits; n++)
            UNROLL_FOR(v, QV) top[v] = maximum<T>(load(partial + n * size + top_offset + v * L), top[v]);
        for (int n = 0; n < top_offset; n += L) store(o + n, V<T>{});
        for (std::int64_t n = 0; n < splits; n++) {
            const T* from = partial + n * size;
            V<T> factor[QV];
            UNROLL_FOR(v, QV) {
                factor[v] = exp2(load(from + top_offset + v * L) - top[v]);
                sum[v] += load(from + top_offset + ROWS + v * L) * factor[v];
            }
            if constexpr (G > 0) {
                for (int g = 0; g < count; g++)
                    for (int c = g * v_width; c < (g + 1) * v_width; c += L)
                        store(o + c, load(o + c) + load(from + c) * factor[0][g]);
            } else {
                for (int c = 0; c < f.v_head_dim; c++)
                    UNROLL_FOR(v, QV) {
                        T* to = o + c * ROWS + v * L;
                        store(to, load(to) + load(from + c * ROWS + v * L) * factor[v]);
                    }
            }
        }
        this->load_spans();
        finish();
    }

    void finish() {
        V<T> inverse[QV];
        I<T> is_zero{};
        UNROLL_FOR(v, QV) {
            inverse[v] = sum[v] == 0 ? V<T>{} : 1 / sum[v];
            is_zero |= sum[v] == 0;
        }
        if (any<T>(is_zero)) invert_zero_sums(inverse);
        const bool finite = store_output(inverse);
        observer.finish(*this);
        if (!finite && f.nonfinite) f.nonfinite->store(true, std::memory_order_relaxed);
        if (!f.lse) return;
        for (int r = 0; r < count; r++) {
            const T total = sum[r / L][r % L];
            const T row_top = top[r / L][r % L], lowest = this->lowest_offset() * T(LOG2E);
            // Added in double: of a row of few keys the roundings to float would be most of the error. The logarithm of
            // a mantissa is small enough for a float, whose log2 takes half the time of that of a double.
            int exponent = 0;
            const T mantissa = std::frexp(total, &exponent);
            T value = T((double(row_top) + exponent + double(std::log2(mantissa))) * LN2);
            if (total > 0 && row_top <= lowest) value = -std::numeric_limits<T>::max();  // so are all biases
            static_cast<T*>(f.lse)[flat_row(r)] = total == 0 ? -std::numeric_limits<T>::infinity() : value;
        }
    }
    // Rows with a sum of 0: the result is NaN if a key is visible (all visible logits are -infinity), else 0.
    NOINLINE void invert_zero_sums(V<T>* inverse) {
        for (int r = 0; r < count; r++)
            if (sum[r / L][r % L] == 0 && this->has_visible_key(r))
                inverse[r / L][r % L] = sum[r / L][r % L] = std::numeric_limits<T>::quiet_NaN();
    }
    // Stores the output, each row times its factor. Returns whether all of it is finite.
    bool store_output(const V<T>* factor) {
        if constexpr (G == 0) return this->store_rows(o, int(f.v_head_dim), factor, f.out, f.out_stride);
        constexpr int STEP = Products::STEP;
        V<T> nan_probe{};
        for (int g = 0; g < count; g++) {
            char* row = this->row_address(static_cast<char*>(f.out), f.out_stride, f.q.dtype, g);
            for (int c = 0; c < v_width; c += STEP) {
                V<T> x[STEP / L];
                UNROLL_FOR(n, STEP / L) {
                    x[n] = load(o + g * v_width + c + n * L) * factor[0][g];
                    nan_probe += x[n] * T(0);  // NaN or infinity times 0 is NaN
                }
                Products::restore_order(x);
                UNROLL_FOR(n, STEP / L) Base::store_columns(row, c + n * L, x[n], int(f.v_head_dim));
            }
        }
        return !any<T>(nan_probe != nan_probe);
    }
};

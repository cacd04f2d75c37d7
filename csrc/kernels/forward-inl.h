// The forward pass of a block of rows: softmax over blocks of keys with a running maximum. With G > 0 there are at most
// G rows, and the output lies as they do: weights times values is a product of Few, and so are the logits of up to
// MOST_FEW. What is measured of the rows on the way is the Rider's (see observer_hooks-inl.h).
template <class T, int QV, int G = 0, class Op = Plain<T>, class Rider = Alone>
struct Attend : SoftmaxTile<T, QV, G, Op, Rider> {
    using Base = SoftmaxTile<T, QV, G, Op, Rider>;
    using Base::f, Base::p, Base::q, Base::count, Base::L, Base::ROWS, Base::KEYS, Base::PAIRS, Base::FEW, Base::head,
        Base::query, Base::row, Base::b, Base::k_width, Base::v_width, Base::o, Base::dropout_factors, Base::weights,
        Base::few_q, Base::top, Base::sum, Base::most, Base::shrink, Base::moved, Base::packed, Base::rider,
        Base::output_size;
    using Base::SoftmaxTile;
    using typename Base::FewProducts;
    using typename Base::Word;
    static std::size_t scratch(const Forward& f) {
        Arena memory{0};
        Attend(f, 0, 0, memory);
        return memory.next;
    }
    // Share `share` of `shares` of the keys that the rows may see.
    void run(std::int64_t first, int rows, std::int64_t share, std::int64_t shares, void* partial) {
        this->first = first;
        count = rows;
        if constexpr (FEW)
            load_few_queries();
        else
            this->load_queries();
        this->load_spans();
        this->start_sums(top, sum, share == 0);
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
            if (T* to = rider.place_for(j)) {
                p = to;
                if constexpr (!PAIRS) weights = p;
            }
            if (!logits(j, keys)) continue;
            if (f.dropout > 0) this->keep(j, keys, dropout_factors);
            rider.before(*this, j, keys);
            if (G == 0 && fresh && !this->all_begin(j)) {
                this->clear_output();
                fresh = false;
            }
            this->weigh(j, keys, fresh);
            mix(j, keys, fresh);
            rider.after(*this, j, keys);
            fresh = false;
        }
        if (fresh) this->clear_output();
        if (shares > 1) return leave(static_cast<T*>(partial));
        finish();
    }

    bool logits(std::int64_t j, int keys) {
        UNROLL_FOR(v, QV) most[v] = top[v];
        if constexpr (FEW) {
            bool whole;
            if (!this->visible(j, keys, whole)) return false;
            const int depth = int(f.head_dim), width = int(f.v_head_dim);
            packed = !Rider::LOOKS && whole && !f.visible.count && !f.bias.data && !(f.softcap > 0) && !(f.dropout > 0);
            if constexpr (PAIRS) {
                const auto* k = reinterpret_cast<const BFloat16*>(at(f.k, b, this->kv_head, j, 2));
                FewProducts::dots(few_q, k_width / 2, k, f.k.stride[2], keys, depth, this->query_factor(), p, packed,
                                  ahead(k, f.v, j, width));
            } else {
                of_dtype(f.k, j, [&](auto* k) {
                    FewProducts::dots(few_q, k_width, k, f.k.stride[2], keys, depth, p, packed,
                                      ahead(k, f.v, j, width));
                });
            }
            if (!packed) this->adjust(j, keys, whole);
            return true;
        }
        return Base::logits(j, keys, nullptr, most);
    }
    void mix(std::int64_t j, int keys, bool fresh) {
        if constexpr (FEW)
            mix_rows<G>(0, j, keys, fresh);
        else if constexpr (G > 0) {
            constexpr int half = MOST_FEW<T>;
            mix_rows<half>(0, j, keys, fresh);
            if (count <= half + 2)
                mix_rows<2>(half, j, keys, fresh);
            else if (count <= half + 4)
                mix_rows<4>(half, j, keys, fresh);
            else
                mix_rows<half>(half, j, keys, fresh);
        } else {
            const Lines v = values(j, keys);
            V<T> factor[QV];  // 1 for vectors that have met some of these keys
            UNROLL_FOR(u, QV) factor[u] = moved ? shrink[u] : splat(T(1));
            this->in_steps(j, keys, [&](auto from_vector, auto vectors, int from, int count) {
                constexpr int u0 = decltype(from_vector)::value, number = decltype(vectors)::value;
                const int word = from / Op::PER_WORD;
                PvTile<T, number, Op, ROWS>::mixes(weights + word * ROWS + u0 * L, {v.data + word * v.stride, v.stride},
                                                   (count + Op::PER_WORD - 1) / Op::PER_WORD, int(f.v_head_dim),
                                                   o + u0 * L, fresh && from == 0, moved ? factor + u0 : nullptr);
                UNROLL_RANGE(u, u0, u0 + number, 1) factor[u] = splat(T(1));
            });
        }
    }
    // Of N rows from the given one on.
    template <int N>
    void mix_rows(int row, std::int64_t j, int keys, bool fresh) {
        using Rows = typename FewOf<T, N, Op>::Type;
        const int width = int(f.v_head_dim);
        const auto run = [&](auto* v) __attribute__((always_inline)) {
            using E = std::remove_const_t<std::remove_pointer_t<decltype(v)>>;
            const auto* next = reinterpret_cast<const E*>(at(f.k, b, this->kv_head, j + keys, sizeof(E)));
            const Ahead<E> ahead{next, f.k.stride[2], FEW ? int(f.head_dim) : 0};
            Rows::mixes(weights + row, packed ? G : ROWS, v, f.v.stride[2], keys, width, o + row * v_width, v_width,
                        fresh, ahead);
        };
        if constexpr (PAIRS)
            run(reinterpret_cast<const BFloat16*>(at(f.v, b, this->kv_head, j, 2)));
        else
            of_dtype(f.v, j, run);
    }
    Lines values(std::int64_t j, int keys) const {
        const int width = int(f.v_head_dim);
        if (PAIRS && f.paired_v) {
            const std::int64_t line = width * 4, pair = j / 2 - f.seen[0] / 2;
            return {
                static_cast<const char*>(f.paired_v) + ((b * f.kv_heads + this->kv_head) * pairs_seen(f) + pair) * line,
                line};
        }
        return this->across(f.v, j, keys, width, this->wide_v);
    }
    // Rows from j on of the other tensor, of the same dtype.
    template <class E>
    auto ahead(const E*, const Tensor4& x, std::int64_t j, int width) const {
        return Ahead<E>{reinterpret_cast<const E*>(at(x, b, this->kv_head, j, sizeof(E))), x.stride[2], width};
    }
    // body(row j of a tensor [B, Hkv, K, .] as what it is)
    template <class Body>
    INLINE void of_dtype(const Tensor4& x, std::int64_t j, const Body& body) const {
        if constexpr (sizeof(T) == 8)
            body(reinterpret_cast<const T*>(at(x, b, this->kv_head, j, 8)));
        else if (x.dtype == Dtype::bf16)
            body(reinterpret_cast<const BFloat16*>(at(x, b, this->kv_head, j, 2)));
        else if (x.dtype == Dtype::f16)
            body(reinterpret_cast<const Float16*>(at(x, b, this->kv_head, j, 2)));
        else
            body(reinterpret_cast<const T*>(at(x, b, this->kv_head, j, 4)));
    }

    void load_few_queries() {
        const int keys = f.keys < KEYS ? int(f.keys) : KEYS;
        for (int n = 0; n < keys * ROWS; n += L) store(p + n, V<T>{});  // rows beyond G stay finite
        for (int g = 0; g < G; g++) {
            if constexpr (PAIRS) {
                auto* to = reinterpret_cast<std::uint16_t*>(few_q) + g * k_width;
                const auto* from = reinterpret_cast<const std::uint16_t*>(this->address_of(f.q, g));
                for (int d = 0; d < k_width; d++) to[d] = d < f.head_dim ? from[d] : 0;
            } else {
                const T* from = this->row_of(f.q, g, int(f.head_dim), this->line);
                for (int d = 0; d < k_width; d++)
                    few_q[g * k_width + d] = d < f.head_dim ? from[d] * this->query_factor() : T(0);
            }
        }
    }
    // What a share of the keys leaves: o, top and sum; and from these the whole.
    void leave(T* partial) const {
        for (int n = 0; n < output_size(); n += L) store(partial + n, load(o + n));
        partial += output_size();
        UNROLL_FOR(v, QV) {
            store(partial + v * L, top[v]);
            store(partial + ROWS + v * L, sum[v]);
        }
    }
    void merge(std::int64_t first, int rows, std::int64_t shares, const T* partial, std::int64_t size) {
        this->first = first;
        count = rows;
        const std::int64_t tops = output_size();
        UNROLL_FOR(v, QV) {
            top[v] = splat(-std::numeric_limits<T>::max());
            sum[v] = V<T>{};
        }
        for (std::int64_t n = 0; n < shares; n++)
            UNROLL_FOR(v, QV) top[v] = greater<T>(load(partial + n * size + tops + v * L), top[v]);
        for (int n = 0; n < tops; n += L) store(o + n, V<T>{});
        for (std::int64_t n = 0; n < shares; n++) {
            const T* from = partial + n * size;
            V<T> factor[QV];
            UNROLL_FOR(v, QV) {
                factor[v] = exp2(load(from + tops + v * L) - top[v]);
                sum[v] += load(from + tops + ROWS + v * L) * factor[v];
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
        I<T> none{};
        UNROLL_FOR(v, QV) {
            inverse[v] = sum[v] == 0 ? V<T>{} : 1 / sum[v];
            none |= sum[v] == 0;
        }
        if (any<T>(none)) divide_by_zero(inverse);
        const bool finite = put(inverse);
        rider.finish(*this);
        if (!finite && f.spoilt) f.spoilt->store(true, std::memory_order_relaxed);
        if (!f.lse) return;
        for (int r = 0; r < count; r++) {
            const T total = sum[r / L][r % L];
            const T most = top[r / L][r % L], least = -std::numeric_limits<T>::max();
            T value = (most + std::log2(total)) * T(LN2);
            if (total > 0 && most == least) value = least;  // of a row of the smallest biases
            static_cast<T*>(f.lse)[row(r)] = total == 0 ? -std::numeric_limits<T>::infinity() : value;
        }
    }
    // Rows with a sum of 0: one that sees keys, all with a logit of -inf, is NaN; one that sees no key stays 0.
    APART void divide_by_zero(V<T>* inverse) {
        for (int r = 0; r < count; r++)
            if (sum[r / L][r % L] == 0 && this->sees_any(r))
                inverse[r / L][r % L] = sum[r / L][r % L] = std::numeric_limits<T>::quiet_NaN();
    }
    // The output times a factor for each row; whether it is finite.
    bool put(const V<T>* factor) {
        if constexpr (G == 0) return this->put_rows(o, int(f.v_head_dim), factor, f.out, f.out_stride);
        constexpr int STEP = FewProducts::STEP;
        V<T> zero{};
        for (int g = 0; g < count; g++) {
            char* row = this->place_of(static_cast<char*>(f.out), f.out_stride, f.q.dtype, g);
            for (int c = 0; c < v_width; c += STEP) {
                V<T> x[STEP / L];
                UNROLL_FOR(n, STEP / L) {
                    x[n] = load(o + g * v_width + c + n * L) * factor[0][g];
                    zero += x[n] * T(0);  // NaN or infinity times 0 is NaN
                }
                FewProducts::in_order(x);
                UNROLL_FOR(n, STEP / L) Base::put(row, c + n * L, x[n], int(f.v_head_dim));
            }
        }
        return !any<T>(zero != zero);
    }
};

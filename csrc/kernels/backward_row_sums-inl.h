// The numbers of each row that the backward pass normalises weights by and subtracts from dP: the largest logit, the
// inverse of the sum of the weights, and δ.

template <class T, int QV, class Op = Fma<T>>
struct BackwardRowSums : LogitsBlock<T, QV, Op> {
    using Base = LogitsBlock<T, QV, Op>;
    using Base::f, Base::p, Base::count, Base::L, Base::ROWS, Base::SUM_CHAIN, Base::flat_row;

    const Backward& g;
    T *dots, *dropout_factors;      // dP and the factors of dropout, [KEYS][ROWS]
    V<T> top[QV], inverse_sum[QV];  // a weight is exp2(logit - top) * inverse_sum
    V<T> delta[QV],
        lse_gradient[QV];  // separate: in a row of few keys the rounding of their difference would be the largest error
    V<T> entropy_gradient[QV], log2_sum[QV];  // if g.grad_entropy; log2_sum is lse * log2(e), 0 where that is infinite

    BackwardRowSums(const Backward& call, std::int64_t batch, std::int64_t head, Arena& memory)
        : Base(call.forward, batch, head, memory), g(call) {}

    // For rows all of whose visible keys are in this block: replaces the logits by exponentials and sums the weights
    // and δ = Σ P dP. Where one weight is nearly 1, the rounding of dP then cancels in dP - δ, as in plain torch.
    // With δ = out · dout the rounding of out does not.
    void exponentiate_and_sum(int keys, bool drops) {
        V<T> sum[QV], weighted_sum[QV];
        start_sums(sum, weighted_sum);
        add_to_sums(keys, drops, sum, weighted_sum);
        finish_sums(sum, weighted_sum);
    }
    void start_sums(V<T>* sum, V<T>* weighted_sum) {
        this->initialize_sums(top, sum, true);
        UNROLL_FOR(v, QV) weighted_sum[v] = V<T>{};
    }
    // Replaces the logits of a block of keys by exponentials, relative to the running maximum, and adds them and their
    // products with dP to the sums.
    void add_to_sums(int keys, bool drops, V<T>* sum, V<T>* weighted_sum) {
        V<T> old_top[QV], total[QV], weighted_total[QV];
        UNROLL_FOR(v, QV) {
            old_top[v] = top[v];
            total[v] = weighted_total[v] = V<T>{};
        }
        for (int n = 0; n < keys; n++)
            UNROLL_FOR(v, QV) top[v] = maximum<T>(load(p + n * ROWS + v * L), top[v]);
        for (int from = 0; from < keys; from += SUM_CHAIN) {
            const int to = from + SUM_CHAIN < keys ? from + SUM_CHAIN : keys;
            V<T> chain[QV]{}, weighted_chain[QV]{};
            for (int n = from; n < to; n++) {
                V<T> weights[QV];
                UNROLL_FOR(v, QV) weights[v] = load_exponent(p + n * ROWS + v * L) - top[v];
                exp2_in_place<QV>(weights);
                UNROLL_FOR(v, QV) {
                    const int at_tile = n * ROWS + v * L;
                    chain[v] += weights[v];
                    store(p + at_tile, weights[v]);
                    const V<T> dropped = drops ? weights[v] * load(dropout_factors + at_tile) : weights[v];
                    weighted_chain[v] += dropped * load(dots + at_tile);
                }
            }
            UNROLL_FOR(v, QV) {
                total[v] += chain[v];
                weighted_total[v] += weighted_chain[v];
            }
        }
        UNROLL_FOR(v, QV) {
            const V<T> rescaling = exp2(old_top[v] - top[v]);
            sum[v] = sum[v] * rescaling + total[v];
            weighted_sum[v] = weighted_sum[v] * rescaling + weighted_total[v];
        }
    }
    void finish_sums(const V<T>* sum, const V<T>* weighted_sum) {
        invert_sums(sum);
        UNROLL_FOR(v, QV) {
            delta[v] = weighted_sum[v] * inverse_sum[v];
        }
    }
    // The weights of rows without a visible key stay 0; those of rows whose lse is NaN become NaN.
    void invert_sums(const V<T>* sum) {
        UNROLL_FOR(v, QV) {
            const V<T> lse = load_row_values(f.lse, v);
            inverse_sum[v] = lse != lse ? lse : 1 / (sum[v] == 0 ? splat(T(1)) : sum[v]);
        }
    }

    void load_entropy_gradient() {
        UNROLL_FOR(v, QV) {
            entropy_gradient[v] = load_row_values(g.grad_entropy, v);
            const V<T> lse = load_row_values(f.lse, v), infinity = splat(std::numeric_limits<T>::infinity());
            log2_sum[v] = ((lse == infinity) | (lse == -infinity)) ? V<T>{} : lse * T(LOG2E);
        }
    }
    // Adds the gradient of the entropy to dP: -(ln P + 1) times that of the row. The logits are relative to
    // `subtrahend` if that is not null. The rounding of lse cancels in dP - δ where δ = Σ P dP.
    NOINLINE void add_entropy_gradient(int keys, const V<T>* subtrahend) {
        V<T> shift[QV], factor[QV];
        UNROLL_FOR(v, QV) {
            shift[v] = subtrahend ? log2_sum[v] - subtrahend[v] : log2_sum[v];
            factor[v] = entropy_gradient[v] * T(LN2);
        }
        const V<T> lowest = splat(-T(LOWEST_LOG2));  // of a masked key, whose weight is 0: dP must be finite
        for (int n = 0; n < keys; n++)
            UNROLL_FOR(v, QV) {
                const int at_tile = n * ROWS + v * L;
                const V<T> log2_weight = maximum<T>(lowest, load(p + at_tile) - shift[v]);
                store(dots + at_tile, load(dots + at_tile) - (factor[v] * log2_weight + entropy_gradient[v]));
            }
    }
    static constexpr int LOWEST_LOG2 = 2000;  // 2**-2000 is 0 in every type

    // A vector of rows of a tensor [B, H, Q]. The lanes are written to memory: the compiler writes a lane of a register
    // by a store and a load of the whole vector.
    V<T> load_row_values(const void* x, int v) const {
        T values[L] __attribute__((aligned(64)));
        for (int r = 0; r < L; r++)
            values[r] = static_cast<const T*>(x)[flat_row(v * L + r < count ? v * L + r : count - 1)];
        return load(values);
    }
    // Splits lse, as log2 of the sum of the weights, into `top` and an inverse. A logit minus 8 or more would be
    // rounded at 2**-21, so a sum of up to 2**32 is a factor and `top` is 0. Of a larger sum only the fraction of the
    // logarithm is a factor, so that no exponential overflows. Returns log2 of the sum.
    static V<T> split_lse(V<T> lse, V<T>& top, V<T>& inverse) {
        constexpr double MAX_FACTOR_LOG2 = 32;
        T logs[L] __attribute__((aligned(64))), tops[L] __attribute__((aligned(64)));
        T fractions[L] __attribute__((aligned(64))), exponents[L] __attribute__((aligned(64)));
        store(logs, lse);
        for (int r = 0; r < L; r++) {
            const bool is_masked = logs[r] == -std::numeric_limits<T>::infinity();  // in all keys: weights are 0
            const double log = is_masked ? 0 : double(logs[r]) * LOG2E, integer = std::nearbyint(log);
            const double subtracted = std::fabs(log) < MAX_FACTOR_LOG2 ? 0 : integer;
            logs[r] = T(log);
            tops[r] = T(subtracted);
            fractions[r] = T(integer - log);
            exponents[r] = T(subtracted - integer);
        }
        top = load(tops);
        inverse = exp2(load(fractions)) * exp2(load(exponents));
        return load(logs);
    }
};

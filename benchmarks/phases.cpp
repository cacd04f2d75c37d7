// Where the kernels' time goes: each phase of a block of rows and a block of keys alone, in one thread, from caches,
// beside multiply-adds in registers. For the widest target that this CPU has:
//
//     g++ -std=c++20 -O3 -march=native -ffp-contract=fast -fno-math-errno -fno-trapping-math
//         benchmarks/phases.cpp -o phases
//     ./phases [length] [head width]
#if defined(__AVX512BF16__)
#include "../csrc/targets/avx512_bf16.cpp"
#define TARGET avx512_bf16
#elif defined(__AVX512F__)
#include "../csrc/targets/avx512.cpp"
#define TARGET avx512
#elif defined(__AVX2__)
#include "../csrc/targets/avx2.cpp"
#define TARGET avx2
#else
#error "phases: this CPU has neither AVX-512 nor AVX2"
#endif

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

namespace headscope::TARGET {
namespace {

// Nanoseconds of one call: the best of many short repetitions, as other work on the machine only takes away.
template <class Body>
double best(const Body& body) {
    using Clock = std::chrono::steady_clock;
    const auto of = [&](int times) {
        const auto begun = Clock::now();
        for (int n = 0; n < times; n++) body();
        return std::chrono::duration<double, std::nano>(Clock::now() - begun).count() / times;
    };
    const int times = std::max(1, int(1e6 / of(1)));
    double least = of(times);
    for (int n = 0; n < 200; n++) least = std::min(least, of(times));
    return least;
}

// Multiply-adds of vectors in a nanosecond.
template <class Op>
double peak() {
    constexpr int SUMS = 12, ROUNDS = 1000;
    typename Op::Word word{}, words[LANES<float>] __attribute__((aligned(64))){};
    asm volatile("" : "+m"(word), "+m"(words));  // whatever they are
    const double ns = best([&] {
        V<float> sum[SUMS];
        UNROLL_FOR(n, SUMS) sum[n] = splat(float(n));
        for (int r = 0; r < ROUNDS; r++)
            UNROLL_FOR(n, SUMS) sum[n] = Op::multiply_add(sum[n], word, words);
        UNROLL_FOR(n, SUMS) asm volatile("" : : "x"(sum[n]));
    });
    return SUMS * ROUNDS / ns;
}

template <class Op>
struct Phases {
    using Attending = ForwardBlock<float, QUERY_VECTORS, 0, Op>;
    using Block = BackwardBlock<float, QUERY_VECTORS, Op>;
    static constexpr int ROWS = Attending::ROWS, KEYS = Attending::KEYS;
    static constexpr bool HALF = Op::PER_WORD == 2;

    const int length, width;
    const double fastest = peak<Op>(),
                 product = double(KEYS) * QUERY_VECTORS * width / Op::PER_WORD;  // multiply-adds of vectors
    Backward g{};
    std::vector<std::vector<char>> memory;
    std::minstd_rand random;
    double total = 0;

    void* take(std::size_t bytes) {
        memory.emplace_back(bytes + 64);
        return reinterpret_cast<void*>((reinterpret_cast<std::uintptr_t>(memory.back().data()) + 63) / 64 * 64);
    }
    Tensor4 tensor() {
        void* const data = take(std::size_t(length) * width * (HALF ? 2 : 4));
        std::uniform_real_distribution<float> numbers(-2, 2);
        for (int n = 0; n < length * width; n++) {
            if (HALF)
                static_cast<std::uint16_t*>(data)[n] = round_to_half(numbers(random), Dtype::bf16);
            else
                static_cast<float*>(data)[n] = numbers(random);
        }
        return {data, {length * width, length * width, width, 1}, HALF ? Dtype::bf16 : Dtype::f32};
    }
    void* result(std::int64_t* stride) {
        stride[0] = stride[1] = length * width;
        stride[2] = width;
        return take(std::size_t(length) * width * 4);
    }
    Phases(int length, int width) : length(length), width(width) {
        Forward& f = g.forward;
        f.batch = f.heads = f.kv_heads = 1;
        f.queries = f.keys = length;
        f.head_dim = f.v_head_dim = width;
        f.scale = 1 / std::sqrt(double(width));
        f.q = tensor();
        f.k = tensor();
        f.v = tensor();
        g.out = tensor();
        g.grad_out = tensor();
        f.out = result(f.out_stride);
        g.dq = result(g.dq_stride);
        g.dk = result(g.dk_stride);
        g.dv = result(g.dv_stride);
        f.lse = take(sizeof(float) * length);
        std::fill_n(static_cast<float*>(f.lse), length, 7.f);
        if (const std::size_t bytes = paired_v_bytes(f)) {
            f.paired_v = take(bytes);
            for (int n = 0; n < pairing_tasks(f); n++) pair_values(f, n);
        }
    }

    // One phase of a block; of how many products of it.
    void show(const char* phase, double ns, int products) {
        total += ns;
        std::printf("  %-36s %8.0f ns", phase, ns);
        if (products) std::printf("  %3.0f %% of the peak", 100 * products * product / ns / fastest);
        std::printf("\n");
    }
    // All of them, and a whole pass, of so many blocks.
    void compare(const char* pass, int products, double ns, double blocks) {
        const double all = total;
        show("all of these", all, products);
        show(pass, ns / blocks, products);
        total = 0;
    }

    void forward() {
        std::printf("%s forward, %d rows and %d keys of (1, 1, %d, %d)\n", HALF ? "bf16" : "fp32", ROWS, KEYS, length,
                    width);
        const Forward& f = g.forward;
        Arena arena{reinterpret_cast<std::uintptr_t>(take(Attending::scratch(f)))};
        Attending a(f, 0, 0, arena);
        a.attend_rows(0, ROWS, 0, 1, nullptr);
        std::int64_t j = 0;
        const auto next = [&] { j = (j + KEYS) % length; };
        show("logits, and the largest", best([&] {
                 std::copy_n(a.top, QUERY_VECTORS, a.new_top);
                 a.compute_block_logits(j, KEYS);
                 next();
             }),
             1);
        show("weights", best([&] {
                 std::copy_n(a.top, QUERY_VECTORS, a.new_top);
                 a.compute_weights(0, KEYS, false);
             }),
             0);
        show("weights times values", best([&] {
                 a.accumulate_values(j, KEYS, true);
                 next();
             }),
             1);
        const double whole = best([&] { a.attend_rows(0, ROWS, 0, 1, nullptr); });
        compare("a pass over all keys, for each block", 2, whole, length / KEYS);
    }
    void backward() {
        std::printf("%s backward, likewise, for each of %d blocks of rows\n", HALF ? "bf16" : "fp32", MAX_GROUP_BLOCKS);
        void* const scratch = take(MAX_GROUP_BLOCKS * Block::scratch(g));
        Arena arena{reinterpret_cast<std::uintptr_t>(scratch)};
        alignas(Block) unsigned char storage[MAX_GROUP_BLOCKS][sizeof(Block)];
        Block* block[MAX_GROUP_BLOCKS];
        for (int n = 0; n < MAX_GROUP_BLOCKS; n++) {
            block[n] = new (storage[n]) Block(g, 0, 0, arena);
            if (n) block[n]->share_buffers(*block[0]);
            block[n]->start(n * ROWS, ROWS);
            block[n]->process_keys(0);
        }
        Block& a = *block[0];
        float* const sums = static_cast<float*>(take(gradient_sums_bytes(g.forward)));
        std::int64_t j = 0;
        const auto next = [&] { j = (j + KEYS) % length; };
        const GradientTurns<float> ordered{g, 0, 0, 1, sums, sums + length * width, width, width, nullptr};
        const StridedRows keys = a.pv_keys(0, KEYS);
        show("logits", best([&] {
                 a.compute_block_logits(j, KEYS);
                 next();
             }),
             1);
        show("dO times values", best([&] {
                 QkTile<float, QUERY_VECTORS, Op>::multiply(
                     a.dout, a.qk_operand(g.forward.v, j, KEYS, width, a.converted_v), KEYS, width / Op::PER_WORD, 1,
                     a.dots, 0, Epilogue::subtract, a.delta);
                 next();
             }),
             1);
        show("weights and dS",
             best([&] { a.template exponentiate_and_differentiate<false, false>(KEYS, false, false); }), 0);
        show("dQ", best([&] {
                 PvTile<float, QUERY_VECTORS, Op>::accumulate_values(a.ds_keys, keys, KEYS / Op::PER_WORD, width, a.dq,
                                                                     true);
             }),
             1);
        show("dK and dV", best([&] {
                              for (Block* x : block) {
                                  x->from = j;
                                  x->to = j + KEYS;
                              }
                              Block::add_key_gradients(block, MAX_GROUP_BLOCKS, ordered);
                              next();
                          }) / MAX_GROUP_BLOCKS,
             2);
        std::vector<std::atomic<std::int64_t>> passed(std::size_t(gradient_groups(g.forward)));
        const double whole = best([&] {
            for (auto& progress : passed) progress = 0;
            for (std::size_t n = 0; n < passed.size(); n++)
                run_gradient(g, 0, std::int64_t(n), scratch, sums, passed.data());
        });
        compare("a pass over all, for each block", 5, whole, double(length) / ROWS * length / KEYS);
    }
    void run() {
        std::printf("%s: %.0f GFLOP/s in registers\n", HALF ? "bf16" : "fp32",
                    fastest * 2 * LANES<float> * Op::PER_WORD);
        forward();
        backward();
    }
};
}  // namespace
}  // namespace headscope::TARGET

int main(int count, char** words) {
    using namespace headscope::TARGET;
    const int length = count > 1 ? std::atoi(words[1]) : 1024, width = count > 2 ? std::atoi(words[2]) : 64;
    if (length < 256 || length % 128 || width < 16 || width % 16 || width > 256) {
        std::fprintf(
            stderr,
            "phases: got length %d and head width %d, wanted a multiple of 128 from 256 on, and of 16 up to 256\n",
            length, width);
        return 2;
    }
    Phases<Fma<float>>(length, width).run();
#if defined(BF16_DOT)
    Phases<Bf16Dot>(length, width).run();
#endif
}

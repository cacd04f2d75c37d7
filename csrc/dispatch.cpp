// Which targets there are, best first, and which of them runs here.
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "attention.h"

namespace headscope {

#if defined(__x86_64__)
namespace avx512_bf16 { extern const Target target; }
namespace avx512 { extern const Target target; }
namespace avx2 { extern const Target target; }
#elif defined(__aarch64__)
namespace neon { extern const Target target; }
#endif
namespace generic { extern const Target target; }

const Target* const* targets(int* count) {
    static const Target* const all[] = {
#if defined(__x86_64__)
        &avx512_bf16::target, &avx512::target, &avx2::target,
#elif defined(__aarch64__)
        &neon::target,
#endif
        &generic::target,
    };
    *count = int(sizeof all / sizeof *all);
    return all;
}

const Target* chosen() {
    static const Target* const once = [] {
        int count = 0;
        const Target* const* all = targets(&count);
        const char* forced = std::getenv("HEADSCOPE_CPU_TARGET");
        std::string names;
        for (int n = 0; n < count; n++) {
            const bool runs = all[n]->runs_here();
            if (runs) names += std::string(names.empty() ? "" : ", ") + all[n]->name;
            if (runs && (!forced || !*forced || !std::strcmp(forced, all[n]->name))) return all[n];
        }
        throw std::invalid_argument(std::string("HEADSCOPE_CPU_TARGET: got '") + forced + "', this CPU has " + names);
    }();
    return once;
}

}  // namespace headscope

// The list of targets, best first, and the selection of one; and what does not depend on the target.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "../interface/attention.h"

namespace headscope {

#if defined(__x86_64__)
namespace avx512_bf16 {
extern const Target target;
}
namespace avx512 {
extern const Target target;
}
namespace avx2 {
extern const Target target;
}
#elif defined(__aarch64__)
namespace neon {
extern const Target target;
}
#endif
namespace generic {
extern const Target target;
}

const Target* const* all_targets(int* count) {
    static const Target* const all[] = {
#if defined(__x86_64__)
        &avx512_bf16::target,
        &avx512::target,
        &avx2::target,
#elif defined(__aarch64__)
        &neon::target,
#endif
        &generic::target,
    };
    *count = int(sizeof all / sizeof *all);
    return all;
}

const Target* selected_target() {
    static const Target* const once = [] {
        int count = 0;
        const Target* const* all = all_targets(&count);
        const char* forced = std::getenv("HEADSCOPE_CPU_TARGET");
        std::string names;
        for (int n = 0; n < count; n++) {
            const bool runs = all[n]->runs_here();
            if (runs) names += std::string(names.empty() ? "" : ", ") + all[n]->name;
            if (runs && (!forced || !*forced || !std::strcmp(forced, all[n]->name))) return all[n];
        }
        throw std::invalid_argument(std::string("HEADSCOPE_CPU_TARGET: got '") + forced +
                                    "', expected a target of this CPU: " + names);
    }();
    return once;
}

void find_visible_range(Forward& f) {
    const Spans& spans = f.mask.spans;
    if (!spans.data || f.row_queries) return;
    std::int64_t from = f.keys, to = 0;
    for (std::int64_t b = 0; b < (spans.batch_stride ? f.batch : 1); b++)
        for (std::int64_t i = 0; i < (spans.query_stride ? f.queries : 1); i++)
            for (int n = 0; n < spans.count; n++) {
                const std::int32_t* const span = spans.data + b * spans.batch_stride + i * spans.query_stride + 2 * n;
                if (span[0] < span[1]) {
                    from = std::min(from, std::int64_t(span[0]));
                    to = std::max(to, std::int64_t(span[1]));
                }
            }
    f.visible_begin = std::min(from, to);
    f.visible_end = to;
}

}  // namespace headscope

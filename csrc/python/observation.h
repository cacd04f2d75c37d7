// The description of an observation, and its outputs in memory.
#pragma once

#include <array>
#include <cstdint>

#include "../interface/attention.h"
#include "../runtime/observe.h"
#include "../runtime/pool.h"

namespace headscope {

// The outputs of an observation, in the order of PLACES in src/headscope/_observe/native_observer.py. All lie in one
// buffer of the caller; temporary ones lie in a scratch buffer that is addressed as if it followed.
enum Place {
    COUNTED,
    VALUES,
    TOP_WEIGHT,
    TOP_KEY,
    RECEIVED,
    ELIGIBLE,
    MAP_SUM,
    MAP_MAX,
    MAP_COUNT,
    MAP_AT,
    EDGE_P,
    EDGE_AT,
    MOMENTS_WHOLE,
    MOMENTS_NUMBERS,
    RECEIVED_MAX,
    SEGMENT_SUM,
    SEGMENT_COUNT,
    NULL_SUMS,
    SEGMENT_NULLS,
    PLACES
};
using Places = std::array<std::int64_t, PLACES>;  // offsets in bytes; -1: not computed

// An observation of calls that differ only in the addresses of their tensors.
struct Observation {
    Forward call;
    Statistics stats;
    std::int64_t rows;
    std::array<std::int64_t, QUANTITIES> value_at;  // index in VALUES; -1: not computed
    std::array<std::int64_t, MAX_WINDOWS> window_at, streaming_at;
    int edges;
    std::int64_t maxima, max_logits;  // index in VALUES, if edges need a second pass; else -1
    std::int64_t names;               // the number of row quantities in VALUES
    const void* borders;              // of their histograms, [names, borders_per_name]
    std::int64_t borders_per_name;
    Places places;
    std::int64_t size, scratch_size;  // bytes of the outputs, and of the scratch buffer
    Exchange exchange;                // without the addresses of its sums
};

inline Moments moments_at(const Observation& x, std::int64_t* whole, double* number) {
    const std::int64_t n = x.names * x.call.heads;
    return {x.names, x.call.batch, x.call.heads,   x.rows,         x.borders, x.borders_per_name, whole, whole + n,
            number,  number + n,   number + 2 * n, number + 3 * n, {}};
}
// Counts [names, H] and histograms [names, H, bins] lie in MOMENTS_WHOLE; mean, M2, min and max [4, names, H] in
// MOMENTS_NUMBERS; the sums of nulls [2, names, H] in NULL_SUMS, those of segments [2, H, S, S] in SEGMENT_NULLS.
template <class AddressOf>
Moments moments_of(const Observation& x, AddressOf address_of) {
    Moments m = moments_at(x, reinterpret_cast<std::int64_t*>(address_of(MOMENTS_WHOLE)),
                           reinterpret_cast<double*>(address_of(MOMENTS_NUMBERS)));
    m.exchange = x.exchange;
    m.exchange.means = reinterpret_cast<double*>(address_of(NULL_SUMS));
    m.exchange.variances = m.exchange.means + x.names * x.call.heads;
    SegmentExchange& between = m.exchange.between;
    between.means = reinterpret_cast<double*>(address_of(SEGMENT_NULLS));
    between.variances = between.means + x.call.heads * between.segments * between.segments;
    return m;
}

// The results of a call with row quantities, and without a map or edges.
inline Results results_in(const Observation& x, char* memory) {
    const auto address_of = [&](Place place) { return x.places[place] < 0 ? nullptr : memory + x.places[place]; };
    const auto numbers_of = [&](Place place) { return reinterpret_cast<double*>(address_of(place)); };
    const auto counts_of = [&](Place place) { return reinterpret_cast<std::int64_t*>(address_of(place)); };
    Results results{x.call.heads, x.call.keys, x.stats.segments, {}, moments_of(x, address_of)};
    results.columns.received = numbers_of(RECEIVED);
    results.columns.eligible = counts_of(ELIGIBLE);
    results.columns.received_max = numbers_of(RECEIVED_MAX);
    results.columns.segment_sum = numbers_of(SEGMENT_SUM);
    results.columns.segment_count = counts_of(SEGMENT_COUNT);
    return results;
}

// An observation with the addresses of its outputs.
class PlacedObservation {
public:
    Forward call;
    Statistics stats;

    PlacedObservation(const Observation& observation, char* output_buffer, char* scratch_buffer)
        : call(observation.call),
          stats(observation.stats),
          all(observation),
          outputs(output_buffer),
          scratch(scratch_buffer) {
        Statistics& s = stats;
        assign_address(s.counted, COUNTED);
        assign_address(s.top_weight, TOP_WEIGHT);
        assign_address(s.top_key, TOP_KEY);
        assign_address(s.total.received, RECEIVED);
        assign_address(s.total.eligible, ELIGIBLE);
        assign_address(s.total.sum, MAP_SUM);
        assign_address(s.total.max, MAP_MAX);
        assign_address(s.total.count, MAP_COUNT);
        assign_address(s.total.largest, MAP_AT);
        assign_address(s.total.received_max, RECEIVED_MAX);
        assign_address(s.total.segment_sum, SEGMENT_SUM);
        assign_address(s.total.segment_count, SEGMENT_COUNT);
        for (int n = 0; n < QUANTITIES; n++) s.value[n] = quantity(all.value_at[std::size_t(n)]);
        for (int n = 0; n < s.window_count; n++) {
            s.window[n] = quantity(all.window_at[std::size_t(n)]);
            s.streaming[n] = quantity(all.streaming_at[std::size_t(n)]);
        }
    }
    void* quantity(std::int64_t n) const {
        const std::int64_t size = call.batch * call.heads * all.rows * (call.q.dtype == Dtype::f64 ? 8 : 4);
        return n < 0 ? nullptr : address_of(VALUES) + n * size;
    }
    EdgeList edge_list() const {
        EdgeList list{all.edges, nullptr, nullptr, quantity(all.maxima), quantity(all.max_logits)};
        assign_address(list.p, EDGE_P);
        assign_address(list.at, EDGE_AT);
        return list;
    }
    Moments moments() const {
        return moments_of(all, [this](Place place) { return address_of(place); });
    }

private:
    const Observation& all;
    char *const outputs, *const scratch;

    char* address_of(Place place) const {
        const std::int64_t n = all.places[place];
        return n < 0 ? nullptr : n < all.size ? outputs + n : scratch + (n - all.size);
    }
    template <class T>
    void assign_address(T*& to, Place place) const {
        to = reinterpret_cast<T*>(address_of(place));
    }
};

}  // namespace headscope

// An observation, and one whose outputs have their places in memory.
#pragma once

#include <array>
#include <cstdint>

#include "../interface/attention.h"
#include "../runtime/observe.h"

namespace headscope {

// An observation of calls that differ in nothing but where their tensors lie. What it finds lies in one piece of memory
// of the caller's, each at an offset; what it only needs on the way lies in scratch, as if that followed. -1: not asked
// for.
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
    PLACES
};
using Places = std::array<std::int64_t, PLACES>;

struct Observation {
    Forward call;
    Statistics stats;
    std::int64_t rows;
    std::array<std::int64_t, QUANTITIES> value_at;  // in the list of row quantities; -1: not asked for
    std::array<std::int64_t, MAX_WINDOWS> window_at, streaming_at;
    int edges;
    std::int64_t maxima, max_logits;  // in that list, where edges are looked for in a pass of their own; else -1
    std::int64_t names;               // of row quantities
    const void* borders;              // of their histograms, [names, borders_of_each]
    std::int64_t borders_of_each;
    Places places;
    std::int64_t size, room;  // bytes of what it finds, and of what is needed on the way
};

// One of them, placed.
class PlacedObservation {
public:
    Forward call;
    Statistics stats;

    PlacedObservation(const Observation& observation, char* outputs, char* scratch)
        : call(observation.call), stats(observation.stats), all(observation), memory(outputs), room(scratch) {
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
    // What rows come to: the counts [names, H] and the histograms [names, H, bins] in one place, the numbers [4, names,
    // H] in another.
    Moments moments() const {
        return moments_at(all, reinterpret_cast<std::int64_t*>(address_of(MOMENTS_WHOLE)),
                          reinterpret_cast<double*>(address_of(MOMENTS_NUMBERS)));
    }
    static Moments moments_at(const Observation& x, std::int64_t* whole, double* number) {
        const std::int64_t n = x.names * x.call.heads;
        return {x.names, x.call.batch, x.call.heads, x.rows,     x.borders,      x.borders_of_each,
                whole,   whole + n,    number,       number + n, number + 2 * n, number + 3 * n};
    }

private:
    const Observation& all;
    char *const memory, *const room;

    char* address_of(Place place) const {
        const std::int64_t n = all.places[place];
        return n < 0 ? nullptr : n < all.size ? memory + n : room + (n - all.size);
    }
    template <class T>
    void assign_address(T*& to, Place place) const {
        to = reinterpret_cast<T*>(address_of(place));
    }
};

}  // namespace headscope

// How the threads of a call share out their work: tiles, each of which goes to the thread that asks next.
#pragma once

#include "lanes.hpp"

namespace {

// Call body(head, first, end) for tiles of up to `length` of the `items` of each head, until none is left.
// next: 0, which all threads count up together.
template <class Body>
INLINE void each_tile(int64_t* next, int64_t heads, int64_t items, int64_t length, Body body) {
    const int64_t tiles = (items + length - 1) / length;
    for (int64_t tile; (tile = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED)) < heads * tiles;) {
        const int64_t first = tile % tiles * length;
        body(tile / tiles, first, first + length < items ? first + length : items);
    }
}

}  // namespace

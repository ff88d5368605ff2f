// How the kernels of the codec hadamard-trellis-columns see a weight [rows, columns]: section 10 of docs/format.md.
//
// A strip is 128 rows; a block is a column of it, and its weights are rotated together. A group is sixteen strips, one
// in each lane: the vector t of a column has row t of each strip. While errors are fed back, a group lies in memory as
// [32, columns, 64]: vectors 4 i to 4 i + 3 of each column are in the tile i.
#pragma once

#include "hadamard.hpp"
#include "weight_tiles.hpp"

namespace {

constexpr int GROUP_TILES = BLOCK * LANES / TILE;

// body(t, vector) for each vector of a column of a group, by its place in memory.
template <class Body>
INLINE void each_vector(float* group, int64_t columns, int64_t column, Body body) {
    for (int tile = 0; tile < GROUP_TILES; tile++)
        each<TILE_VECTORS>([&](auto v) ALWAYS {
            body(tile * TILE_VECTORS + v, group + (tile * columns + column) * TILE + v * LANES);
        });
}

}  // namespace

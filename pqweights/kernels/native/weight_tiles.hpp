// Rows of weights in tiles of 64, by columns [size, 64], where columns count unequally or errors are fed back.
#pragma once

#include "lanes.hpp"

namespace {

constexpr int TILE = 64, TILE_VECTORS = TILE / LANES;

}  // namespace

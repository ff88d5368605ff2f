// Sums of products of numbers with rows of 64 numbers: the loop of which the kernels are made that feed errors back.
//
// Products are added in the order of the rows, one multiplication and one addition at a time, so results are the same
// on every machine.
#pragma once

#include "weight_tiles.hpp"

namespace {

constexpr int QUAD = 4;             // sums that are computed together
constexpr int PRODUCT_ROWS = 1024;  // rows of 64 numbers that are multiplied by several quads while they are in the cache
#if defined(__AVX512F__)
constexpr int AT_ONCE = TILE_VECTORS;  // vectors for which there are registers
#else
constexpr int AT_ONCE = 1;
#endif

// 64 numbers, one for each row of a tile.
using Row = Floats[TILE_VECTORS];
using Quad = Row[QUAD];

// Add panel[q, i] * rows[i] to the sums, in the order of i. Row q of the panel begins at q * width, row i at
// i * stride.
void multiply_quad(const float* panel, int64_t width, const float* rows, int64_t stride, int64_t count, Quad& sums) {
    for (int first = 0; first < TILE_VECTORS; first += AT_ONCE) {
        Floats totals[QUAD][AT_ONCE];
        auto over_totals = [](auto body) ALWAYS {
            each<QUAD>([&](auto q) ALWAYS { each<AT_ONCE>([&](auto v) ALWAYS { body(q, v); }); });
        };
        over_totals([&](auto q, auto v) ALWAYS { totals[q][v] = sums[q][first + v]; });
        for (int64_t i = 0; i < count; i++) {
            Floats row[AT_ONCE];
            each<AT_ONCE>([&](auto v) ALWAYS { row[v] = load<Floats>(rows + i * stride + (first + v) * LANES); });
            over_totals([&](auto q, auto v) ALWAYS { totals[q][v] += panel[q * width + i] * row[v]; });
        }
        over_totals([&](auto q, auto v) ALWAYS { sums[q][first + v] = totals[q][v]; });
    }
}

// The same for several quads.
void multiply_quads(const float* panel, int64_t width, const float* rows, int64_t stride, int64_t count, int64_t quads,
                    Quad* sums) {
    for (int64_t block = 0; block < count; block += PRODUCT_ROWS) {
        const int64_t some = count - block < PRODUCT_ROWS ? count - block : PRODUCT_ROWS;
        for (int64_t quad = 0; quad < quads; quad++) {
            multiply_quad(panel + quad * QUAD * width + block, width, rows + block * stride, stride, some, sums[quad]);
        }
    }
}

}  // namespace

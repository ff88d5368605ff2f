// Sums of values times weights (docs/kv-cache.md), without restoring the values: a value is levels of codes, times a
// scale of its token, plus a low end of its token.
//
// Each token's levels times its weight and scale are added to one sum for each coordinate; vectors run along the
// coordinates. Tokens are cut into tiles, whose sums are added in their order by the thread that finishes last: what is
// computed does not depend on the threads.
#include "interface.hpp"
#include "token_codes.hpp"

namespace {

constexpr int TOKENS = 64;  // whose codes stay in the nearest cache while all coordinates are computed

struct Sums {
    const float* weights;
    const uint8_t* codes;
    const float* levels;
    const uint16_t *scales, *lows;
    float* sums;
    int64_t* finished;
    float* out;
    int64_t heads, rows, tokens, size, tile_tokens;
};

// Add `count` tokens times their weights to the sums of some rows, for the coordinates of one load_codes.
//
// chains: tokens that are added to sums of their own, because each addition waits for the one before.
template <int width, int rows, int chains, int entries>
INLINE void add_coordinates(const uint8_t* codes, int64_t stride, int64_t count, int64_t size, int64_t k,
                            const Table<entries>& levels, const float* weights, float* sums) {
    Floats totals[chains][rows][PARTS<width>]{};
    auto each_sum = [&](auto body) ALWAYS {
        each<rows>([&](auto row) ALWAYS {
            each<PARTS<width>>([&](auto part) ALWAYS {
                body(row, part, sums + row * size + coordinate<width>(size, k, part));
            });
        });
    };
    each_sum([&](int row, int part, float* sum) ALWAYS { totals[0][row][part] = load<Floats>(sum); });
    for (int64_t token = 0; token < count; token += chains) {
        each<chains>([&](auto chain) ALWAYS {
            Unsigned found[PARTS<width>];
            load_codes<width>(codes + (token + chain) * stride, size, k, found);
            each<PARTS<width>>([&](auto part) ALWAYS {
                Floats level = levels[found[part]];
                each<rows>([&](auto row) ALWAYS {
                    Floats weight = splat(weights[row * TOKENS + token + chain]);
                    totals[chain][row][part] = multiply_add(level, weight, totals[chain][row][part]);
                });
            });
        });
    }
    each_sum([&](int row, int part, float* sum) ALWAYS {
        Floats parts[chains];
        each<chains>([&](auto chain) ALWAYS { parts[chain] = totals[chain][row][part]; });
        store(folded(parts), sum);
    });
}

// Add up to TOKENS tokens to all sums.
template <int width, int entries>
[[gnu::noinline]] void add_tokens(const uint8_t* codes, int64_t stride, int64_t count, int64_t size,
                                  const Table<entries>& levels, const float* weights, int64_t rows, float* sums) {
    const int64_t even = count / 4 * 4;
    for (int64_t k = 0; k < loads_of_token<width>(size); k++) {
        int64_t row = 0;
        for (; rows - row >= 4; row += 4) {
            add_coordinates<width, 4, 1>(codes, stride, count, size, k, levels, weights + row * TOKENS,
                                         sums + row * size);
        }
        for (; row < rows; row++) {
            const float* weight = weights + row * TOKENS;
            if (even) add_coordinates<width, 1, 4>(codes, stride, even, size, k, levels, weight, sums + row * size);
            if (even == count) continue;
            add_coordinates<width, 1, 1>(codes + even * stride, stride, count - even, size, k, levels, weight + even,
                                         sums + row * size);
        }
    }
}

// Take weights of some tokens times their scales, and add them, times their lows, to sixteen sums of each row.
INLINE void scale_weights(const Sums& task, int64_t head, int64_t block, int64_t count, float (*scaled)[TOKENS],
                          Floats* low_sums) {
    for (int64_t group = 0; group < count; group += LANES) {
        const int64_t few = count - group < LANES ? count - group : LANES, at = head * task.tokens + block + group;
        Floats scale = task.scales ? float_from_half(load_first<Words>(task.scales + at, few)) : splat(1.0f);
        Floats low = task.lows ? float_from_half(load_first<Words>(task.lows + at, few)) : Floats{};
        for (int64_t row = 0; row < task.rows; row++) {
            const float* weights = task.weights + (head * task.rows + row) * task.tokens + block + group;
            Floats weight = load_first<Floats>(weights, few);
            store(weight * scale, scaled[row] + group);
            if (task.lows) low_sums[row] += weight * low;
        }
    }
}

// Add the sums of all tiles of a head.
INLINE void add_tiles(const float* sums, int64_t tiles, int64_t count, float* out) {
    for (int64_t i = 0; i < count; i += LANES) {
        Floats total{};
        for (int64_t tile = 0; tile < tiles; tile++) total += load<Floats>(sums + tile * count + i);
        store(total, out + i);
    }
}

template <int bits, bool packed>
void add_values(const Sums& task, int64_t* next_tile) {
    const int64_t size = task.size, row_sums = task.rows * size;
    float room[LANES], scaled[MOST_ROWS][TOKENS];
    const auto levels = level_table<bits>(task.levels, room);
    TokenCodes<bits, packed, TOKENS> tokens(size);
    const int64_t tiles = (task.tokens + task.tile_tokens - 1) / task.tile_tokens;
    each_tile(next_tile, task.heads, task.tokens, task.tile_tokens, [&](int64_t head, int64_t start, int64_t end) ALWAYS {
        float* sums = task.sums + (head * tiles + start / task.tile_tokens) * row_sums;
        std::memset(sums, 0, row_sums * sizeof(float));
        Floats low_sums[MOST_ROWS]{};
        for (int64_t block = start; block < end; block += TOKENS) {
            const int64_t count = end - block < TOKENS ? end - block : TOKENS;
            const uint8_t* codes = tokens.of(task.codes, head * task.tokens + block, count);
            scale_weights(task, head, block, count, scaled, low_sums);
            add_tokens<tokens.width>(codes, tokens.stride, count, size, levels, scaled[0], task.rows, sums);
        }
        for (int64_t row = 0; task.lows && row < task.rows; row++) {
            const float low = lane_sum(low_sums[row]);
            for (int64_t i = 0; i < size; i++) sums[row * size + i] += low;
        }
        // Who sees a count sees all that was written before it.
        if (__atomic_fetch_add(task.finished + head, 1, __ATOMIC_ACQ_REL) == tiles - 1) {
            add_tiles(task.sums + head * tiles * row_sums, tiles, row_sums, task.out + head * row_sums);
        }
    });
}

}  // namespace

// weights: [heads, rows, tokens], of at most 16 rows; codes: [heads, tokens, size * bits / 8], of a size that is a
// multiple of 32 up to 256; levels: [1 << bits]; scales, lows: float16 [heads, tokens], or null for 1 and 0; sums: room
// for [heads, tiles, rows, size]; finished: zeros [heads]; out: [heads, rows, size]; next_tile: 0, which all threads
// count up together.
void pqweights::weighted_values(int64_t* next_tile, const float* weights, const uint8_t* codes, const float* levels,
                                const uint16_t* scales, const uint16_t* lows, float* sums, int64_t* finished,
                                float* out, int64_t heads, int64_t rows, int64_t tokens, int64_t size, int64_t bits,
                                int64_t tile_tokens) {
    const Sums task = {weights, codes, levels, scales, lows, sums, finished,
                       out,     heads, rows,   tokens, size, tile_tokens};
    with_token_codes(bits, size, [&](auto bits, auto packed) { add_values<bits, packed>(task, next_tile); });
}

// Products of queries with Hadamard keys (docs/kv-cache.md), without restoring the keys: levels of codes, times a norm.
//
// Levels times the query are added up for each token in the sixteen lanes of a vector, along the coordinates; then
// those of sixteen tokens are added up together.
#include "interface.hpp"
#include "token_codes.hpp"

namespace {

struct Scores {
    const float* queries;
    const uint8_t* codes;
    const uint16_t* norms;
    const float* levels;
    float* out;
    int64_t heads, rows, tokens, size, tile_tokens;
};

// The sum of the lanes of each of sixteen vectors.
INLINE Floats lane_sums(Floats (&x)[LANES]) {
    each<4>([&](auto level) ALWAYS {  // a vector has the sums of 2**level vectors, each in `run` lanes
        constexpr int run = LANES / 2 >> level;
        constexpr auto lower = [](int k) { return k / run * 2 * run + k % run; };
        constexpr auto upper = [](int k) { return k / run * 2 * run + k % run + run; };
        each<run>([&](auto i) ALWAYS {
            x[i] = shuffled(x[2 * i], x[2 * i + 1], lower) + shuffled(x[2 * i], x[2 * i + 1], upper);
        });
    });
    return x[0];
}

// Multiply some rows with up to sixteen tokens: sixteen sums for each.
template <int width, int rows, int entries>
INLINE void multiply(const uint8_t* codes, int64_t stride, int64_t count, int64_t size, const Table<entries>& levels,
                     const float* queries, Floats (*parts)[LANES]) {
    constexpr int chains = PARTS<width> > 1 ? 2 : 1;  // each addition waits for the one before
    for (int64_t token = 0; token < count; token++) {
        Floats sums[rows][chains]{};
        for (int64_t k = 0; k < loads_of_token<width>(size); k++) {
            Unsigned found[PARTS<width>];
            load_codes<width>(codes + token * stride, size, k, found);
            each<PARTS<width>>([&](auto part) ALWAYS {
                Floats level = levels[found[part]];
                each<rows>([&](auto row) ALWAYS {
                    Floats query = load<Floats>(queries + row * size + coordinate<width>(size, k, part));
                    sums[row][part % chains] = multiply_add(level, query, sums[row][part % chains]);
                });
            });
        }
        each<rows>([&](auto row) ALWAYS { parts[row][token] = folded(sums[row]); });
    }
}

template <int bits, bool packed>
void score_tiles(const Scores& task, int64_t* next_tile) {
    constexpr int width = packed ? bits : 8;
    const int64_t size = task.size, stride = size * bits / 8;
    float room[LANES];
    const auto levels = level_table<bits>(task.levels, room);
    uint8_t copied[packed ? 1 : LANES * MOST_SIZE + LANES], unpacked[packed ? 1 : LANES * UNPACKED_ROW];
    Floats parts[4][LANES]{};
    const int64_t tiles = (task.tokens + task.tile_tokens - 1) / task.tile_tokens;
    for (int64_t tile; (tile = __atomic_fetch_add(next_tile, 1, __ATOMIC_RELAXED)) < task.heads * tiles;) {
        const int64_t head = tile / tiles, start = tile % tiles * task.tile_tokens;
        const int64_t end = start + task.tile_tokens < task.tokens ? start + task.tile_tokens : task.tokens;
        for (int64_t block = start; block < end; block += LANES) {
            const int64_t count = end - block < LANES ? end - block : LANES, at = head * task.tokens + block;
            const uint8_t* codes = task.codes + at * stride;
            if constexpr (!packed) {
                std::memcpy(copied, codes, count * stride);
                unpack_tokens(copied, stride, count, size, bits, unpacked, UNPACKED_ROW);
                codes = unpacked;
            }
            const Floats norms = float_from_half(load_first<Words>(task.norms + at, count));
            for (int64_t row = 0; row < task.rows;) {
                const float* query = task.queries + (head * task.rows + row) * size;
                const bool four = task.rows - row >= 4;
                if (four) multiply<width, 4>(codes, packed ? stride : UNPACKED_ROW, count, size, levels, query, parts);
                else multiply<width, 1>(codes, packed ? stride : UNPACKED_ROW, count, size, levels, query, parts);
                for (int one = 0; one < (four ? 4 : 1); one++, row++) {
                    Floats scores = lane_sums(parts[one]) * norms;
                    store_first(scores, task.out + (head * task.rows + row) * task.tokens + block, count);
                }
            }
        }
    }
}

}  // namespace

// queries: [heads, rows, size], of at most 16 rows and a size that is a multiple of 32 up to 256; codes: [heads,
// tokens, size * bits / 8]; norms: float16 [heads, tokens]; levels: [1 << bits]; out: [heads, rows, tokens];
// next_tile: 0, which all threads count up together.
void pqweights::hadamard_scores(int64_t* next_tile, const float* queries, const uint8_t* codes, const uint16_t* norms,
                                const float* levels, float* out, int64_t heads, int64_t rows, int64_t tokens,
                                int64_t size, int64_t bits, int64_t tile_tokens) {
    static constexpr void (*PACKED[])(const Scores&, int64_t*) = {score_tiles<2, true>, score_tiles<3, true>,
                                                                  score_tiles<4, true>};
    static constexpr void (*OTHERS[])(const Scores&, int64_t*) = {
        score_tiles<2, false>, score_tiles<3, false>, score_tiles<4, false>, score_tiles<5, false>,
        score_tiles<6, false>, score_tiles<7, false>, score_tiles<8, true>};
    const Scores task = {queries, codes, norms, levels, out, heads, rows, tokens, size, tile_tokens};
    (bits < 8 && is_read_packed(size, bits) ? PACKED : OTHERS)[bits - 2](task, next_tile);
}

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
    const int64_t size = task.size;
    float room[LANES];
    const auto levels = level_table<bits>(task.levels, room);
    TokenCodes<bits, packed, LANES> tokens(size);
    constexpr int width = tokens.width;
    Floats parts[4][LANES]{};
    each_tile(next_tile, task.heads, task.tokens, task.tile_tokens, [&](int64_t head, int64_t start, int64_t end) ALWAYS {
        for (int64_t block = start; block < end; block += LANES) {
            const int64_t count = end - block < LANES ? end - block : LANES, at = head * task.tokens + block;
            const uint8_t* codes = tokens.of(task.codes, at, count);
            const Floats norms = float_from_half(load_first<Words>(task.norms + at, count));
            for (int64_t row = 0; row < task.rows;) {
                const float* query = task.queries + (head * task.rows + row) * size;
                const bool four = task.rows - row >= 4;
                if (four) multiply<width, 4>(codes, tokens.stride, count, size, levels, query, parts);
                else multiply<width, 1>(codes, tokens.stride, count, size, levels, query, parts);
                for (int one = 0; one < (four ? 4 : 1); one++, row++) {
                    Floats scores = lane_sums(parts[one]) * norms;
                    store_first(scores, task.out + (head * task.rows + row) * task.tokens + block, count);
                }
            }
        }
    });
}

}  // namespace

// queries: [heads, rows, size], of at most 16 rows and a size that is a multiple of 32 up to 256; codes: [heads,
// tokens, size * bits / 8]; norms: float16 [heads, tokens]; levels: [1 << bits]; out: [heads, rows, tokens];
// next_tile: 0, which all threads count up together.
void pqweights::hadamard_scores(int64_t* next_tile, const float* queries, const uint8_t* codes, const uint16_t* norms,
                                const float* levels, float* out, int64_t heads, int64_t rows, int64_t tokens,
                                int64_t size, int64_t bits, int64_t tile_tokens) {
    const Scores task = {queries, codes, norms, levels, out, heads, rows, tokens, size, tile_tokens};
    with_token_codes(bits, size, [&](auto bits, auto packed) { score_tiles<bits, packed>(task, next_tile); });
}

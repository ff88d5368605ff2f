// Levels of transform codes (docs/kv-cache.md), whose widths differ within a vector, times a factor of the vector.
//
// A vector is cut into runs of coefficients whose codes have the same width, each packed by itself as section 5 of
// docs/format.md packs a block. A run may be as short as eight coefficients, so that its fields have single bytes.
#include "interface.hpp"
#include "token_codes.hpp"

namespace {

// As in kernels/transform_codes.py.
constexpr int MOST_COEFFICIENTS = 1024, LEVELS_OF_WIDTH = 256;
// Bytes of the codes of a token, unpacked: sixteen are always written.
constexpr int ROW = MOST_COEFFICIENTS + LANES;

struct Run {
    const uint8_t* codes;
    int64_t stride, tokens, count;
    const float *levels, *factors;
    float* out;
    int64_t used;  // coefficients between two tokens in out
};

// Write the levels of a run of up to sixteen tokens, of codes of `width` bits as they are packed, or of bytes.
template <int bits, int width>
void write_levels(const Run& run) {
    float room[LANES];
    const auto table = level_table<bits>(run.levels + bits * LEVELS_OF_WIDTH, room);
    for (int64_t token = 0; token < run.tokens; token++) {
        const uint8_t* codes = run.codes + token * run.stride;
        float *out = run.out + token * run.used, factor = run.factors[token];
        for (int64_t k = 0; k < loads_of_token<width>(run.count); k++) {
            Unsigned found[PARTS<width>];
            load_codes<width>(codes, run.count, k, found);
            each<PARTS<width>>([&](auto part) ALWAYS {
                store(table[found[part]] * factor, out + coordinate<width>(run.count, k, part));
            });
        }
        if (const int64_t whole = run.count / LANES * LANES; whole < run.count) {  // a half is left, of bytes
            Floats level = table[converted<Unsigned>(load<Bytes>(codes + whole))] * factor;
            store(slice<0, LANES / 2>(level), out + whole);
        }
    }
}

// By the bits of codes that became bytes, and of those that are read as they are packed.
using WriteLevels = void (*)(const Run&);
constexpr WriteLevels UNPACKED[] = {nullptr, write_levels<1, 8>, write_levels<2, 8>, write_levels<3, 8>,
                                    write_levels<4, 8>, write_levels<5, 8>, write_levels<6, 8>, write_levels<7, 8>};
constexpr WriteLevels PACKED[] = {nullptr, write_levels<1, 1>, write_levels<2, 2>, write_levels<3, 3>,
                                  write_levels<4, 4>, nullptr, nullptr, nullptr, write_levels<8, 8>};

}  // namespace

// codes: of `heads` heads, which begin head_bytes after each other, the bytes of all runs of each token; factors:
// float16 of each token, head_factors from head to head; runs: [run_count, 2], the coefficients of each run, a
// multiple of 8, and their bits, 1 to 8; levels: [9, 256], by bits; out: [heads, tokens, coefficients of all runs, at
// most 1024]; next_tile: 0, which all threads count up together.
void pqweights::restore_levels(int64_t* next_tile, const uint8_t* codes, const uint16_t* factors, const int64_t* runs,
                               const float* levels, float* out, int64_t heads, int64_t tokens, int64_t head_bytes,
                               int64_t head_factors, int64_t run_count, int64_t tile_tokens) {
    int64_t used = 0, stride = 0;
    for (int64_t run = 0; run < run_count; run++) {
        used += runs[2 * run];
        stride += runs[2 * run] * runs[2 * run + 1] / 8;
    }
    uint8_t packed[LANES * MOST_COEFFICIENTS + LANES], unpacked[LANES * ROW];
    each_tile(next_tile, heads, tokens, tile_tokens, [&](int64_t head, int64_t start, int64_t end) ALWAYS {
        for (int64_t block = start; block < end; block += LANES) {
            const int64_t count = end - block < LANES ? end - block : LANES;
            // A copy, as sixteen bytes are read where the last token may have fewer.
            std::memcpy(packed, codes + head * head_bytes + block * stride, count * stride);
            float factor[LANES];
            store(float_from_half(load_first<Words>(factors + head * head_factors + block, count)), factor);
            const uint8_t* at = packed;
            float* to = out + (head * tokens + block) * used;
            for (int64_t run = 0; run < run_count; run++) {
                const int64_t size = runs[2 * run], bits = runs[2 * run + 1];
                const bool as_packed = bits == 8 || is_read_packed(size, bits);
                if (!as_packed) unpack_tokens(at, stride, count, size, bits, unpacked, ROW);
                (as_packed ? PACKED : UNPACKED)[bits](
                    {as_packed ? at : unpacked, as_packed ? stride : ROW, count, size, levels, factor, to, used});
                at += size * bits / 8;
                to += size;
            }
        }
    });
}

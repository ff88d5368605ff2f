// Codes and norms of the scalar codecs back to weights: section 4 of docs/format.md. The caller has refused norms that
// are negative, infinite or NaN; what they decode to means nothing.
#include "codes.hpp"
#include "conversions.hpp"
#include "interface.hpp"
#include "table.hpp"

namespace {

template <int width>
void decode_blocks(const uint8_t* codes, const uint16_t* norms, const float* levels, const float* signs,
                   uint8_t* values, Dtype dtype, int64_t blocks, double unit) {
    const Table<ENTRIES<width>> level(levels);
    float factors[LANES];
    for (int64_t block = 0; block < blocks; block++) {
        const int lane = int(block % LANES);
        if (lane == 0) {  // the norms of sixteen blocks, or of those that are left
            Words halves{};
            std::memcpy(&halves, norms + block, sizeof(uint16_t) * (blocks - block < LANES ? blocks - block : LANES));
            store(converted<Floats>(converted<Doubles>(float_from_half(halves)) * unit), factors);
        }
        Unsigned code[VECTORS];
        Floats x[VECTORS];
        unpack_block<width>(codes + block * LANES * width, code);
        each<VECTORS>([&](auto g) ALWAYS { x[g] = level[code[g]]; });
        rotate_block(x);
        each<VECTORS>([&](auto g) ALWAYS {
            Floats y = x[g] * factors[lane];
            if (signs) y *= load<Floats>(signs + LANES * g);
            store_values(y, values + (block * BLOCK + LANES * g) * bytes_of(dtype), dtype);
        });
    }
}

constexpr decltype(&decode_blocks<1>) DECODE[] = {decode_blocks<1>, decode_blocks<2>, decode_blocks<3>,
                                                  decode_blocks<4>, decode_blocks<5>, decode_blocks<6>,
                                                  decode_blocks<7>, decode_blocks<8>};

}  // namespace

// codes: [blocks, 16 * width]. norms: [blocks], float16. levels: [max(16, 2**width)]. signs: [128], factors of the
// coordinates, or null. values: [blocks, 128] of a dtype. unit: what each norm is multiplied by, for section 4's g.
void pqweights::decode(const uint8_t* codes, const uint16_t* norms, const float* levels, const float* signs,
                       uint8_t* values, int64_t dtype, int64_t blocks, int64_t width, double unit) {
    DECODE[width - 1](codes, norms, levels, signs, values, Dtype(dtype), blocks, unit);
}

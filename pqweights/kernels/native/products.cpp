// Products of packed weights with a few rows of inputs, y = W x + b, without decoding W: docs/running-a-master.md.
//
// A block of W is norm * H levels[codes] (docs/format.md), and the Hadamard matrix H is symmetric, so
// <H c, x> = <c, H x>: each block of 128 inputs is rotated once for all rows of W, and what is left for a row are table
// look-ups, multiplications and additions.
//
// For BF16 and F16 models, rotated inputs become integers of 15 bits with a scale for each block, and levels integers
// of 14 bits. Within a block their products are added up exactly, in i32; blocks are added up in float32, in 16 lanes.
// For F32 models, inputs and levels are float32 throughout.
#include "codes.hpp"
#include "conversions.hpp"
#include "interface.hpp"
#include "product_levels.hpp"
#include "table.hpp"
#include "tiles.hpp"

namespace {

// --- inputs ---

// What an input is at most as an integer: kernels/products.py has the same.
constexpr float MOST_INPUT = 16383;

// Call write(x, row, block) for each block of inputs, [rows, blocks * 128] of the dtype, brought into the basis of the
// codes: divided by AWQ scales and multiplied by signs, where there are such, and rotated.
template <class Write>
INLINE void change_basis(const void* values, Dtype dtype, const float* awq, const float* signs, int64_t rows,
                         int64_t blocks, Write write) {
    const uint8_t* from = (const uint8_t*)values;
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t block = 0; block < blocks; block++, from += BLOCK * bytes_of(dtype)) {
            Floats x[VECTORS];
            each<VECTORS>([&](auto g) ALWAYS {
                x[g] = load_values(from + LANES * g * bytes_of(dtype), dtype);
                if (awq) x[g] = x[g] / load<Floats>(awq + block * BLOCK + LANES * g);
                if (signs) x[g] = x[g] * load<Floats>(signs + LANES * g);
            });
            rotate_block(x);
            write(x, row, block);
        }
    }
}

// The bits of the largest magnitude; magnitudes are in the order of their bits, and NaN above all.
INLINE uint32_t largest_magnitude(const Floats (&x)[VECTORS]) {
    Unsigned lanes{};
    each<VECTORS>([&](auto g) ALWAYS {
        const Unsigned u = bits(magnitude(x[g]));
        lanes = choose<Unsigned>(u > lanes, u, lanes);
    });
    return lane_maximum(lanes);
}

// Write the nearest integers to x * factor, in the order of code_at.
INLINE void store_integers(const Floats (&x)[VECTORS], float factor, int16_t* to) {
    Integers ordered[QUARTERS];
    each<QUARTERS>([&](auto q) ALWAYS {
        const Floats low = rint(x[2 * q] * factor), high = rint(x[2 * q + 1] * factor);
        ordered[q] = converted<Integers>(joined(converted<Ints>(low), converted<Ints>(high)));
    });
    each<QUARTERS>([&](auto q) ALWAYS {
        constexpr int quarter = q, half = code_at(q, 0) / 64;
        const auto order = [](int lane) { return code_at(quarter, lane) % 64; };
        store(shuffled(ordered[2 * half], ordered[2 * half + 1], order), to + 32 * q);
    });
}

// Write a block as integers; return what a one stands for. If that cannot be told, the integers are 0 and it is NaN.
INLINE float to_integers(const Floats (&x)[VECTORS], int16_t* to) {
    const uint32_t pattern = largest_magnitude(x);
    const float largest = __builtin_bit_cast(float, pattern);
    if (pattern >= 0x7F800000 || largest < 0x1p-100f) {
        std::memset(to, 0, BLOCK * sizeof *to);
        return pattern >= 0x7F800000 ? __builtin_nanf("") : 0;
    }
    store_integers(x, MOST_INPUT / largest, to);
    return largest / MOST_INPUT;
}

// --- sums ---

// Rows of inputs that one call multiplies, and blocks whose norms are converted together.
constexpr int MOST_ROWS = 16, GROUP = LANES;

// The products of a block of levels with a block of inputs. They fit: 16 * 8191 * 16383 < 2**31.
INLINE Floats block_products(const Integers (&levels)[QUARTERS], const int16_t* inputs) {
    Ints sums[QUARTERS];
    each<QUARTERS>([&](auto q) ALWAYS { sums[q] = pair_sums(levels[q], load<Integers>(inputs + 32 * q)); });
    return converted<Floats>(folded(sums));
}

// Some blocks of a row of W and `together` rows of inputs.
// inputs: those of the first block and row; step: elements from block to block; factors, sums: of the first row
template <int width, int together>
INLINE void add_blocks(const LevelTable<width>& table, const uint8_t* codes, int64_t blocks, const int16_t* inputs,
                       int64_t step, const Floats* factors, Floats* sums) {
    Floats totals[together];
    each<together>([&](auto j) ALWAYS { totals[j] = sums[j]; });
    for (int64_t block = 0; block < blocks; block++, codes += 16 * width, inputs += step) {
        Integers levels[QUARTERS];
        table.look_up(codes, levels);
        each<together>([&](auto j) ALWAYS {
            const float factor = ((const float*)(factors + j))[block];
            totals[j] = multiply_add(block_products(levels, inputs + BLOCK * j), splat(factor), totals[j]);
        });
    }
    each<together>([&](auto j) ALWAYS { sums[j] = totals[j]; });
}

// The sums of a row of W, of integers.
template <int width>
struct IntegerRow {
    LevelTable<width> table;
    const int16_t* inputs;  // [blocks, rows, 128] in the order of code_at
    const float* scales;    // [rows, blocks], what a one of the inputs stands for
    int64_t blocks, rows;

    INLINE void add(const uint8_t* codes, const uint16_t* norms, Floats (&sums)[MOST_ROWS]) const {
        for (int64_t first = 0; first < blocks; first += GROUP) {
            const int64_t count = blocks - first < GROUP ? blocks - first : GROUP;
            const Floats norm = float_from_half(load_first<Words>(norms + first, count));
            Floats factors[MOST_ROWS];
            for (int64_t j = 0; j < rows; j++) {
                factors[j] = norm * load_first<Floats>(scales + j * blocks + first, count);
            }
            const uint8_t* at = codes + first * 16 * width;
            const int16_t* x = inputs + first * rows * BLOCK;
            int64_t j = 0;
            for (; rows - j >= 4; j += 4) {
                add_blocks<width, 4>(table, at, count, x + j * BLOCK, rows * BLOCK, factors + j, sums + j);
            }
            for (; j < rows; j++) {
                add_blocks<width, 1>(table, at, count, x + j * BLOCK, rows * BLOCK, factors + j, sums + j);
            }
        }
    }
};

// The same, of floats.
template <int width>
struct FloatRow {
    Table<ENTRIES<width>> table;
    const float* inputs;  // [blocks, rows, 128]
    int64_t blocks, rows;

    INLINE void add(const uint8_t* codes, const uint16_t* norms, Floats (&sums)[MOST_ROWS]) const {
        for (int64_t block = 0; block < blocks; block++) {
            const Floats norm = splat(float_from_half(Words{norms[block]})[0]);
            Unsigned index[VECTORS];
            unpack_block<width>(codes + block * 16 * width, index);
            Floats levels[VECTORS];
            each<VECTORS>([&](auto g) ALWAYS { levels[g] = table[index[g]]; });
            for (int64_t j = 0; j < rows; j++) {
                const float* x = inputs + (block * rows + j) * BLOCK;
                Floats halves[2]{};  // in a chain, each addition waits for the one before
                each<VECTORS>([&](auto g) ALWAYS {
                    halves[g % 2] = multiply_add(levels[g], load<Floats>(x + LANES * g), halves[g % 2]);
                });
                sums[j] = multiply_add(halves[0] + halves[1], norm, sums[j]);
            }
        }
    }
};

// --- outputs ---

// The 16-bit float next to each number: too large becomes infinite, and a NaN the positive quiet one.
INLINE Words rounded(Floats x, Dtype dtype) {
    const Unsigned sign = (bits(x) >> 16) & 0x8000;
    const Unsigned number = dtype == Dtype::BF16 ? rounded_off(bits(x), 16)
                                                 : converted<Unsigned>(half_from_float(magnitude(x))) | sign;
    return converted<Words>(choose<Unsigned>(x == x, number, splat(dtype == Dtype::BF16 ? 0x7FC0u : 0x7E00u)));
}

template <class Element>
struct Outputs {
    const float* bias;  // [stride], or null
    Element* out;       // [rows, stride]
    int64_t outputs, column, stride;
    Dtype dtype;
    double factor;

    // Of `count` rows of W from the first one, and of one row of inputs.
    [[gnu::noinline]] void write(Floats sums, int64_t row, int64_t first, int64_t count) const {
        Floats y = converted<Floats>(converted<Doubles>(sums) * factor);
        if (bias) y = y + load_first<Floats>(bias + column + first, count);
        Element* to = out + row * stride + column + first;
        if constexpr (sizeof(Element) == 2) store_first(rounded(y, dtype), to, count);
        else store_first(y, to, count);
    }
};

// Take tiles of rows of W until there are no more. Threads may do so together.
template <int width, class Row, class Element>
INLINE void multiply_tiles(int64_t* next_tile, int64_t tile_rows, const Row& row, const uint8_t* codes,
                           const uint16_t* norms, const Outputs<Element>& outputs) {
    each_tile(next_tile, 1, outputs.outputs, tile_rows, [&](int64_t, int64_t start, int64_t end) ALWAYS {
        for (int64_t first = start; first < end; first += LANES) {
            const int64_t count = end - first < LANES ? end - first : LANES;
            Floats found[MOST_ROWS]{};
            for (int64_t i = 0; i < count; i++) {
                const int64_t at = (first + i) * row.blocks;
                Floats sums[MOST_ROWS];
                for (int64_t j = 0; j < row.rows; j++) sums[j] = Floats{};
                row.add(codes + at * 16 * width, norms + at, sums);
                for (int64_t j = 0; j < row.rows; j++) ((float*)(found + j))[i] = lane_sum(sums[j]);
            }
            for (int64_t j = 0; j < row.rows; j++) outputs.write(found[j], j, first, count);
        }
    });
}

// Call body(std::integral_constant<int, width>) for a width from 2 to 8.
template <class Body>
INLINE void with_width(int64_t width, Body body) {
    each<7>([&](auto i) ALWAYS {
        if (width == i + 2) body(std::integral_constant<int, i + 2>{});
    });
}

}  // namespace

// Bring inputs into the basis of the codes, as integers.
// values: [rows, blocks * 128] BF16 or F16; awq: [blocks * 128] or null; signs: [128] or null
// out: [blocks, rows, 128] in the order of code_at; scales: [rows, blocks], what a one stands for
void pqweights::prepare(const uint16_t* values, const float* awq, const float* signs, int16_t* out, float* scales,
                        int64_t rows, int64_t blocks, int64_t dtype) {
    change_basis(values, Dtype(dtype), awq, signs, rows, blocks, [&](const auto& x, auto row, auto block) {
        scales[row * blocks + block] = to_integers(x, out + (block * rows + row) * BLOCK);
    });
}

// The same for F32, whose inputs stay floats. out: [blocks, rows, 128]
void pqweights::prepare_f32(const float* values, const float* awq, const float* signs, float* out, int64_t rows,
                            int64_t blocks) {
    change_basis(values, Dtype::F32, awq, signs, rows, blocks, [&](const auto& x, auto row, auto block) {
        std::memcpy(out + (block * rows + row) * BLOCK, &x, sizeof x);
    });
}

// W x + b for up to 16 rows of inputs. All threads of a call count the tiles of `tile_rows` rows of W together.
// codes: [outputs, blocks, 16 * width]; norms: [outputs, blocks], float16; levels: [2**width], repeated up to 32
// inputs, scales: as `prepare` writes them; bias: [stride] or null; factor: by which W is multiplied
// out: [rows, stride] BF16 or F16, of which `outputs` columns from `column` on are written
void pqweights::product(int64_t* next_tile, const uint8_t* codes, const uint16_t* norms, const int16_t* levels,
                        const int16_t* inputs, const float* scales, const float* bias, uint16_t* out, int64_t outputs,
                        int64_t tile_rows, int64_t blocks, int64_t rows, int64_t width, int64_t column, int64_t stride,
                        double factor, int64_t dtype) {
    with_width(width, [&](auto width) ALWAYS {
        const IntegerRow<width> row{LevelTable<width>(levels), inputs, scales, blocks, rows};
        const Outputs<uint16_t> results{bias, out, outputs, column, stride, Dtype(dtype), factor};
        multiply_tiles<width>(next_tile, tile_rows, row, codes, norms, results);
    });
}

// The same for F32. levels: repeated up to 16; inputs: as `prepare_f32` writes them
void pqweights::product_f32(int64_t* next_tile, const uint8_t* codes, const uint16_t* norms, const float* levels,
                            const float* inputs, const float* bias, float* out, int64_t outputs, int64_t tile_rows,
                            int64_t blocks, int64_t rows, int64_t width, int64_t column, int64_t stride,
                            double factor) {
    with_width(width, [&](auto width) ALWAYS {
        const FloatRow<width> row{Table<ENTRIES<width>>(levels), inputs, blocks, rows};
        const Outputs<float> results{bias, out, outputs, column, stride, Dtype::F32, factor};
        multiply_tiles<width>(next_tile, tile_rows, row, codes, norms, results);
    });
}

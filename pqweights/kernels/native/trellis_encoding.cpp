// Encodes superblocks of the codec hadamard-trellis: section 8 of docs/format.md has the bytes, docs/trellis.md the
// method.
//
// A tile is sixteen blocks of 128 weights in the sixteen lanes: vector t has weight t of each block. So no butterfly
// and no sum crosses lanes.
#include "conversions.hpp"
#include "interface.hpp"
#include "trellis_packing.hpp"
#include "trellis_search.hpp"

namespace {

constexpr int TILE = BLOCK * LANES;
// Magnitudes outside these are brought to 1 by a power of two, so that sums of squares stay in the range of float32.
constexpr uint32_t SMALLEST = (127 - 40) << 23, LARGEST = (127 + 40) << 23, INFINITE = 0x7F800000;
constexpr double LARGEST_STEP = 3.4028234663852886e38;  // those of weights near the largest float32 could be larger
constexpr double MOST_GAIN = 1.5;  // more than that of any Gaussian weights
constexpr int ATTEMPTS = 12, MOST_FITS = 3;  // after so many of the attempts the best one that fits will do

// A superblock on the way to its bytes. Arrays end with lanes that have no block.
struct Superblock {
    int tiles;
    int exponent;          // weights were divided by this power of two
    float* work;           // [tiles, 128, 16], the rotated weights
    uint16_t* decisions;   // [tiles, 128, states]
    int16_t* numbers;      // [tiles, 128, 16]
    uint16_t* stream_end;  // words are written before it
    BlockSizes sizes;
    Classes classes;
    float products[MOST_BLOCKS], lengths[MOST_BLOCKS], errors[MOST_BLOCKS];  // see NumberSums and squared_errors
    Floats metrics[1 << MOST_STATE_BITS], room[1 << MOST_STATE_BITS];
};

// --- weights ---

// The largest bit pattern of the magnitude of a weight.
uint32_t largest_magnitude(const uint8_t* values, int64_t count, Dtype dtype) {
    Unsigned largest{};
    for (int64_t i = 0; i < count; i += LANES)
        largest = maximum(largest, bits(magnitude(load_values(values + i * bytes_of(dtype), dtype))));
    return lane_maximum(largest);
}

// Rotate a tile of weights, which are first multiplied by two factors.
void load_tile(Superblock& it, int tile, const uint8_t* values, Dtype dtype, const float* signs, float once,
               float twice) {
    Floats x[BLOCK];
    const int64_t block_bytes = BLOCK * bytes_of(dtype);
    for (int j = 0; j < BLOCK; j += LANES) {
        const Floats sign = signs ? load<Floats>(signs + j) : splat(1.0f);
        for (int lane = 0; lane < LANES; lane++) {
            const int block = tile * LANES + lane;
            const uint8_t* from = values + block * block_bytes + j * bytes_of(dtype);
            x[j + lane] = block < it.classes.blocks ? load_values(from, dtype) * once * twice * sign : Floats{};
        }
        transpose(x + j);
    }
    rotate_blocks(x);
    Floats squares{}, largest{};
    for (int j = 0; j < LANES; j++) {
        for (int t = j; t < BLOCK; t += LANES) {
            squares += x[t] * x[t];
            largest = maximum(largest, magnitude(x[t]));
            store(x[t], it.work + TILE * tile + LANES * t);
        }
    }
    store(squares, it.sizes.squares + LANES * tile);
    store(largest, it.sizes.largest + LANES * tile);
}

// Rotate a superblock; return whether all weights are finite.
bool load_superblock(Superblock& it, const uint8_t* values, Dtype dtype, const float* signs) {
    const uint32_t largest = largest_magnitude(values, it.classes.blocks * int64_t(BLOCK), dtype);
    if (largest >= INFINITE) return false;
    it.exponent = largest && (largest < SMALLEST || largest > LARGEST) ? int(largest >> 23) - 127 : 0;
    const int half = it.exponent >> 1;
    const float once = float(power_of_two(-half)), twice = float(power_of_two(half - it.exponent));
    for (int tile = 0; tile < it.tiles; tile++) load_tile(it, tile, values, dtype, signs, once, twice);
    return true;
}

// --- numbers ---

// Find the numbers of a superblock for a step.
template <int state_bits>
void quantize(Superblock& it, const ClassModel& model, double step) {
    constexpr int states = 1 << state_bits;
    const double inverse = ORTHONORMAL / step;
    auto factors = [&](int block) { return float(model.down[it.classes.at(block)] * inverse); };
    auto penalties = [&](int block) { return it.classes.at(block) ? 0.0f : FORBIDDEN; };
    auto decisions = [&](int tile) { return it.decisions + int64_t(tile) * BLOCK * states; };

    begin_search(Ints{}, *(Floats(*)[states])it.metrics);
    for (int tile = 0; tile < it.tiles; tile++)
        pqweights::extend<state_bits>(it.work + TILE * tile, by_block<Floats>(tile, factors),
                                      by_block<Floats>(tile, penalties), decisions(tile), it.metrics, it.room);
    Planes<state_bits> planes;
    split<state_bits>(cheapest_states<state_bits>(it.metrics), planes);
    for (int tile = it.tiles - 1; tile >= 0; tile--) {
        Residues residues[BLOCK];
        trace<state_bits>(decisions(tile), planes, residues);
        const NumberSums sums =
            find_numbers(it.work + TILE * tile, by_block<Floats>(tile, factors), residues, it.numbers + TILE * tile);
        store(sums.products, it.products + LANES * tile);
        store(sums.lengths, it.lengths + LANES * tile);
    }
}

// The step, for the weights as they came, with which the numbers decode with the least squared error. `gained`: the one
// with which their product with the weights is the energy of these, but at most MOST_GAIN times as much.
float fitted_step(const Superblock& it, const ClassModel& model, double energy, bool gained) {
    double product = 0, length = 0;
    for (int i = 0; i < it.classes.blocks; i++) {
        const double gain = model.up[it.classes.of[i]];
        product += gain * it.products[i];
        length += gain * gain * it.lengths[i];
    }
    if (length == 0 || product <= 0) return 0;
    double fitted = product / length * ORTHONORMAL;
    if (gained) {
        const double larger = energy / (product * ORTHONORMAL);
        fitted = larger < MOST_GAIN * fitted ? larger : MOST_GAIN * fitted;
    }
    const double step = fitted * power_of_two(it.exponent);
    return float(step < LARGEST_STEP ? step : LARGEST_STEP);
}

// The sum of squared errors, in the scale of the work, with a step in the scale of the weights.
double measure(Superblock& it, const ClassModel& model, float step) {
    const double unit = power_of_two(-it.exponent) * 128.0;
    for (int tile = 0; tile < it.tiles; tile++) {
        const Floats scales = by_block<Floats>(tile, [&](int block) {
            const float scale = float(step * (model.up[it.classes.at(block)] * ORTHONORMAL));  // as decoders compute it
            return float(scale * unit);
        });
        store(squared_errors(it.work + TILE * tile, it.numbers + TILE * tile, scales), it.errors + LANES * tile);
    }
    double total = 0;
    for (int i = 0; i < it.classes.blocks; i++) total += it.errors[i];
    return total / 128.0;
}

// --- bytes ---

// Encode all numbers and classes.
Stream encode_stream(const Superblock& it, const ClassModel& model) {
    Stream stream(it.stream_end);
    for (int tile = it.tiles - 1; tile >= 0; tile--) {
        encode_numbers(stream, it.classes, tile, it.numbers + TILE * tile, model);
        encode_classes(stream, it.classes, tile);
    }
    return stream;
}

struct Row {
    uint8_t* bytes;
    int64_t stride;
};

// Write a superblock if it fits into its row and leaves fewer bytes than `unused`; return how many it leaves.
int64_t write(const Superblock& it, Row row, float step, int state_bits, const Stream& stream, int64_t unused) {
    const int64_t left = row.stride - packed_bytes(it.classes, stream);
    if (left < 0 || left >= unused) return left;
    std::memset(pack(row.bytes, it.classes, stream, step, state_bits), 0, left);
    return left;
}

// --- superblocks ---

struct Energies {
    double energy, error;
};

// A step from which find_step starts.
double first_guess(const ClassModel& model, double deviation, int64_t byte_count, int blocks) {
    double step = deviation * 2.0, bits = 8.0 * byte_count;
    for (int turn = 0; turn < 30 && bits > 0; turn++) {
        bits -= 2.0 * 128.0 / model.pace * blocks;
        step *= 0.25;
    }
    return step;
}

// Encode a superblock that is in the work.
template <int state_bits>
Energies encode_row(Superblock& it, const ClassModel& model, bool gained, Row row) {
    std::memset(row.bytes, 0, row.stride);
    double energy = 0;
    float most = 0;
    for (int i = 0; i < it.classes.blocks; i++) {
        energy += it.sizes.squares[i] / 128.0;
        most = it.sizes.squares[i] > most ? it.sizes.squares[i] : most;
    }
    if (energy == 0) return {0, 0};
    const double unit = power_of_two(it.exponent) * power_of_two(it.exponent);
    // Blocks that are so much smaller than the largest become zeros, whatever the rate.
    const double least = __builtin_sqrt(double(most)) / 128.0 * 0x1p-45;
    const double margin = 16.0 + 0.0003 * 8.0 * row.stride;
    double step = first_guess(model, __builtin_sqrt(energy / (128.0 * it.classes.blocks)), row.stride, it.classes.blocks);
    double best = energy, wanted = 8.0 * row.stride - margin;
    int64_t unused = row.stride + 1;
    for (int attempt = 0; attempt < ATTEMPTS; attempt++) {
        step = find_step(it.classes, it.sizes, model, wanted, step, least);
        if (it.classes.counts[0] == it.classes.blocks) break;
        quantize<state_bits>(it, model, step);
        const float fitted = fitted_step(it, model, energy, gained);
        const int64_t left = write(it, row, fitted, state_bits, encode_stream(it, model), unused);
        if (left < 0) {
            wanted += 8.0 * left - margin * (1 + attempt);
            continue;
        }
        if (left < unused) best = measure(it, model, fitted), unused = left;
        if (left <= 0.0018 * row.stride + 1.0 || attempt >= MOST_FITS) break;
        wanted += 8.0 * left - margin;
    }
    return {energy * unit, best * unit};
}

}  // namespace

// values: [superblocks, blocks, 128] of the dtype. signs: null without. limits to pace: see ClassModel. gained: see
// fitted_step. rows:
// [superblocks, stride]. energies, errors: [superblocks]: the sums of squares of the weights, and of the errors.
// first_bad: [1]: the first superblock with a NaN or an infinity, or -1. work to stream: room for a superblock; stream:
// [tiles * TILE_WORDS + LANES]. states: of the trellis: 8, 64 or 256.
void pqweights::encode_trellis(const uint8_t* values, const float* signs, const double* limits, const double* bits,
                               const double* slopes, const double* down, const double* up, const int32_t* reach,
                               const int32_t* zero, const double* logarithms, const uint32_t* entries, double pace,
                               int64_t gained, uint8_t* rows, double* energies, double* errors, int64_t* first_bad, float* work,
                               uint16_t* decisions, int16_t* numbers, uint16_t* stream, int64_t superblocks,
                               int64_t blocks, int64_t stride, int64_t states, int64_t dtype) {
    const ClassModel model{limits, bits, slopes, down, up, reach, zero, entries, logarithms, pace};
    const int tiles = int((blocks + LANES - 1) / LANES);
    const int64_t value_bytes = blocks * BLOCK * bytes_of(Dtype{dtype});
    Superblock it;
    it.classes.blocks = int(blocks), it.tiles = tiles;
    it.work = work, it.decisions = decisions, it.numbers = numbers;
    it.stream_end = stream + tiles * TILE_WORDS + LANES;
    first_bad[0] = -1;
    for (int64_t i = 0; i < superblocks; i++) {
        const Row row{rows + i * stride, stride};
        Energies found{};
        if (!load_superblock(it, values + i * value_bytes, Dtype{dtype}, signs)) {
            if (first_bad[0] < 0) first_bad[0] = i;
        } else if (states == 8) {
            found = encode_row<3>(it, model, gained, row);
        } else if (states == 64) {
            found = encode_row<6>(it, model, gained, row);
        } else {
            found = encode_row<8>(it, model, gained, row);
        }
        energies[i] = found.energy, errors[i] = found.error;
    }
}

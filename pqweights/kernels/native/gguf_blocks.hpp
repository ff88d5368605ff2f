// Blocks of GGUF, sixteen at a time: loading them, rounding their numbers to F16, and writing their bytes.
//
// Each lane has a block: weight j of the sixteen is in the j-th vector, in the scale of the work (group_fitting.hpp).
//
// The error that encoders minimise is the sum of squared errors, each times the importance of its weight. If columns
// have no importance, that of a weight is its magnitude plus EVENNESS root mean squares of its block. If all counted
// alike, the largest weights would be clipped, which costs models more.
#pragma once

#include "gguf_formats.hpp"
#include "group_fitting.hpp"

namespace {

// What the kernels are called with.
struct Job {
    const float* values;      // [blocks, size of a block]
    const float* importance;  // [row_blocks, size of a block], positive, the same for each row; null: by magnitude
    const float* starts;      // where the searches for the scales of parts begin
    int64_t start_count;
    const float* factors;  // candidates of d, or pairs of d and dmin, in units that the largest scale and offset give
    int64_t factor_count;
    uint8_t* data;
    double *energies, *errors;
    int64_t blocks, row_blocks;
};

// 1 / scale, and 0 for 0.
INLINE Floats inverse_of(Floats scale) { return choose<Floats>(scale == 0.0f, Floats{}, 1.0f / scale); }

constexpr float TINY = 0x1p-100f, INFINITE = __builtin_inff();  // what divisors are at least; no error so far
constexpr float EVENNESS = 2.0f;  // in root mean squares of a block
constexpr float LARGEST_HALF = 65504.0f, LEAST_HALF = 0x1p-24f;

struct Neighbours {
    Floats nearest, other;
};

// The F16 number nearest to x, saturated, and the next one on the other side of x, in the scale of the work.
INLINE Neighbours half_neighbours(Floats x, const Scaling& scaling) {
    x = maximum(minimum(x * scaling.up, splat(LARGEST_HALF)), splat(-LARGEST_HALF));
    Floats size = magnitude(x);
    Unsigned exponent = bits(size) & 0x7F800000;
    exponent = maximum(exponent, splat(113u << 23));  // 2**-14: below it the step does not shrink any further
    Floats step = floats(exponent - (10 << 23)), inverse_step = floats((264u << 23) - exponent);
    Floats nearest = rint(size * inverse_step) * step;
    Floats other = choose<Floats>(size > nearest, nearest + step, nearest - step);
    other = maximum(minimum(other, splat(LARGEST_HALF)), Floats{});
    auto signed_like_x = [&](Floats y) ALWAYS { return choose<Floats>(x < 0.0f, -y, y) * scaling.down; };
    return {signed_like_x(nearest), signed_like_x(other)};
}

// Weights of blocks, and their importance, by which squared errors count.
template <int size>
struct Weights {
    Floats weights[size], importance[size];
};

// Replace weights by their importance; in a block of zeros all are 1.
[[gnu::noinline]] void weigh_by_magnitude(int64_t size, Floats* weights) {
    Floats most{}, squares{};
    for (int64_t j = 0; j < size; j++) most = maximum(magnitude(weights[j]), most);
    scale_groups(weights, size, scaling_of(most, -126, 126).down);
    for (int64_t j = 0; j < size; j++) squares += weights[j] * weights[j];
    Floats least = square_root(squares / splat(float(size))) * EVENNESS;
    for (int64_t j = 0; j < size; j++) {
        weights[j] = choose<Floats>(most == 0.0f, splat(1.0f), magnitude(weights[j]) + least);
    }
}

// Sixteen blocks of a size, transposed: a function of its own, because it would be the largest part of each encoder.
[[gnu::noinline]] void load_blocks(const float* values, int64_t size, Floats* weights) {
    transpose_groups(values, size, size, weights, [](auto&) ALWAYS {});
}

// The blocks.
template <class S>
struct Blocks : Weights<SIZE<S>> {
    using Base = Weights<SIZE<S>>;
    using Base::weights, Base::importance;
    static constexpr int PARTS = S::PARTS, PART_SIZE = S::PART_SIZE, SIZE_OF_BLOCK = SIZE<S>;
    Scaling scaling;
    Doubles energy, error;  // sums of squares
    Fields fields[LANES];

    // body(weight, its importance) for each weight of a part.
    template <class Body>
    INLINE void over_part(int part, Body body) const {
        for (int j = part * PART_SIZE; j < (part + 1) * PART_SIZE; j++) body(weights[j], importance[j]);
    }

    // Write the codes of a part: encode(weight) gives a code, and the error, which is added up.
    template <class Encode>
    INLINE void write_codes(int part, Encode encode) {
        for (int at = part * PART_SIZE; at < (part + 1) * PART_SIZE; at += LANES) {
            Bytes codes[LANES];
            for (int k = 0; k < LANES; k++) {
                auto [code, own_error] = encode(weights[at + k]);
                Doubles wide = converted<Doubles>(weights[at + k]);
                energy += wide * wide;
                error += own_error * own_error;
                codes[k] = converted<Bytes>(code);
            }
            transpose(codes);
            each<LANES>([&](auto lane) ALWAYS { store(codes[lane], fields[lane].codes + at); });
        }
    }

    // Write d, or dmin, given in the scale of the weights: F16 numbers.
    void write_half(Floats x, Half Fields::*field) {
        Words halves = converted<Words>(finite_half(magnitude(x)) | ((bits(x) >> 16) & 0x8000));
        for (int lane = 0; lane < LANES; lane++) fields[lane].*field = halves[lane];
    }

    // Write the scales, or the offsets, of a part, counted from the lowest: whole numbers.
    void write_level(Floats level, int part, uint8_t (Fields::*field)[16]) {
        if constexpr (PARTS == 1) return;
        Ints whole = converted<Ints>(level);
        for (int lane = 0; lane < LANES; lane++) (fields[lane].*field)[part] = uint8_t(whole[lane]);
    }
};

// Writes a block.
using Pack = void (*)(const Fields& from, uint8_t* to);

// Encode all blocks of a job, of which the last few may be fewer than sixteen.
template <class Encoder>
[[gnu::noinline]] void encode_blocks(Encoder& sixteen, const Job& job, Pack pack, int64_t block_bytes) {
    constexpr int size = Encoder::SIZE_OF_BLOCK;
    alignas(64) float rows[LANES * size];
    for (int64_t first = 0; first < job.blocks; first += LANES) {
        const int count = job.blocks - first < LANES ? int(job.blocks - first) : LANES;
        if (job.importance) {
            for (int lane = 0; lane < LANES; lane++) {
                const float* from = job.importance + (first + lane) % job.row_blocks * size;
                std::memcpy(rows + lane * size, from, size * sizeof(float));
            }
            load_blocks(rows, size, sixteen.importance);
        }
        const float* values = job.values + first * size;
        if (count < LANES) {
            std::memset(rows, 0, sizeof rows);
            std::memcpy(rows, values, count * size * sizeof(float));
            values = rows;
        }
        if (!job.importance) {
            load_blocks(values, size, sixteen.importance);
            weigh_by_magnitude(size, sixteen.importance);
        }
        sixteen.energy = sixteen.error = Doubles{};
        sixteen.encode(values, job);
        const Doubles up = converted<Doubles>(sixteen.scaling.up);
        const Doubles energy = sixteen.energy * up * up, error = sixteen.error * up * up;
        std::memcpy(job.energies + first, &energy, count * sizeof(double));
        std::memcpy(job.errors + first, &error, count * sizeof(double));
        for (int lane = 0; lane < count; lane++) {
            pack(sixteen.fields[lane], job.data + (first + lane) * block_bytes);
        }
    }
}

// Encode in the format of this number. more: what an encoder is made of beside the limits of the format.
template <template <class> class Encoder, class... Formats, class... More>
void encode_type(int64_t type, const Job& job, const More&... more) {
    auto encode = [&]<class Format>(Format*) {
        if (type != Format::TYPE) return;
        Encoder<typename Format::Of> sixteen(Format::LIMITS, more...);
        auto pack = [](const Fields& from, uint8_t* to) {
            Format block;
            block.pack(from);
            std::memcpy(to, &block, sizeof block);
        };
        encode_blocks(sixteen, job, pack, sizeof(Format));
    };
    (encode((Formats*)nullptr), ...);
}

}  // namespace

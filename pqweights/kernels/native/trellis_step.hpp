// The step of a superblock: the classes that its blocks get, and the bits that they are expected to take. An encoder is
// free to choose (section 8 of docs/format.md); this one does so in float64, with operations that every machine rounds
// alike.
#pragma once

#include "trellis_entropy.hpp"

namespace {

constexpr int MOST_BLOCKS = 1024;
constexpr double STATE_BITS = 23.625;                // what the state of a lane takes less what it holds, on average

// What the encoder knows of the classes, by number, as far as it needs it; see EncodeModel in
// kernels/trellis.py.
struct ClassModel {
    const double* limits{};        // [257]: the least mean square, in squares of the step, of a block of this class
    const double *bits{}, *slopes{};  // a weight of a block with mean square w takes bits + slopes * w
    const double *down{}, *up{};  // weights are multiplied by down / step before the search, numbers by up * step
    const int32_t* reach{};       // the largest magnitude of a number
    const int32_t* zero{};        // [256, 2], and
    const uint32_t* entries{};    // see EncodeTable in formats/trellis_tables.py
    const double* logarithms{};   // [257]: -log2(i / 256)
    double pace{};                // octaves by which find_step changes the step for a bit per weight
};

// What the choice of classes needs of the blocks, after the rotation.
struct BlockSizes {
    float squares[MOST_BLOCKS], largest[MOST_BLOCKS];  // the sum of squares, and the largest magnitude
};

struct Classes {
    int blocks;
    int32_t of[MOST_BLOCKS];  // the class of each block
    int32_t counts[CLASSES];  // the blocks of each class
    int32_t shares[CLASSES];  // its frequency of 256
    int32_t starts[CLASSES];  // the frequencies before it, added
    int first, end;           // the classes that there are

    int stored_shares() const { return end - first > 1 ? end - first : 0; }
    int lanes() const { return blocks < LANES ? blocks : LANES; }
    // The class of a block, or 0 for a lane without one.
    int at(int block) const { return block < blocks ? of[block] : 0; }
};

// About 2**x, for |x| <= 1.
inline double exp2_near_zero(double x) {
    const double y = x * 0.6931471805599453;
    return 1.0 + y * (1.0 + y * (0.5 + y * (0.16666666666666666 + y * 0.041666666666666664)));
}

// The class of a block with mean square w in squares of the step, and largest coordinate `top` in steps, looked for from
// a class on.
inline int class_for(const ClassModel& model, double w, double top, int c) {
    while (c > 0 && w < model.limits[c]) c--;
    while (w >= model.limits[c + 1]) c++;
    while (c > 0 && c < CLASSES - 1 && top * model.down[c] + 2.0 > model.reach[c]) c++;  // n may be 2 from its weight
    return c;
}

// Choose the classes of all blocks, count them, and return how many bits the numbers are expected to take.
inline double classify(Classes& classes, const BlockSizes& sizes, const ClassModel& model, double step) {
    std::memset(classes.counts, 0, sizeof classes.counts);
    const double inverse = 1.0 / step, per_square = inverse * inverse / (128.0 * 128.0);
    double total = 0;
    for (int i = 0; i < classes.blocks; i++) {
        const double w = sizes.squares[i] * per_square;
        const int c = class_for(model, w, sizes.largest[i] * inverse * ORTHONORMAL, classes.of[i]);
        if (c > 0) total += 128.0 * (model.bits[c] + model.slopes[c] * w);
        classes.of[i] = c;
        classes.counts[c]++;
    }
    return total;
}

// The class whose frequency is to change by 1: of equals the first, the largest one if the frequencies are `too_many`,
// else the smallest for its count.
inline int class_to_change(const Classes& classes, bool too_many) {
    const auto &shares = classes.shares, &counts = classes.counts;
    int best = -1;
    for (int c = classes.first; c < classes.end; c++) {
        if (too_many ? shares[c] <= 1 : counts[c] == 0) continue;
        if (best < 0 || (too_many ? shares[c] > shares[best] : counts[c] * shares[best] > counts[best] * shares[c]))
            best = c;
    }
    return best;
}

// Turn counts of classes into frequencies that add up to 256.
inline void share_classes(Classes& classes) {
    const int blocks = classes.blocks;
    int given = 0;
    classes.first = classes.end = 0;
    for (int c = CLASSES - 1; c >= 0; c--) {
        const int count = classes.counts[c], share = (2 * CLASSES * count + blocks) / (2 * blocks);
        classes.shares[c] = count == 0 ? 0 : share > 1 ? share : 1;
        given += classes.shares[c];
        if (count) classes.first = c;
        if (count && !classes.end) classes.end = c + 1;
    }
    for (; given != CLASSES; given += given > CLASSES ? -1 : 1)
        classes.shares[class_to_change(classes, given > CLASSES)] += given > CLASSES ? -1 : 1;
    for (int c = 0, start = 0; c < CLASSES; start += classes.shares[c++]) classes.starts[c] = start;
}

// How many bits a superblock is expected to take with a step; sets its classes.
inline double expected_bits(Classes& classes, const BlockSizes& sizes, const ClassModel& model, double step) {
    double total = classify(classes, sizes, model, step);
    share_classes(classes);
    for (int c = classes.first; c < classes.end; c++)
        if (classes.counts[c]) total += classes.counts[c] * model.logarithms[classes.shares[c]];
    return total + STATE_BITS * classes.lanes() + 8.0 * (HEADER_BYTES + classes.stored_shares());
}

// A step, at least `least`, with which a superblock is expected to take `wanted` bits, from a first guess. Sets the
// classes that belong to it.
inline double find_step(Classes& classes, const BlockSizes& sizes, const ClassModel& model, double wanted, double step,
                        double least) {
    for (int i = 0; i < classes.blocks; i++) classes.of[i] = 8;
    for (int turn = 0; turn < 24; turn++) {
        step = step > least ? step : least;
        const double excess = expected_bits(classes, sizes, model, step) - wanted;
        if (__builtin_fabs(excess) < 4.0) return step;
        const int coded = classes.blocks - classes.counts[0];
        const double ratio = model.pace * excess / (128.0 * (coded > 1 ? coded : 1));
        step *= exp2_near_zero(ratio < -1.0 ? -1.0 : ratio > 1.0 ? 1.0 : ratio);
    }
    step = step > least ? step : least;
    expected_bits(classes, sizes, model, step);
    return step;
}

}  // namespace

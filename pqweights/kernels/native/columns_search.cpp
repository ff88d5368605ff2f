// Finds the numbers of the columns of a weight one after the other, each of which is searched for with the errors of
// those before it fed back (LDLQ: Chee et al., arXiv:2307.13304, section 3): docs/trellis.md.
//
// Errors are fed back in the rotated coordinates, as the rotation goes along the rows, and in steps of each column.
#include "columns.hpp"
#include "interface.hpp"
#include "row_products.hpp"
#include "tiles.hpp"
#include "trellis_search.hpp"
#include "trellis_step.hpp"

namespace {

// Columns for which the errors of earlier ones are multiplied together.
constexpr int RUN = 64;
// Magnitudes of coordinates are limited to so many steps, so that whatever the weights are, numbers are within 16 bits.
constexpr double MOST_STEPS = 0x1p40;

// A group whose columns are searched.
struct Group {
    const float* feedback;  // [columns + QUAD - 1, columns]
    float* values;          // [32, columns, 64]: weights, or, where they were searched, errors
    const float* sums;      // [32, RUN, 64]: what is added to the weights of a run
    int64_t columns;
};

// What belongs to all columns of a superblock.
struct Search {
    const ClassModel& model;
    uint16_t* decisions;  // [128, states]
    double step;
    Ints starts[LANES]{};  // by column mod 16: in which state of the trellis the next block begins
    Floats metrics[1 << MOST_STATE_BITS]{}, room[1 << MOST_STATE_BITS]{};
};

// What is found of a column.
struct Found {
    int16_t* numbers;                      // [128, 16]
    uint8_t* classes;                      // [16]
    float *error_sums, *target_sums;       // [128, 16] each: to which the squared errors are added
    float error_weight, target_weight;     // times these
};

// --- what the errors of earlier columns change ---

// The targets of a column: its weights, and what the errors of all columns before it add, those of the run from `start`
// on included.
void load_targets(const Group& group, int64_t start, int64_t column, double limit, Floats (&targets)[BLOCK]) {
    const float* factors = group.feedback + column * group.columns;
    const float most = float(limit);
    for (int tile = 0; tile < GROUP_TILES; tile++) {
        const float* values = group.values + tile * group.columns * TILE;
        Row sum;
        each<TILE_VECTORS>([&](auto v) ALWAYS {
            sum[v] = load<Floats>(group.sums + (tile * RUN + column - start) * TILE + v * LANES);
        });
        for (int64_t j = start; j < column; j++)
            each<TILE_VECTORS>([&](auto v) ALWAYS {
                sum[v] += factors[j] * load<Floats>(values + j * TILE + v * LANES);
            });
        each<TILE_VECTORS>([&](auto v) ALWAYS {
            const Floats target = load<Floats>(values + column * TILE + v * LANES) + sum[v];
            targets[tile * TILE_VECTORS + v] = minimum(maximum(target, splat(-most)), splat(most));  // a NaN: -most
        });
    }
}

// --- the search ---

// Choose the classes of sixteen blocks.
Ints choose_classes(const Search& search, const Floats (&targets)[BLOCK]) {
    Floats squares{}, largest{};
    for (const Floats& x : targets) {
        squares += x * x;
        largest = maximum(largest, magnitude(x));
    }
    const double inverse = 1.0 / search.step;
    return lanes_of<Ints>([&](int lane) {
        const double w = squares[lane] * inverse * inverse / (128.0 * 128.0);
        return class_for(search.model, w, largest[lane] * inverse * ORTHONORMAL, 8);
    });
}

// Find the numbers of a column, of which `place` is the number in its superblock; write what it decodes to, rotated.
template <int state_bits>
void quantize(Search& search, int64_t place, const Floats (&targets)[BLOCK], const Found& found,
              Floats (&decoded)[BLOCK]) {
    constexpr int states = 1 << state_bits;
    const ClassModel& model = search.model;
    const Ints classes = choose_classes(search, targets);
    store(converted<Bytes>(classes), found.classes);
    const double inverse = ORTHONORMAL / search.step;
    const Floats factor = lanes_of<Floats>([&](int lane) { return float(model.down[classes[lane]] * inverse); });
    const Floats scale = lanes_of<Floats>([&](int lane) {
        return 128.0f * float(search.step * (model.up[classes[lane]] * ORTHONORMAL));  // as decoders compute it
    });
    const Floats penalty = choose<Floats>(classes == 0, splat(FORBIDDEN), Floats{});
    Ints& start = search.starts[place % LANES];

    begin_search(start, *(Floats(*)[states])search.metrics);
    pqweights::extend<state_bits>((const float*)targets, factor, penalty, search.decisions, search.metrics,
                                  search.room);
    start = cheapest_states<state_bits>(search.metrics);
    Planes<state_bits> planes;
    split<state_bits>(start, planes);
    Residues residues[BLOCK];
    trace<state_bits>(search.decisions, planes, residues);
    find_numbers((const float*)targets, factor, residues, found.numbers);
    for (int t = 0; t < BLOCK; t++)
        decoded[t] = converted<Floats>(converted<Ints>(load<Shorts>(found.numbers + LANES * t))) * scale;
}

// Add the squares of errors of weights, from those of coordinates.
void add_squares(Floats (&errors)[BLOCK], float weight, float* sums) {
    rotate_blocks(errors);
    for (int t = 0; t < BLOCK; t++)
        store(load<Floats>(sums + LANES * t) + errors[t] * errors[t] * weight, sums + LANES * t);
}

// Search a column, and put its errors in the place of its weights.
template <int state_bits>
void search_column(const Group& group, Search& search, int64_t start, int64_t column, int64_t place,
                   const Found& found) {
    Floats targets[BLOCK], decoded[BLOCK];
    load_targets(group, start, column, search.step * MOST_STEPS, targets);
    quantize<state_bits>(search, place, targets, found, decoded);
    for (int t = 0; t < BLOCK; t++) targets[t] -= decoded[t];
    add_squares(targets, found.target_weight, found.target_sums);
    each_vector(group.values, group.columns, column, [&](int t, float* at) ALWAYS {
        decoded[t] = load<Floats>(at) - decoded[t];
        store(decoded[t], at);
    });
    add_squares(decoded, found.error_weight, found.error_sums);
}

// Search a run from column `first` on, which is number `place` of its superblock.
template <int state_bits>
void search_run(const Group& group, Search& search, int64_t first, int64_t place, int64_t count, Found found,
                const float* weights) {
    for (int64_t i = 0; i < count; i++) {
        found.error_weight = weights[2 * (place + i)], found.target_weight = weights[2 * (place + i) + 1];
        search_column<state_bits>(group, search, first, first + i, place + i, found);
        found.numbers += BLOCK * LANES, found.classes += LANES;
    }
}

}  // namespace

// What the errors of the columns before a run add to those of the run, `count` columns from `first` on, up to 64.
//
// feedback: [columns + QUAD - 1, columns]; row k has by what the errors of the columns j < k are multiplied before they
// are added to column k; the last rows mean nothing. groups: [groups, 32, columns, 64], errors in the columns before
// `first`. sums: [groups, 32, 64, 64].
void pqweights::feed_back_columns(int64_t* next_tile, const float* feedback, const float* groups, float* sums,
                                  int64_t group_count, int64_t columns, int64_t first, int64_t count) {
    each_tile(next_tile, 1, group_count * GROUP_TILES, 1, [&](int64_t, int64_t tile, int64_t) ALWAYS {
        Quad run[RUN / QUAD]{};
        multiply_quads(feedback + first * columns, columns, groups + tile * columns * TILE, TILE, first,
                       (count + QUAD - 1) / QUAD, run);
        std::memcpy(sums + tile * RUN * TILE, run, sizeof run);
    });
}

// Searches a run, up to 64 columns from `first` on, of each of some groups.
//
// feedback, groups, sums: see feed_back_columns; weights are replaced by errors. weights: [blocks, 2], those of the
// squared errors of a column, and of what is left of its targets. limits to reach: see ClassModel. numbers: [groups,
// blocks, 128, 16]. classes: [groups, blocks, 16]. All these are of superblocks; the run begins with their block `place`.
// squares: [groups, 2, 128, 16]: to which the squared errors of the weights are added, times their weights, and those
// of the targets. starts: [groups, 16, 16], see Search; 0 before the first run of superblocks. decisions: room, [groups,
// 128, states]. states: of the trellis: 8, 64 or 256. step: of the coordinates in the groups.
void pqweights::search_columns(int64_t* next_tile, const float* feedback, float* groups, const float* sums,
                               const float* weights, const double* limits, const double* down, const double* up,
                               const int32_t* reach, int16_t* numbers, uint8_t* classes, float* squares,
                               int32_t* starts, uint16_t* decisions, int64_t group_count, int64_t columns,
                               int64_t first, int64_t count, int64_t place, int64_t blocks, int64_t states,
                               double step) {
    const ClassModel model{.limits = limits, .down = down, .up = up, .reach = reach};
    each_tile(next_tile, 1, group_count, 1, [&](int64_t, int64_t number, int64_t) ALWAYS {
        const int64_t block = number * blocks + place, of_group = GROUP_TILES * TILE;
        const Group group{feedback, groups + number * of_group * columns, sums + number * of_group * RUN, columns};
        Search search{model, decisions + number * BLOCK * states, step};
        float* own = squares + number * 2 * BLOCK * LANES;
        const Found found{numbers + block * BLOCK * LANES, classes + block * LANES, own, own + BLOCK * LANES, 0, 0};
        std::memcpy(search.starts, starts + number * LANES * LANES, sizeof search.starts);
        if (states == 8) search_run<3>(group, search, first, place, count, found, weights);
        else if (states == 64) search_run<6>(group, search, first, place, count, found, weights);
        else search_run<8>(group, search, first, place, count, found, weights);
        std::memcpy(starts + number * LANES * LANES, search.starts, sizeof search.starts);
    });
}

// Codes, scales and offsets found again in weights that were decoded from them and rounded: checkpoints that were decoded
// from few bits, or trained for them, hold nothing else.
//
// Each weight stands for an interval, of the numbers that round to it. A scale is a number of 16 bits, so few of them put
// the largest weight of a part into its interval with a given code; these are tried, from the middle outward, and the
// first with which all weights are scale * code + offset, rounded as they are stored, is taken.
//
// 1. Load.    The distinct weights of each part, with their intervals: more than there are codes are not on a grid.
// 2. Ranges.  For each number of steps that may lie between the extremes of a part, the interval of its scale (Steps).
// 3. Scales.  Alone: each scale, and each offset for it. Where scales are d times a level: each d with which a level of
//             the part of the widest range is a scale of it, and with which the other parts have levels, too; for each
//             the same with dmin.
// 4. Check.   Decode as the format does, in float32, round, and compare.
// tests/references.md names what checks it.
#include "conversions.hpp"
#include "gguf_formats.hpp"
#include "interface.hpp"

namespace {

constexpr int MOST_WEIGHTS = 256, MOST_STEPS = 32, MOST_CHOICES = 128, MOST_NUMBERS = 64, MOST_TRIES = 20000;
constexpr double INFINITE = __builtin_inf(), SLACK = 1e-9;

struct Interval {
    double low, high;

    bool empty() const { return !(low <= high); }
    Interval operator&(Interval other) const {
        return {low > other.low ? low : other.low, high < other.high ? high : other.high};
    }
    Interval operator-(double x) const { return {low - x, high - x}; }
    Interval operator-() const { return {-high, -low}; }
    // Of positive numbers.
    Interval operator/(double x) const { return {low / x, high / x}; }
};

double rounded(double x) { return __builtin_rint(x); }
bool has_sign(float x) { return __builtin_signbit(x) != 0; }

// Call right(number) for the whole numbers of an interval from `least` to `most`, until it says so.
template <class Right>
bool any_whole(Interval in, int least, int most, Right right) {
    const double low = __builtin_ceil(in.low - SLACK), high = __builtin_floor(in.high + SLACK);
    if (!(low <= most && high >= least)) return false;
    const int first = low > least ? int(low) : least, last = high < most ? int(high) : most;
    for (int number = first; number <= last; number++) {
        if (right(number)) return true;
    }
    return false;
}

template <class To, class From>
To cast(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// --- numbers of 16 bits, which follow each other as their bits do ---

// The number with these bits, or its negative.
float number_of(int order, Dtype dtype) {
    const uint32_t bits = uint32_t(order < 0 ? -order : order);
    float magnitude;
    if (dtype == Dtype::BF16) magnitude = cast<float>(bits << 16);
    else if (bits < 0x400) magnitude = float(bits) * 0x1p-24f;
    else magnitude = cast<float>((bits << 13) + (112u << 23));
    return order < 0 ? -magnitude : magnitude;
}
int last_of(Dtype dtype) { return dtype == Dtype::BF16 ? 0x7F7F : 0x7BFF; }

// The bits of the number next to x, saturated, with its sign.
int order_of(float x, Dtype dtype) {
    const uint32_t bits = cast<uint32_t>(x) & 0x7FFFFFFF;
    const int dropped = dtype == Dtype::BF16 ? 16 : 13;
    uint32_t order = (bits + ((1u << (dropped - 1)) - 1) + ((bits >> dropped) & 1)) >> dropped;
    if (dtype == Dtype::F16) {
        const bool tiny = bits < cast<uint32_t>(0x1p-14f);
        order = tiny ? uint32_t(rounded(double(cast<float>(bits)) * 0x1p24)) : order - (112u << 10);
    }
    const int least = int(order) < last_of(dtype) ? int(order) : last_of(dtype);
    return x < 0 ? -least : least;
}

// The bits of a number of F16.
Half half_of(float x) {
    const int order = order_of(x, Dtype::F16);
    return Half(order < 0 ? 0x8000 - order : order);
}

// Try numbers of a dtype in an interval, from its middle outward; return whether one was right. tries: that are left
template <class Right>
bool any_number(Interval in, Dtype dtype, int& tries, Right right) {
    if (in.empty()) return false;
    const double slack = 0x1p-40 * (in.high > -in.low ? in.high : -in.low);
    const int middle = order_of(float((in.low + in.high) / 2), dtype), last = last_of(dtype);
    bool up = true, down = true;
    for (int step = 0; step < MOST_NUMBERS && (up || down) && tries > 0; step++) {
        for (int side = 0; side < (step ? 2 : 1); side++) {
            tries--;
            bool& open = side ? down : up;
            const int order = side ? middle - step : middle + step;
            if (!open || order < -last || order > last) continue;
            const float number = number_of(order, dtype);
            open = side ? number >= in.low - slack : number <= in.high + slack;
            if (number >= in.low - slack && number <= in.high + slack && right(number)) return true;
        }
    }
    return false;
}

// x as weights are stored.
float stored(float x, Dtype dtype) {
    if (dtype == Dtype::F32) return x;
    const float limit = dtype == Dtype::F16 ? 65520.0f : 0x1.FFp127f;  // from here on, infinite
    return x < limit && x > -limit ? number_of(order_of(x, dtype), dtype) : x;
}

// The numbers that round to a stored one.
Interval around(float x, Dtype dtype) {
    const uint32_t bits = cast<uint32_t>(x) & 0x7FFFFFFF;
    const double magnitude = cast<float>(bits);
    Interval of;
    if (dtype == Dtype::F32) {
        of = {(magnitude + cast<float>(bits - 1)) / 2, (magnitude + cast<float>(bits + 1)) / 2};
    } else if (dtype == Dtype::F16 && magnitude < 0x1p-14) {
        of = {magnitude - 0x1p-25, magnitude + 0x1p-25};
    } else {
        const uint32_t half = dtype == Dtype::BF16 ? 1u << 15 : 1u << 12;
        of = {cast<float>(bits - half), cast<float>(bits + half)};
    }
    if (bits == 0) of = {-of.high, of.high};
    return x < 0 ? -of : of;
}

// --- 1. load ---

// The code that is next to the middle of an interval, which is not the weight itself where that is a power of two.
double code_of(Interval weight, float scale, float offset) {
    return scale == 0 ? 0 : rounded(((weight.low + weight.high) / 2 - offset) / scale);
}

// Distinct weights in ascending order, each with the numbers that round to it.
template <int size>
struct Part {
    int count;
    float values[size];
    Interval intervals[size];
    Dtype dtype;
    bool zero[2];  // whether there are any, positive and negative ones

    // False for weights that are not finite numbers of the dtype, and for more than `most`.
    bool load(const float* weights, int64_t weight_count, int most, Dtype of) {
        count = 0, dtype = of, zero[0] = zero[1] = false;
        for (int64_t i = 0; i < weight_count; i++) {
            const float w = weights[i];
            if (w == 0) zero[has_sign(w)] = true;
            int place = count;
            while (place > 0 && values[place - 1] > w) place--;
            if (place > 0 && values[place - 1] == w) continue;
            if (!(w - w == 0) || stored(w, dtype) != w || count == most) return false;
            for (int k = count; k > place; k--) values[k] = values[k - 1];
            values[place] = w;
            count++;
        }
        for (int i = 0; i < count; i++) intervals[i] = around(values[i], dtype);
        return true;
    }

    float first() const { return values[0]; }
    float last() const { return values[count - 1]; }
    float most() const { return last() > -first() ? last() : -first(); }
    double range() const { return double(last()) - first(); }
    bool is_zero() const { return count == 1 && first() == 0; }
    // Whether zeros have their signs with this scale, whose sign they get.
    bool has_zeros_of(float scale) const { return !zero[scale > 0]; }

    // Whether these codes, between two limits, are the weights.
    bool is(float scale, float offset, int lowest, int highest) const {
        for (int i = 0; i < count; i++) {
            const double code = code_of(intervals[i], scale, offset);
            if (!(code >= lowest && code <= highest)) return false;
            if (stored(float(code) * scale + offset, dtype) != values[i]) return false;
        }
        return true;
    }
};

// --- 2. ranges ---

// How many steps there may be between the extremes of a part, and how large one is then.
struct Steps {
    int steps;
    Interval size;
};

// The numbers of steps that lie within an interval, for a step in another one.
struct Whole {
    double low, high;

    Whole(Interval distance, Interval step) {
        low = __builtin_ceil(distance.low / (distance.low < 0 ? step.low : step.high) - SLACK);
        high = __builtin_floor(distance.high / (distance.high < 0 ? step.high : step.low) + SLACK);
    }
    bool is_one() const { return low == high; }
};

// The size of a step, if so many lie between the extremes, narrowed by the other weights.
template <class Part>
Interval step_between(const Part& part, int steps) {
    const Interval &first = part.intervals[0], &last = part.intervals[part.count - 1];
    Interval size = Interval{last.low - first.high, last.high - first.low} / steps;
    for (int i = 1; i + 1 < part.count && !size.empty(); i++) {
        const Interval& own = part.intervals[i];
        const Interval below = {own.low - first.high, own.high - first.low};
        const Whole number(below, size);
        if (number.high < number.low) return {1, 0};
        if (!number.is_one()) continue;
        const double k = number.low;
        if (k > 0) size = size & below / k;
        if (steps - k > 0) size = size & Interval{last.low - own.high, last.high - own.low} / (steps - k);
    }
    return size;
}

// The size of a step, if so many lie between 0 and the weight of the largest magnitude, narrowed by the others.
template <class Part>
Interval step_from_zero(const Part& part, int steps) {
    const bool negative = part.most() != part.last();
    const Interval own = part.intervals[negative ? 0 : part.count - 1];
    Interval size = (negative ? -own : own) / steps;
    for (int i = 0; i < part.count && !size.empty(); i++) {
        const Interval weight = part.values[i] < 0 ? -part.intervals[i] : part.intervals[i];
        const Whole number(weight, size);
        if (number.high < number.low) return {1, 0};
        if (number.is_one() && number.low > 0) size = size & weight / number.low;
    }
    return size;
}

// Where the first weight is, given the size of a step: in its interval, narrowed by those of the other weights.
template <class Part>
Interval first_of(const Part& part, double size) {
    Interval first = part.intervals[0];
    for (int i = 1; i < part.count && !first.empty(); i++) {
        const double steps = rounded((part.values[i] - (first.low + first.high) / 2) / size);
        first = first & (part.intervals[i] - size * steps);
    }
    return first;
}

// All possible ones, the most steps first; return how many.
template <class Part, class StepOf>
int all_steps(const Part& part, int most, StepOf step_of, Steps (&found)[MOST_STEPS]) {
    int count = 0;
    for (int steps = most; steps > 0 && count < MOST_STEPS; steps--) {
        Interval size = step_of(part, steps);
        if (size.high > 0 && !size.empty()) found[count++] = {steps, size};
    }
    return count;
}

// --- 3. scales and offsets that are stored as they are ---

enum class Kind : int64_t { AFFINE, SYMMETRIC, ASYMMETRIC };

// What codes are, and what scales and offsets are stored in. Of ASYMMETRIC, the code that stands for 0 is the offset.
struct Rule {
    Kind kind;
    int lowest, highest;
    Dtype dtype;
};

struct Pair {
    float scale, offset;
};

template <class Part>
bool find_symmetric(const Part& part, const Rule& rule, int& tries, Pair& pair) {
    const int most = -rule.lowest > rule.highest ? -rule.lowest : rule.highest;
    for (int steps = most; steps > 0; steps--) {
        const Interval size = step_from_zero(part, steps);
        const float likely = part.zero[1] ? -1.0f : 1.0f;  // zeros have the sign of the scale
        for (float sign : {likely, -likely}) {
            if (any_number(size, rule.dtype, tries, [&](float scale) {
                    return part.is(pair.scale = scale * sign, pair.offset = 0, rule.lowest, rule.highest);
                })) {
                return true;
            }
        }
    }
    return false;
}

template <class Part>
bool find_asymmetric(const Part& part, const Rule& rule, int& tries, Pair& pair) {
    const int last = rule.highest;
    for (int steps = last; steps > 0; steps--) {
        if (any_number(step_from_zero(part, steps), rule.dtype, tries, [&](float scale) {
                const double first = code_of(part.intervals[0], scale, 0), least = first < 0 ? first : 0;
                pair = {scale, float(-least)};
                return least >= -last && part.is(scale, 0, int(least), last + int(least));
            })) {
            return true;
        }
    }
    return false;
}

template <class Part>
bool find_affine(const Part& part, const Rule& rule, int& tries, Pair& pair) {
    for (int steps = rule.highest - rule.lowest; steps > 0; steps--) {
        const Interval size = step_between(part, steps);
        const int spare = rule.highest - rule.lowest - steps;
        const auto right = [&](float scale) {
            const Interval first = first_of(part, scale);
            for (int below = 0; below <= spare && !first.empty(); below++) {
                for (float sign : {1.0f, -1.0f}) {  // of the scale: the first weight has a low code, or a high one
                    const int code = sign > 0 ? rule.lowest + below : rule.highest - below;
                    if (any_number(first - double(scale) * sign * code, rule.dtype, tries, [&](float offset) {
                            pair = {scale * sign, offset};
                            return part.is(pair.scale, offset, rule.lowest, rule.highest);
                        })) {
                        return true;
                    }
                }
            }
            return false;
        };
        if (any_number(size, rule.dtype, tries, right)) return true;
    }
    return false;
}

// --- 3. scales and offsets in levels ---

// What a part may be with some d: the level of its scale, the codes that its first weight may have, and where that is.
struct Choice {
    int level, lowest, highest;
    Interval first;
};

// The numbers of F16 and the levels that a block has. Of symmetric formats, there are no offsets.
struct Levels {
    float d, dmin;
    int scales[16], offsets[16];
};

// A block of parts.
template <int parts, int part_size>
struct Block {
    Part<part_size> part[parts];
    Steps steps[parts][MOST_STEPS];
    int step_counts[parts];
    Choice choices[parts][MOST_CHOICES];
    int choice_counts[parts];
    Levels found{};
    int tries;
    bool signed_zeros;  // whether zeros must have their signs

    static constexpr auto BETWEEN = [](const auto& part, int steps) { return step_between(part, steps); };
    static constexpr auto FROM_ZERO = [](const auto& part, int steps) { return step_from_zero(part, steps); };

    // Try d with which a level of the part of the widest range is a scale of it. least, most: of levels
    template <class Right>
    bool any_scale(int widest, int most, Right right) {
        for (int level = most; level > 0; level--) {
            for (int i = 0; i < step_counts[widest]; i++) {
                if (any_number(steps[widest][i].size / level, Dtype::F16, tries, right)) return true;
            }
        }
        return false;
    }

    // --- symmetric: each part for itself, once there is a d ---

    bool find_symmetric(const SymmetricLimits& limits, bool with_signed_zeros) {
        signed_zeros = with_signed_zeros, tries = MOST_TRIES;
        const int lowest = int(limits.lowest), highest = int(limits.highest);
        const int least = int(limits.least_factor), most = int(limits.most_factor);
        int widest = 0;
        for (int i = 0; i < parts; i++) {
            step_counts[i] = all_steps(part[i], -lowest, FROM_ZERO, steps[i]);
            if (!part[i].is_zero() && !step_counts[i]) return false;
            if (part[i].most() > part[widest].most()) widest = i;
        }
        return any_scale(widest, -least, [&](float size) {
            for (float d : {size, -size}) {
                found.d = d;
                bool all = has_level(widest, lowest, highest, least, most);
                for (int i = 0; i < parts && all; i++) all = i == widest || has_level(i, lowest, highest, least, most);
                if (all) return true;
            }
            return false;
        });
    }

    // Find a level for a part, the positive ones first.
    bool has_level(int i, int lowest, int highest, int least, int most) {
        if (part[i].is_zero()) return found.scales[i] = 0, true;
        const double d = found.d < 0 ? -found.d : found.d;
        for (int k = 0; k < step_counts[i]; k++) {
            if (any_whole(steps[i][k].size / d, 1, -least, [&](int level) {
                    for (int own : {level, -level}) {
                        found.scales[i] = own;
                        if (signed_zeros && !part[i].has_zeros_of(found.d * float(own))) continue;
                        if (own > most || tries-- <= 0) continue;
                        if (part[i].is(found.d * float(own), 0, lowest, highest)) return true;
                    }
                    return false;
                })) {
                return true;
            }
        }
        return false;
    }

    // --- affine: dmin has to fit all parts ---

    bool find_affine(const AffineLimits& limits) {
        const int last = int(limits.last_code), most = int(limits.last_level);
        int widest = 0;
        for (int i = 0; i < parts; i++) {
            step_counts[i] = part[i].count == 1 ? 0 : all_steps(part[i], last, BETWEEN, steps[i]);
            if (part[i].count > 1 && !step_counts[i]) return false;
            if (part[i].range() > part[widest].range()) widest = i;
        }
        if (part[widest].count == 1) {  // all parts are constant: the largest one may be any code
            for (int i = 0; i < parts; i++) widest = part[i].last() > part[widest].last() ? i : widest;
            if (part[widest].first() <= 0) return is_offset(last, most);
            for (int steps = last; steps > 0; steps--) {
                this->steps[widest][step_counts[widest]++] = {steps, part[widest].intervals[0] / steps};
            }
        }
        return any_scale(widest, most, [&](float d) {
            found.d = d;
            for (int k = 0; k < parts; k++) {
                const int i = (widest + k) % parts;
                if (!find_choices(i, last, most)) return false;
            }
            return any_offset(last, most);
        });
    }

    // Whether constant parts are nothing but offsets.
    bool is_offset(int last, int most) {
        found.d = 0;
        bool all_zero = true;
        for (int i = 0; i < parts; i++) {
            all_zero = all_zero && part[i].is_zero();
            find_choices(i, 0, 0);
        }
        return !all_zero && any_offset(last, most);
    }

    // Find what a part may be with this d.
    bool find_choices(int i, int last, int most) {
        choice_counts[i] = 0;
        auto add = [&](Choice choice) {
            if (choice_counts[i] < MOST_CHOICES) choices[i][choice_counts[i]++] = choice;
        };
        if (part[i].count == 1) {  // an offset alone, or a code without one
            const Interval weight = part[i].intervals[0];
            if (weight.low <= 0) add({0, 0, 0, weight});
            for (int level = 1; level <= most && weight.low > 0; level++) {
                any_whole(weight / (found.d * float(level)), 1, last, [&](int code) {
                    add({level, code, code, weight});
                    return true;
                });
            }
            return choice_counts[i] > 0;
        }
        for (int k = 0; k < step_counts[i]; k++) {
            any_whole(steps[i][k].size / found.d, 1, most, [&](int level) {
                if (tries-- <= 0) return true;
                const Interval first = first_of(part[i], found.d * float(level));
                if (!first.empty()) add({level, 0, last - steps[i][k].steps, first});
                return false;
            });
        }
        return choice_counts[i] > 0;
    }

    // Where dmin times a level would have to be, with this code of the first weight.
    Interval lowering(const Choice& choice, int code) const {
        return -(choice.first - double(found.d * float(choice.level)) * code);
    }

    // Call right(choice, code) for all that a part may be, until it says so.
    template <class Right>
    bool any_choice(int i, Right right) {
        for (int k = 0; k < choice_counts[i]; k++) {
            const Choice& choice = choices[i][k];
            for (int code = choice.lowest; code <= choice.highest; code++) {
                if (tries-- <= 0) return false;
                if (right(choice, code)) return true;
            }
        }
        return false;
    }

    // Find dmin, from the part whose offset is the largest even if it is the least that it may be.
    bool any_offset(int last, int most) {
        int deepest = 0;
        double deepest_least = -1;
        for (int i = 0; i < parts; i++) {
            double least = INFINITE;
            any_choice(i, [&](const Choice& choice, int code) {
                const Interval offset = lowering(choice, code);
                if (offset.high >= 0 && offset.low < least) least = offset.low;
                return false;
            });
            if (least > deepest_least) deepest = i, deepest_least = least;
        }
        found.dmin = 0;
        if (deepest_least <= 0) return with_offset(last, most);
        return any_choice(deepest, [&](const Choice& choice, int code) {
            const Interval offset = lowering(choice, code);
            if (offset.high <= 0) return false;
            for (int level = most; level > 0; level--) {
                if (any_number(offset / level, Dtype::F16, tries, [&](float dmin) {
                        found.dmin = dmin;
                        return dmin > 0 && with_offset(last, most);
                    })) {
                    return true;
                }
            }
            return false;
        });
    }

    // Find levels of all parts for d and dmin.
    bool with_offset(int last, int most) {
        for (int i = 0; i < parts; i++) {
            const bool is_found = any_choice(i, [&](const Choice& choice, int code) {
                const Interval offset = lowering(choice, code);
                const bool has_zero = offset.low <= 0 && offset.high >= 0;
                const Interval levels = found.dmin > 0 ? offset / found.dmin : Interval{0, has_zero ? 0.0 : -1.0};
                return any_whole(levels, 0, most, [&](int level) {
                    found.scales[i] = choice.level, found.offsets[i] = level;
                    return part[i].is(scale_of(i), offset_of(i), 0, last);
                });
            });
            if (!is_found) return false;
        }
        return true;
    }

    // The levels, and with them the scale and the offset of each part. least: the level that is stored as 0
    void write(int least, Fields& fields, Pair (&pairs)[parts]) const {
        fields.d = half_of(found.d), fields.dmin = half_of(found.dmin);
        for (int i = 0; i < parts; i++) {
            pairs[i] = {scale_of(i), offset_of(i)};
            fields.scales[i] = uint8_t(found.scales[i] - least), fields.offsets[i] = uint8_t(found.offsets[i]);
        }
    }

    float scale_of(int i) const { return found.d * float(found.scales[i]); }
    float offset_of(int i) const { return 0.0f - found.dmin * float(found.offsets[i]); }
};

// --- 4. blocks and groups ---

// Weights, and where the blocks and whether they were found go.
struct Job {
    const float* values;
    uint8_t *data, *found;
    int64_t blocks;
    Dtype dtype;
};

template <class Format>
constexpr bool IS_AFFINE = std::is_same_v<std::remove_cv_t<decltype(Format::LIMITS)>, AffineLimits>;

template <class Format>
void recover(const Job& job) {
    constexpr int parts = Format::PARTS, part_size = Format::PART_SIZE, size = parts * part_size;
    constexpr bool affine = IS_AFFINE<Format>;
    constexpr auto limits = Format::LIMITS;
    Rule rule = {affine ? Kind::AFFINE : Kind::SYMMETRIC, 0, 0, Dtype::F16};
    int least = 0;  // of levels
    if constexpr (affine) rule.highest = int(limits.last_code);
    else rule.lowest = int(limits.lowest), rule.highest = int(limits.highest), least = int(limits.least_factor);
    Block<parts, part_size> block;
    for (int64_t number = 0; number < job.blocks; number++) {
        const float* values = job.values + number * size;
        Pair pairs[parts]{};
        Fields fields{};
        bool is_found = true;
        block.tries = MOST_TRIES;
        for (int i = 0; i < parts && is_found; i++) {
            is_found = block.part[i].load(values + i * part_size, part_size, rule.highest - rule.lowest + 1, job.dtype);
        }
        if constexpr (parts == 1) {
            is_found = is_found && !block.part[0].is_zero();
            if constexpr (affine) is_found = is_found && find_affine(block.part[0], rule, block.tries, pairs[0]);
            else is_found = is_found && find_symmetric(block.part[0], rule, block.tries, pairs[0]);
            if (is_found) fields.d = half_of(pairs[0].scale), fields.dmin = half_of(pairs[0].offset);
        } else {
            if constexpr (affine) is_found = is_found && block.find_affine(limits);
            else is_found = is_found && (block.find_symmetric(limits, true) || block.find_symmetric(limits, false));
            if (is_found) block.write(least, fields, pairs);
        }
        job.found[number] = is_found;
        if (!is_found) continue;
        for (int i = 0; i < size; i++) {
            const Pair& pair = pairs[i / part_size];
            double code = code_of(around(values[i], job.dtype), pair.scale, pair.offset);
            if (!affine && pair.scale == 0 && has_sign(values[i]) != has_sign(pair.scale)) code = -1;  // of zeros alone
            fields.codes[i] = uint8_t(code - rule.lowest);
        }
        Format packed;
        packed.pack(fields);
        std::memcpy(job.data + number * sizeof packed, &packed, sizeof packed);
    }
}

template <class... Formats>
void recover_type(int64_t type, const Job& job) {
    auto one = [&]<class Format>(Format*) {
        if (type == Format::TYPE) recover<Format>(job);
    };
    (one((Formats*)nullptr), ...);
}

}  // namespace

// values: the weights of blocks. data: the bytes of those that are found, as GGUF has them. found: 1 for these, 0 for
// others, of which nothing is written; blocks of zeros are among the latter. dtype: as the weights are stored.
void pqweights::recover_blocks(int64_t type, const float* values, uint8_t* data, uint8_t* found, int64_t blocks,
                               int64_t dtype) {
    recover_type<Q4_0, Q5_0, Q8_0, Q4_1, Q5_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, TQ1_0, TQ2_0>(
        type, {values, data, found, blocks, Dtype(dtype)});
}

// values: [groups, size], of at most MOST_WEIGHTS. codes, scales, offsets: of groups that are found, as `fit` has them.
// found: see recover_blocks. bits: 2 to 8. kind: of Kind. middle: codes count from the middle one. scale_dtype: BF16 or
// F16. dtype: as the weights are stored.
void pqweights::recover_groups(const float* values, uint8_t* codes, float* scales, float* offsets, uint8_t* found,
                               int64_t groups, int64_t size, int64_t bits, int64_t kind, int64_t middle,
                               int64_t scale_dtype, int64_t dtype) {
    const int lowest = middle ? -(1 << (bits - 1)) : 0, last = (1 << bits) - 1;
    const Rule rule = {Kind(kind), lowest, lowest + last, Dtype(scale_dtype)};
    Part<MOST_WEIGHTS> part;
    for (int64_t group = 0; group < groups; group++) {
        const float* weights = values + group * size;
        Pair pair{};
        int tries = MOST_TRIES;
        const bool is_found = part.load(weights, size, last + 1, Dtype(dtype)) && !part.is_zero() &&
                              (rule.kind == Kind::SYMMETRIC    ? find_symmetric(part, rule, tries, pair)
                               : rule.kind == Kind::ASYMMETRIC ? find_asymmetric(part, rule, tries, pair)
                                                               : find_affine(part, rule, tries, pair));
        found[group] = is_found;
        if (!is_found) continue;
        scales[group] = pair.scale, offsets[group] = pair.offset;
        const bool asymmetric = rule.kind == Kind::ASYMMETRIC;
        const float least = asymmetric ? -pair.offset : float(lowest), offset = asymmetric ? 0 : pair.offset;
        for (int64_t i = 0; i < size; i++) {
            codes[group * size + i] = uint8_t(code_of(around(weights[i], Dtype(dtype)), pair.scale, offset) - least);
        }
    }
}

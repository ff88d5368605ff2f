// Sixteen lanes: the vectors in which every kernel computes, whatever the processor.
//
// They are the vector types of Clang, so + - * / << >> & | ^ < == work lane by lane, in the order written;
// -ffp-contract=off keeps anything from being fused. A processor with shorter vectors takes each in pieces, so the
// results are the same bits everywhere. A comparison gives -1 where it is true and 0 elsewhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define INLINE [[gnu::always_inline]] inline
#define ALWAYS __attribute__((always_inline))  // behind the parameters of a lambda

namespace {

constexpr int LANES = 16;

template <class T, int count>
using Vector = T __attribute__((vector_size(sizeof(T) * count)));
using Floats = Vector<float, LANES>;
using Doubles = Vector<double, LANES>;
using Ints = Vector<int32_t, LANES>;
using Unsigned = Vector<uint32_t, LANES>;
using Longs = Vector<int64_t, LANES>;
using Words = Vector<uint16_t, LANES>;
using Bytes = Vector<uint8_t, LANES>;

template <class V>
using ElementOf = std::remove_cvref_t<decltype(std::declval<V>()[0])>;
template <class V>
constexpr int COUNT_OF = sizeof(V) / sizeof(ElementOf<V>);
// What comparing two V gives.
template <class V>
using TruthsOf = decltype(V{} < V{});
using Truths = Ints;

// --- loops whose indices are constants ---

// body(0), ..., body(count - 1), unrolled; each argument is a std::integral_constant.
template <int count, class Body>
INLINE void each(Body body) {
    [&]<int... i>(std::integer_sequence<int, i...>) ALWAYS {
        (body(std::integral_constant<int, i>{}), ...);
    }(std::make_integer_sequence<int, count>{});
}

// The vector of f(0), f(1), ...
template <class V, class F>
INLINE V lanes_of(F f) {
    V result{};
    each<COUNT_OF<V>>([&](int lane) ALWAYS { result[lane] = f(lane); });
    return result;
}

// --- memory, of any alignment ---

template <class V>
INLINE V load(const void* from) {
    V result;
    std::memcpy(&result, from, sizeof result);
    return result;
}

template <class V>
INLINE void store(V lanes, void* to) {
    std::memcpy(to, &lanes, sizeof lanes);
}

// Copy the first `count` elements of sixteen, in pieces of constant sizes: calling memcpy would take longer.
template <class T>
INLINE void copy_first(T* to, const T* from, int64_t count) {
    each<5>([&](auto power) ALWAYS {
        constexpr int piece = LANES >> power;
        if (count & piece) {
            std::memcpy(to, from, piece * sizeof *to);
            to += piece;
            from += piece;
        }
    });
}

// The first `count` lanes from memory that has no more, the others from `rest`; and the inverse. For the end of a row.
template <class V>
INLINE V load_first(const void* from, int64_t count, V rest = V{}) {
    static_assert(COUNT_OF<V> <= LANES);
    if (count >= COUNT_OF<V>) return load<V>(from);
    ElementOf<V> lanes[COUNT_OF<V>];
    store(rest, lanes);
    copy_first(lanes, (const ElementOf<V>*)from, count);
    return load<V>(lanes);
}

template <class V>
INLINE void store_first(V x, void* to, int64_t count) {
    static_assert(COUNT_OF<V> <= LANES);
    if (count >= COUNT_OF<V>) return store(x, to);
    ElementOf<V> lanes[COUNT_OF<V>];
    store(x, lanes);
    copy_first((ElementOf<V>*)to, lanes, count);
}

// body(first, left) for each sixteen of `count` elements, where `left` of them are left from the first on; a constant
// unless there are fewer than sixteen, so that load_first and store_first cost no more than load and store.
template <class Body>
INLINE void each_sixteen(int64_t count, Body body) {
    int64_t first = 0;
    for (; first + LANES <= count; first += LANES) body(first, LANES);
    if (first < count) body(first, count - first);
}

// table[index], lane by lane, which costs less than the gathers of most processors.
template <class V, class T, class Index>
INLINE V gathered(const T* table, Index index) {
    if constexpr (sizeof(index) == 4 * LANES) {  // two by two, which takes fewer of the moves out of vectors
        const Vector<uint64_t, LANES / 2> pairs = (Vector<uint64_t, LANES / 2>)index;
        return lanes_of<V>([&](int lane) ALWAYS { return table[uint32_t(pairs[lane / 2] >> lane % 2 * 32)]; });
    } else {
        return lanes_of<V>([&](int lane) ALWAYS { return table[index[lane]]; });
    }
}

// --- other types ---

INLINE Unsigned bits(Floats x) { return (Unsigned)x; }
INLINE Floats floats(Unsigned x) { return (Floats)x; }

// Each number as one of V's element type.
template <class V, class From>
INLINE V converted(From x) {
    return __builtin_convertvector(x, V);
}

template <class V>
INLINE V splat(ElementOf<V> number) {
    return lanes_of<V>([&](int) ALWAYS { return number; });
}
INLINE Floats splat(float number) { return splat<Floats>(number); }
INLINE Unsigned splat(uint32_t number) { return splat<Unsigned>(number); }

// A number that the compiler does not know with AVX-512, where it would make something slower of what is written.
INLINE float hidden(float number) {
#if defined(__AVX512F__)
    __asm__("" : "+x"(number));
#endif
    return number;
}

// --- choices ---

// `yes` where the truth value is -1, `no` where it is 0; elements of all three have the same size, which
// converted<TruthsOf<V>>(where) brings about.
template <class V>
INLINE V choose(TruthsOf<V> where, V yes, V no) { return where ? yes : no; }

// The smaller and the larger; b if neither is: of two zeros, or with a NaN.
template <class V>
INLINE V minimum(V a, V b) { return choose<V>(a < b, a, b); }
template <class V>
INLINE V maximum(V a, V b) { return choose<V>(a > b, a, b); }

// Of a power of two of vectors: in each lane that of the one whose number has its bit k set where upper(k) is true.
template <int count, class V, class Upper>
INLINE V selected(const V (&x)[count], Upper upper, int bit = 0) {
    if constexpr (count == 1) {
        return x[0];
    } else {
        const auto where = upper(bit);
        V half[count / 2];
        each<count / 2>([&](auto i) ALWAYS { half[i] = choose<V>(where, x[2 * i + 1], x[2 * i]); });
        return selected(half, upper, bit + 1);
    }
}

// A bit for each lane, that of lane 0 the lowest.
INLINE uint32_t mask_of(Truths truths) {
#if defined(__AVX512DQ__)
    return _mm512_movepi32_mask((__m512i)truths);
#elif defined(__AVX2__)
    struct { __m256 low, high; } half;
    std::memcpy(&half, &truths, sizeof half);
    return uint32_t(_mm256_movemask_ps(half.low) | _mm256_movemask_ps(half.high) << 8);
#else
    using Flags = bool __attribute__((ext_vector_type(LANES)));
    return __builtin_bit_cast(uint16_t, __builtin_convertvector(truths, Flags));
#endif
}

// The inverse.
INLINE Truths truths_of(uint32_t mask) {
    return (splat(mask) & lanes_of<Unsigned>([](int lane) ALWAYS { return 1u << lane; })) != 0;
}

// --- other orders ---

// The lanes order(0), order(1), ... of a, or, from the number of its lanes on, of b.
template <class V, class Order>
INLINE V shuffled(V a, V b, Order) {
    return [&]<int... lane>(std::integer_sequence<int, lane...>) ALWAYS {
        return __builtin_shufflevector(a, b, Order{}(lane)...);
    }(std::make_integer_sequence<int, COUNT_OF<V>>{});
}

// The `count` lanes of x from `first` on, as a shorter vector.
template <int first, int count, class V>
INLINE Vector<ElementOf<V>, count> slice(V x) {
    return [&]<int... lane>(std::integer_sequence<int, lane...>) ALWAYS {
        return __builtin_shufflevector(x, x, (first + lane)...);
    }(std::make_integer_sequence<int, count>{});
}

// The lanes of a, then those of b.
template <class V>
INLINE Vector<ElementOf<V>, 2 * COUNT_OF<V>> joined(V a, V b) {
    return [&]<int... lane>(std::integer_sequence<int, lane...>) ALWAYS {
        return __builtin_shufflevector(a, b, lane...);
    }(std::make_integer_sequence<int, 2 * COUNT_OF<V>>{});
}

// table[place], byte by byte, for places from 0 to 15.
INLINE Bytes looked_up(Bytes table, Bytes places) {
#if defined(__SSSE3__)
    return (Bytes)_mm_shuffle_epi8((__m128i)table, (__m128i)places);
#elif defined(__ARM_NEON)
    return (Bytes)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)places);
#else
    return lanes_of<Bytes>([&](int lane) ALWAYS { return table[places[lane]]; });
#endif
}

// A longer vector, which has the lanes of x again and again.
template <class V, class From>
INLINE V cycled(From x) {
    return [&]<int... lane>(std::integer_sequence<int, lane...>) ALWAYS {
        return __builtin_shufflevector(x, x, (lane % COUNT_OF<From>)...);
    }(std::make_integer_sequence<int, COUNT_OF<V>>{});
}

// Rows i and i + distance, replaced by their lanes in the first and in the second order.
template <int distance, class V, class First, class Second>
INLINE void shuffle_pairs(V* rows, First first, Second second) {
    each<LANES>([&](auto i) ALWAYS {
        if constexpr (!(i & distance)) {
            V a = rows[i], b = rows[i + distance];
            rows[i] = shuffled(a, b, first);
            rows[i + distance] = shuffled(a, b, second);
        }
    });
}

// Each four by four lanes of four adjacent rows, transposed.
template <class V>
INLINE void transpose_quarters(V* rows) {
    shuffle_pairs<1>(rows, [](int k) { return (k & 12) + (k & 3) / 2 + 16 * (k & 1); },
                     [](int k) { return (k & 12) + (k & 3) / 2 + 2 + 16 * (k & 1); });
    shuffle_pairs<2>(rows, [](int k) { return (k & 13) + 8 * (k & 2); },
                     [](int k) { return (k & 13) + 2 + 8 * (k & 2); });
    for (int i = 0; i < LANES; i += 4) std::swap(rows[i + 1], rows[i + 2]);
}

// Of eight quarters, those of even and of odd number.
constexpr auto EVEN_QUARTERS = [](int k) { return (k & 3) + (k >> 2) * 8; };
constexpr auto ODD_QUARTERS = [](int k) { return (k & 3) + (k >> 2) * 8 + 4; };

// Sixteen rows to the columns that they have.
template <class V>
INLINE void transpose(V* rows) {
    transpose_quarters(rows);
    shuffle_pairs<4>(rows, EVEN_QUARTERS, ODD_QUARTERS);
    shuffle_pairs<8>(rows, EVEN_QUARTERS, ODD_QUARTERS);
}

// The sixteen columns of sixteen rows of sixteen elements, of which row i begins at first + i * stride (bytes).
//
// The halves of rows are loaded apart, those of rows i and i + 4 into one vector: that takes more loads, and fewer of
// the shuffles that few units of a processor can do.
template <class V>
INLINE void load_columns(const void* first, int64_t stride, V* columns) {
    each<2>([&](auto half) ALWAYS {
        V rows[LANES]{};  // the last eight are not used: what is done to them is left out by the compiler
        each<LANES / 2>([&](auto i) ALWAYS {
            constexpr int row = i + (i & 4);  // 0 to 3 and 8 to 11, each with the one that is 4 below it
            const char* from = (const char*)first + row * stride + half * int(sizeof(V)) / 2;
            std::memcpy(&rows[i], from, sizeof(V) / 2);
            std::memcpy((char*)&rows[i] + sizeof(V) / 2, from + 4 * stride, sizeof(V) / 2);
        });
        transpose_quarters(rows);
        shuffle_pairs<4>(rows, EVEN_QUARTERS, ODD_QUARTERS);
        each<LANES / 2>([&](auto i) ALWAYS { columns[half * LANES / 2 + i] = rows[i]; });
    });
}

// --- arithmetic ---

// a * b + c, fused where the processor can: only for uses in which fusing changes no result.
INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    return __builtin_elementwise_fma(a, b, c);
#else
    return a * b + c;
#endif
}

INLINE Floats magnitude(Floats x) { return floats(bits(x) & 0x7FFFFFFF); }

// The nearest integer, ties to even.
INLINE Floats rint(Floats x) { return __builtin_elementwise_rint(x); }

INLINE Floats floor(Floats x) { return __builtin_elementwise_floor(x); }

INLINE Floats square_root(Floats x) { return __builtin_elementwise_sqrt(x); }

// The sum of a power of two of vectors, by adding the upper half to the lower one until one vector is left.
template <int count, class V>
INLINE V folded(const V (&x)[count]) {
    if constexpr (count == 1) {
        return x[0];
    } else {
        V half[count / 2];
        each<count / 2>([&](auto i) ALWAYS { half[i] = x[i] + x[i + count / 2]; });
        return folded(half);
    }
}

// The sum of all lanes, in the same order.
template <class V>
INLINE ElementOf<V> lane_sum(V x) {
    if constexpr (COUNT_OF<V> == 2) return x[0] + x[1];
    else return lane_sum(slice<0, COUNT_OF<V> / 2>(x) + slice<COUNT_OF<V> / 2, COUNT_OF<V> / 2>(x));
}

// The largest lane.
template <class V>
INLINE ElementOf<V> lane_maximum(V x) {
    ElementOf<V> largest = x[0];
    each<COUNT_OF<V>>([&](int lane) ALWAYS { largest = x[lane] > largest ? x[lane] : largest; });
    return largest;
}

// 2**exponent, of a number that is not subnormal.
INLINE double power_of_two(int exponent) { return __builtin_bit_cast(double, int64_t(1023 + exponent) << 52); }

}  // namespace

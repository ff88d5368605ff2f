// How Python calls a kernel: a name, the types of its arguments, and a function that takes them as slots of 8 bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

namespace pqweights {

union Slot {
    void* address;
    int64_t integer;
    double number;
};

// What __init__.py reads: the types end with a null pointer.
struct Kernel {
    const char* name;
    const char* const* types;
    void (*call)(const Slot*);
};

// The name of a type of arguments: r or w, for memory that is read or written, and numpy's name of an element; or what
// kind of number it is.
template <class A>
constexpr const char* type_name() {
    if constexpr (std::is_same_v<A, const uint8_t*>) return "r u1";
    else if constexpr (std::is_same_v<A, uint8_t*>) return "w u1";
    else if constexpr (std::is_same_v<A, const int8_t*>) return "r i1";
    else if constexpr (std::is_same_v<A, int8_t*>) return "w i1";
    else if constexpr (std::is_same_v<A, const uint16_t*>) return "r u2";
    else if constexpr (std::is_same_v<A, uint16_t*>) return "w u2";
    else if constexpr (std::is_same_v<A, const int16_t*>) return "r i2";
    else if constexpr (std::is_same_v<A, int16_t*>) return "w i2";
    else if constexpr (std::is_same_v<A, const uint32_t*>) return "r u4";
    else if constexpr (std::is_same_v<A, uint32_t*>) return "w u4";
    else if constexpr (std::is_same_v<A, const int32_t*>) return "r i4";
    else if constexpr (std::is_same_v<A, int32_t*>) return "w i4";
    else if constexpr (std::is_same_v<A, const int64_t*>) return "r i8";
    else if constexpr (std::is_same_v<A, int64_t*>) return "w i8";
    else if constexpr (std::is_same_v<A, const float*>) return "r f4";
    else if constexpr (std::is_same_v<A, float*>) return "w f4";
    else if constexpr (std::is_same_v<A, const double*>) return "r f8";
    else if constexpr (std::is_same_v<A, double*>) return "w f8";
    else if constexpr (std::is_same_v<A, int64_t>) return "integer";
    else if constexpr (std::is_same_v<A, double>) return "number";
}

template <class A>
A argument(const Slot& slot) {
    if constexpr (std::is_pointer_v<A>) return static_cast<A>(slot.address);
    else if constexpr (std::is_same_v<A, int64_t>) return slot.integer;
    else return slot.number;
}

template <auto function>
struct Callable;

template <class... A, void (*function)(A...)>
struct Callable<function> {
    static constexpr const char* types[] = {type_name<A>()..., nullptr};

    static void call(const Slot* slots) {
        [&]<std::size_t... i>(std::index_sequence<i...>) {
            function(argument<A>(slots[i])...);
        }(std::index_sequence_for<A...>{});
    }
};

#define KERNEL(name, ...) void name(__VA_ARGS__);
#include "kernels.inc"
#undef KERNEL

}  // namespace pqweights

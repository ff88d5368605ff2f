// What kernel_runner.cpp and the kernels call of C, for a program without the C library on Linux for aarch64: zig would
// compile that library first, for a minute.
#include <cstddef>
#include <cstdint>

namespace {

long system_call(long number, long a = 0, long b = 0, long c = 0, long d = 0, long e = 0) {
    register long x8 asm("x8") = number;
    register long x0 asm("x0") = a;
    register long x1 asm("x1") = b;
    register long x2 asm("x2") = c;
    register long x3 asm("x3") = d;
    register long x4 asm("x4") = e;
    register long x5 asm("x5") = 0;
    asm volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
    return x0;
}

}  // namespace

int main();

extern "C" {

long read(int file, void* to, size_t size) { return system_call(63, file, long(to), size); }
long write(int file, const void* from, size_t size) { return system_call(64, file, long(from), size); }
[[noreturn]] void _exit(int status) {
    for (;;) system_call(94, status);
}
void _start() { _exit(main()); }

void* memcpy(void* to, const void* from, size_t size) {
    for (size_t i = 0; i < size; i++) ((char*)to)[i] = ((const char*)from)[i];
    return to;
}

void* memmove(void* to, const void* from, size_t size) {
    if (to <= from) return memcpy(to, from, size);
    while (size--) ((char*)to)[size] = ((const char*)from)[size];
    return to;
}

void* memset(void* to, int byte, size_t size) {
    for (size_t i = 0; i < size; i++) ((char*)to)[i] = char(byte);
    return to;
}

int strcmp(const char* a, const char* b) {
    while (*a && *a == *b) a++, b++;
    return uint8_t(*a) - uint8_t(*b);
}

// Pages for each array: of 16 bytes more, which keep how many there are.
void* malloc(size_t size) {
    constexpr long ANYWHERE = 0, READ_WRITE = 3, PRIVATE_ANONYMOUS = 0x22, NO_FILE = -1;
    size += 16;
    auto* pages = (size_t*)system_call(222, ANYWHERE, size, READ_WRITE, PRIVATE_ANONYMOUS, NO_FILE);
    *pages = size;
    return pages + 2;
}

void free(void* array) {
    if (array) system_call(215, long((size_t*)array - 2), ((size_t*)array)[-2]);
}

}  // extern "C"

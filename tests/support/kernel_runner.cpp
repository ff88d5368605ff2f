// Calls kernels for another process, which sends arguments to stdin and reads from stdout what was written: so kernels
// run on an emulated processor, or with sanitizers. Each array gets memory of exactly its size: from malloc, which a
// sanitizer watches, or with GUARDED between two pages that nobody may touch. kernel_runner.py is the other side.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#if defined(GUARDED)
#include <sys/mman.h>
#endif

#include "interface.hpp"

extern "C" const pqweights::Kernel* pqweights_kernels();

#if defined(SOME_KERNELS)
// In place of those that are not linked.
namespace pqweights {
#define KERNEL(name, ...) [[gnu::weak]] void name(__VA_ARGS__) { __builtin_trap(); }
#include "kernels.inc"
#undef KERNEL
}  // namespace pqweights
#endif

namespace {

constexpr int MOST_ARGUMENTS = 64;

void receive(void* to, size_t size) {
    if (size && fread(to, 1, size, stdin) != size) exit(0);  // the other side has gone
}

template <class T>
T received() {
    T value;
    receive(&value, sizeof value);
    return value;
}

#if defined(GUARDED)
constexpr size_t PAGE = 4096;

// An array, and the pages that it lies in, whose first and last one end the process if they are touched.
struct Memory {
    char* pages = nullptr;
    size_t mapped = 0;
    char* array = nullptr;

    // at_end: the array ends where the last page begins; else it begins where the first page ends.
    void take(size_t size, bool at_end) {
        mapped = (size + PAGE - 1) / PAGE * PAGE + 2 * PAGE;
        pages = (char*)mmap(nullptr, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (mapped > 2 * PAGE) mprotect(pages + PAGE, mapped - 2 * PAGE, PROT_READ | PROT_WRITE);
        array = at_end ? pages + mapped - PAGE - size : pages + PAGE;
    }
    void give_back() { munmap(pages, mapped); }
};
#else
struct Memory {
    char* array = nullptr;

    void take(size_t size, bool) { array = (char*)malloc(size); }
    void give_back() { free(array); }
};
#endif

const pqweights::Kernel& kernel_of(const char* name) {
    const pqweights::Kernel* kernel = pqweights_kernels();
    while (kernel->name && strcmp(kernel->name, name)) kernel++;
    if (!kernel->name) exit(2);
    return *kernel;
}

}  // namespace

int main() {
    for (bool at_end = true;; at_end = !at_end) {
        char name[64] = {};
        receive(name, received<uint32_t>());
        const pqweights::Kernel& kernel = kernel_of(name);
        pqweights::Slot slots[MOST_ARGUMENTS];
        size_t sizes[MOST_ARGUMENTS] = {};
        Memory memory[MOST_ARGUMENTS] = {};
        for (int i = 0; kernel.types[i]; i++) {
            if (kernel.types[i][1] != ' ') {
                slots[i].integer = received<int64_t>();  // the bits of either kind of number
                continue;
            }
            const int64_t size = received<int64_t>();
            slots[i].address = nullptr;
            if (size < 0) continue;
            memory[i].take(size, at_end);
            slots[i].address = memory[i].array;
            sizes[i] = size;
            receive(slots[i].address, sizes[i]);
        }
        kernel.call(slots);
        for (int i = 0; kernel.types[i]; i++) {
            if (!memory[i].array) continue;
            if (kernel.types[i][0] == 'w') fwrite(slots[i].address, 1, sizes[i], stdout);
            memory[i].give_back();
        }
        fflush(stdout);
    }
}

// Calls kernels for another process, which sends arguments to stdin and reads from stdout what was written: so kernels
// run on an emulated processor, or with sanitizers, which watch the memory of exactly its size that each array gets.
// kernel_runner.py is the other side.
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "interface.hpp"

extern "C" const pqweights::Kernel* pqweights_kernels();

namespace {

constexpr int MOST_ARGUMENTS = 64;

void receive(void* to, size_t size) {
    while (size) {
        const ssize_t count = read(STDIN_FILENO, to, size);
        if (count <= 0) _exit(0);  // the other side has gone
        to = (char*)to + count;
        size -= count;
    }
}

void send(const void* from, size_t size) {
    while (size) {
        const ssize_t count = write(STDOUT_FILENO, from, size);
        if (count <= 0) _exit(0);
        from = (const char*)from + count;
        size -= count;
    }
}

template <class T>
T received() {
    T value;
    receive(&value, sizeof value);
    return value;
}

const pqweights::Kernel& kernel_of(const char* name) {
    const pqweights::Kernel* kernel = pqweights_kernels();
    while (kernel->name && strcmp(kernel->name, name)) kernel++;
    if (!kernel->name) _exit(2);
    return *kernel;
}

}  // namespace

int main() {
    for (;;) {
        char name[64] = {};
        receive(name, received<uint32_t>());
        const pqweights::Kernel& kernel = kernel_of(name);
        pqweights::Slot slots[MOST_ARGUMENTS];
        int64_t sizes[MOST_ARGUMENTS];  // -1: no array
        for (int i = 0; kernel.types[i]; i++) {
            const bool is_array = kernel.types[i][1] == ' ';
            slots[i].integer = received<int64_t>();  // the bits of either kind of number, or the size of an array
            sizes[i] = is_array ? slots[i].integer : -1;
            if (is_array) slots[i].address = sizes[i] < 0 ? nullptr : malloc(sizes[i]);
            if (sizes[i] >= 0) receive(slots[i].address, sizes[i]);
        }
        kernel.call(slots);
        for (int i = 0; kernel.types[i]; i++) {
            if (sizes[i] < 0) continue;
            if (kernel.types[i][0] == 'w') send(slots[i].address, sizes[i]);
            free(slots[i].address);
        }
    }
}

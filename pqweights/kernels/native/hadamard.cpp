// Blocks of 128 numbers, rotated where they are.
#include "hadamard.hpp"
#include "interface.hpp"

// values: [blocks, 128]; each becomes the Walsh-Hadamard transform of its block, times the factor as a float32.
void pqweights::rotate(float* values, int64_t blocks, double factor) {
    for (int64_t block = 0; block < blocks; block++) {
        float* at = values + block * BLOCK;
        Floats x[VECTORS];
        each<VECTORS>([&](auto g) ALWAYS { x[g] = load<Floats>(at + LANES * g); });
        rotate_block(x);
        each<VECTORS>([&](auto g) ALWAYS { store(x[g] * float(factor), at + LANES * g); });
    }
}

// Blocks of 128 numbers, rotated where they are.
#include "hadamard.hpp"
#include "interface.hpp"

// values: [blocks, 128]; each block becomes its Walsh-Hadamard transform, with the factor that keeps lengths.
void pqweights::rotate(float* values, int64_t blocks) {
    for (int64_t block = 0; block < blocks; block++) {
        float* at = values + block * BLOCK;
        Floats x[VECTORS];
        each<VECTORS>([&](auto g) ALWAYS { x[g] = load<Floats>(at + LANES * g); });
        rotate_block(x);
        each<VECTORS>([&](auto g) ALWAYS { store(x[g] * float(ORTHONORMAL), at + LANES * g); });
    }
}

// The table of all kernels, and from which sources they were built.
#include "interface.hpp"

#define EXPORT extern "C" [[gnu::visibility("default")]]

namespace pqweights {

constexpr Kernel KERNELS[] = {
#define KERNEL(name, ...) {#name, Callable<&name>::types, &Callable<&name>::call},
#include "kernels.inc"
#undef KERNEL
    {nullptr, nullptr, nullptr}};

}  // namespace pqweights

EXPORT const pqweights::Kernel* pqweights_kernels() { return pqweights::KERNELS; }

// PQWEIGHTS_SOURCES: see sources.py.
EXPORT const char* pqweights_sources() { return PQWEIGHTS_SOURCES; }

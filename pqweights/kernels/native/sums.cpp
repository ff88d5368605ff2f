// Sums in the order of the summands, which vectors would change. Three of them take no longer than one: what a sum takes
// is that each addition waits for the one before.
#include "interface.hpp"

// first, second, third: [count], or null for the second or third; totals: [arrays that are not null], to which the
// elements of each are added one after the other.
void pqweights::add_in_order(const double* first, const double* second, const double* third, double* totals,
                             int64_t count) {
    const double *b = second ? second : first, *c = third ? third : first;
    double of_first = totals[0], of_second = second ? totals[1] : 0, of_third = third ? totals[2] : 0;
    for (int64_t i = 0; i < count; i++) {
        of_first += first[i];
        of_second += b[i];
        of_third += c[i];
    }
    totals[0] = of_first;
    if (second) totals[1] = of_second;
    if (third) totals[2] = of_third;
}

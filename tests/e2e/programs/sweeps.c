// Sweeps over ARGV[1] MiB with OpenMP, whose library waits for futexes by its own machine code, and prints the sums.
#include <stdio.h>
#include <stdlib.h>

int main(int argc, char **argv) {
    const long count = (atol(argv[1]) << 20) / sizeof(double);
    double *data = malloc(count * sizeof *data), sum = 0;
#pragma omp parallel for
    for (long index = 0; index < count; index++)
        data[index] = index / 100;
    for (int sweep = 0; sweep < 3; sweep++) {
#pragma omp parallel for reduction(+ : sum)
        for (long index = 0; index < count; index++)
            sum += data[index];
        printf("%.0f\n", sum);
    }
    return argc != 2;
}

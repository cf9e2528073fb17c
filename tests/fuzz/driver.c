/* SPDX-License-Identifier: Apache-2.0 */
/* fuzz-TARGET [-n ITERATIONS] [-s SEED] [-f FIRST] [-v] [FILE...]: runs the target on its seeds and
 * the files, then on ITERATIONS (3000) random mutations of them, one after the other in this
 * process, and says how many a second it were. Iteration i of a seed is always the same input; -f i
 * -n 1 runs it alone, and -v prints the numbers. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "fuzz/fuzz.h"

enum { INPUT_MAX = 2 * FUZZ_SEED_MAX, SEEDS_MAX = 64 };

typedef struct input {
    uint8_t bytes[INPUT_MAX];
    size_t size;
} input;

static uint64_t next(uint64_t *state)
{
    uint64_t x = *state += UINT64_C(0x9E3779B97F4A7C15);
    x = (x ^ x >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ x >> 27) * UINT64_C(0x94D049BB133111EB);
    return x ^ x >> 31;
}

static size_t below(uint64_t *state, size_t bound)
{
    return bound ? (size_t)(next(state) % bound) : 0;
}

/* Replaces `out` bytes at `at` by `in` bytes of text. */
static void splice(input *data, size_t at, size_t out, const void *text, size_t in)
{
    if (out > data->size - at)
        out = data->size - at;
    if (data->size - out + in > INPUT_MAX)
        return;
    memmove(data->bytes + at + in, data->bytes + at + out, data->size - at - out);
    memcpy(data->bytes + at, text, in);
    data->size += in - out;
}

static void mutate(input *data, const input *other, uint64_t *random)
{
    size_t at = below(random, data->size + 1), words = 0;
    uint8_t byte = (uint8_t)next(random);
    while (fuzz_words[words])
        words++;
    switch (below(random, 7)) {
    case 0:
        splice(data, at, 1, &byte, 1);
        break;
    case 1:
        if (at < data->size)
            data->bytes[at] ^= (uint8_t)(1 << below(random, 8));
        break;
    case 2:
        splice(data, at, below(random, 16), "", 0);
        break;
    case 3:
    case 4: {
        const char *word = fuzz_words[below(random, words)];
        splice(data, at, below(random, 12), word, strlen(word));
        break;
    }
    case 5: {
        size_t from = below(random, other->size), length = below(random, other->size - from);
        splice(data, at, 0, other->bytes + from, length);
        break;
    }
    case 6:
        if (below(random, 8) == 0)
            data->size = at;
        break;
    }
}

static void read_seed(const char *path, input *out)
{
    FILE *file = fopen(path, "rb");
    if (!file) {
        perror(path);
        exit(1);
    }
    out->size = fread(out->bytes, 1, FUZZ_SEED_MAX, file);
    fclose(file);
}

int main(int argc, char **argv)
{
    unsigned long iterations = 3000, seed = 1, first = 0;
    int verbose = 0;
    size_t seeds = 0;
    input *inputs = calloc(SEEDS_MAX + 2, sizeof *inputs), *mutant = inputs + SEEDS_MAX;
    if (!inputs)
        return 1;
    while (seeds < SEEDS_MAX && (inputs[seeds].size = fuzz_seed(seeds, inputs[seeds].bytes)))
        seeds++;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "-v"))
            verbose = 1;
        else if (!strcmp(argv[i], "-n") && i + 1 < argc)
            iterations = strtoul(argv[++i], NULL, 10);
        else if (!strcmp(argv[i], "-s") && i + 1 < argc)
            seed = strtoul(argv[++i], NULL, 10);
        else if (!strcmp(argv[i], "-f") && i + 1 < argc)
            first = strtoul(argv[++i], NULL, 10);
        else if (seeds < SEEDS_MAX)
            read_seed(argv[i], &inputs[seeds++]);
    }
    for (size_t i = 0; i < seeds; i++)
        LLVMFuzzerTestOneInput(inputs[i].bytes, inputs[i].size);
    struct timespec begin, end;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    for (unsigned long i = first; i < first + iterations; i++) {
        uint64_t random = seed * UINT64_C(0xD1B54A32D192ED03) + i;
        if (verbose)
            fprintf(stderr, "%lu\n", i);
        *mutant = inputs[below(&random, seeds)];
        for (size_t k = 1 + below(&random, 4); k > 0; k--)
            mutate(mutant, &inputs[below(&random, seeds)], &random);
        /* A block of exactly its size, so that the address sanitizer sees each byte past it. */
        uint8_t *exact = malloc(mutant->size + !mutant->size);
        if (!exact)
            return 1;
        memcpy(exact, mutant->bytes, mutant->size);
        LLVMFuzzerTestOneInput(exact, mutant->size);
        free(exact);
    }
    clock_gettime(CLOCK_MONOTONIC, &end);
    const double seconds =
        (double)(end.tv_sec - begin.tv_sec) + 1e-9 * (double)(end.tv_nsec - begin.tv_nsec);
    printf("%zu seeds, %lu mutations of seed %lu, %.0f a second\n", seeds, iterations, seed,
           (double)iterations / seconds);
    free(inputs);
    return 0;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Visits every state of the commit protocol, breadth first: as built no state may lose or mix a
 * commit, and with any one rule broken (docs/commit.md) one must. States are remembered by 128-bit
 * hashes.
 *
 * commit [--long] [--mutation NAME] [--trace] */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "property/commit_model.h"

enum { SHORT_TRACE = 12 };

typedef struct seen {
    uint64_t hash[2];
    uint32_t parent;
} seen;

typedef struct search {
    seen *seen; /* in the order they were found */
    uint32_t count, capacity;
    uint32_t *table; /* number + 1 by hash */
    uint32_t slots;
    state *queue; /* those not expanded yet */
    uint32_t queue_first, queue_count, queue_capacity;
    uint32_t parent;
    const char *violation;
} search;

static search x;

static void *grow(void *old, size_t count, size_t item)
{
    void *new = realloc(old, count * item);
    if (!new) {
        fprintf(stderr, "no memory for %zu states\n", count);
        exit(1);
    }
    return new;
}

static uint64_t mix(uint64_t h)
{
    h ^= h >> 32;
    h *= 0xd6e8feb86659fd93u;
    return h ^ h >> 32;
}

static void hash_state(const state *s, uint64_t out[2])
{
    uint64_t words[(sizeof *s + 7) / 8] = {0};
    memcpy(words, s, sizeof *s);
    out[0] = 1;
    out[1] = 2;
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        out[0] = mix(out[0] ^ words[i]);
        out[1] = mix(out[1] + words[i] * 0x9e3779b97f4a7c15u);
    }
}

static void rehash(void)
{
    x.slots = x.slots ? 2 * x.slots : 1 << 16;
    free(x.table);
    x.table = grow(NULL, x.slots, sizeof *x.table);
    memset(x.table, 0, x.slots * sizeof *x.table);
    for (uint32_t i = 0; i < x.count; i++) {
        uint32_t at = (uint32_t)x.seen[i].hash[0] & (x.slots - 1);
        while (x.table[at])
            at = (at + 1) & (x.slots - 1);
        x.table[at] = i + 1;
    }
}

static void enqueue(const state *s)
{
    if (x.queue_first + x.queue_count == x.queue_capacity) {
        if (x.queue_first > x.queue_count) {
            memcpy(x.queue, x.queue + x.queue_first, x.queue_count * sizeof *s);
            x.queue_first = 0;
        } else {
            x.queue_capacity = x.queue_capacity ? 2 * x.queue_capacity : 1 << 12;
            x.queue = grow(x.queue, x.queue_capacity, sizeof *s);
        }
    }
    x.queue[x.queue_first + x.queue_count++] = *s;
}

static void found(const state *s, const char *violation)
{
    uint64_t hash[2];
    if (x.violation)
        return;
    hash_state(s, hash);
    if (2 * (uint64_t)x.count >= x.slots)
        rehash();
    uint32_t at = (uint32_t)hash[0] & (x.slots - 1);
    for (; x.table[at]; at = (at + 1) & (x.slots - 1))
        if (!violation && !memcmp(x.seen[x.table[at] - 1].hash, hash, sizeof hash))
            return;
    if (x.count == x.capacity) {
        x.capacity = x.capacity ? 2 * x.capacity : 1 << 12;
        x.seen = grow(x.seen, x.capacity, sizeof *x.seen);
    }
    x.seen[x.count] = (seen){{hash[0], hash[1]}, x.parent};
    x.table[at] = ++x.count;
    if (violation)
        x.violation = violation;
    else
        enqueue(s);
}

static struct {
    uint64_t hash[2];
    int wants_violation, found;
    state next;
    char label[120];
    const char *violation;
} goal;

static void follow(const state *s, const char *violation)
{
    uint64_t hash[2];
    hash_state(s, hash);
    if (goal.found || memcmp(hash, goal.hash, sizeof hash) || goal.wants_violation != !!violation)
        return;
    goal.found = 1;
    goal.next = *s;
    goal.violation = violation;
    snprintf(goal.label, sizeof goal.label, "%s", model_label());
}

/* What led to the last state found: all of it, or the end. */
static void print_trace(const model_config *config, int all)
{
    static uint32_t path[1000];
    static char lines[1000][sizeof goal.label];
    uint32_t length = 0, count = 0;
    state s;
    for (uint32_t i = x.count - 1; i && length < 1000; i = x.seen[i].parent)
        path[length++] = i;
    model_begin(config, &s);
    while (length--) {
        memcpy(goal.hash, x.seen[path[length]].hash, sizeof goal.hash);
        goal.found = 0;
        goal.wants_violation = x.violation && !length;
        model_expand(&s, 1, follow);
        s = goal.next;
        if (goal.found && goal.label[0])
            memcpy(lines[count++], goal.label, sizeof goal.label);
    }
    const uint32_t first = all || count <= SHORT_TRACE ? 0 : count - SHORT_TRACE;
    if (first)
        printf("    (after %u others)\n", first);
    for (uint32_t i = first; i < count; i++)
        printf("    %s\n", lines[i]);
}

/* Violation found, or NULL after all states. */
static const char *run(const model_config *config)
{
    state s;
    x.count = x.queue_first = x.queue_count = 0;
    x.parent = 0;
    x.violation = NULL;
    if (x.table)
        memset(x.table, 0, x.slots * sizeof *x.table);
    model_begin(config, &s);
    found(&s, NULL);
    for (uint32_t i = 0; x.queue_count && !x.violation; i++) {
        s = x.queue[x.queue_first++];
        x.queue_count--;
        x.parent = i;
        model_expand(&s, 0, found);
    }
    return x.violation;
}

static int run_mutation(mutation m, int trace)
{
    static const model_config smallest[] = {
        {.worlds = {2, 0}, .chunks = 1},
        {.worlds = {2, 1}, .chunks = 1},
        {.worlds = {2, 0}, .chunks = 2},
    };
    for (size_t i = 0; i < sizeof smallest / sizeof *smallest; i++) {
        model_config config = smallest[i];
        config.mutation = m;
        config.slots = model_slots(m);
        if (!run(&config))
            continue;
        printf("%s: found after %u states: %s\n", model_name(m), x.count, x.violation);
        print_trace(&config, trace);
        return 0;
    }
    printf("%s: NOT FOUND (%s)\n", model_name(m), model_what(m));
    return 1;
}

static int run_as_built(const model_config *config)
{
    const char *why = run(config);
    printf("%d rank(s), then %d, %d chunk(s), %d slot(s)%s: %u states: %s\n", config->worlds[0],
           config->worlds[1], config->chunks, config->slots,
           config->over ? ", also starting over" : "", x.count, why ? why : "no commit is lost");
    if (why)
        print_trace(config, 1);
    fflush(stdout);
    return why != NULL;
}

int main(int argc, char **argv)
{
    static const model_config short_runs[] = {
        {.worlds = {2, 0}, .chunks = 2, .slots = 2, .over = 1},
        {.worlds = {2, 1}, .chunks = 1, .slots = 2},
        {.worlds = {3, 0}, .chunks = 1, .slots = 2},
        {.worlds = {2, 0}, .chunks = 2, .slots = 1},
        {.worlds = {2, 0}, .chunks = 1, .slots = 3, .over = 1},
    };
    static const model_config long_runs[] = {
        {.worlds = {1, 2}, .chunks = 2, .slots = 2},
        {.worlds = {3, 2}, .chunks = 1, .slots = 2},
        {.worlds = {2, 3}, .chunks = 1, .slots = 2},
        {.worlds = {3, 3}, .chunks = 1, .slots = 2},
        {.worlds = {3, 0}, .chunks = 2, .slots = 2, .over = 1},
        {.worlds = {3, 0}, .chunks = 1, .slots = 1, .over = 1},
        {.worlds = {3, 2}, .chunks = 1, .slots = 1},
        {.worlds = {2, 3}, .chunks = 1, .slots = 1},
        {.worlds = {2, 1}, .chunks = 1, .slots = 3},
        {.worlds = {1, 2}, .chunks = 1, .slots = 3},
        {.worlds = {2, 0}, .chunks = 2, .slots = 3},
        {.worlds = {3, 0}, .chunks = 1, .slots = 3},
        {.worlds = {3, 0}, .chunks = 1, .slots = 4},
    };
    int is_long = 0, trace = 0, bad = 0;
    setvbuf(stdout, NULL, _IOLBF, 0);
    const char *only = NULL;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--long"))
            is_long = 1;
        else if (!strcmp(argv[i], "--trace"))
            trace = 1;
        else if (!strcmp(argv[i], "--mutation") && i + 1 < argc)
            only = argv[++i];
    }
    for (mutation m = AS_BUILT + 1; m < MUTATIONS; m++)
        if (!only || !strcmp(only, model_name(m)))
            bad += run_mutation(m, trace);
    if (only)
        return bad != 0;
    for (size_t i = 0; i < sizeof short_runs / sizeof *short_runs; i++)
        bad += run_as_built(&short_runs[i]);
    for (size_t i = 0; is_long && i < sizeof long_runs / sizeof *long_runs; i++)
        bad += run_as_built(&long_runs[i]);
    return bad != 0;
}

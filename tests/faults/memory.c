/* SPDX-License-Identifier: Apache-2.0 */
/* Memory runs out at the n-th allocation, for each n until none is left: alone, or that one and all
 * after it. The call that met it says so, nothing crashes, nothing leaks (the address sanitizer's
 * build looks for that), descriptors are closed, and what was committed last is there.
 *
 * With ZSPILL_MEMORY_SHOW set each message is printed. The linker sends the library's allocations
 * to the functions named __wrap_... here (meson.build lists them). */
#include <dirent.h>
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/util.h"
#include "io/io.h"
#include "unit/temp.h"
#include "zspill.h"

/* ---- allocations that fail ---- */

/* Only the thread that is armed counts, so that the n-th is the same one each time. */
static _Thread_local struct {
    int armed, for_good;
    long count, fail_at; /* from 1 on */
} supply;

static int runs_out(void)
{
    if (!supply.armed)
        return 0;
    supply.count++;
    return supply.for_good ? supply.count >= supply.fail_at : supply.count == supply.fail_at;
}

/* RESULT name(PARAMETERS): fails with what FAILED says, or does what the real one does. */
#define WRAP(result, name, parameters, arguments, failed)                                          \
    result __real_##name parameters;                                                               \
    result __wrap_##name parameters;                                                               \
    result __wrap_##name parameters                                                                \
    {                                                                                              \
        if (runs_out()) {                                                                          \
            errno = ENOMEM;                                                                        \
            return failed;                                                                         \
        }                                                                                          \
        return __real_##name arguments;                                                            \
    }

WRAP(void *, malloc, (size_t bytes), (bytes), NULL)
WRAP(void *, calloc, (size_t count, size_t bytes), (count, bytes), NULL)
WRAP(void *, realloc, (void *old, size_t bytes), (old, bytes), NULL)
WRAP(void *, aligned_alloc, (size_t align, size_t bytes), (align, bytes), NULL)
WRAP(char *, strdup, (const char *text), (text), NULL)
WRAP(char *, strndup, (const char *text, size_t bytes), (text, bytes), NULL)
WRAP(FILE *, open_memstream, (char **text, size_t *bytes), (text, bytes), NULL)
WRAP(FILE *, fopen, (const char *path, const char *mode), (path, mode), NULL)
WRAP(FILE *, fopen64, (const char *path, const char *mode), (path, mode), NULL)
WRAP(DIR *, opendir, (const char *path), (path), NULL)
WRAP(void *, mmap, (void *at, size_t bytes, int prot, int flags, int fd, off_t offset),
     (at, bytes, prot, flags, fd, offset), MAP_FAILED)
WRAP(void *, mmap64, (void *at, size_t bytes, int prot, int flags, int fd, off_t offset),
     (at, bytes, prot, flags, fd, offset), MAP_FAILED)
WRAP(int, pthread_create,
     (pthread_t * thread, const pthread_attr_t *attr, void *(*run)(void *), void *cookie),
     (thread, attr, run, cookie), EAGAIN)

int __wrap_asprintf(char **out, const char *format, ...);
int __wrap_asprintf(char **out, const char *format, ...)
{
    va_list args;
    int length = -1;
    if (runs_out())
        return length; /* and *out is anything */
    va_start(args, format);
    length = vasprintf(out, format, args);
    va_end(args);
    return length;
}

/* ---- a small job ---- */

enum { PARAMS = 3, UNITS = 2, MOST = 9000, WORLD_MOST = 2, STEPS = 3, SHAPES = 2 };

static const struct {
    const char *name;
    int64_t numel;
    zs_dtype dtype;
    int unit, frozen;
} params[PARAMS] = {
    {"first", 700, ZS_FP32, 0, 0}, {"second", MOST, ZS_BF16, 1, 0}, {"frozen", 90, ZS_BF16, 1, 1}};

/* The same run in one of its two shapes; the second one resumes what the first one left. */
typedef struct scenario {
    const char *name;
    int world;
    int broken; /* in so many of them, from the first on, memory runs out */
    zs_engine_config shape[SHAPES];
} scenario;

/* What a run ends with: masters and moments of all ranks. */
typedef struct outcome {
    float values[PARAMS][3][MOST];
} outcome;

typedef struct run {
    const scenario *scenario;
    int shape, steps, commits;
    long fail_at; /* in the last rank; 0: never */
    int for_good;
    outcome *out; /* NULL: not wanted */

    int fired;
    uint64_t begun, committed; /* steps */
    zs_status status[WORLD_MOST];
    char message[WORLD_MOST][1024];
} run;

static float made_up(int rank, uint64_t step, int param, int64_t i)
{
    uint32_t x = (uint32_t)(i * 2654435761u) ^ (uint32_t)(param * 40503 + rank * 30011) ^
                 (uint32_t)(step * 69069);
    x ^= x >> 15;
    x *= 2246822519u;
    x ^= x >> 13;
    return (float)(x & 0xffff) / 65536.0f - 0.5f;
}

static zs_status set_up(zs_engine *e)
{
    zs_group_config group;
    zs_status s;
    zs_group_config_init(&group);
    if ((s = zs_group_add(e, &group, NULL)) != ZS_OK)
        return s;
    for (int p = 0; p < PARAMS && s == ZS_OK; p++) {
        zs_param_config config;
        zs_param_config_init(&config);
        config.name = params[p].name;
        config.ndim = 1;
        config.shape = &params[p].numel;
        config.dtype = params[p].dtype;
        config.frozen = params[p].frozen;
        s = zs_param_add(e, &config, NULL);
    }
    for (int u = 0; u < UNITS && s == ZS_OK; u++) {
        zs_param members[PARAMS];
        size_t count = 0;
        for (int p = 0; p < PARAMS; p++)
            if (params[p].unit == u)
                members[count++] = p;
        s = zs_unit_add(e, u ? "tail" : "head", members, count, NULL);
    }
    return s == ZS_OK ? zs_engine_commit(e) : s;
}

static zs_status load(zs_engine *e, int frozen_only)
{
    float values[MOST];
    for (int p = 0; p < PARAMS; p++) {
        uint64_t first, count;
        if (frozen_only && !params[p].frozen)
            continue;
        zs_status s = zs_param_local(e, p, &first, &count);
        for (uint64_t i = 0; i < count; i++)
            values[i] = made_up(0, 0, p, (int64_t)(first + i));
        if (s == ZS_OK)
            s = zs_param_write(e, p, first, count, ZS_FP32, values);
        if (s != ZS_OK)
            return s;
    }
    return zs_params_publish(e);
}

static zs_status take_step(zs_engine *e, int rank, uint64_t step)
{
    float grad[MOST];
    zs_status s = zs_grad_begin(e, 1);
    for (int u = 0; u < UNITS && s == ZS_OK; u++)
        if ((s = zs_unit_acquire(e, u)) == ZS_OK)
            s = zs_unit_release(e, u);
    for (int u = UNITS - 1; u >= 0 && s == ZS_OK; u--) {
        s = zs_unit_acquire(e, u);
        for (int p = PARAMS - 1; p >= 0 && s == ZS_OK; p--) {
            if (params[p].unit != u || params[p].frozen)
                continue;
            for (int64_t i = 0; i < params[p].numel; i++)
                grad[i] = made_up(rank + 1, step, p, i);
            s = zs_grad_ready(e, p, grad, ZS_FP32);
        }
        if (s == ZS_OK)
            s = zs_unit_release(e, u);
    }
    if (s == ZS_OK)
        s = zs_grad_finish(e);
    return s == ZS_OK ? zs_step(e, NULL, NULL) : s;
}

static zs_status collect(zs_engine *e, outcome *out)
{
    for (int p = 0; p < PARAMS; p++) {
        uint64_t first, count;
        zs_status s = zs_param_owned(e, p, &first, &count);
        for (int a = 0; a < 3 && s == ZS_OK && !params[p].frozen; a++)
            s = zs_param_read(e, p, (zs_array)(ZS_MASTER + a), first, count, ZS_FP32,
                              out->values[p][a] + first);
        if (s != ZS_OK)
            return s;
    }
    return ZS_OK;
}

static zs_status work(run *r, zs_engine *e, int rank)
{
    uint64_t step = 0;
    size_t bytes = sizeof step;
    int found = 0;
    zs_status s = set_up(e);
    if (s == ZS_OK && r->scenario->shape[r->shape].state_dir)
        s = zs_state_resume(e, &found, &step, &bytes);
    if (s == ZS_OK)
        s = load(e, found);
    if (rank == 0)
        r->begun = step;
    while (s == ZS_OK && step < (uint64_t)r->steps) {
        s = take_step(e, rank, ++step);
        if (s != ZS_OK || !r->commits)
            continue;
        s = zs_state_commit(e, &step, sizeof step);
        if (s == ZS_OK && rank == 0)
            r->committed = step;
    }
    return s == ZS_OK && r->out ? collect(e, r->out) : s;
}

typedef struct rank_args {
    run *run;
    zs_comm *comm;
    int rank;
} rank_args;

static void *rank_main(void *cookie)
{
    rank_args *args = cookie;
    run *r = args->run;
    zs_engine *e = NULL;
    if (r->fail_at && args->rank == r->scenario->world - 1) {
        supply.armed = 1;
        supply.count = 0;
        supply.fail_at = r->fail_at;
        supply.for_good = r->for_good;
    }
    zs_status s = zs_engine_open(&r->scenario->shape[r->shape], args->comm, &e);
    if (s == ZS_OK)
        s = work(r, e, args->rank);
    r->status[args->rank] = s;
    snprintf(r->message[args->rank], sizeof r->message[0], "%s", s ? zs_last_error() : "");
    if (s != ZS_OK)
        zs_comm_abort(args->comm, r->message[args->rank]);
    zs_engine_close(&e);
    if (supply.armed)
        r->fired = supply.count >= supply.fail_at;
    supply.armed = 0;
    return NULL;
}

static void run_it(run *r)
{
    zs_comm *comms[WORLD_MOST];
    rank_args args[WORLD_MOST];
    pthread_t thread;
    const int world = r->scenario->world;
    r->fired = 0;
    r->begun = r->committed = 0;
    assert_int_equal(zs_comm_open_threads(world, 60, comms), ZS_OK);
    for (int i = 0; i < world; i++)
        args[i] = (rank_args){r, comms[i], i};
    if (world == 2)
        assert_int_equal(pthread_create(&thread, NULL, rank_main, &args[1]), 0);
    rank_main(&args[0]);
    if (world == 2)
        pthread_join(thread, NULL);
    for (int i = 0; i < world; i++)
        zs_comm_close(&comms[i]);
}

/* ---- the loop ---- */

static int count_descriptors(void)
{
    int count = 0;
    DIR *dir = opendir("/proc/self/fd");
    while (dir && readdir(dir))
        count++;
    if (dir)
        closedir(dir);
    return count;
}

static void expect_ok(const run *r, const char *when)
{
    for (int i = 0; i < r->scenario->world; i++)
        if (r->status[i] != ZS_OK)
            fail_msg("%s: %s: rank %d: %s: %s", r->scenario->name, when, i,
                     zs_status_name(r->status[i]), r->message[i]);
}

/* The one that ran out says so, and names something; the others hear of it. */
static void check_failure(const run *r)
{
    const int last = r->scenario->world - 1;
    const char *text = r->message[last];
    if (r->status[last] != ZS_ERR_NOMEM ||
        !(strstr(text, "memory") || strstr(text, strerror(ENOMEM)) ||
          strstr(text, strerror(EAGAIN))))
        fail_msg("%s: allocation %ld: %s: %s", r->scenario->name, r->fail_at,
                 zs_status_name(r->status[last]), text);
    if (last && (r->status[0] != ZS_ERR_COMM || !strstr(r->message[0], text)))
        fail_msg("%s: allocation %ld: rank 0 heard %s: %s", r->scenario->name, r->fail_at,
                 zs_status_name(r->status[0]), r->message[0]);
    if (getenv("ZSPILL_MEMORY_SHOW"))
        fprintf(stderr, "%ld: %s\n", r->fail_at, text);
}

/* With one slot a run that ends after it began to write has left no state, and says so. */
static int is_written_over(const run *r)
{
    return r->scenario->shape[0].slots == 1 && r->status[0] == ZS_ERR_CORRUPT &&
           strstr(r->message[0], "has one slot for each chunk");
}

static void clear(const temp_dir *dir)
{
    DIR *entries = opendir(dir->path);
    assert_non_null(entries);
    for (struct dirent *entry; (entry = readdir(entries));)
        (void)unlinkat(dirfd(entries), entry->d_name, 0);
    closedir(entries);
}

/* With memory again: from the last commit, or from the start, to the same end. */
static void check_afterwards(const run *broken, uint64_t committed, const outcome *expected,
                             outcome *have, const temp_dir *dir)
{
    const scenario *s = broken->scenario;
    run r = {.scenario = s, .shape = 1, .steps = STEPS, .commits = broken->commits, .out = have};
    memset(have, 0, sizeof *have);
    run_it(&r);
    if (is_written_over(&r)) {
        clear(dir);
        run_it(&r);
        committed = 0;
    }
    expect_ok(&r, "afterwards");
    if (r.begun < committed)
        fail_msg("%s: allocation %ld: step %d was committed, %d is left", s->name, broken->fail_at,
                 (int)committed, (int)r.begun);
    if (memcmp(have, expected, sizeof *have) != 0)
        fail_msg("%s: allocation %ld: afterwards: other bits", s->name, broken->fail_at);
}

/* A step in each shape up to `shape`, each going on where the one before it was; in the last one
 * allocation n fails. Whether there was such an allocation. */
static int run_short_of_memory(const scenario *s, int shape, long n, int for_good,
                               const outcome *expected, outcome *have, const temp_dir *dir)
{
    const int durable = s->shape[0].state_dir != NULL;
    for (int before = 0; before < shape; before++) {
        run r = {.scenario = s, .shape = before, .steps = before + 1, .commits = durable};
        run_it(&r);
        expect_ok(&r, "before");
    }
    run r = {.scenario = s,
             .shape = shape,
             .steps = shape + 1,
             .commits = durable,
             .fail_at = n,
             .for_good = for_good};
    const int descriptors = count_descriptors();
    run_it(&r);
    if (count_descriptors() != descriptors)
        fail_msg("%s: allocation %ld: descriptors stay open", s->name, n);
    if (r.status[s->world - 1] == ZS_OK)
        expect_ok(&r, "went on");
    else
        check_failure(&r);
    check_afterwards(&r, ZS_MAX((uint64_t)shape, r.committed), expected, have, dir);
    return r.fired;
}

static void check_scenario(scenario *s, const temp_dir *dir)
{
    outcome *expected = calloc(1, sizeof *expected), *have = calloc(1, sizeof *have);
    assert_non_null(expected);
    assert_non_null(have);
    for (int i = 0; i < SHAPES; i++) {
        if (s->shape[i].state_dir)
            s->shape[i].state_dir = dir->path;
        s->shape[i].param_dir = s->shape[i].param_tier == ZS_TIER_NVME ? dir->path : NULL;
        s->shape[i].resume = 1;
        s->shape[i].threads = 1;
    }
    run whole = {.scenario = s, .shape = 1, .steps = STEPS, .out = expected};
    run_it(&whole);
    expect_ok(&whole, "undisturbed");
    for (int broken = 0; broken < s->broken; broken++)
        for (int for_good = 0; for_good < 2; for_good++) {
            long n = 0;
            int fired;
            do {
                clear(dir);
                fired = run_short_of_memory(s, broken, ++n, for_good, expected, have, dir);
            } while (fired);
            print_message("%s: shape %d, %s: %ld allocations\n", s->name, broken,
                          for_good ? "all from the n-th on" : "the n-th", n - 1);
            assert_true(n > 20);
        }
    clear(dir);
    free(expected);
    free(have);
}

/* ---- scenarios ---- */

static scenario make_scenario(const char *name, int world, zs_tier tier, zs_io_engine engine)
{
    scenario s = {.name = name, .world = world, .broken = SHAPES};
    for (int i = 0; i < SHAPES; i++) {
        zs_engine_config_init(&s.shape[i]);
        s.shape[i].optimizer_tier = tier;
        s.shape[i].io_engine = engine;
        s.shape[i].state_dir = "";
        s.shape[i].chunk_numel = 4096;
    }
    return s;
}

/* A directory in memory where there is one: nothing here is about the disk. */
static void make_dir(temp_dir *dir)
{
    if (access("/dev/shm", W_OK) == 0)
        setenv("TMPDIR", "/dev/shm", 0);
    temp_make(dir);
}

static void check(scenario s)
{
    temp_dir dir;
    make_dir(&dir);
    check_scenario(&s, &dir);
    temp_remove(&dir);
}

static void test_device(void **state)
{
    scenario s = make_scenario("device", 1, ZS_TIER_DEVICE, ZS_IO_POSIX);
    check(s);
}

static void test_host(void **state)
{
    /* The second shape takes the states over from the first: other chunks. */
    scenario s = make_scenario("host", 1, ZS_TIER_HOST, ZS_IO_POSIX);
    s.shape[1].chunk_numel = 8192;
    s.shape[0].zero_stage = 1;
    check(s);
}

static void test_nvme(void **state)
{
    scenario s = make_scenario("nvme", 1, ZS_TIER_NVME, ZS_IO_POSIX);
    s.shape[0].zero_stage = s.shape[1].zero_stage = 3;
    s.shape[0].param_tier = s.shape[1].param_tier = ZS_TIER_NVME;
    check(s);
}

static void test_libaio(void **state)
{
    scenario s = make_scenario("libaio", 1, ZS_TIER_NVME, ZS_IO_LIBAIO);
    char reason[256];
    if (zs_io_probe(ZS_IO_LIBAIO, reason, sizeof reason) != ZS_OK)
        skip();
    /* The kernel takes 30 ms to let go of a context: no more of them than needed. */
    s.broken = 1;
    s.shape[1].io_engine = ZS_IO_POSIX;
    check(s);
}

static void test_two_ranks(void **state)
{
    scenario s = make_scenario("two ranks", 2, ZS_TIER_NVME, ZS_IO_AUTO);
    s.shape[0].zero_stage = 2;
    s.shape[1].zero_stage = 0; /* every rank then holds all */
    check(s);
}

static void test_one_slot(void **state)
{
    scenario s = make_scenario("one slot", 1, ZS_TIER_NVME, ZS_IO_POSIX);
    s.shape[0].slots = s.shape[1].slots = 1;
    check(s);
}

static void test_no_store(void **state)
{
    scenario s = make_scenario("no store", 2, ZS_TIER_DEVICE, ZS_IO_AUTO);
    s.broken = 1;
    for (int i = 0; i < SHAPES; i++) {
        s.shape[i].state_dir = NULL;
        s.shape[i].zero_stage = 3;
        s.shape[i].missing_grad = ZS_MISSING_SKIP;
    }
    check(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_device),    cmocka_unit_test(test_host),
        cmocka_unit_test(test_nvme),      cmocka_unit_test(test_libaio),
        cmocka_unit_test(test_two_ranks), cmocka_unit_test(test_one_slot),
        cmocka_unit_test(test_no_store),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* SPDX-License-Identifier: Apache-2.0 */
/* The engine on a CUDA device (emulated) gives the bits of the engine on the host: norms, weights,
 * moments, and what each forward pass saw. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "tests/engine/harness.h"

static const char *dir;

static void run_ok(job *j, const char *what)
{
    job_run(j);
    for (int r = 0; r < j->world; r++)
        if (j->status[r])
            fail_msg("%s: rank %d: %s", what, r, j->error[r]);
}

static void compare(const job *base, const job *j, const char *what)
{
    const int p = job_differ(base, j);
    if (p)
        fail_msg("%s: parameter '%s' differs from the host", what, j->params[p - 1].name);
    if (memcmp(base->norms, j->norms, sizeof base->norms))
        fail_msg("%s: gradient norms differ from the host", what);
    if (base->seen != j->seen)
        fail_msg("%s: forward saw other weights than on the host", what);
}

typedef struct variant {
    int world, micros;
    zs_dtype grad_dtype;
    int use_buffer, boundary;
    int stride; /* of the shapes, every one of so many; 0: all */
} variant;

static void init(job *j, const variant *v)
{
    job_init(j, dir);
    j->world = v->world;
    j->micros = v->micros;
    j->grad_dtype = v->grad_dtype;
    j->use_buffer = v->use_buffer;
    if (v->boundary)
        j->config.reduce = ZS_REDUCE_BOUNDARY;
}

typedef struct shape {
    int stage;
    zs_tier states, params;
    zs_adam_side adam;
} shape;

static void init_shape(job *j, const variant *v, const shape *s, char what[160])
{
    static const char *const sides[] = {"auto", "device", "host", "zero copy"};
    init(j, v);
    j->device = "cuda";
    j->config.zero_stage = s->stage;
    j->config.optimizer_tier = s->states;
    j->config.param_tier = s->params;
    j->config.adam = s->adam;
    j->config.chunk_numel = s->states ? 4096 : 0;
    snprintf(what, 160, "world %d, %d micro-batches, stage %d, states %d, params %d, Adam %s",
             v->world, v->micros, s->stage, (int)s->states, (int)s->params, sides[s->adam]);
}

/* Every stage, tier and side. */
static int next_shape(const variant *v, shape *s)
{
    const int stages = v->boundary ? 1 : 3;
    if (s->states != ZS_TIER_DEVICE && s->adam < ZS_ADAM_ZERO_COPY) {
        s->adam++;
        return 1;
    }
    s->adam = ZS_ADAM_AUTO;
    if (s->states < ZS_TIER_NVME) {
        s->states++;
        return 1;
    }
    s->states = ZS_TIER_DEVICE;
    if (s->stage == 3 && s->params < ZS_TIER_NVME) {
        s->params++;
        return 1;
    }
    s->params = ZS_TIER_DEVICE;
    return ++s->stage <= stages;
}

static void matrix(const variant *v)
{
    job base, j;
    shape s = {0};
    int runs = 0, shapes = 0;
    init(&base, v);
    run_ok(&base, "host");
    do {
        char what[160];
        if (shapes++ % (v->stride ? v->stride : 1))
            continue;
        init_shape(&j, v, &s, what);
        run_ok(&j, what);
        compare(&base, &j, what);
        job_free(&j);
        runs++;
    } while (next_shape(v, &s));
    job_free(&base);
    print_message("emulated: world %d, %d micro-batches: %d runs equal the host\n", v->world,
                  v->micros, runs);
}

/* A state committed in one shape goes on in another with the same bits. */
static void resume(int world)
{
    const variant v = {.world = world, .micros = 2};
    static const shape shapes[] = {
        {0, ZS_TIER_DEVICE, ZS_TIER_DEVICE, ZS_ADAM_AUTO},
        {1, ZS_TIER_HOST, ZS_TIER_DEVICE, ZS_ADAM_DEVICE},
        {3, ZS_TIER_NVME, ZS_TIER_NVME, ZS_ADAM_DEVICE},
        {3, ZS_TIER_HOST, ZS_TIER_HOST, ZS_ADAM_HOST},
        {3, ZS_TIER_DEVICE, ZS_TIER_NVME, ZS_ADAM_AUTO},
        {2, ZS_TIER_NVME, ZS_TIER_DEVICE, ZS_ADAM_AUTO},
    };
    enum { SHAPES = sizeof shapes / sizeof shapes[0] };
    job base, j;
    char what[160];
    init(&base, &v);
    run_ok(&base, "host");
    for (int from = 0; from < SHAPES; from++)
        for (int i = 1; i <= 4; i += 3) {
            const int to = (from + i) % SHAPES;
            init_shape(&j, &v, &shapes[from], what);
            j.commit_at = j.stop_at = 2;
            j.config.chunk_numel = from % 2 ? 4096 : 0;
            run_ok(&j, what);
            job_free(&j);
            init_shape(&j, &v, &shapes[to], what);
            j.use_resume = j.config.resume = 1;
            j.config.chunk_numel = 0;
            run_ok(&j, what);
            assert_int_equal(j.resumed_at, 2);
            const int p = job_differ(&base, &j);
            if (p)
                fail_msg("%s, resumed: parameter '%s' differs from the host", what,
                         j.params[p - 1].name);
            job_free(&j);
            job_clean(dir);
        }
    job_free(&base);
}

static void several_ranks(void **state)
{
    (void)state;
    matrix(&(variant){.world = 2, .micros = 2});
    matrix(&(variant){.world = 3, .micros = 2, .use_buffer = 1, .stride = 5});
    matrix(&(variant){.world = 4, .micros = 1, .grad_dtype = ZS_BF16, .stride = 5});
    matrix(&(variant){.world = 2, .micros = 3, .boundary = 1, .stride = 5});
}

static void resumed(void **state)
{
    (void)state;
    resume(1);
    resume(2);
}

static void one_rank(void **state)
{
    (void)state;
    matrix(&(variant){.world = 1, .micros = 2, .use_buffer = 1});
    matrix(&(variant){.world = 1, .micros = 1, .stride = 5});
    matrix(&(variant){.world = 1, .micros = 3, .boundary = 1, .stride = 5});
    matrix(&(variant){.world = 1, .micros = 2, .grad_dtype = ZS_BF16, .stride = 5});
}

int main(void)
{
    dir = job_temp_dir();
    if (!dir)
        return 1;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_rank),
        cmocka_unit_test(several_ranks),
        cmocka_unit_test(resumed),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    job_clean(dir);
    return failed;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Stage 3 from NVMe: what is read before it is asked for, and what has to go for it. The results
 * are the matrix's business; here it is when things happen, which only the engine's insides show.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "unit/temp.h"
#include "zero/engine.h"

enum { UNITS = 5, NUMEL = 4096 };

static temp_dir dir;

static int set_up(void **state)
{
    temp_make(&dir);
    return 0;
}

static int tear_down(void **state)
{
    temp_remove(&dir);
    return 0;
}

typedef struct rig {
    zs_comm *comm;
    zs_engine *e;
} rig;

static void rig_open(rig *r, uint64_t live_units)
{
    const int64_t shape[1] = {NUMEL};
    zs_engine_config config;
    zs_param_config param;
    zs_engine_config_init(&config);
    zs_param_config_init(&param);
    config.zero_stage = 3;
    config.param_tier = ZS_TIER_NVME;
    config.param_dir = dir.path;
    config.threads = 1;
    config.max_live_params = live_units * NUMEL;
    param.ndim = 1;
    param.shape = shape;
    param.frozen = 1;
    assert_int_equal(zs_comm_open_self(&r->comm), ZS_OK);
    assert_int_equal(zs_engine_open(&config, r->comm, &r->e), ZS_OK);
    for (int u = 0; u < UNITS; u++) {
        char name[16];
        zs_param p;
        snprintf(name, sizeof name, "unit %d", u);
        param.name = name;
        assert_int_equal(zs_param_add(r->e, &param, &p), ZS_OK);
        assert_int_equal(zs_unit_add(r->e, name, &p, 1, NULL), ZS_OK);
    }
    if (zs_engine_commit(r->e))
        fail_msg("%s", zs_last_error());
    for (int u = 0; u < UNITS; u++) {
        float value = (float)u;
        assert_int_equal(zs_param_write(r->e, u, 0, 1, ZS_FP32, &value), ZS_OK);
    }
    assert_int_equal(zs_params_publish(r->e), ZS_OK);
}

static void rig_close(rig *r)
{
    zs_engine_close(&r->e);
    zs_comm_close(&r->comm);
}

static void use(rig *r, zs_unit u)
{
    void *data;
    if (zs_unit_acquire(r->e, u))
        fail_msg("%s", zs_last_error());
    assert_int_equal(zs_param_data(r->e, u, &data), ZS_OK);
    assert_float_equal(*(float *)data, (float)u, 0);
    assert_int_equal(zs_unit_release(r->e, u), ZS_OK);
}

/* Forward and backward, as a model goes. */
static void pass(rig *r)
{
    for (int u = 0; u < UNITS; u++)
        use(r, u);
    for (int u = UNITS - 1; u >= 0; u--)
        use(r, u);
}

static int here(const rig *r)
{
    int count = 0;
    for (int u = 0; u < UNITS; u++)
        count += r->e->units[u].state != ZS_UNIT_AWAY;
    return count;
}

static void test_order_is_learned(void **state)
{
    rig r;
    rig_open(&r, 3);
    /* Nothing is known of the first pass. */
    use(&r, 0);
    assert_int_equal(here(&r), 1);
    rig_close(&r);

    rig_open(&r, 2);
    pass(&r);
    pass(&r);
    /* Upwards what is above comes next, downwards what is below. */
    use(&r, 0);
    assert_int_not_equal(r.e->units[1].state, ZS_UNIT_AWAY);
    use(&r, 1);
    assert_int_equal(r.e->units[2].state, ZS_UNIT_READING);
    assert_int_equal(r.e->units[0].state, ZS_UNIT_AWAY);
    for (int u = 2; u < UNITS; u++)
        use(&r, u);
    use(&r, 4);
    use(&r, 3);
    assert_int_equal(r.e->units[2].state, ZS_UNIT_READING);
    assert_int_equal(r.e->units[4].state, ZS_UNIT_AWAY);
    rig_close(&r);
}

static void test_budget_is_kept(void **state)
{
    for (uint64_t live = 1; live <= UNITS; live++) {
        rig r;
        rig_open(&r, live);
        for (int i = 0; i < 3; i++) {
            pass(&r);
            assert_true(r.e->live_numel <= live * NUMEL);
            assert_int_equal((uint64_t)here(&r) * NUMEL, r.e->live_numel);
        }
        /* With room for all of them nothing is read twice. */
        if (live == UNITS)
            assert_int_equal(here(&r), UNITS);
        rig_close(&r);
    }
}

/* What is acquired stays, and beyond the budget there is an error that says what it takes. */
static void test_acquired_stays(void **state)
{
    rig r;
    rig_open(&r, 2);
    pass(&r);
    assert_int_equal(zs_unit_acquire(r.e, 0), ZS_OK);
    assert_int_equal(zs_unit_acquire(r.e, 1), ZS_OK);
    assert_int_equal(zs_unit_acquire(r.e, 0), ZS_OK);
    assert_int_equal(zs_unit_acquire(r.e, 2), ZS_ERR_ARG);
    const char *text = "'unit 2' (4096 elements) does not fit beside the 8192 that are acquired: "
                       "raise max_live_params from 8192 to at least 12288";
    if (!strstr(zs_last_error(), text))
        fail_msg("%s", zs_last_error());
    rig_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_order_is_learned, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_budget_is_kept, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_acquired_stays, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Two parameters of 30 and 10 zeros on one rank, driven by hand. Includes cmocka's assertions, so
 * what cmocka.h wants before it must be there. */
#ifndef ZS_TESTS_ENGINE_SMALL_H
#define ZS_TESTS_ENGINE_SMALL_H

#include <stdio.h>
#include <string.h>

#include "zspill.h"

#define assert_says(status, expected, text)                                                        \
    do {                                                                                           \
        assert_int_equal(status, expected);                                                        \
        if (!strstr(zs_last_error(), text))                                                        \
            fail_msg("'%s' is not in '%s'", text, zs_last_error());                                \
    } while (0)

typedef struct small {
    zs_comm *comm;
    zs_engine *e;
    zs_param a, b;
    zs_unit u, v;
} small;

static inline void small_open(small *s, const zs_engine_config *config)
{
    const int64_t shape[2] = {10, 3};
    zs_group_config group;
    zs_param_config param;
    assert_int_equal(zs_comm_open_self(&s->comm), ZS_OK);
    if (zs_engine_open(config, s->comm, &s->e))
        fail_msg("%s", zs_last_error());
    zs_group_config_init(&group);
    group.lr = 0.1;
    group.weight_decay = 0;
    assert_int_equal(zs_group_add(s->e, &group, NULL), ZS_OK);
    zs_param_config_init(&param);
    param.name = "a";
    param.ndim = 2;
    param.shape = shape;
    assert_int_equal(zs_param_add(s->e, &param, &s->a), ZS_OK);
    param.name = "b";
    param.ndim = 1;
    assert_int_equal(zs_param_add(s->e, &param, &s->b), ZS_OK);
    assert_int_equal(zs_unit_add(s->e, "first", &s->a, 1, &s->u), ZS_OK);
    assert_int_equal(zs_unit_add(s->e, "second", &s->b, 1, &s->v), ZS_OK);
    if (zs_engine_commit(s->e))
        fail_msg("%s", zs_last_error());
}

static inline void small_close(small *s)
{
    zs_engine_close(&s->e);
    assert_null(s->e);
    zs_comm_close(&s->comm);
}

static inline void give(small *s, zs_param p, float value)
{
    float g[30];
    for (int i = 0; i < 30; i++)
        g[i] = value;
    if (zs_grad_ready(s->e, p, g, ZS_FP32))
        fail_msg("%s", zs_last_error());
}

static inline float weight(small *s, zs_param p)
{
    float w;
    assert_int_equal(zs_param_read(s->e, p, ZS_WEIGHT, 0, 1, ZS_FP32, &w), ZS_OK);
    return w;
}

#endif

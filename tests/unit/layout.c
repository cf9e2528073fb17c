/* SPDX-License-Identifier: Apache-2.0 */
#include "zero/layout.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "base/util.h"

static void test_known(void **state)
{
    const uint64_t numel[] = {5, 0, 40, 32};
    zs_layout layout;
    assert_int_equal(zs_layout_init(&layout, numel, 4, 2), ZS_OK);
    assert_int_equal(layout.offset[0], 0);
    assert_int_equal(layout.offset[2], 32);
    assert_int_equal(layout.offset[3], 96);
    assert_int_equal(layout.shard, 64);
    assert_int_equal(layout.padded, 128);
    assert_int_equal(layout.used, 77);

    zs_layout_part part = zs_layout_locate(&layout, 2, 0);
    assert_int_equal(part.first, 0);
    assert_int_equal(part.count, 32);
    assert_int_equal(part.shard_offset, 32);
    part = zs_layout_locate(&layout, 2, 1);
    assert_int_equal(part.first, 32);
    assert_int_equal(part.count, 8);
    assert_int_equal(part.shard_offset, 0);
    part = zs_layout_locate(&layout, 0, 1);
    assert_int_equal(part.count, 0);
    zs_layout_free(&layout);
    assert_null(layout.offset);
}

static void test_empty(void **state)
{
    zs_layout layout;
    assert_int_equal(zs_layout_init(&layout, NULL, 0, 64), ZS_OK);
    assert_int_equal(layout.shard, 0);
    assert_int_equal(layout.padded, 0);
    zs_layout_free(&layout);
}

static void test_refused(void **state)
{
    zs_layout layout;
    uint64_t one = 1;
    assert_int_equal(zs_layout_init(&layout, &one, 1, 0), ZS_ERR_ARG);
    assert_string_equal(zs_last_error(), "layout: world 0 is not in 1..64");
    assert_int_equal(zs_layout_init(&layout, &one, 1, 65), ZS_ERR_ARG);

    const uint64_t huge[][2] = {
        {UINT64_MAX, 1}, {1, UINT64_MAX}, {UINT64_C(1) << 60, 1}, {UINT64_C(3) << 58, 1ull << 59}};
    for (size_t i = 0; i < ZS_COUNT(huge); i++) {
        assert_int_equal(zs_layout_init(&layout, huge[i], 2, 3), ZS_ERR_ARG);
        assert_non_null(strstr(zs_last_error(), i ? "parameter 1 with" : "parameter 0 with"));
        assert_null(layout.offset);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_known),
        cmocka_unit_test(test_empty),
        cmocka_unit_test(test_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

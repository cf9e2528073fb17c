/* SPDX-License-Identifier: Apache-2.0 */
/* For random units and every world size: each element of each parameter lies in exactly one shard,
 * at one place, in order; and padding is bounded. */
#include "zero/layout.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include <cmocka.h>

static uint64_t seed = 20240229;

static uint64_t draw(uint64_t below)
{
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return seed % below;
}

static void check(const uint64_t *numel, size_t count, int world)
{
    zs_layout layout;
    assert_int_equal(zs_layout_init(&layout, numel, count, world), ZS_OK);
    assert_int_equal(layout.world, world);
    assert_int_equal(layout.count, count);
    assert_int_equal(layout.shard % ZS_LAYOUT_ALIGN, 0);
    assert_int_equal(layout.padded, layout.shard * (uint64_t)world);

    uint64_t used = 0, filled = 0, end = 0;
    for (size_t p = 0; p < count; p++) {
        assert_int_equal(layout.numel[p], numel[p]);
        assert_int_equal(layout.offset[p] % ZS_LAYOUT_ALIGN, 0);
        assert_true(layout.offset[p] >= end);
        end = layout.offset[p] + numel[p];
        assert_true(end <= layout.padded);
        used += numel[p];
        filled += numel[p] > 0;

        uint64_t next = 0;
        for (int r = 0; r < world; r++) {
            zs_layout_part part = zs_layout_locate(&layout, p, r);
            assert_true(part.first <= numel[p]);
            assert_true(part.shard_offset <= layout.shard);
            assert_true(part.count <= layout.shard - part.shard_offset);
            if (!part.count)
                continue;
            assert_int_equal(part.first, next);
            assert_int_equal((uint64_t)r * layout.shard + part.shard_offset,
                             layout.offset[p] + part.first);
            next += part.count;
        }
        assert_int_equal(next, numel[p]);
    }
    assert_int_equal(layout.used, used);
    uint64_t padding = layout.padded - used;
    assert_true(padding <= (filled + (uint64_t)world) * ZS_LAYOUT_ALIGN);
    if (!used)
        assert_int_equal(layout.padded, 0);
    zs_layout_free(&layout);
}

static void test_random(void **state)
{
    uint64_t numel[40];
    for (int world = 1; world <= 64; world++)
        for (int round = 0; round < 60; round++) {
            size_t count = draw(41);
            /* from far below the world size to millions */
            uint64_t below = UINT64_C(1) << draw(24);
            for (size_t p = 0; p < count; p++)
                numel[p] = draw(5) ? draw(below) : draw(3);
            check(numel, count, world);
        }
}

static void test_small(void **state)
{
    for (int world = 1; world <= 64; world++)
        for (uint64_t n = 0; n <= 140; n++) {
            uint64_t numel[] = {n, 0, 140 - n, 1};
            check(numel, 1, world);
            check(numel, 4, world);
        }
}

static void test_huge(void **state)
{
    /* over 2^32 elements: offsets must not be cut to 32 bits */
    const uint64_t numel[] = {(UINT64_C(1) << 33) + 7, 1, (UINT64_C(1) << 40) - 1, 0, 3};
    for (int world = 1; world <= 64; world++)
        check(numel, 5, world);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random),
        cmocka_unit_test(test_small),
        cmocka_unit_test(test_huge),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

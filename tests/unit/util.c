/* SPDX-License-Identifier: Apache-2.0 */
#include "base/util.h"

#include "check.h"

static void test_arithmetic(void **state)
{
    uint64_t out = 0;

    assert_int_equal(zs_round_up(0, 4096), 0);
    assert_int_equal(zs_round_up(1, 4096), 4096);
    assert_int_equal(zs_round_up(4096, 4096), 4096);
    assert_int_equal(zs_round_up(4097, 4096), 8192);
    assert_int_equal(zs_div_up(0, 3), 0);
    assert_int_equal(zs_div_up(7, 3), 3);
    assert_int_equal(zs_div_up(UINT64_MAX, 2), 1ull << 63);
    assert_false(zs_mul_overflow(1ull << 32, (1ull << 32) - 1, &out));
    assert_int_equal(out, UINT64_MAX - UINT32_MAX);
    assert_true(zs_mul_overflow(1ull << 32, 1ull << 32, &out));
    assert_int_equal(ZS_MIN(2, 3), 2);
    assert_int_equal(ZS_MAX(2, 3), 3);
}

static void test_names(void **state)
{
    assert_int_equal(zs_dtype_size(ZS_FP32), 4);
    assert_int_equal(zs_dtype_size(ZS_BF16), 2);
    assert_int_equal(zs_dtype_size(ZS_FP16), 2);
    assert_string_equal(zs_dtype_name(ZS_BF16), "bf16");
    assert_string_equal(zs_dtype_name((zs_dtype)3), "?");
    assert_string_equal(zs_tier_name(ZS_TIER_NVME), "nvme");
    assert_string_equal(zs_tier_name((zs_tier)3), "?");
}

static void test_format_bytes(void **state)
{
    char buf[16];

    assert_string_equal(zs_format_bytes(0, buf), "0 B");
    assert_string_equal(zs_format_bytes(1023, buf), "1023 B");
    assert_string_equal(zs_format_bytes(1536, buf), "1.50 KiB");
    assert_string_equal(zs_format_bytes(3ull << 30, buf), "3.00 GiB");
    assert_string_equal(zs_format_bytes(UINT64_MAX, buf), "16384.00 PiB");
}

static void test_now(void **state)
{
    double a = zs_now(), b = zs_now();
    assert_true(a > 0 && b >= a);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_arithmetic),
        cmocka_unit_test(test_names),
        cmocka_unit_test(test_format_bytes),
        cmocka_unit_test(test_now),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

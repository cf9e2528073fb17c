/* SPDX-License-Identifier: Apache-2.0 */
#include "base/ledger.h"

#include <pthread.h>

#include "check.h"

static void check_row(const zs_memory_row *row, zs_tier tier, const char *purpose, uint64_t bytes,
                      uint64_t peak)
{
    assert_int_equal(row->tier, tier);
    assert_string_equal(row->purpose, purpose);
    assert_int_equal(row->bytes, bytes);
    assert_int_equal(row->peak, peak);
}

static void test_rows_and_peaks(void **state)
{
    zs_ledger *ledger = NULL;
    zs_memory_row rows[4];
    size_t count = 9;

    assert_int_equal(zs_ledger_open(&ledger), ZS_OK);
    zs_ledger_rows(ledger, NULL, 0, &count);
    assert_int_equal(count, 0);
    assert_int_equal(zs_ledger_add(ledger, ZS_TIER_HOST, "gradients", 100), ZS_OK);
    assert_int_equal(zs_ledger_add(ledger, ZS_TIER_DEVICE, "gradients", 7), ZS_OK);
    assert_int_equal(zs_ledger_add(ledger, ZS_TIER_HOST, "gradients", 50), ZS_OK);
    assert_int_equal(zs_ledger_add(ledger, ZS_TIER_HOST, "gradients", -120), ZS_OK);
    assert_int_equal(zs_ledger_add(ledger, ZS_TIER_HOST, "gradients", 10), ZS_OK);
    assert_int_equal(zs_ledger_add(ledger, ZS_TIER_NVME, "optimizer states", 1ll << 40), ZS_OK);
    memset(rows, 0xff, sizeof rows);
    zs_ledger_rows(ledger, rows, 4, &count);
    assert_int_equal(count, 3);
    check_row(&rows[0], ZS_TIER_HOST, "gradients", 40, 150);
    check_row(&rows[1], ZS_TIER_DEVICE, "gradients", 7, 7);
    check_row(&rows[2], ZS_TIER_NVME, "optimizer states", 1ull << 40, 1ull << 40);
    /* Fewer than there are. */
    memset(rows, 0xff, sizeof rows);
    zs_ledger_rows(ledger, rows, 1, &count);
    assert_int_equal(count, 3);
    check_row(&rows[0], ZS_TIER_HOST, "gradients", 40, 150);
    assert_int_equal((unsigned char)rows[1].purpose[0], 0xff);
    zs_ledger_close(&ledger);
    assert_null(ledger);
    zs_ledger_close(&ledger);
}

static void test_errors(void **state)
{
    zs_ledger *ledger = NULL;
    zs_memory_row row;
    size_t count;

    assert_int_equal(zs_ledger_open(&ledger), ZS_OK);
    assert_int_equal(zs_ledger_add(ledger, ZS_TIER_HOST, "x", 5), ZS_OK);
    assert_int_equal(zs_ledger_add(ledger, ZS_TIER_HOST, "x", -6), ZS_ERR_MISUSE);
    check_message("'x' in tier host holds 5 bytes, 6 cannot be taken off");
    assert_int_equal(zs_ledger_add(ledger, ZS_TIER_NVME, "x", INT64_MIN), ZS_ERR_MISUSE);
    check_message("holds 0 bytes, 9223372036854775808 cannot");
    assert_int_equal(zs_ledger_add(ledger, (zs_tier)3, "x", 1), ZS_ERR_ARG);
    check_message("tier 3 for 'x'");
    zs_ledger_rows(ledger, &row, 1, &count);
    assert_int_equal(count, 1);
    check_row(&row, ZS_TIER_HOST, "x", 5, 5);
    zs_ledger_close(&ledger);
}

static void test_long_purpose(void **state)
{
    static const char name[] = "a purpose of more than thirty-nine letters, cut";
    zs_ledger *ledger = NULL;
    zs_memory_row rows[100];
    size_t count;
    char text[16];

    assert_int_equal(zs_ledger_open(&ledger), ZS_OK);
    assert_int_equal(zs_ledger_add(ledger, ZS_TIER_HOST, name, 5), ZS_OK);
    assert_int_equal(zs_ledger_add(ledger, ZS_TIER_HOST, name, -2), ZS_OK);
    zs_ledger_rows(ledger, rows, 1, &count);
    assert_int_equal(count, 1);
    check_row(&rows[0], ZS_TIER_HOST, "a purpose of more than thirty-nine lett", 3, 5);
    for (int i = 1; i < 100; i++) {
        snprintf(text, sizeof text, "p%d", i);
        assert_int_equal(zs_ledger_add(ledger, ZS_TIER_HOST, text, i), ZS_OK);
    }
    zs_ledger_rows(ledger, rows, 100, &count);
    assert_int_equal(count, 100);
    check_row(&rows[99], ZS_TIER_HOST, "p99", 99, 99);
    zs_ledger_close(&ledger);
}

static void *add_and_take(void *cookie)
{
    for (int i = 0; i < 2000; i++) {
        zs_ledger_add(cookie, ZS_TIER_HOST, "shared", 3);
        zs_ledger_add(cookie, ZS_TIER_HOST, "shared", -2);
    }
    return NULL;
}

static void test_threads(void **state)
{
    zs_ledger *ledger = NULL;
    zs_memory_row row;
    pthread_t threads[4];
    size_t count;

    assert_int_equal(zs_ledger_open(&ledger), ZS_OK);
    for (int i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, add_and_take, ledger), 0);
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    zs_ledger_rows(ledger, &row, 1, &count);
    assert_int_equal(count, 1);
    assert_int_equal(row.bytes, 8000);
    assert_true(row.peak >= 8002 && row.peak <= 8008);
    zs_ledger_close(&ledger);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rows_and_peaks),
        cmocka_unit_test(test_errors),
        cmocka_unit_test(test_long_purpose),
        cmocka_unit_test(test_threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

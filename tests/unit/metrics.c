/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/metrics.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static char path[64];

static zs_metrics *open_at(uint64_t step)
{
    zs_metrics *metrics;
    assert_int_equal(zs_metrics_open(path, &metrics), ZS_OK);
    assert_int_equal(zs_metrics_begin(metrics, step), ZS_OK);
    return metrics;
}

static void write_steps(zs_metrics *metrics, uint64_t from, uint64_t to)
{
    for (uint64_t step = from; step <= to; step++) {
        zs_step_row row = {.step = step, .loss = 0.1, .grad_norm = 2, .seconds = 0.5, .tokens = 8};
        assert_int_equal(zs_metrics_step(metrics, &row), ZS_OK);
    }
}

static size_t read_all(char *text, size_t capacity)
{
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    size_t got = fread(text, 1, capacity - 1, file);
    text[got] = 0;
    fclose(file);
    return got;
}

static int count(const char *text, const char *what)
{
    int n = 0;
    for (; (text = strstr(text, what)); text++)
        n++;
    return n;
}

static void test_rows(void **state)
{
    static const zs_memory_row ledger = {
        .tier = ZS_TIER_HOST, .purpose = "gradients", .bytes = 12, .peak = 34};
    char text[4096];
    (void)state;
    zs_metrics *metrics = open_at(0);
    zs_step_row row = {.step = 1,
                       .loss = 0.1,
                       .grad_norm = 1.0 / 3,
                       .lr = 1e-3,
                       .tokens = 64,
                       .targets = 60,
                       .seconds = 0.5,
                       .tier[ZS_TIER_NVME] = {.read_bytes = 7, .written_bytes = 8, .seconds = 0.25},
                       .ledger = &ledger,
                       .ledger_rows = 1};
    assert_int_equal(zs_metrics_step(metrics, &row), ZS_OK);
    row.step = 2;
    row.skipped = 1;
    row.loss = row.grad_norm = NAN;
    assert_int_equal(zs_metrics_step(metrics, &row), ZS_OK);
    assert_int_equal(zs_metrics_eval(metrics, 2, 2.5, 99, 1), ZS_OK);
    zs_metrics_close(&metrics);
    read_all(text, sizeof(text));
    assert_string_equal(
        strtok(text, "\n"),
        "{\"step\":1,\"loss\":0.10000000000000001,\"grad_norm\":0.33333333333333331,"
        "\"lr\":0.001,\"tokens\":64,\"targets\":60,\"tokens_per_s\":128.0,\"seconds\":0.5,"
        "\"tiers\":{\"device\":{\"read_bytes\":0,\"written_bytes\":0,\"seconds\":0.0},"
        "\"host\":{\"read_bytes\":0,\"written_bytes\":0,\"seconds\":0.0},"
        "\"nvme\":{\"read_bytes\":7,\"written_bytes\":8,\"seconds\":0.25}},"
        "\"ledger\":[{\"tier\":\"host\",\"purpose\":\"gradients\",\"bytes\":12,\"peak\":34}]}");
    const char *skipped = strtok(NULL, "\n");
    assert_non_null(strstr(skipped, "\"loss\":null,\"grad_norm\":null,"));
    assert_non_null(strstr(skipped, "\"skipped\":true"));
    assert_string_equal(strtok(NULL, "\n"),
                        "{\"step\":2,\"eval_loss\":2.5,\"targets\":99,\"seconds\":1.0}");
    unlink(path);
}

/* A run killed at step 5 that had committed step 3. */
static void test_goes_on(void **state)
{
    char text[16384];
    (void)state;
    zs_metrics *metrics = open_at(0);
    write_steps(metrics, 1, 5);
    zs_metrics_close(&metrics);
    FILE *file = fopen(path, "a");
    fputs("{\"step\":2,\"lo", file);
    fclose(file);
    metrics = open_at(3);
    write_steps(metrics, 4, 6);
    zs_metrics_close(&metrics);
    read_all(text, sizeof(text));
    for (int step = 1; step <= 6; step++) {
        char key[32];
        snprintf(key, sizeof(key), "{\"step\":%d,", step);
        assert_int_equal(count(text, key), 1);
    }
    assert_int_equal(count(text, "\n"), 6);
    metrics = open_at(0);
    write_steps(metrics, 1, 1);
    zs_metrics_close(&metrics);
    read_all(text, sizeof(text));
    assert_int_equal(count(text, "\n"), 1);
    unlink(path);
}

static void test_nothing_left(void **state)
{
    zs_metrics *metrics;
    (void)state;
    assert_int_equal(zs_metrics_open(path, &metrics), ZS_OK);
    zs_metrics_close(&metrics);
    assert_int_not_equal(access(path, F_OK), 0);
    assert_int_equal(zs_metrics_open("/does/not/exist", &metrics), ZS_ERR_IO);
    assert_string_equal(zs_last_error(), "--metrics /does/not/exist cannot be written: No such "
                                         "file or directory");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rows),
        cmocka_unit_test(test_goes_on),
        cmocka_unit_test(test_nothing_left),
    };
    snprintf(path, sizeof(path), "/tmp/zspill-metrics-%ld.jsonl", (long)getpid());
    return cmocka_run_group_tests(tests, NULL, NULL);
}

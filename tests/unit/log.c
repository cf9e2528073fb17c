/* SPDX-License-Identifier: Apache-2.0 */
#include "base/log.h"

#include "check.h"

static void keep(void *cookie, zs_log_level level, const char *text)
{
    char *lines = cookie;
    size_t used = strlen(lines);
    snprintf(lines + used, 4096 - used, "%d:%s|", (int)level, text);
}

static void test_levels(void **state)
{
    char lines[4096] = "";
    zs_log log = {keep, lines, ZS_LOG_INFO};

    zs_log_print(&log, ZS_LOG_ERROR, "e%d", 1);
    zs_log_print(&log, ZS_LOG_INFO, "i");
    zs_log_print(&log, ZS_LOG_DEBUG, "d");
    assert_string_equal(lines, "0:e1|2:i|");
    log.level = ZS_LOG_DEBUG;
    zs_log_print(&log, ZS_LOG_DEBUG, "d");
    assert_string_equal(lines, "0:e1|2:i|3:d|");
}

static void test_silent(void **state)
{
    zs_log log = {NULL, NULL, ZS_LOG_DEBUG};

    zs_log_print(NULL, ZS_LOG_ERROR, "e");
    zs_log_print(&log, ZS_LOG_ERROR, "e");
}

static void test_long(void **state)
{
    char lines[4096] = "", text[3000];
    zs_log log = {keep, lines, ZS_LOG_INFO};

    memset(text, 'a', sizeof text - 1);
    text[sizeof text - 1] = '\0';
    zs_log_print(&log, ZS_LOG_INFO, "%s", text);
    assert_true(strlen(lines) > 1000);
    assert_memory_equal(lines, "2:aaa", 5);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_levels),
        cmocka_unit_test(test_silent),
        cmocka_unit_test(test_long),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

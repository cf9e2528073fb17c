/* SPDX-License-Identifier: Apache-2.0 */
#include "base/status.h"

#include <pthread.h>

#include "check.h"

static void *read_error(void *cookie)
{
    snprintf(cookie, 8, "%.7s", zs_last_error());
    return NULL;
}

/* First of all tests here: nothing has failed yet. */
static void test_message(void **state)
{
    char other[8] = "x";
    char text[3000];
    pthread_t thread;

    assert_string_equal(zs_last_error(), "");
    assert_int_equal(zs_fail(ZS_ERR_IO, "file %d", 7), ZS_ERR_IO);
    assert_string_equal(zs_last_error(), "file 7");
    assert_int_equal(zs_fail_prefix(ZS_ERR_COMM, "rank %d: ", 2), ZS_ERR_COMM);
    assert_string_equal(zs_last_error(), "rank 2: file 7");
    /* The message may be an argument of the next. */
    zs_fail(ZS_ERR_IO, "%s again", zs_last_error());
    assert_string_equal(zs_last_error(), "rank 2: file 7 again");
    assert_int_equal(pthread_create(&thread, NULL, read_error, other), 0);
    pthread_join(thread, NULL);
    assert_string_equal(other, "");
    memset(text, 'a', sizeof text - 1);
    text[sizeof text - 1] = '\0';
    zs_fail(ZS_ERR_IO, "%s", text);
    zs_fail_prefix(ZS_ERR_IO, "%s", text);
    assert_true(strlen(zs_last_error()) < sizeof text);
}

static zs_status check(zs_status with)
{
    ZS_CHECK(with);
    return ZS_ERR_INTERNAL;
}

static zs_status try(zs_status with)
{
    zs_status status;
    ZS_TRY(with);
    return ZS_ERR_INTERNAL;
fail:
    return status;
}

static void test_macros(void **state)
{
    assert_int_equal(check(ZS_ERR_ARG), ZS_ERR_ARG);
    assert_int_equal(check(ZS_OK), ZS_ERR_INTERNAL);
    assert_int_equal(try(ZS_ERR_ARG), ZS_ERR_ARG);
    assert_int_equal(try(ZS_OK), ZS_ERR_INTERNAL);
}

static void test_names(void **state)
{
    assert_string_equal(zs_status_name(ZS_OK), "ZS_OK");
    assert_string_equal(zs_status_name(ZS_ERR_NOSPACE), "ZS_ERR_NOSPACE");
    assert_string_equal(zs_status_name(ZS_ERR_FORKED), "ZS_ERR_FORKED");
    assert_string_equal(zs_status_name(ZS_ERR_DEVICE), "ZS_ERR_DEVICE");
    assert_string_equal(zs_status_name((zs_status)18), "ZS_ERR_?");
    assert_string_equal(zs_status_name((zs_status)-1), "ZS_ERR_?");
    assert_string_equal(zs_version(), ZS_VERSION);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_message),
        cmocka_unit_test(test_macros),
        cmocka_unit_test(test_names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* SPDX-License-Identifier: Apache-2.0 */
#include <jansson.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"

static char path[64];

/* The events of the file, the last (zspill_trace) included. */
static json_t *load(json_t **root)
{
    json_error_t error;
    json_t *events;

    *root = json_load_file(path, 0, &error);
    if (!*root)
        fail_msg("%s line %d: %s", path, error.line, error.text);
    events = json_object_get(*root, "traceEvents");
    assert_true(json_is_array(events));
    return events;
}

static const char *text_of(const json_t *object, const char *key)
{
    const char *text = json_string_value(json_object_get(object, key));
    assert_non_null(text);
    return text;
}

static json_int_t int_of(const json_t *object, const char *key)
{
    assert_true(json_is_integer(json_object_get(object, key)));
    return json_integer_value(json_object_get(object, key));
}

/* The name that a metadata event gives to the track of a span. */
static const char *name_of(const json_t *events, const char *what, const json_t *span)
{
    size_t i;
    const json_t *event;

    json_array_foreach(
        events, i,
        event) if (!strcmp(text_of(event, "ph"), "M") && !strcmp(text_of(event, "name"), what) &&
                   int_of(event, "pid") == int_of(span, "pid") &&
                   (!strcmp(what, "process_name") ||
                    int_of(event, "tid") ==
                        int_of(span, "tid"))) return text_of(json_object_get(event, "args"),
                                                             "name");
    fail_msg("no %s for a span", what);
    return NULL;
}

static size_t count_spans(const json_t *events)
{
    size_t i, count = 0;
    const json_t *event;

    json_array_foreach(events, i, event) count += !strcmp(text_of(event, "ph"), "X");
    return count;
}

static const json_t *find_span(const json_t *events, const char *name)
{
    size_t i;
    const json_t *event;

    json_array_foreach(events, i, event) if (!strcmp(text_of(event, "name"), name)) return event;
    fail_msg("no span '%s'", name);
    return NULL;
}

static void test_spans(void **state)
{
    static const char odd[] = "a \"b\" \\ c\n\x01 \xc3\xa9";
    zs_trace *trace = NULL;
    json_t *root;
    const json_t *events, *span;
    char track[] = "io"; /* equal text, another address */

    assert_int_equal(zs_trace_open(path, 0, &trace), ZS_OK);
    assert_int_equal(access(path, F_OK), 0);
    zs_trace_span(trace, 0, "compute", "adam", 1234567890123, 1234567891123);
    zs_trace_span(trace, 0, "io", odd, 5, 6);
    zs_trace_span(trace, 0, track, "second", 10, 5);
    zs_trace_span(trace, 3, "io", "other rank", 7, 1007);
    zs_trace_span(NULL, 0, "x", "y", 0, 1);
    assert_int_equal(zs_trace_close(&trace), ZS_OK);
    assert_null(trace);
    assert_int_equal(zs_trace_close(&trace), ZS_OK);

    events = load(&root);
    assert_int_equal(count_spans(events), 4);
    span = find_span(events, "adam");
    assert_int_equal(int_of(span, "pid"), 0);
    assert_true(json_number_value(json_object_get(span, "ts")) == 1234567890.123);
    assert_true(json_number_value(json_object_get(span, "dur")) == 1.0);
    assert_string_equal(name_of(events, "thread_name", span), "compute");
    assert_string_equal(name_of(events, "process_name", span), "rank 0");
    span = find_span(events, odd);
    assert_string_equal(name_of(events, "thread_name", span), "io");
    assert_int_equal(int_of(span, "tid"), int_of(find_span(events, "second"), "tid"));
    assert_true(json_number_value(json_object_get(find_span(events, "second"), "dur")) == 0);
    span = find_span(events, "other rank");
    assert_int_equal(int_of(span, "pid"), 3);
    assert_string_equal(name_of(events, "process_name", span), "rank 3");
    json_decref(root);
}

static void test_refused(void **state)
{
    zs_trace *trace = NULL;
    (void)state;

    assert_int_equal(zs_trace_open(NULL, 0, &trace), ZS_ERR_ARG);
    assert_int_equal(zs_trace_open(path, 0, NULL), ZS_ERR_ARG);
    assert_non_null(strstr(zs_last_error(), "is NULL"));
    assert_int_equal(zs_trace_close(NULL), ZS_OK);
    /* Nobody reads it: an error, not a wait. */
    unlink(path);
    assert_int_equal(mkfifo(path, 0600), 0);
    assert_int_equal(zs_trace_open(path, 0, &trace), ZS_ERR_IO);
    assert_null(trace);
    assert_non_null(strstr(zs_last_error(), "choose another path"));
    unlink(path);
}

static void test_empty(void **state)
{
    zs_trace *trace = NULL;
    json_t *root;

    assert_int_equal(zs_trace_open(path, 0, &trace), ZS_OK);
    assert_int_equal(zs_trace_close(&trace), ZS_OK);
    assert_int_equal(count_spans(load(&root)), 0);
    json_decref(root);
}

static void test_limit(void **state)
{
    zs_trace *trace = NULL;
    json_t *root;
    const json_t *events, *last;

    assert_int_equal(zs_trace_open(path, 1500, &trace), ZS_OK);
    for (uint64_t i = 0; i < 2000; i++)
        zs_trace_span(trace, 0, "t", "n", i, i + 1);
    assert_int_equal(zs_trace_close(&trace), ZS_OK);
    events = load(&root);
    assert_int_equal(count_spans(events), 1500);
    last = json_object_get(find_span(events, "zspill_trace"), "args");
    assert_int_equal(int_of(last, "events"), 1500);
    assert_int_equal(int_of(last, "dropped"), 500);
    json_decref(root);
}

static void *span_often(void *cookie)
{
    for (int i = 0; i < 2000; i++) {
        uint64_t begin = zs_trace_now();
        zs_trace_span(cookie, i % 4, "track", "span", begin, zs_trace_now());
    }
    return NULL;
}

static void test_threads(void **state)
{
    zs_trace *trace = NULL;
    pthread_t threads[3];
    json_t *root;

    assert_int_equal(zs_trace_open(path, 0, &trace), ZS_OK);
    for (int i = 0; i < 3; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, span_often, trace), 0);
    for (int i = 0; i < 3; i++)
        pthread_join(threads[i], NULL);
    assert_int_equal(zs_trace_close(&trace), ZS_OK);
    assert_int_equal(count_spans(load(&root)), 6000);
    json_decref(root);
}

static void test_errors(void **state)
{
    zs_trace *trace = NULL;

    assert_int_equal(zs_trace_open("/no/such/dir/trace.json", 0, &trace), ZS_ERR_IO);
    assert_null(trace);
    check_message("trace '/no/such/dir/trace.json' cannot be created: No such file or directory");
    if (access("/dev/full", W_OK))
        skip();
    assert_int_equal(zs_trace_open("/dev/full", 0, &trace), ZS_OK);
    zs_trace_span(trace, 0, "t", "n", 0, 1);
    assert_int_equal(zs_trace_close(&trace), ZS_ERR_IO);
    assert_null(trace);
    check_message("trace '/dev/full': writing 1 events failed: No space left on device");
}

static int make_path(void **state)
{
    int fd;
    snprintf(path, sizeof path, "/tmp/zspill-trace-XXXXXX");
    fd = mkstemp(path);
    return fd < 0 ? -1 : close(fd);
}

static int remove_path(void **state)
{
    return unlink(path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_spans), cmocka_unit_test(test_refused), cmocka_unit_test(test_empty),
        cmocka_unit_test(test_limit), cmocka_unit_test(test_threads), cmocka_unit_test(test_errors),
    };
    return cmocka_run_group_tests(tests, make_path, remove_path);
}

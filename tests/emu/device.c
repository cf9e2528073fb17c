/* SPDX-License-Identifier: Apache-2.0 */
/* A CUDA device through the plug-in: memory, copies, events, messages. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/status.h"
#include "device/cuda.h"

enum { COUNT = 100000 };

static void copies_are_ordered_by_events(void **state)
{
    zs_device *device;
    (void)state;
    assert_int_equal(zs_device_open_cuda(0, &device), ZS_OK);
    const zs_device_ops *ops = device->ops;
    const size_t bytes = COUNT * sizeof(uint32_t);
    void *on_device, *from, *to;
    assert_int_equal(ops->alloc(device, bytes, &on_device), ZS_OK);
    assert_int_equal(ops->host_alloc(device, bytes, &from), ZS_OK);
    assert_int_equal(ops->host_alloc(device, bytes, &to), ZS_OK);
    zs_stream *out;
    zs_event *there;
    assert_int_equal(ops->stream_open(device, &out), ZS_OK);
    assert_int_equal(ops->event_open(device, &there), ZS_OK);

    /* Device memory begins as zeros. */
    memset(to, 1, bytes);
    assert_int_equal(ops->copy(device, to, on_device, bytes, NULL), ZS_OK);
    assert_int_equal(ops->stream_sync(device, NULL), ZS_OK);
    for (size_t i = 0; i < bytes; i++)
        assert_int_equal(((char *)to)[i], 0);

    for (uint32_t i = 0; i < COUNT; i++)
        ((uint32_t *)from)[i] = i * 2654435761u;
    assert_int_equal(ops->copy(device, on_device, from, bytes, NULL), ZS_OK);
    assert_int_equal(ops->event_record(device, there, NULL), ZS_OK);
    assert_int_equal(ops->event_wait(device, there, out), ZS_OK);
    assert_int_equal(ops->copy(device, to, on_device, bytes, out), ZS_OK);
    assert_int_equal(ops->event_record(device, there, out), ZS_OK);
    assert_int_equal(ops->event_sync(device, there), ZS_OK);
    assert_memory_equal(to, from, bytes);

    ops->event_close(device, there);
    ops->stream_close(device, out);
    ops->host_free(device, to, bytes);
    ops->host_free(device, from, bytes);
    ops->free(device, on_device, bytes);
    zs_device_close(&device);
    assert_null(device);
}

static void too_much_is_refused(void **state)
{
    zs_device *device;
    size_t free_before, free_after, total;
    void *ptr;
    (void)state;
    assert_int_equal(zs_device_open_cuda(1, &device), ZS_OK);
    assert_int_equal(device->ops->mem_info(device, &free_before, &total), ZS_OK);
    assert_int_equal(device->ops->alloc(device, total + 1, &ptr), ZS_ERR_NOMEM);
    assert_null(ptr);
    assert_non_null(strstr(zs_last_error(), "cudaErrorMemoryAllocation"));
    /* The failure is not found again by the next call. */
    assert_int_equal(device->ops->alloc(device, 4096, &ptr), ZS_OK);
    device->ops->free(device, ptr, 4096);
    assert_int_equal(device->ops->mem_info(device, &free_after, &total), ZS_OK);
    assert_int_equal(free_before, free_after);
    zs_device_close(&device);
}

static void devices_that_are_not_there(void **state)
{
    const zs_cuda_plugin *plugin;
    zs_device *device;
    int count;
    (void)state;
    assert_int_equal(zs_cuda_open(&plugin), ZS_OK);
    assert_int_equal(plugin->device_count(&count), ZS_OK);
    assert_int_equal(zs_device_open_cuda(count, &device), ZS_ERR_ARG);
    assert_null(device);
    assert_non_null(strstr(zs_last_error(), "CUDA_VISIBLE_DEVICES"));
    assert_int_equal(zs_device_open_cuda(-1, &device), ZS_ERR_ARG);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(copies_are_ordered_by_events),
        cmocka_unit_test(too_much_is_refused),
        cmocka_unit_test(devices_that_are_not_there),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

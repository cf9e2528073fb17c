/* SPDX-License-Identifier: Apache-2.0 */
#include "device/device.h"

#include <sys/wait.h>
#include <unistd.h>

#include "base/util.h"
#include "check.h"

static void check_row(const zs_ledger *ledger, size_t index, zs_tier tier, uint64_t bytes,
                      uint64_t peak)
{
    zs_memory_row rows[8];
    size_t count;

    zs_ledger_rows(ledger, rows, 8, &count);
    assert_true(index < count);
    assert_int_equal(rows[index].tier, tier);
    assert_int_equal(rows[index].bytes, bytes);
    assert_int_equal(rows[index].peak, peak);
}

static void test_mem(void **state)
{
    zs_device *device = NULL;
    zs_ledger *ledger = NULL;
    zs_mem a = {0}, b = {0}, none = {0};

    assert_int_equal(zs_device_open_host(&device), ZS_OK);
    assert_string_equal(device->ops->name, "host");
    assert_int_equal(zs_ledger_open(&ledger), ZS_OK);
    assert_int_equal(zs_mem_alloc(device, ledger, ZS_TIER_DEVICE, "weights", 12345, &a), ZS_OK);
    assert_int_equal(zs_mem_alloc(device, ledger, ZS_TIER_HOST, "weights", (5 << 20) + 3, &b),
                     ZS_OK);
    assert_int_equal((uintptr_t)a.ptr % ZS_PAGE, 0);
    assert_int_equal((uintptr_t)b.ptr % ZS_PAGE, 0);
    assert_int_equal(a.bytes, 12345);
    for (size_t i = 0; i < b.bytes; i++)
        assert_int_equal(((unsigned char *)b.ptr)[i], 0);
    memset(a.ptr, 1, a.bytes);
    memset(b.ptr, 1, b.bytes);
    check_row(ledger, 0, ZS_TIER_DEVICE, 12345, 12345);
    check_row(ledger, 1, ZS_TIER_HOST, (5 << 20) + 3, (5 << 20) + 3);
    assert_int_equal(zs_mem_alloc(device, ledger, ZS_TIER_HOST, "nothing", 0, &none), ZS_OK);
    assert_null(none.ptr);
    zs_mem_free(&none);
    zs_mem_free(&a);
    assert_null(a.ptr);
    zs_mem_free(&a);
    zs_mem_free(&b);
    check_row(ledger, 0, ZS_TIER_DEVICE, 0, 12345);
    check_row(ledger, 1, ZS_TIER_HOST, 0, (5 << 20) + 3);
    zs_ledger_close(&ledger);
    zs_device_close(&device);
    assert_null(device);
    zs_device_close(&device);
}

static void test_mem_failure(void **state)
{
    zs_device *device = NULL;
    zs_ledger *ledger = NULL;
    zs_mem mem = {0};
    size_t count;

    assert_int_equal(zs_device_open_host(&device), ZS_OK);
    assert_int_equal(zs_ledger_open(&ledger), ZS_OK);
    assert_int_equal(
        zs_mem_alloc(device, ledger, ZS_TIER_HOST, "optimizer states", 1ull << 60, &mem),
        ZS_ERR_NOMEM);
    check_message("optimizer states: 1024.00 PiB (1152921504606846976 bytes) of host memory");
    check_message("use more ranks");
    check_message("Cannot allocate memory");
    assert_null(mem.ptr);
    zs_mem_free(&mem);
    assert_int_equal(zs_mem_alloc(device, ledger, ZS_TIER_DEVICE, "weights", SIZE_MAX, &mem),
                     ZS_ERR_NOMEM);
    check_message("weights: 18446744073709551615 bytes of device memory");
    assert_int_equal(zs_mem_alloc(device, ledger, ZS_TIER_NVME, "weights", 1, &mem), ZS_ERR_ARG);
    check_message("tier nvme");
    zs_ledger_rows(ledger, NULL, 0, &count);
    assert_int_equal(count, 0);
    zs_ledger_close(&ledger);
    zs_device_close(&device);
}

static void test_streams(void **state)
{
    zs_device *device = NULL;
    const zs_device_ops *ops;
    zs_stream *stream = NULL;
    zs_event *event = NULL;
    char a[100], b[100];

    assert_int_equal(zs_device_open_host(&device), ZS_OK);
    ops = device->ops;
    assert_int_equal(ops->stream_open(device, &stream), ZS_OK);
    assert_int_equal(ops->event_open(device, &event), ZS_OK);
    assert_non_null(stream);
    assert_non_null(event);
    memset(a, 7, sizeof a);
    assert_int_equal(ops->zero(device, b, sizeof b, stream), ZS_OK);
    assert_int_equal(b[0] | b[99], 0);
    assert_int_equal(ops->copy(device, b, a, 99, NULL), ZS_OK);
    assert_memory_equal(a, b, 99);
    assert_int_equal(b[99], 0);
    assert_int_equal(ops->copy(device, a, a, 0, stream), ZS_OK);
    assert_int_equal(ops->event_record(device, event, stream), ZS_OK);
    assert_int_equal(ops->event_wait(device, event, NULL), ZS_OK);
    assert_int_equal(ops->stream_sync(device, stream), ZS_OK);
    ops->event_close(device, event);
    ops->stream_close(device, stream);
    zs_device_close(&device);
}

/* Pinned memory is not there in the child: copying gigabytes at fork, or on the first write to a
 * registered buffer after it, is what MADV_DONTFORK is for. Device memory is. */
static int is_there(const void *ptr)
{
    int ends[2], fine;
    assert_int_equal(pipe(ends), 0);
    fine = write(ends[1], ptr, 1) == 1; /* EFAULT instead of a crash */
    close(ends[0]);
    close(ends[1]);
    return fine;
}

static void test_fork(void **state)
{
    zs_device *device = NULL;
    void *pinned = NULL, *plain = NULL;
    int result = -1;
    pid_t pid;

    assert_int_equal(zs_device_open_host(&device), ZS_OK);
    assert_int_equal(device->ops->host_alloc(device, 1 << 20, &pinned), ZS_OK);
    assert_int_equal(device->ops->alloc(device, 1 << 20, &plain), ZS_OK);
    memset(pinned, 1, 1 << 20);
    memset(plain, 1, 1 << 20);
    pid = fork();
    if (!pid)
        _exit((is_there(pinned) ? 1 : 0) + (is_there(plain) ? 0 : 2));
    assert_int_equal(waitpid(pid, &result, 0), pid);
    assert_int_equal(result, 0);
    device->ops->host_free(device, pinned, 1 << 20);
    device->ops->free(device, plain, 1 << 20);
    zs_device_close(&device);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_mem),
        cmocka_unit_test(test_mem_failure),
        cmocka_unit_test(test_streams),
        cmocka_unit_test(test_fork),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

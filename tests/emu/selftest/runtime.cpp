/* SPDX-License-Identifier: Apache-2.0 */
/* Streams, devices and errors as CUDA has them; failures that were asked for; what is counted and
 * recorded. */
#include <fstream>
#include <sstream>
#include <string>
#include <unistd.h>

#include "tests/emu/kernel.h"
#include "tests/emu/selftest/check.h"

__global__ void add_one(float *x, int count)
{
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < count)
        x[i] += 1;
}

static cudaError_t launch(cudaStream_t stream, float *x)
{
    ZS_LAUNCH(add_one, 1, 32, 0, stream, x, 32);
    return cudaGetLastError();
}

static void devices_are_kept_apart()
{
    CHECK(cudaSetDevice(99) == cudaErrorInvalidDevice && cudaGetLastError() != cudaSuccess);
    CHECK(cudaSetDevice(1) == cudaSuccess);
    cudaStream_t second = new_stream();
    float *y = new_device<float>(32);
    cudaEvent_t event = new_event();
    CHECK(cudaSetDevice(0) == cudaSuccess);
    cudaStream_t first = new_stream();
    float *x = new_device<float>(32);
    float *host = new_pinned<float>(32);

    CHECK(launch(second, x) == cudaErrorInvalidResourceHandle);
    CHECK(cudaMemsetAsync(y, 0, 4, second) == cudaErrorInvalidResourceHandle);
    CHECK(cudaEventRecord(event, first) == cudaErrorInvalidResourceHandle);
    CHECK(cudaGetLastError() == cudaErrorInvalidResourceHandle);
    CHECK(cudaGetLastError() == cudaSuccess);
    /* These may. */
    CHECK(cudaMemcpyAsync(y, host, 128, cudaMemcpyDefault, second) == cudaSuccess);
    CHECK(cudaEventRecord(event, second) == cudaSuccess);
    CHECK(cudaStreamWaitEvent(first, event, 0) == cudaSuccess);
    CHECK(cudaMemcpyAsync(x, y, 128, cudaMemcpyDeviceToDevice, first) == cudaSuccess);
    CHECK(launch(first, x) == cudaSuccess);
    CHECK(from_device(first, x, 1)[0] == 1);
    CHECK(cudaEventQuery(event) == cudaSuccess);

    struct cudaPointerAttributes at;
    CHECK(cudaPointerGetAttributes(&at, y) == cudaSuccess && at.type == cudaMemoryTypeDevice &&
          at.device == 1);
    CHECK(cudaPointerGetAttributes(&at, host + 31) == cudaSuccess && at.type == cudaMemoryTypeHost);
    CHECK(cudaPointerGetAttributes(&at, &at) == cudaSuccess &&
          at.type == cudaMemoryTypeUnregistered);
    CHECK(cudaHostRegister(host + 8, 4, cudaHostRegisterPortable | cudaHostRegisterMapped) ==
          cudaErrorHostMemoryAlreadyRegistered);
    CHECK(cudaHostUnregister(host + 8) == cudaErrorHostMemoryNotRegistered);

    CHECK(cudaStreamDestroy(first) == cudaSuccess && cudaStreamDestroy(second) == cudaSuccess);
    CHECK(cudaEventDestroy(event) == cudaSuccess);
    CHECK(cudaFree(x) == cudaSuccess && cudaFree(y) == cudaSuccess);
    free_pinned(host);
    CHECK(cudaGetLastError() == cudaErrorHostMemoryNotRegistered);
}

static void failures_come_when_asked_for()
{
    const emu_control &control = emu_control_table;
    cudaStream_t stream = new_stream();
    float *x = new_device<float>(32);
    float *host = new_pinned<float>(32);
    void *ptr;
    cudaStream_t another;
    cudaEvent_t event;

    control.fail(EMU_MALLOC, EMU_ANY_DEVICE, 2);
    CHECK(cudaMalloc(&ptr, 4) == cudaSuccess && cudaFree(ptr) == cudaSuccess);
    CHECK(cudaMalloc(&ptr, 4) == cudaErrorMemoryAllocation);
    CHECK(cudaMalloc(&ptr, 4) == cudaSuccess && cudaFree(ptr) == cudaSuccess);
    control.fail(EMU_MALLOC, 1, 1); /* another device's */
    CHECK(cudaMalloc(&ptr, 4) == cudaSuccess && cudaFree(ptr) == cudaSuccess);
    control.fail(EMU_MALLOC, 1, 0);
    control.fail(EMU_HOST_REGISTER, 0, 1);
    CHECK(cudaHostRegister(&ptr, 4, 3) == cudaErrorMemoryAllocation);
    control.fail(EMU_STREAM, 0, 1);
    CHECK(cudaStreamCreateWithFlags(&another, cudaStreamNonBlocking) == cudaErrorMemoryAllocation);
    control.fail(EMU_EVENT, 0, 1);
    CHECK(cudaEventCreateWithFlags(&event, 0) == cudaErrorMemoryAllocation);
    control.fail(EMU_LAUNCH, 0, 1);
    CHECK(launch(stream, x) == cudaErrorLaunchOutOfResources);
    control.fail(EMU_COPY, 0, 1);
    CHECK(cudaMemcpyAsync(x, host, 4, cudaMemcpyDefault, stream) == cudaErrorInvalidValue);
    control.fail(EMU_MEMSET, 0, 1);
    CHECK(cudaMemsetAsync(x, 0, 4, stream) == cudaErrorInvalidValue);
    CHECK(cudaGetLastError() == cudaErrorInvalidValue);
    CHECK(launch(stream, x) == cudaSuccess);

    const uint64_t to_device = control.bytes(EMU_TO_DEVICE), to_host = control.bytes(EMU_TO_HOST),
                   copies = control.calls(EMU_COPY, 0);
    CHECK(cudaMemcpyAsync(x, host, 100, cudaMemcpyDefault, stream) == cudaSuccess);
    CHECK(cudaMemcpyAsync(host, x, 28, cudaMemcpyDefault, stream) == cudaSuccess);
    CHECK(control.bytes(EMU_TO_DEVICE) - to_device == 100);
    CHECK(control.bytes(EMU_TO_HOST) - to_host == 28);
    CHECK(control.calls(EMU_COPY, 0) - copies == 2);

    size_t free_bytes, total;
    CHECK(control.used(0) == 128 && control.peak(0) >= 132);
    control.set_capacity(128 + 64);
    CHECK(cudaMemGetInfo(&free_bytes, &total) == cudaSuccess && free_bytes == 64 && total == 192);
    CHECK(cudaMalloc(&ptr, 65) == cudaErrorMemoryAllocation);
    CHECK(cudaMalloc(&ptr, 64) == cudaSuccess && cudaFree(ptr) == cudaSuccess);
    control.set_capacity((size_t)1 << 30);

    CHECK(cudaStreamDestroy(stream) == cudaSuccess && cudaFree(x) == cudaSuccess);
    free_pinned(host);
    (void)cudaGetLastError();
}

/* Last: the device does not come back. */
static void an_illegal_address_ends_the_device()
{
    cudaStream_t stream = new_stream();
    cudaEvent_t event = new_event();
    float *x = new_device<float>(32);
    void *ptr;
    emu_control_table.fail(EMU_ILLEGAL, 0, 1);
    (void)launch(stream, x); /* which may have reached the device when it returns */
    /* Those behind it do not run, and the host is not kept waiting. */
    (void)cudaMemsetAsync(x, 0, 128, stream);
    CHECK(cudaStreamSynchronize(stream) == cudaErrorIllegalAddress);
    CHECK(cudaGetLastError() == cudaErrorIllegalAddress);
    CHECK(cudaGetLastError() == cudaErrorIllegalAddress);
    CHECK(launch(stream, x) == cudaErrorIllegalAddress);
    CHECK(cudaEventRecord(event, stream) == cudaErrorIllegalAddress);
    CHECK(cudaMalloc(&ptr, 4) == cudaErrorIllegalAddress);
    CHECK(cudaEventDestroy(event) == cudaErrorIllegalAddress);
    CHECK(cudaStreamDestroy(stream) == cudaErrorIllegalAddress);
    CHECK(cudaFree(x) == cudaErrorIllegalAddress);
    /* The others live on. */
    CHECK(cudaSetDevice(1) == cudaSuccess);
    CHECK(cudaMalloc(&ptr, 4) == cudaSuccess && cudaFree(ptr) == cudaSuccess);
}

static void what_is_queued_is_recorded(const char *path)
{
    cudaStream_t stream = new_stream(), other = new_stream();
    cudaEvent_t event = new_event();
    float *x = new_device<float>(32);
    float *host = new_pinned<float>(32);
    CHECK(truncate(path, 0) == 0);
    CHECK(cudaMemcpyAsync(x, host, 128, cudaMemcpyDefault, stream) == cudaSuccess);
    CHECK(cudaEventRecord(event, stream) == cudaSuccess);
    CHECK(cudaStreamWaitEvent(other, event, 0) == cudaSuccess);
    CHECK(launch(other, x) == cudaSuccess);
    CHECK(cudaEventSynchronize(event) == cudaSuccess);
    std::ifstream file(path);
    std::stringstream got;
    got << file.rdbuf();
    CHECK(got.str() ==
          "{\"device\":0,\"stream\":1,\"op\":\"copy\",\"kind\":\"h2d\",\"bytes\":128}\n"
          "{\"device\":0,\"stream\":1,\"op\":\"record\",\"event\":1}\n"
          "{\"device\":0,\"stream\":2,\"op\":\"wait\",\"event\":1}\n"
          "{\"device\":0,\"stream\":2,\"op\":\"kernel\",\"name\":\"add_one\",\"grid\":[1,1,1],"
          "\"block\":[32,1,1],\"numbers\":[32]}\n"
          "{\"device\":0,\"stream\":0,\"op\":\"event_sync\",\"event\":1}\n");
    CHECK(cudaStreamDestroy(stream) == cudaSuccess && cudaStreamDestroy(other) == cudaSuccess);
    CHECK(cudaEventDestroy(event) == cudaSuccess && cudaFree(x) == cudaSuccess);
    free_pinned(host);
    CHECK(unlink(path) == 0);
}

int main()
{
    char path[] = "/tmp/zs-emu-record-XXXXXX";
    CHECK(mkstemp(path) >= 0);
    setenv("ZS_EMU_RECORD", path, 1);
    what_is_queued_is_recorded(path);
    devices_are_kept_apart();
    failures_come_when_asked_for();
    an_illegal_address_ends_the_device();
    CHECK(emu_control_table.open_objects() == 0);
    puts("emulated: all right");
    return 0;
}

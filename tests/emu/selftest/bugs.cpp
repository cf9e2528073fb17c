/* SPDX-License-Identifier: Apache-2.0 */
/* Mistakes that a GPU punishes, or not, from time to time: each is made in a process of its own,
 * and has to be found: by the emulation itself, by ThreadSanitizer or by AddressSanitizer. */
#include <cmath>
#include <string>
#include <sys/wait.h>
#include <unistd.h>

#include <nccl.h>

#include "tests/emu/kernel.h"
#include "tests/emu/selftest/check.h"

#ifdef __clang__
#if __has_feature(thread_sanitizer)
#define __SANITIZE_THREAD__ 1
#elif __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__ 1
#endif
#endif

enum { THREADS = 64, BLOCKS = 2, COUNT = THREADS * BLOCKS };

/* ---- kernels ---- */

/* Reverses the halves of a block. */
__global__ void exchange(float *out, const float *in, int barrier)
{
    ZS_SHARED(float, shared, THREADS);
    const unsigned t = threadIdx.x;
    shared[t] = in[t];
    if (barrier)
        __syncthreads();
    out[t] = shared[THREADS - 1 - t];
}

__global__ void shared_past_end(float *out)
{
    ZS_SHARED(float, shared, THREADS);
    shared[threadIdx.x] = 1;
    __syncthreads();
    out[threadIdx.x] = shared[threadIdx.x + 1];
}

__global__ void dynamic_past_end(float *out)
{
    ZS_SHARED_DYNAMIC(float, shared);
    shared[threadIdx.x + 1] = 1;
    out[threadIdx.x] = 1;
}

__global__ void divergent_shuffle(float *out)
{
    float x = 1;
    if (threadIdx.x & 1)
        x = __shfl_xor_sync(0xffffffff, x, 1);
    out[threadIdx.x] = x;
}

__global__ void two_shuffles(float *out)
{
    float x = 1;
    if (threadIdx.x & 1)
        x = __shfl_xor_sync(0xffffffff, x, 1);
    else
        x = __shfl_xor_sync(0xffffffff, x, 1) + 1;
    out[threadIdx.x] = x;
}

__global__ void outside_mask(float *out)
{
    if (threadIdx.x < 16)
        out[threadIdx.x] = __shfl_down_sync(0xffff, 1.0f, 8, 32);
}

__global__ void early_exit(float *out, unsigned count)
{
    if (threadIdx.x >= count)
        return;
    __syncthreads();
    out[threadIdx.x] = 1;
}

__global__ void early_exit_of_a_lane(float *out, unsigned count)
{
    if (threadIdx.x >= count)
        return;
    out[threadIdx.x] = __shfl_xor_sync(0xffffffff, 1.0f, 1);
}

__global__ void barrier_for_some(float *out)
{
    if (threadIdx.x < 32)
        __syncthreads();
    out[threadIdx.x] = 1;
}

__global__ void unset_shared(float *out)
{
    ZS_SHARED(float, shared, THREADS);
    out[threadIdx.x] = shared[threadIdx.x];
}

__global__ void large_shared(float *out)
{
    ZS_SHARED(float, shared, (48 << 10) / sizeof(float) + 1);
    out[threadIdx.x] = shared[threadIdx.x];
}

/* All blocks add to one number. */
__global__ void add_all(float *sum, const float *x, int atomic)
{
    const float mine = x[blockIdx.x * blockDim.x + threadIdx.x];
    if (threadIdx.x)
        return;
    if (atomic)
        atomicAdd(sum, mine);
    else
        *sum += mine;
}

__global__ void misaligned(float *out)
{
    const float2 pair = __ldcs((const float2 *)(out + 1));
    out[0] = pair.x;
}

__global__ void twice(float *x, unsigned count)
{
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count)
        x[i] *= 2;
}

/* ---- mistakes ---- */

static cudaStream_t stream, other;
static cudaEvent_t event;
static float *x, *y, *pinned;

static void launch_exchange(int barrier)
{
    ZS_LAUNCH(exchange, 1, THREADS, 0, stream, y, x, barrier);
}

static void no_barrier()
{
    launch_exchange(0);
}

static void wrong_shared_index()
{
    ZS_LAUNCH(shared_past_end, 1, THREADS, 0, stream, y);
}

static void wrong_dynamic_index()
{
    ZS_LAUNCH(dynamic_past_end, 1, THREADS, THREADS * sizeof(float), stream, y);
}

static void no_dynamic_memory()
{
    ZS_LAUNCH(dynamic_past_end, 1, THREADS, 0, stream, y);
}

static void half_a_shuffle()
{
    ZS_LAUNCH(divergent_shuffle, 1, THREADS, 0, stream, y);
}

static void two_shuffles_for_one()
{
    ZS_LAUNCH(two_shuffles, 1, THREADS, 0, stream, y);
}

static void shuffle_outside_mask()
{
    ZS_LAUNCH(outside_mask, 1, THREADS, 0, stream, y);
}

static void exit_before_barrier()
{
    ZS_LAUNCH(early_exit, 1, THREADS, 0, stream, y, THREADS - 3);
}

static void exit_before_shuffle()
{
    ZS_LAUNCH(early_exit_of_a_lane, 1, THREADS, 0, stream, y, THREADS - 3);
}

static void barrier_in_a_branch()
{
    ZS_LAUNCH(barrier_for_some, 1, THREADS, 0, stream, y);
}

static void shared_before_it_is_set()
{
    ZS_LAUNCH(unset_shared, 1, THREADS, 0, stream, y);
    if (std::isnan(from_device(stream, y, 1)[0]))
        fputs("not a number\n", stderr);
}

static void device_memory_before_it_is_set()
{
    float *fresh = new_device<float>(COUNT);
    ZS_LAUNCH(twice, BLOCKS, THREADS, 0, stream, fresh, COUNT);
    if (std::isnan(from_device(stream, fresh, 1)[0]))
        fputs("not a number\n", stderr);
}

static void too_much_shared()
{
    ZS_LAUNCH(large_shared, 1, THREADS, 0, stream, y);
}

static void blocks_without_atomic()
{
    ZS_LAUNCH(add_all, BLOCKS, THREADS, 0, stream, y, x, 0);
}

static void wrong_index()
{
    ZS_LAUNCH(twice, BLOCKS + 1, THREADS, 0, stream, x, COUNT + 1);
}

static void far_index()
{
    ZS_LAUNCH(twice, BLOCKS + 1, THREADS, 0, stream, x, COUNT + THREADS);
}

static void misaligned_vector()
{
    ZS_LAUNCH(misaligned, 1, 1, 0, stream, y);
}

static void freed_memory()
{
    CHECK(cudaFree(x) == cudaSuccess);
    ZS_LAUNCH(twice, BLOCKS, THREADS, 0, stream, x, COUNT);
}

static void freed_twice()
{
    CHECK(cudaFree(x) == cudaSuccess);
    CHECK(cudaFree(x) == cudaSuccess);
}

static void host_memory_in_a_kernel()
{
    ZS_LAUNCH(twice, BLOCKS, THREADS, 0, stream, std::vector<float>(COUNT).data(), COUNT);
}

static void memory_of_another_device()
{
    CHECK(cudaSetDevice(1) == cudaSuccess);
    float *far = new_device<float>(COUNT);
    CHECK(cudaSetDevice(0) == cudaSuccess);
    ZS_LAUNCH(twice, BLOCKS, THREADS, 0, stream, far, COUNT);
}

static void host_reads_device_memory()
{
    printf("%f\n", (double)x[0]);
}

static void copy(void *dst, const void *src, cudaStream_t on)
{
    CHECK(cudaMemcpyAsync(dst, src, COUNT * sizeof(float), cudaMemcpyDefault, on) == cudaSuccess);
}

static void pageable_copy()
{
    std::vector<float> host(COUNT);
    copy(x, host.data(), stream);
}

static void long_copy()
{
    (void)cudaMemcpyAsync(x, pinned, COUNT * sizeof(float) + 1, cudaMemcpyDefault, stream);
}

static void copy_of_the_wrong_kind()
{
    (void)cudaMemcpyAsync(x, pinned, sizeof(float), cudaMemcpyDeviceToHost, stream);
}

static void default_stream()
{
    ZS_LAUNCH(twice, BLOCKS, THREADS, 0, nullptr, x, COUNT);
}

static void blocking_stream()
{
    cudaStream_t blocking;
    (void)cudaStreamCreateWithFlags(&blocking, 0);
}

static void event_never_recorded()
{
    (void)cudaStreamWaitEvent(other, new_event(), 0);
}

/* The kernel waits for the copy, if it does. */
static void copy_then_kernel(bool waits)
{
    copy(x, pinned, other);
    CHECK(cudaEventRecord(event, other) == cudaSuccess);
    if (waits)
        CHECK(cudaStreamWaitEvent(stream, event, 0) == cudaSuccess);
    ZS_LAUNCH(twice, BLOCKS, THREADS, 0, stream, x, COUNT);
}

static void kernel_before_its_copy()
{
    copy_then_kernel(false);
}

static void wait_that_is_skipped()
{
    emu_control_table.fail(EMU_STREAM_WAIT, EMU_ANY_DEVICE, 1);
    copy_then_kernel(true);
}

static void buffer_reused_too_early()
{
    ZS_LAUNCH(twice, BLOCKS, THREADS, 0, stream, x, COUNT);
    copy(x, pinned, other);
}

static void host_does_not_wait()
{
    copy(pinned, x, stream);
    pinned[0] += 1;
}

static void host_writes_too_early()
{
    copy(x, pinned, stream);
    pinned[0] = 1;
}

static void reduced_before_it_is_computed()
{
    ncclComm_t comm;
    CHECK(ncclCommInitAll(&comm, 1, nullptr) == ncclSuccess);
    ZS_LAUNCH(twice, BLOCKS, THREADS, 0, stream, x, COUNT);
    CHECK(ncclReduceScatter(x, y, COUNT, ncclFloat32, ncclSum, comm, other) == ncclSuccess);
}

static void ranks_disagree()
{
    ncclComm_t comms[2];
    CHECK(ncclCommInitAll(comms, 2, nullptr) == ncclSuccess);
    CHECK(ncclAllReduce(x, x, COUNT, ncclFloat32, ncclSum, comms[0], stream) == ncclSuccess);
    CHECK(cudaSetDevice(1) == cudaSuccess);
    cudaStream_t second = new_stream();
    float *z = new_device<float>(COUNT);
    CHECK(ncclAllReduce(z, z, COUNT / 2, ncclFloat32, ncclSum, comms[1], second) == ncclSuccess);
}

static void stream_left_open()
{
    (void)new_stream();
}

static void no_mistake()
{
    launch_exchange(1);
    ZS_LAUNCH(add_all, BLOCKS, THREADS, 0, stream, y, x, 1);
    CHECK(cudaEventRecord(event, stream) == cudaSuccess);
    CHECK(cudaStreamWaitEvent(other, event, 0) == cudaSuccess);
    copy_then_kernel(true);
    copy(pinned, x, stream);
    CHECK(cudaEventRecord(event, stream) == cudaSuccess);
    CHECK(cudaEventSynchronize(event) == cudaSuccess);
    pinned[0] += 1;
}

/* ---- how each is found ---- */

enum Finder { ALWAYS, BY_TSAN, BY_ASAN };

static const struct Mistake {
    const char *name;
    void (*make)();
    Finder finder;
    const char *message;
} mistakes[] = {
#define MISTAKE(name, finder, message)                                                             \
    {                                                                                              \
#name, name, finder, message                                                               \
    }
    MISTAKE(no_mistake, ALWAYS, "exit 0"),
    MISTAKE(no_barrier, BY_TSAN, "data race"),
    MISTAKE(wrong_shared_index, BY_ASAN, "AddressSanitizer"),
    MISTAKE(wrong_dynamic_index, BY_ASAN, "AddressSanitizer"),
    MISTAKE(no_dynamic_memory, ALWAYS, "none was given to the launch"),
    MISTAKE(half_a_shuffle, ALWAYS, "names a lane that has ended"),
    MISTAKE(two_shuffles_for_one, ALWAYS, "different warp operations"),
    MISTAKE(shuffle_outside_mask, ALWAYS, "not in its mask"),
    MISTAKE(exit_before_barrier, ALWAYS, "while others wait in __syncthreads"),
    MISTAKE(exit_before_shuffle, ALWAYS, "kernel early_exit_of_a_lane: "),
    MISTAKE(barrier_in_a_branch, ALWAYS, "while others wait in __syncthreads"),
    MISTAKE(shared_before_it_is_set, ALWAYS, "not a number"),
    MISTAKE(device_memory_before_it_is_set, ALWAYS, "not a number"),
    MISTAKE(too_much_shared, ALWAYS, "too much shared memory"),
    MISTAKE(blocks_without_atomic, BY_TSAN, "data race"),
    MISTAKE(wrong_index, BY_ASAN, "AddressSanitizer"),
    MISTAKE(far_index, ALWAYS, "signal"),
    MISTAKE(misaligned_vector, ALWAYS, "misaligned access"),
    MISTAKE(freed_memory, ALWAYS, "freed"),
    MISTAKE(freed_twice, ALWAYS, "freed"),
    MISTAKE(host_memory_in_a_kernel, ALWAYS, "not pinned"),
    MISTAKE(memory_of_another_device, ALWAYS, "on device 0 got memory of device 1"),
    MISTAKE(host_reads_device_memory, ALWAYS, "signal"),
    MISTAKE(pageable_copy, ALWAYS, "not pinned"),
    MISTAKE(long_copy, ALWAYS, "runs 1 past the end"),
    MISTAKE(copy_of_the_wrong_kind, ALWAYS, "kind does not match"),
    MISTAKE(default_stream, ALWAYS, "default stream"),
    MISTAKE(blocking_stream, ALWAYS, "cudaStreamNonBlocking"),
    MISTAKE(event_never_recorded, ALWAYS, "never recorded"),
    MISTAKE(kernel_before_its_copy, BY_TSAN, "data race"),
    MISTAKE(wait_that_is_skipped, BY_TSAN, "data race"),
    MISTAKE(buffer_reused_too_early, BY_TSAN, "data race"),
    MISTAKE(host_does_not_wait, BY_TSAN, "data race"),
    MISTAKE(host_writes_too_early, BY_TSAN, "data race"),
    MISTAKE(reduced_before_it_is_computed, BY_TSAN, "data race"),
    MISTAKE(ranks_disagree, ALWAYS, "a GPU hangs"),
    MISTAKE(stream_left_open, ALWAYS, "left open at the end: 1 streams"),
#undef MISTAKE
};

/* In a process of its own: makes the mistake, lets all streams end, and closes everything. */
static int make(const std::string &name)
{
    const std::vector<float> zeros(COUNT);
    stream = new_stream();
    other = new_stream();
    event = new_event();
    x = on_device(zeros);
    y = on_device(zeros);
    pinned = new_pinned<float>(COUNT);
    for (const Mistake &each : mistakes)
        if (name == each.name)
            each.make();
    CHECK(cudaDeviceSynchronize() == cudaSuccess);
    CHECK(cudaStreamDestroy(stream) == cudaSuccess && cudaStreamDestroy(other) == cudaSuccess);
    CHECK(cudaEventDestroy(event) == cudaSuccess);
    CHECK(cudaFree(x) == cudaSuccess && cudaFree(y) == cudaSuccess);
    free_pinned(pinned);
    return 0;
}

/* What the process writes on stderr, and how it ends. */
static std::string outcome(const char *name)
{
    int ends[2];
    CHECK(pipe(ends) == 0);
    const pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], 2);
        close(ends[0]);
        setenv("ZS_EMU_LEAKS", "1", 1);
        execl("/proc/self/exe", "bugs", name, (char *)nullptr);
        _exit(127);
    }
    close(ends[1]);
    std::string text;
    char part[4096];
    for (ssize_t n; (n = read(ends[0], part, sizeof part)) > 0;)
        text.append(part, (size_t)n);
    close(ends[0]);
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    /* Sanitizers turn SIGSEGV into a report and an exit code. */
    const bool signalled =
        WIFSIGNALED(status) || text.find("SEGV on unknown address") != std::string::npos;
    return text + (signalled ? "\nsignal" : "\nexit " + std::to_string(WEXITSTATUS(status)));
}

int main(int argc, char **argv)
{
    if (argc > 1)
        return make(argv[1]);
    int missed = 0, found = 0;
    for (const Mistake &each : mistakes) {
#if !defined(__SANITIZE_THREAD__)
        if (each.finder == BY_TSAN)
            continue;
#endif
#if !defined(__SANITIZE_ADDRESS__)
        if (each.finder == BY_ASAN)
            continue;
#endif
        const std::string got = outcome(each.name);
        if (got.find(each.message) == std::string::npos) {
            fprintf(stderr, "FAILED: %s: expected '%s', got:\n%s\n", each.name, each.message,
                    got.substr(0, 2000).c_str());
            missed++;
        } else {
            found++;
        }
    }
    printf("emulated: %d mistakes found, %d missed\n", found, missed);
    return missed != 0;
}

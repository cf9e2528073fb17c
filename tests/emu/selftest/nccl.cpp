/* SPDX-License-Identifier: Apache-2.0 */
/* Collectives of ranks that are threads, and of ranks that are processes; errors that were asked
 * for, and how a hang ends. */
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

#include <nccl.h>

#include "kernels/element.h"
#include "tests/emu/selftest/check.h"

/* More than what ranks show each other at once. */
enum { COUNT = 70001 };

static float value(int rank, size_t i)
{
    return (float)((i * 7 + (size_t)rank * 3) % 61) - 30;
}

static void all_collectives(ncclComm_t comm, int rank, int ranks)
{
    cudaStream_t stream = new_stream();
    const size_t n = (size_t)ranks;
    std::vector<float> mine(COUNT * n);
    for (size_t i = 0; i < mine.size(); i++)
        mine[i] = value(rank, i);
    float *send = on_device(mine), *recv = new_device<float>(COUNT * n);

    CHECK(ncclReduceScatter(send, recv, COUNT, ncclFloat32, ncclSum, comm, stream) == ncclSuccess);
    std::vector<float> got = from_device(stream, recv, COUNT);
    for (size_t i = 0; i < COUNT; i++) {
        float sum = 0;
        for (int r = 0; r < ranks; r++)
            sum += value(r, (size_t)rank * COUNT + i);
        CHECK(got[i] == sum);
    }
    CHECK(ncclAllGather(send, recv, COUNT, ncclFloat32, comm, stream) == ncclSuccess);
    got = from_device(stream, recv, COUNT * n);
    for (int r = 0; r < ranks; r++)
        for (size_t i = 0; i < COUNT; i++)
            CHECK(got[(size_t)r * COUNT + i] == value(r, i));

    /* In place. */
    CHECK(ncclAllReduce(recv, recv, COUNT, ncclFloat32, ncclMax, comm, stream) == ncclSuccess);
    CHECK(ncclReduceScatter(send, send + (size_t)rank * COUNT, COUNT, ncclFloat32, ncclAvg, comm,
                            stream) == ncclSuccess);
    CHECK(ncclAllGather(send + (size_t)rank * COUNT, send, COUNT, ncclFloat32, comm, stream) ==
          ncclSuccess);
    got = from_device(stream, send, COUNT * n);
    for (size_t i = 0; i < COUNT * n; i++) {
        float sum = 0;
        for (int r = 0; r < ranks; r++)
            sum += value(r, i);
        CHECK(got[i] == sum / (float)ranks);
    }

    std::vector<uint16_t> halves(8);
    for (size_t i = 0; i < 8; i++)
        halves[i] = zs_bf16_from_fp32(1 + (float)rank / 128);
    uint16_t *narrow = on_device(halves);
    float sum = 0;
    for (int r = 0; r < ranks; r++)
        sum += 1 + (float)r / 128;
    CHECK(ncclAllReduce(narrow, narrow, 8, ncclBfloat16, ncclSum, comm, stream) == ncclSuccess);
    CHECK(from_device(stream, narrow, 8)[7] == zs_bf16_from_fp32(sum));
    CHECK(ncclBroadcast(narrow, narrow, 8, ncclBfloat16, ranks - 1, comm, stream) == ncclSuccess);

    /* Round the ring, larger than a pipe. */
    CHECK(ncclGroupStart() == ncclSuccess);
    CHECK(ncclSend(send, COUNT, ncclFloat32, (rank + 1) % ranks, comm, stream) == ncclSuccess);
    CHECK(ncclRecv(recv, COUNT, ncclFloat32, (rank + ranks - 1) % ranks, comm, stream) ==
          ncclSuccess);
    CHECK(ncclGroupEnd() == ncclSuccess);
    CHECK(from_device(stream, recv, COUNT)[9] == from_device(stream, send, COUNT)[9]);

    CHECK(cudaFree(send) == cudaSuccess && cudaFree(recv) == cudaSuccess &&
          cudaFree(narrow) == cudaSuccess && cudaStreamDestroy(stream) == cudaSuccess);
}

static void threads(int ranks)
{
    std::vector<ncclComm_t> comms((size_t)ranks);
    CHECK(ncclCommInitAll(comms.data(), ranks, nullptr) == ncclSuccess);
    std::vector<std::thread> all;
    for (int r = 0; r < ranks; r++)
        all.emplace_back([=, comm = comms[(size_t)r]] {
            CHECK(cudaSetDevice(r) == cudaSuccess);
            all_collectives(comm, r, ranks);
            CHECK(ncclCommDestroy(comm) == ncclSuccess);
        });
    for (auto &each : all)
        each.join();
}

/* Each process has a device of its own; before any other thread is there. */
static void processes(int ranks)
{
    ncclUniqueId id;
    CHECK(ncclGetUniqueId(&id) == ncclSuccess);
    for (int r = 0; r < ranks; r++)
        if (fork() == 0) {
            ncclComm_t comm;
            CHECK(ncclCommInitRank(&comm, ranks, id, r) == ncclSuccess);
            all_collectives(comm, r, ranks);
            CHECK(ncclCommDestroy(comm) == ncclSuccess);
            CHECK(emu_control_table.open_objects() == 0);
            _exit(0);
        }
    for (int r = 0; r < ranks; r++) {
        int status;
        CHECK(wait(&status) > 0 && status == 0);
    }
}

static void errors_are_reported()
{
    ncclComm_t comm;
    ncclResult_t error;
    cudaStream_t stream = new_stream();
    float *x = new_device<float>(4);
    CHECK(ncclCommInitAll(&comm, 1, nullptr) == ncclSuccess);
    emu_control_table.fail(EMU_NCCL, EMU_ANY_DEVICE, 2);
    CHECK(ncclAllReduce(x, x, 4, ncclFloat32, ncclSum, comm, stream) == ncclSuccess);
    CHECK(ncclAllReduce(x, x, 4, ncclFloat32, ncclSum, comm, stream) == ncclSystemError);
    CHECK(strstr(ncclGetLastError(comm), "asked for"));
    CHECK(ncclCommGetAsyncError(comm, &error) == ncclSuccess && error == ncclSuccess);

    emu_control_table.fail(EMU_NCCL_ASYNC, 0, 1);
    CHECK(ncclAllReduce(x, x, 4, ncclFloat32, ncclSum, comm, stream) == ncclSuccess);
    do
        CHECK(ncclCommGetAsyncError(comm, &error) == ncclSuccess);
    while (error == ncclSuccess);
    CHECK(error == ncclRemoteError);
    CHECK(ncclCommAbort(comm) == ncclSuccess);
    CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
    CHECK(cudaFree(x) == cudaSuccess && cudaStreamDestroy(stream) == cudaSuccess);
}

/* Rank 1 hangs; both see an operation that does not end, until they give it up. */
static void a_hang_ends_by_abort()
{
    ncclComm_t comms[2];
    CHECK(ncclCommInitAll(comms, 2, nullptr) == ncclSuccess);
    emu_control_table.fail(EMU_NCCL_HANG, 1, 1);
    cudaStream_t streams[2];
    cudaEvent_t events[2];
    float *x[2];
    for (int r = 0; r < 2; r++) {
        CHECK(cudaSetDevice(r) == cudaSuccess);
        streams[r] = new_stream();
        events[r] = new_event();
        x[r] = new_device<float>(4);
        CHECK(ncclAllReduce(x[r], x[r], 4, ncclFloat32, ncclSum, comms[r], streams[r]) ==
              ncclSuccess);
        CHECK(cudaEventRecord(events[r], streams[r]) == cudaSuccess);
    }
    usleep(20000);
    for (int r = 0; r < 2; r++)
        CHECK(cudaEventQuery(events[r]) == cudaErrorNotReady);
    for (int r = 0; r < 2; r++) {
        CHECK(ncclCommAbort(comms[r]) == ncclSuccess);
        CHECK(cudaEventSynchronize(events[r]) == cudaSuccess);
        CHECK(cudaEventDestroy(events[r]) == cudaSuccess && cudaFree(x[r]) == cudaSuccess &&
              cudaStreamDestroy(streams[r]) == cudaSuccess);
    }
    CHECK(cudaSetDevice(0) == cudaSuccess);
}

static void a_rank_that_does_not_come()
{
    ncclUniqueId id;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t comm;
    ncclResult_t error;
    config.blocking = 0;
    CHECK(ncclGetUniqueId(&id) == ncclSuccess);
    CHECK(ncclCommInitRankConfig(&comm, 2, id, 0, &config) == ncclInProgress);
    CHECK(ncclCommGetAsyncError(comm, &error) == ncclSuccess && error == ncclInProgress);
    CHECK(ncclCommAbort(comm) == ncclSuccess);
}

int main()
{
    processes(3);
    threads(1);
    threads(3);
    errors_are_reported();
    a_hang_ends_by_abort();
    a_rank_that_does_not_come();
    CHECK(emu_control_table.open_objects() == 0);
    puts("emulated: all right");
    return 0;
}

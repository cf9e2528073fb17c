/* SPDX-License-Identifier: Apache-2.0 */
/* See nccl_world.h. */
#include <climits>
#include <ctime>
#include <fcntl.h>
#include <linux/futex.h>
#include <map>
#include <mutex>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "tests/emu/emu.h"
#include "tests/emu/nccl_world.h"

/* Behind the world: a slot for each rank, then a pipe for each pair. */
static constexpr size_t HEAD = (sizeof(emu_nccl_world) + 63) / 64 * 64;

static size_t world_bytes(int ranks)
{
    const size_t n = (size_t)ranks;
    return HEAD + n * sizeof(emu_nccl_slot) + n * n * sizeof(emu_nccl_pipe);
}

emu_nccl_slot &emu_nccl_world::slot(int rank)
{
    return reinterpret_cast<emu_nccl_slot *>(reinterpret_cast<char *>(this) + HEAD)[rank];
}

emu_nccl_pipe &emu_nccl_world::pipe(int from, int to)
{
    auto *pipes = reinterpret_cast<emu_nccl_pipe *>(&slot(ranks.load()));
    return pipes[from * ranks.load() + to];
}

bool emu_nccl_world::meet(const std::atomic<bool> *given_up)
{
    const uint32_t now = phase.load(std::memory_order_acquire);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == (uint32_t)ranks.load()) {
        arrived.store(0, std::memory_order_relaxed);
        phase.store(now + 1, std::memory_order_release);
        syscall(SYS_futex, &phase, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
        return true;
    }
    const struct timespec look = {0, 10 * 1000 * 1000};
    while (phase.load(std::memory_order_acquire) == now) {
        if (given_up->load(std::memory_order_relaxed))
            return false;
        syscall(SYS_futex, &phase, FUTEX_WAIT, now, &look, nullptr, 0);
    }
    return true;
}

std::string emu_nccl_new_name()
{
    uint64_t random[2];
    char name[64];
    if (getrandom(random, sizeof random, 0) != (ssize_t)sizeof random)
        emu_die("no random name for a communicator");
    snprintf(name, sizeof name, "/zs-emu-nccl-%016llx%016llx", (unsigned long long)random[0],
             (unsigned long long)random[1]);
    return name;
}

struct Mapped {
    emu_nccl_world *world;
    int users;
};
static std::mutex lock;
static std::map<std::string, Mapped> &mapped = *new std::map<std::string, Mapped>;

static emu_nccl_world *map_world(const std::string &name, int ranks)
{
    const int file = shm_open(name.c_str(), O_RDWR | O_CREAT, 0600);
    if (file < 0 || ftruncate(file, (off_t)world_bytes(ranks)) != 0)
        emu_die("cannot make a communicator's shared memory %s: %m", name.c_str());
    void *ptr = mmap(nullptr, world_bytes(ranks), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (ptr == MAP_FAILED)
        emu_die("cannot map a communicator's shared memory: %m");
    return static_cast<emu_nccl_world *>(ptr);
}

emu_nccl_world *emu_nccl_join(const std::string &name, int ranks, int rank)
{
    std::lock_guard<std::mutex> guard(lock);
    Mapped &entry = mapped[name];
    if (!entry.users++)
        entry.world = map_world(name, ranks);
    emu_nccl_world *world = entry.world;
    int other = 0;
    if (!world->ranks.compare_exchange_strong(other, ranks) && other != ranks)
        emu_die("NCCL: rank %d says that there are %d ranks, another one %d", rank, ranks, other);
    if (world->slot(rank).joined.exchange(1))
        emu_die("NCCL: rank %d joins twice", rank);
    if (world->joined.fetch_add(1) + 1 == ranks)
        shm_unlink(name.c_str());
    return world;
}

void emu_nccl_leave(emu_nccl_world *world)
{
    std::lock_guard<std::mutex> guard(lock);
    for (auto each = mapped.begin(); each != mapped.end(); ++each)
        if (each->second.world == world && !--each->second.users) {
            if (world->joined.load() < world->ranks.load())
                shm_unlink(each->first.c_str());
            munmap(world, world_bytes(world->ranks.load()));
            mapped.erase(each);
            return;
        }
}

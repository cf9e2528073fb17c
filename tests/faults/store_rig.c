/* SPDX-License-Identifier: Apache-2.0 */
#include "faults/store_rig.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

void store_rig_says(int line, const char *const *words)
{
    for (; *words; words++)
        if (!strstr(zs_last_error(), *words))
            fail_msg("line %d: '%s' is not in: %s", line, *words, zs_last_error());
}

char store_rig_logged[4096];

static void keep_log(void *cookie, zs_log_level level, const char *text)
{
    size_t used = strlen(store_rig_logged);
    snprintf(store_rig_logged + used, sizeof store_rig_logged - used, "%s\n", text);
}

rig_config store_rig_nvme(const temp_dir *dir)
{
    return (rig_config){.tier = ZS_TIER_NVME,
                        .engine = ZS_IO_POSIX,
                        .chunk = 4096,
                        .dir = dir->path,
                        .resume = 1,
                        .aliased = 1,
                        .log = {keep_log, NULL, ZS_LOG_WARN}};
}

/* A store with commits of steps 1 .. steps. */
void store_rig_make(rig_config config, int steps)
{
    rig r;
    store_rig_logged[0] = 0;
    OK(rig_open(&r, &config));
    OK(rig_load(&r));
    for (int i = 0; i < steps; i++) {
        OK(rig_step(&r));
        OK(rig_commit(&r));
    }
    rig_close(&r);
}

char *store_rig_path(const temp_dir *dir)
{
    return temp_path(dir, "zspill-rank00000.state");
}

uint64_t store_rig_bytes(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 ? (uint64_t)st.st_size : 0;
}

void store_rig_flip(const char *path, uint64_t offset)
{
    unsigned char byte;
    int fd = open(path, O_RDWR);
    assert_true(fd >= 0);
    assert_int_equal(pread(fd, &byte, 1, (off_t)offset), 1);
    byte ^= 0x10;
    assert_int_equal(pwrite(fd, &byte, 1, (off_t)offset), 1);
    close(fd);
}

void store_rig_expect(rig *r, uint64_t step)
{
    char what[128];
    rig_reference ref;
    rig_reference_open(&ref, r->config.scale);
    rig_reference_advance(&ref, step);
    if (rig_differs(r, &ref, what))
        fail_msg("at step %llu: %s", (unsigned long long)step, what);
    rig_reference_close(&ref);
}

/* Where things lie: as the rig's store has it. */
void store_rig_geometry(zs_store_geometry *out)
{
    static const zs_dtype dtypes[RIG_SHARDS] = {ZS_BF16, ZS_FP32, ZS_BF16,
                                                ZS_FP16, ZS_BF16, ZS_FP32};
    zs_store_shard shards[RIG_SHARDS];
    for (size_t s = 0; s < RIG_SHARDS; s++)
        shards[s] = (zs_store_shard){rig_numel(1, s), dtypes[s]};
    OK(zs_store_geometry_make(0, 1, 2, 4096, shards, RIG_SHARDS, out));
}

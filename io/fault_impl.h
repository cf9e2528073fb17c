/* SPDX-License-Identifier: Apache-2.0 */
/* Between the parts of fault injection: specification (fault_spec.c), engine (fault.c), power
 * supply (power.c). */
#ifndef ZS_IO_FAULT_IMPL_H
#define ZS_IO_FAULT_IMPL_H

#include <pthread.h>

#include "io/fault.h"

typedef enum zs_fault_op {
    ZS_FAULT_READ = 1,
    ZS_FAULT_WRITE = 2,
    ZS_FAULT_SYNC = 4,
    ZS_FAULT_ALLOCATE = 8,
    ZS_FAULT_RENAME = 16
} zs_fault_op;

typedef enum zs_cut { ZS_CUT_NONE, ZS_CUT_ERROR, ZS_CUT_KILL, ZS_CUT_SILENT } zs_cut;

/* What to do about one operation. */
typedef struct zs_fault {
    int error; /* errno; 0: none */
    zs_cut cut;
    int shorten, flip;
    uint32_t short_bytes;
    uint64_t flip_bit;
    double delay; /* seconds */
} zs_fault;

typedef struct zs_fault_rule zs_fault_rule;
typedef struct zs_power zs_power;
typedef struct zs_power_names zs_power_names;

struct zs_faults {
    pthread_mutex_t lock; /* of all below, and of what is done while there is a power supply */
    unsigned users;
    char *spec;
    zs_fault_rule *rules;
    size_t count;
    uint64_t seed, random, fired;
    zs_power *power; /* NULL: no rule has a cut */
    zs_cut dark;     /* once the power has failed: how that shows */
};

/* Counts the operation and says what is to become of it. With the lock held. */
void zs_faults_next(zs_faults *faults, zs_fault_op op, const char *path, uint32_t bytes,
                    zs_fault *out);

zs_status zs_power_open(uint64_t seed, zs_power **out);
void zs_power_close(zs_power *power);
/* Writes, so that it can be undone. Bytes written or -errno. */
int zs_power_write(zs_power *power, const zs_file *file, const void *data, uint32_t bytes,
                   uint64_t offset);
/* file is about to be allocated. 0 or a positive errno. */
int zs_power_allocate(zs_power *power, const zs_file *file);
/* file was flushed: what it holds stays. */
void zs_power_flushed(zs_power *power, const zs_file *file);
/* Renames, so that it can be undone. 0 or a positive errno. */
int zs_power_rename(zs_power *power, const char *from, const char *to);
/* The directory was flushed: its names stay. */
void zs_power_flushed_dir(zs_power *power, int fd);
/* 0, or a positive errno where the medium could not be put into that state. */
int zs_power_cut(zs_power *power);

/* For power.c: the renames. The whole list is undone from a random place on. */
zs_power_names *zs_power_names_open(void);
void zs_power_names_close(zs_power_names *names);
int zs_power_names_rename(zs_power_names *names, const char *from, const char *to);
void zs_power_names_flushed(zs_power_names *names, int dir_fd);
int zs_power_names_cut(zs_power_names *names, uint64_t *random);

/* splitmix64 */
static inline uint64_t zs_fault_random(uint64_t *state)
{
    uint64_t z = *state += 0x9E3779B97F4A7C15u;

    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

#endif

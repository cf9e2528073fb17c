/* SPDX-License-Identifier: Apache-2.0 */
/* Stores of the rig's states, to be damaged, killed and refused. */
#ifndef ZS_TESTS_STORE_RIG_H
#define ZS_TESTS_STORE_RIG_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/status.h"
#include "offload/store.h"
#include "unit/states_rig.h"
#include "unit/temp.h"

#define OK(expr)                                                                                   \
    do {                                                                                           \
        if ((expr) != ZS_OK)                                                                       \
            fail_msg("%s: %s", #expr, zs_last_error());                                            \
    } while (0)

/* The call fails with this status and a message that has these words. */
#define REFUSED(expr, expected, ...)                                                               \
    do {                                                                                           \
        zs_status refused_status = (expr);                                                         \
        if (refused_status != (expected))                                                          \
            fail_msg("%s: %s, not %s: %s", #expr, zs_status_name(refused_status),                  \
                     zs_status_name(expected), zs_last_error());                                   \
        store_rig_says(__LINE__, (const char *const[]){__VA_ARGS__, NULL});                        \
    } while (0)

/* Each of words, ended by NULL, is in this thread's last message. */
void store_rig_says(int line, const char *const *words);
/* What the store logged since store_rig_make. */
extern char store_rig_logged[4096];
/* States on disk in dir. */
rig_config store_rig_nvme(const temp_dir *dir);
/* A store with commits of steps 1 .. steps. */
void store_rig_make(rig_config config, int steps);
/* To be freed. */
char *store_rig_path(const temp_dir *dir);
uint64_t store_rig_bytes(const char *path);
void store_rig_flip(const char *path, uint64_t offset);
/* The rig holds what `step` steps give. */
void store_rig_expect(rig *r, uint64_t step);
/* Where things lie: as the rig's store has it. */
void store_rig_geometry(zs_store_geometry *out);

#endif

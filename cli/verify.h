/* SPDX-License-Identifier: Apache-2.0 */
/* `zspill inspect --verify`: every checksum of a run's state. */
#ifndef ZS_CLI_VERIFY_H
#define ZS_CLI_VERIFY_H

#include <stdint.h>

/* A commit that all ranks' files in dir keep, 0: the newest; the value is the exit code. */
int zs_verify_state(const char *dir, uint64_t commit);
/* Of one rank's file, likewise. */
int zs_verify_file(const char *path, uint64_t commit);

#endif

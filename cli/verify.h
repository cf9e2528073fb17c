/* SPDX-License-Identifier: Apache-2.0 */
/* `zspill inspect --verify`: every checksum of a run's state. */
#ifndef ZS_CLI_VERIFY_H
#define ZS_CLI_VERIFY_H

/* The newest commit that all ranks' files in dir hold; the value is the exit code. */
int zs_verify_state(const char *dir);
/* The newest commit of one rank's file. */
int zs_verify_file(const char *path);

#endif

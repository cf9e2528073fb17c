/* SPDX-License-Identifier: Apache-2.0 */
/* The program zspill: one function a subcommand. argv[0] is the subcommand's name; the value is the
 * exit code. */
#ifndef ZS_CLI_CLI_H
#define ZS_CLI_CLI_H

#include <stddef.h>

enum { ZS_EXIT_OK = 0, ZS_EXIT_FAILED = 1, ZS_EXIT_USAGE = 2 };

int zs_cli_train(int argc, char **argv);
int zs_cli_doctor(int argc, char **argv);
int zs_cli_inspect(int argc, char **argv);
int zs_cli_export(int argc, char **argv);
int zs_cli_import(int argc, char **argv);

/* "zspill: TEXT" on standard error. */
void zs_cli_error(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* The entry of names that word was most likely meant to be; NULL when none is near. Dashes and
 * underscores count as equal. */
const char *zs_cli_nearest(const char *word, const char *const *names, size_t count);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* Options of the small subcommands: --NAME VALUE or --NAME=VALUE, and one path. */
#ifndef ZS_CLI_ARGUMENTS_H
#define ZS_CLI_ARGUMENTS_H

#include <stddef.h>

typedef struct zs_argument {
    const char *name;   /* without dashes; "": the path that stands alone */
    const char **value; /* where it goes; points into argv */
} zs_argument;

/* -1: all is well; else the exit code: help was shown, or something is wrong and was said. */
int zs_arguments_parse(int argc, char **argv, const char *usage, const zs_argument *arguments,
                       size_t count);
/* text as a number from least to most, or as one of the words "a|b|c" (its place); -1: neither, and
 * that was said. text NULL: other. */
long long zs_arguments_number(const char *name, const char *text, long long least, long long most,
                              long long other);
int zs_arguments_word(const char *name, const char *text, const char *words, int other);

#endif

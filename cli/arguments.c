/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/arguments.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/util.h"
#include "cli/cli.h"

enum { ARGUMENTS_MAX = 16 };

static const zs_argument *find(const zs_argument *arguments, size_t count, const char *name)
{
    for (size_t i = 0; i < count; i++)
        if (!strcmp(arguments[i].name, name))
            return &arguments[i];
    return NULL;
}

static int fail_unknown(const char *command, const char *word, const zs_argument *arguments,
                        size_t count)
{
    const char *names[ARGUMENTS_MAX];
    size_t known = 0;
    for (size_t i = 0; i < count && known < ARGUMENTS_MAX; i++)
        if (*arguments[i].name)
            names[known++] = arguments[i].name;
    const char *near = zs_cli_nearest(word, names, known);
    if (near)
        zs_cli_error("unknown option '--%s': did you mean '--%s'?", word, near);
    else
        zs_cli_error("unknown option '--%s': `zspill %s --help` lists them", word, command);
    return ZS_EXIT_USAGE;
}

int zs_arguments_parse(int argc, char **argv, const char *usage, const zs_argument *arguments,
                       size_t count)
{
    for (int i = 1; i < argc; i++) {
        char name[64] = "";
        const char *value = argv[i];
        if (!strcmp(value, "--help") || !strcmp(value, "-h")) {
            fputs(usage, stdout);
            return ZS_EXIT_OK;
        }
        if (!strncmp(value, "--", 2)) {
            const char *equals = strchr(value, '=');
            size_t length = equals ? (size_t)(equals - value - 2) : strlen(value + 2);
            snprintf(name, sizeof name, "%.*s", (int)ZS_MIN(length, sizeof name - 1), value + 2);
            value = equals ? equals + 1 : NULL;
        }
        const zs_argument *argument = find(arguments, count, name);
        if (!argument && *name)
            return fail_unknown(argv[0], name, arguments, count);
        if (!argument || (!*name && *argument->value)) {
            zs_cli_error("argument '%s' is one too many: `zspill %s --help` says what there is",
                         argv[i], argv[0]);
            return ZS_EXIT_USAGE;
        }
        if (!value && ++i < argc)
            value = argv[i];
        if (!value || !*value) {
            zs_cli_error("--%s needs a value", name);
            return ZS_EXIT_USAGE;
        }
        *argument->value = value;
    }
    return -1;
}

long long zs_arguments_number(const char *name, const char *text, long long least, long long most,
                              long long other)
{
    char *end;
    if (!text)
        return other;
    errno = 0;
    const long long value = strtoll(text, &end, 10);
    if (end != text && !*end && !errno && value >= least && value <= most)
        return value;
    zs_cli_error("--%s '%s' is no number from %lld to %lld", name, text, least, most);
    return -1;
}

int zs_arguments_word(const char *name, const char *text, const char *words, int other)
{
    const char *word = words;
    if (!text)
        return other;
    for (int i = 0;; i++) {
        size_t n = strcspn(word, "|");
        if (n == strlen(text) && !strncmp(word, text, n))
            return i;
        if (!word[n])
            break;
        word += n + 1;
    }
    zs_cli_error("--%s '%s' is none of %s", name, text, words);
    return -1;
}

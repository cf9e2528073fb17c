/* SPDX-License-Identifier: Apache-2.0 */
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "base/util.h"
#include "cli/cli.h"

enum { WORD_MAX = 48 };

void zs_cli_error(const char *format, ...)
{
    va_list args;
    /* One call for the line, so that ranks as processes do not mix theirs. */
    char text[2048];
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    fflush(stdout);
    fprintf(stderr, "zspill: %s\n", text);
}

static int same(char a, char b)
{
    return a == b || ((a == '-' || a == '_') && (b == '-' || b == '_'));
}

static size_t distance(const char *a, const char *b)
{
    size_t la = strlen(a), lb = strlen(b);
    size_t row[WORD_MAX + 1];
    if (la > WORD_MAX || lb > WORD_MAX)
        return SIZE_MAX;
    for (size_t j = 0; j <= lb; j++)
        row[j] = j;
    for (size_t i = 1; i <= la; i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= lb; j++) {
            size_t change = diagonal + !same(a[i - 1], b[j - 1]);
            diagonal = row[j];
            row[j] = ZS_MIN(change, ZS_MIN(row[j], row[j - 1]) + 1);
        }
    }
    return row[lb];
}

const char *zs_cli_nearest(const char *word, const char *const *names, size_t count)
{
    const char *best = NULL;
    size_t least = SIZE_MAX;
    size_t length = strlen(word);
    for (size_t i = 0; i < count; i++) {
        size_t d = distance(word, names[i]);
        /* A word cut short ("--offload-opt") is nearer than its missing letters say. */
        if (length >= 3 && !strncmp(word, names[i], length))
            d = ZS_MIN(d, 1);
        if (d < least) {
            least = d;
            best = names[i];
        }
    }
    return least <= ZS_MAX((length + 1) / 3, 1) ? best : NULL;
}

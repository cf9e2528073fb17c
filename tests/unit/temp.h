/* SPDX-License-Identifier: Apache-2.0 */
/* Files for tests: a directory that vanishes, small files in it. */
#ifndef ZS_TESTS_TEMP_H
#define ZS_TESTS_TEMP_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct temp_dir {
    char path[256];
} temp_dir;

static inline void temp_make(temp_dir *dir)
{
    const char *base = getenv("TMPDIR");
    snprintf(dir->path, sizeof dir->path, "%s/zspill-test-XXXXXX", base ? base : "/tmp");
    if (!mkdtemp(dir->path))
        abort();
}

static inline void temp_remove(const temp_dir *dir)
{
    char command[300];
    snprintf(command, sizeof command, "rm -rf '%s'", dir->path);
    if (system(command) != 0)
        abort();
}

/* DIR/name, malloc'ed. */
static inline char *temp_path(const temp_dir *dir, const char *name)
{
    char *path;
    if (asprintf(&path, "%s/%s", dir->path, name) < 0)
        abort();
    return path;
}

static inline void temp_write(const temp_dir *dir, const char *name, const void *data, size_t bytes)
{
    char *path = temp_path(dir, name);
    FILE *file = fopen(path, "w");
    if (!file || fwrite(data, 1, bytes, file) != bytes || fclose(file) != 0)
        abort();
    free(path);
}

#endif

/* SPDX-License-Identifier: Apache-2.0 */
#include "model/json.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/status.h"
#include "base/util.h"

/* jansson's lexer drops letters when it has no memory for them, or ends the process by an
 * assertion. While a text is parsed it therefore gets from a reserve what malloc has not, and
 * nothing more to read. */
static _Thread_local struct {
    int lacks_memory;
    char *begin, *at, *end;
} supply;

static void *watched_malloc(size_t bytes)
{
    void *ptr = malloc(bytes);
    if (ptr)
        return ptr;
    supply.lacks_memory = 1;
    bytes = (size_t)zs_round_up(bytes, 16);
    if ((size_t)(supply.end - supply.at) < bytes)
        return NULL;
    ptr = supply.at;
    supply.at += bytes;
    return ptr;
}

static void watched_free(void *ptr)
{
    if ((uintptr_t)ptr < (uintptr_t)supply.begin || (uintptr_t)ptr >= (uintptr_t)supply.end)
        free(ptr);
}

static void watch_all(void)
{
    json_set_alloc_funcs(watched_malloc, watched_free);
}

void zs_json_watch(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_all);
    supply.lacks_memory = 0;
}

int zs_json_lacks_memory(void)
{
    return supply.lacks_memory;
}

typedef struct rest {
    const char *at;
    size_t bytes;
} rest;

static size_t next_piece(void *to, size_t room, void *cookie)
{
    rest *r = cookie;
    size_t bytes = ZS_MIN(room, r->bytes);
    if (supply.lacks_memory)
        return (size_t)-1;
    memcpy(to, r->at, bytes);
    r->at += bytes;
    r->bytes -= bytes;
    return bytes;
}

zs_status zs_json_parse(const char *text, size_t bytes, const char *path, json_t **out)
{
    /* A piece has at most 1024 bytes; from its middle on, at most so many small values, a string of
     * the whole text, and the buffer it is gathered in, grown to twice that. */
    const size_t reserve = 3 * bytes + (128 << 10);
    zs_status status = ZS_OK;
    json_error_t error;
    json_t *root = NULL;
    *out = NULL;
    zs_json_watch();
    supply.begin = supply.at = malloc(reserve);
    if (supply.begin) {
        supply.end = supply.begin + reserve;
        root = json_load_callback(next_piece, &(rest){text, bytes}, JSON_REJECT_DUPLICATES, &error);
    }
    if (!supply.begin || supply.lacks_memory) {
        status = zs_fail(ZS_ERR_NOMEM, "no memory for the values of %s", path);
    } else if (!root) {
        status = zs_fail(ZS_ERR_CORRUPT, "%s is not valid JSON: line %d, column %d: %s", path,
                         error.line, error.column, error.text);
    } else if (!json_is_object(root)) {
        status = zs_fail(ZS_ERR_CORRUPT, "%s must hold a JSON object", path);
    } else {
        *out = root;
        root = NULL;
    }
    json_decref(root);
    free(supply.begin);
    supply.begin = supply.at = supply.end = NULL;
    return status;
}

static zs_status read_file(int fd, const char *path, char *text, size_t bytes)
{
    size_t done = 0;
    while (done < bytes) {
        ssize_t got = pread(fd, text + done, bytes - done, (off_t)done);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return zs_fail(ZS_ERR_IO, "cannot read %s: %s", path, strerror(errno));
        if (got == 0)
            return zs_fail(ZS_ERR_IO, "%s became shorter while it was read", path);
        done += (size_t)got;
    }
    return ZS_OK;
}

zs_status zs_json_load(const char *path, uint64_t max_bytes, json_t **out)
{
    zs_status status = ZS_OK;
    char *text = NULL;
    struct stat st;
    *out = NULL;
    /* O_NONBLOCK: a FIFO by that name must not hang the open. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return zs_fail(ZS_ERR_IO, "cannot open %s: %s", path, strerror(errno));
    if (fstat(fd, &st) != 0) {
        status = zs_fail(ZS_ERR_IO, "cannot stat %s: %s", path, strerror(errno));
        goto fail;
    }
    if (!S_ISREG(st.st_mode)) {
        status = zs_fail(ZS_ERR_ARG, "%s is not a regular file", path);
        goto fail;
    }
    if ((uint64_t)st.st_size > max_bytes) {
        status = zs_fail(ZS_ERR_CORRUPT, "%s has %llu bytes, more than the %llu that are accepted",
                         path, (unsigned long long)st.st_size, (unsigned long long)max_bytes);
        goto fail;
    }
    text = malloc((size_t)st.st_size + 1);
    if (!text) {
        status = zs_fail(ZS_ERR_NOMEM, "no memory for the %llu bytes of %s",
                         (unsigned long long)st.st_size, path);
        goto fail;
    }
    ZS_TRY(read_file(fd, path, text, (size_t)st.st_size));
    ZS_TRY(zs_json_parse(text, (size_t)st.st_size, path, out));
fail:
    free(text);
    close(fd);
    return status;
}

const char *zs_json_text(const json_t *value, char buf[80])
{
    char *text = json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT | JSON_REAL_PRECISION(6));
    buf[0] = 0;
    if (text) {
        size_t length = strlen(text);
        memcpy(buf, text, length < 76 ? length + 1 : 76);
        if (length >= 76)
            memcpy(buf + 76, "...", 4);
        free(text);
    }
    return buf;
}

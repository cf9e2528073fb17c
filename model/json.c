/* SPDX-License-Identifier: Apache-2.0 */
#include "model/json.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/status.h"

static _Thread_local int lacks_memory;

static void *watched_malloc(size_t bytes)
{
    void *ptr = malloc(bytes);
    lacks_memory |= !ptr;
    return ptr;
}

static void watch_all(void)
{
    json_set_alloc_funcs(watched_malloc, free);
}

void zs_json_watch(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_all);
    lacks_memory = 0;
}

int zs_json_lacks_memory(void)
{
    return lacks_memory;
}

zs_status zs_json_parse(const char *text, size_t bytes, const char *path, json_t **out)
{
    json_error_t error;
    *out = NULL;
    zs_json_watch();
    json_t *root = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &error);
    if (zs_json_lacks_memory()) {
        json_decref(root); /* if there is one, letters may be missing in it */
        return zs_fail(ZS_ERR_NOMEM, "no memory for the values of %s", path);
    }
    if (!root)
        return zs_fail(ZS_ERR_CORRUPT, "%s is not valid JSON: line %d, column %d: %s", path,
                       error.line, error.column, error.text);
    if (!json_is_object(root)) {
        json_decref(root);
        return zs_fail(ZS_ERR_CORRUPT, "%s must hold a JSON object", path);
    }
    *out = root;
    return ZS_OK;
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

/* SPDX-License-Identifier: Apache-2.0 */
#include "base/plugin.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/status.h"
#include "base/util.h"

/* The folder of the file this code is in: libzspill.so, or the program that links it. */
static int own_folder(char *folder, size_t bytes)
{
    Dl_info info;
    char *path = NULL;
    if (dladdr(&zs_plugin_open, &info) && info.dli_fname && strchr(info.dli_fname, '/'))
        path = realpath(info.dli_fname, NULL);
    /* A program found through PATH is known by its bare name. */
    if (!path)
        path = realpath("/proc/self/exe", NULL);
    char *slash = path ? strrchr(path, '/') : NULL;
    int found = slash && (size_t)(slash - path) < bytes;
    if (found) {
        memcpy(folder, path, (size_t)(slash - path));
        folder[slash - path] = 0;
    }
    free(path);
    return found;
}

static zs_status open_file(const zs_plugin_spec *spec, const char *path, void **out)
{
    *out = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!*out)
        return zs_fail(ZS_ERR_UNSUPPORTED, "cannot load the %s plug-in (%s): %s", spec->what,
                       dlerror(), spec->broken);
    return ZS_OK;
}

zs_status zs_plugin_open(const zs_plugin_spec *spec, void **handle)
{
    const char *named = getenv(spec->variable);
    if (named && *named) {
        zs_status status = open_file(spec, named, handle);
        return status ? zs_fail_prefix(status, "%s=%.160s: ", spec->variable, named) : ZS_OK;
    }
    char beside[PATH_MAX];
    snprintf(beside, sizeof beside, "../%.200s", spec->folder);
    const char *const places[] = {".", spec->folder, beside, ZS_LIBDIR_FROM_BIN};
    char folder[PATH_MAX], path[2 * PATH_MAX];
    if (own_folder(folder, sizeof folder))
        for (size_t i = 0; i < ZS_COUNT(places); i++) {
            snprintf(path, sizeof path, "%s/%.200s/%.60s", folder, places[i], spec->file);
            if (!access(path, F_OK))
                return open_file(spec, path, handle);
        }
    *handle = dlopen(spec->file, RTLD_NOW | RTLD_LOCAL);
    if (!*handle)
        return zs_fail(ZS_ERR_UNSUPPORTED,
                       "there is no %s plug-in (%s beside the program or library): %s", spec->what,
                       spec->file, spec->missing);
    return ZS_OK;
}

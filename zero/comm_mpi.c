/* SPDX-License-Identifier: Apache-2.0 */
/* Finds and opens libzspill-mpi.so; the collectives are in zero/mpi/plugin.c. */
#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/status.h"
#include "base/util.h"
#include "zero/comm_impl.h"
#include "zero/mpi/plugin.h"

#define PLUGIN "libzspill-mpi.so"

/* The folder of the file this code is in: libzspill.so, or the program that links it. */
static int own_folder(char *folder, size_t bytes)
{
    Dl_info info;
    char *path = NULL;
    if (dladdr(&zs_comm_describe, &info) && info.dli_fname && strchr(info.dli_fname, '/'))
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

static zs_status open_file(const char *path, void **out)
{
    /* Never closed: MPI does not survive being unloaded. */
    *out = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!*out)
        return zs_fail(ZS_ERR_UNSUPPORTED,
                       "cannot load the MPI plug-in (%s): install the MPI library it was built "
                       "with (Debian: libmpich12)",
                       dlerror());
    return ZS_OK;
}

static zs_status open_plugin(void **out)
{
    const char *named = getenv("ZSPILL_MPI_LIB");
    if (named && *named) {
        zs_status status = open_file(named, out);
        return status ? zs_fail_prefix(status, "ZSPILL_MPI_LIB=%.160s: ", named) : ZS_OK;
    }
    /* Beside it (wheel, library folder); in a build tree; from bin/ to the library folder. */
    static const char *const places[] = {".", "zero/mpi", "../zero/mpi", ZS_LIBDIR_FROM_BIN};
    char folder[PATH_MAX], path[PATH_MAX + 256];
    if (own_folder(folder, sizeof folder))
        for (size_t i = 0; i < ZS_COUNT(places); i++) {
            snprintf(path, sizeof path, "%s/%.200s/" PLUGIN, folder, places[i]);
            if (!access(path, F_OK))
                return open_file(path, out);
        }
    *out = dlopen(PLUGIN, RTLD_NOW | RTLD_LOCAL);
    if (!*out)
        return zs_fail(ZS_ERR_UNSUPPORTED,
                       "there is no MPI plug-in (" PLUGIN " beside the program or library): "
                       "install MPI (Debian: libmpich-dev), build zspill with -Dmpi=enabled, or "
                       "set ZSPILL_MPI_LIB to it");
    return ZS_OK;
}

zs_status zs_comm_open_mpi(double timeout_s, zs_comm **out)
{
    if (!out)
        return zs_fail(ZS_ERR_ARG, "zs_comm_open_mpi: out is NULL");
    *out = NULL;
    if (!(timeout_s > 0))
        return zs_fail(ZS_ERR_ARG,
                       "zs_comm_open_mpi: timeout_s %g is not above 0: give the seconds a rank "
                       "waits for the others",
                       timeout_s);
    void *plugin;
    ZS_CHECK(open_plugin(&plugin));
    zs_mpi_entry entry = (zs_mpi_entry)(uintptr_t)dlsym(plugin, ZS_MPI_ENTRY);
    if (!entry)
        return zs_fail(ZS_ERR_UNSUPPORTED,
                       "the MPI plug-in has no " ZS_MPI_ENTRY ": it belongs to another version of "
                       "zspill than " ZS_VERSION "; install both from one build");
    zs_mpi_job job;
    char message[512];
    if (entry(timeout_s, &job, message, sizeof message))
        return zs_fail(ZS_ERR_COMM, "zs_comm_open_mpi: %s", message);

    zs_status status = ZS_OK;
    if (job.world > ZS_COMM_RANKS)
        status =
            zs_fail(ZS_ERR_UNSUPPORTED, "zs_comm_open_mpi: %d ranks are more than %d: start fewer",
                    job.world, ZS_COMM_RANKS);
    if (status == ZS_OK) {
        zs_comm_transport transport = {
            .callbacks = job.callbacks,
            .local_ranks = job.local_ranks,
            .timeout_code = ZS_MPI_LATE,
            .in_place = 1,
            .max_bytes = INT_MAX,
            .abort = job.abort,
        };
        status = zs_comm_open_transport(&transport, job.rank, job.world, out);
    }
    if (status != ZS_OK)
        job.callbacks.close(job.callbacks.cookie);
    return status;
}

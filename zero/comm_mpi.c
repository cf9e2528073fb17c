/* SPDX-License-Identifier: Apache-2.0 */
/* Finds and opens libzspill-mpi.so; the collectives are in zero/mpi/plugin.c. */
#include <dlfcn.h>
#include <limits.h>

#include "base/plugin.h"
#include "base/status.h"
#include "zero/comm_impl.h"
#include "zero/mpi/plugin.h"

static const zs_plugin_spec spec = {
    .what = "MPI",
    .file = "libzspill-mpi.so",
    .variable = "ZSPILL_MPI_LIB",
    .folder = "zero/mpi",
    .missing = "install MPI (Debian: libmpich-dev), build zspill with -Dmpi=enabled, or set "
               "ZSPILL_MPI_LIB to it",
    .broken = "install the MPI library it was built with (Debian: libmpich12)",
};

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
    ZS_CHECK(zs_plugin_open(&spec, &plugin));
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
            .timeout_s = timeout_s,
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

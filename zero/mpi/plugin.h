/* SPDX-License-Identifier: Apache-2.0 */
/* Between zero/comm_mpi.c and libzspill-mpi.so, which is a library of its own so that libzspill
 * needs no MPI. A change here takes a new number in the entry's name. */
#ifndef ZS_ZERO_MPI_PLUGIN_H
#define ZS_ZERO_MPI_PLUGIN_H

#include "zspill.h"

/* What the callbacks return beside 0. */
enum { ZS_MPI_FAILED = 1, ZS_MPI_LATE = 2 };

typedef struct zs_mpi_job {
    /* all_gather takes send == recv + rank * bytes too. bytes is at most INT_MAX. */
    zs_comm_callbacks callbacks;
    int rank, world;
    int local_ranks; /* on this machine */
    /* Makes a callback that waits return; any thread. */
    void (*abort)(void *cookie);
} zs_mpi_job;

#define ZS_MPI_ENTRY "zs_mpi_entry_1"
/* 0, or -1 with the reason in message (of at least 256 bytes). */
typedef int (*zs_mpi_entry)(double timeout_s, zs_mpi_job *out, char *message, size_t bytes);
ZS_API int zs_mpi_entry_1(double timeout_s, zs_mpi_job *out, char *message, size_t bytes);

#endif

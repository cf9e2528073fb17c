/* SPDX-License-Identifier: Apache-2.0 */
/* Fault injection: an engine over any other that breaks what it is told to break, so that tests,
 * and with ZSPILL_FAULTS the program, meet what disks do once in a blue moon.
 *
 *   SPEC  = ITEM { ";" ITEM }
 *   ITEM  = OP [ "@" WHEN ] "=" FAULT [ ",file=" TEXT ]  |  "seed=" NUMBER
 *   OP    = read | write | sync | allocate | rename | change (all but read) | any
 *   WHEN  = N     the n-th, from 1       N-M   from the n-th to the m-th
 *           N+    from the n-th on       N/K   the n-th and every k-th after it
 *           left out: all
 *   FAULT = ENAME        it fails with that errno and nothing is moved: EIO, ENOSPC, EAGAIN, ...
 *           short[:N]    only N bytes of a read or write are moved (half of them, in whole pages)
 *           flip[:N]     bit N (a random one) of what is read or written is flipped: a write
 * damages the medium, a read only what arrives delay:MS     it begins MS milliseconds later
 *           cut[:kill | :silent]   the power fails during it
 *
 * One operation is one request of an engine (at most ZS_IO_REQUEST bytes), a flush of a file or a
 * directory, the allocation of a file, or a rename; what is tried again counts again. Each item
 * counts for itself, and only what its OP and TEXT (a part of the path) fit. Of several faults that
 * meet in one operation the first of the worst counts: cut, ENAME, short; flip and delay go with
 * any.
 *
 * A power cut: of each file everything since its last good flush is undone, then each write is
 * kept, dropped, or torn (each 512 bytes kept or dropped), by the seed; an allocation is kept, or
 * dropped with all that followed. The operation itself counts as begun: a write may survive, a
 * flush has not happened. From then on every operation fails with EIO and nothing reaches the
 * medium; with :kill the process ends by SIGKILL there and then; with :silent all is claimed to
 * succeed (reads read). Names of files are not part of it: what was made or removed stays so. With
 * a cut in the specification writes are carried out one after the other when they are submitted,
 * and what has not been flushed is kept in memory. */
#ifndef ZS_IO_FAULT_H
#define ZS_IO_FAULT_H

#include "io/backend.h"

/* Shared by all the engines that were opened with it: one power supply, one count. Any thread. */
typedef struct zs_faults zs_faults;

/* ZS_ERR_ARG names the item that is wrong. */
zs_status zs_faults_open(const char *spec, zs_faults **out);
/* Engines that use it keep it alive. */
void zs_faults_close(zs_faults **faults);
/* How often something was broken so far: loops end when it stays 0. */
uint64_t zs_faults_fired(zs_faults *faults);
/* ZSPILL_FAULTS; NULL: it is not set. Owned by the process: it counts on as long as the text stays
 * the same, and anew when it changes. */
zs_status zs_faults_of_environment(zs_faults **out);

/* Takes inner over in either case; log is copied. */
zs_status zs_io_fault_open(zs_io_backend *inner, unsigned depth, zs_faults *faults,
                           const zs_log *log, zs_io_backend **out);
/* zs_io_open over faults instead of those of the environment. */
zs_status zs_io_open_faults(zs_io_engine engine, unsigned depth, const zs_log *log,
                            zs_faults *faults, zs_io **out);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* An I/O engine that does nothing until somebody waits, then does the newest request first: what
 * reads or changes memory without waiting for its I/O gets wrong bits every time, not once in a
 * while. Writes may take their data at once and still arrive late. And it fails when told to. */
#ifndef ZS_TESTS_LAZY_IO_H
#define ZS_TESTS_LAZY_IO_H

#include "io/io.h"

typedef struct lazy_io_control {
    long requests; /* carried out so far, reads and writes */
    long fail_at;  /* this one fails, and all after it when persistent; -1: none */
    int persistent;
    int error; /* errno of the failure */
    int only;  /* 0: any request, 1: only reads count and fail, 2: only writes */
    int oldest_first;
    int early_data; /* writes take their data when they are queued */
} lazy_io_control;

extern lazy_io_control lazy_io;

zs_status lazy_io_open(zs_io **out);

#endif

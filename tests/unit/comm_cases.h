/* SPDX-License-Identifier: Apache-2.0 */
/* What every transport must do, as seen by one rank: run by unit/comm.c on threads and by
 * engine/mpi.c in processes. Each returns NULL or what went wrong (static per thread). */
#ifndef ZS_TEST_COMM_CASES_H
#define ZS_TEST_COMM_CASES_H

#include "zero/comm.h"

typedef const char *(*comm_case)(zs_comm *comm, zs_math *math);

const char *case_moves(zs_comm *comm, zs_math *math);
const char *case_all_reduce(zs_comm *comm, zs_math *math);
const char *case_agree(zs_comm *comm, zs_math *math);
const char *case_same(zs_comm *comm, zs_math *math);
const char *case_mismatch(zs_comm *comm, zs_math *math);

extern const comm_case comm_cases[];
extern const char *const comm_case_names[];
enum { COMM_CASES = 5 };

/* Formats a failure text. */
const char *wrong(const char *format, ...) __attribute__((format(printf, 1, 2)));
#define EXPECT(condition, ...)                                                                     \
    do {                                                                                           \
        if (!(condition))                                                                          \
            return wrong(__VA_ARGS__);                                                             \
    } while (0)

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* What a fork() must not inherit: descriptors whose open file description carries a lock or a
 * ring. Registered descriptors are closed in the child by a pthread_atfork handler. */
#ifndef ZS_BASE_FORK_H
#define ZS_BASE_FORK_H

#include "zspill.h"

/* fd will be closed in the child of a fork. */
zs_status zs_fork_guard_fd(int fd);
/* Before closing fd in the parent. */
void zs_fork_unguard_fd(int fd);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* Where a run's state is: in OUT/state, or where --offload-optimizer nvme:DIR says; OUT/state.path
 * names it in the latter case, so that a resume with another --offload-optimizer finds it. */
#ifndef ZS_CLI_RELOCATE_H
#define ZS_CLI_RELOCATE_H

#include "zspill.h"

/* May refuse a state for its user bytes. */
typedef zs_status (*zs_state_check)(void *cookie, const char *user, size_t user_bytes);

/* When out or its note lead to the state elsewhere, and there is none, or an older one of the same
 * run, in dir: moves it to dir, unless check refuses commit (0: the newest), which it sees before
 * any file changes. A crash at any point leaves the state whole in one of the two. */
zs_status zs_state_relocate(const char *out, const char *dir, uint64_t commit, zs_state_check check,
                            void *cookie);
/* Notes in out that the state is in dir, or that it is in OUT/state. */
zs_status zs_state_note(const char *out, const char *dir);

#endif

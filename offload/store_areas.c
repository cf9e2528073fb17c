/* SPDX-License-Identifier: Apache-2.0 */
/* Which superblock is what: in force, kept beside it, abandoned, next to be replaced. Pure: looks
 * at what the store has in memory. docs/commit.md has the rules. */
#include <stdio.h>

#include "base/status.h"
#include "base/util.h"
#include "offload/store.h"

/* Newer than what is in force: a commit that some rank did not finish. */
static int abandoned(const zs_store *store, int area)
{
    return store->committed >= 0 && store->whole[area] &&
           store->super[area].sequence > store->super[store->committed].sequence;
}

int zs_store_next_area(const zs_store *store)
{
    int empty = -1, oldest = -1;
    for (int i = 0; i < store->area_count; i++) {
        if (i == store->committed)
            continue;
        if (abandoned(store, i))
            return i; /* first: what it names is not guarded, and it must not pass for kept */
        if (!store->whole[i])
            empty = empty < 0 ? i : empty;
        else if (oldest < 0 || store->super[i].sequence < store->super[oldest].sequence)
            oldest = i;
    }
    return empty < 0 ? oldest : empty;
}

int zs_store_guards(const zs_store *store, int area)
{
    if (store->committed < 0 || !store->whole[area] || abandoned(store, area))
        return 0;
    return area == store->committed || area != zs_store_next_area(store);
}

/* Of the areas that pass, the numbers of their commits, newest first. */
static int list(const zs_store *store, int (*pass)(const zs_store *, int), uint64_t *commits)
{
    int count = 0;
    uint64_t below = UINT64_MAX;
    for (;;) {
        int newest = -1;
        for (int i = 0; i < store->area_count; i++)
            if (pass(store, i) && store->super[i].sequence < below &&
                (newest < 0 || store->super[i].sequence > store->super[newest].sequence))
                newest = i;
        if (newest < 0)
            return count;
        below = store->super[newest].sequence;
        /* Numbers grow: a greater one before is of a run that was started over. */
        if (!count || store->super[newest].commit < commits[count - 1])
            commits[count++] = store->super[newest].commit;
    }
}

/* What the agreement of the ranks may fall upon. With one slot that is the newest, and the one
 * before it only where nothing has been written over since. */
static int may_be_taken(const zs_store *store, int area)
{
    const zs_superblock *super = &store->super[area];
    return store->whole[area] &&
           (super->slot_count > 1 || area == store->committed || !super->dirty);
}

int zs_store_commits(const zs_store *store, uint64_t commits[ZS_STORE_SLOTS_MOST])
{
    return list(store, may_be_taken, commits);
}

int zs_store_kept(const zs_store *store, uint64_t commits[ZS_STORE_SLOTS_MOST])
{
    return list(store, zs_store_guards, commits);
}

zs_status zs_store_fail_not_kept(const char *path, uint64_t commit, const uint64_t *kept, int count)
{
    char text[ZS_STORE_SLOTS_MOST * 22] = "none";
    for (int i = 0, at = 0; i < count; i++)
        at += snprintf(text + at, sizeof text - (size_t)at, "%s%llu", i ? ", " : "",
                       (unsigned long long)kept[i]);
    return zs_fail(ZS_ERR_ARG,
                   "commit %llu is not kept in '%s': there are %s: take one of these (zspill "
                   "inspect shows their steps)",
                   (unsigned long long)commit, path, text);
}

int zs_store_find(const zs_store *store, uint64_t commit)
{
    int found = -1;
    for (int i = 0; i < store->area_count; i++)
        if (store->whole[i] && store->super[i].commit == commit &&
            (found < 0 || store->super[i].sequence > store->super[found].sequence))
            found = i;
    return found;
}

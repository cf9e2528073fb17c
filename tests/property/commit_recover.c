/* SPDX-License-Identifier: Apache-2.0 */
/* What a power cut leaves, and what a job that begins then finds: zero/state.c and zero/saved.c. */
#include <string.h>

#include "property/commit_internal.h"

/* ---- power cut ---- */

/* Each pending location on its own, from the i-th on. */
static void cut(state *s, int i);

static void cut_number(state *s, int i, u8 *seen, u8 *durable, u8 torn)
{
    const u8 a = *seen, b = *durable;
    *seen = b;
    cut(s, i + 1);
    if (a != b) {
        *seen = *durable = torn ? torn : a;
        cut(s, i + 1);
    }
    *seen = a;
    *durable = b;
}

static void cut_superblock(state *s, int i, superblock *seen, superblock *durable)
{
    const superblock a = *seen, b = *durable;
    const int pending = memcmp(&a, &b, sizeof a) != 0;
    *seen = b;
    cut(s, i + 1);
    if (pending && a.number) {
        *seen = *durable = a;
        cut(s, i + 1);
    }
    if (pending && b.number) {
        *seen = *durable = (superblock){0};
        cut(s, i + 1);
    }
    *seen = a;
    *durable = b;
}

static void cut_slot(state *s, int i, u8 *seen, u8 *durable)
{
    const u8 a = *seen, b = *durable;
    *seen = b;
    cut(s, i + 1);
    if (a != b && a != TORN) {
        *seen = *durable = a;
        cut(s, i + 1);
    }
    if (a != b && b != TORN) {
        *seen = *durable = TORN;
        cut(s, i + 1);
    }
    *seen = a;
    *durable = b;
}

static void cut(state *s, int i)
{
    const int areas = area_count(), per_file = areas + config.slots * config.chunks + 1;
    const int which = i / per_file, at = i % per_file;
    if (which == GENS * RANKS) {
        if (at == 0) {
            cut_number(s, i, &s->manifest[SEEN], &s->manifest[DURABLE],
                       is(MANIFEST_NOT_FLUSHED) ? TORN : 0);
        } else {
            state copy = *s;
            SAY("power cut (manifest %d)", s->manifest[SEEN]);
            emit(&copy);
        }
        return;
    }
    const int g = which / RANKS, r = which % RANKS;
    content *seen = &s->file[g][r].side[SEEN], *durable = &s->file[g][r].side[DURABLE];
    if (at == 0) {
        cut_number(s, i, &s->named[SEEN][g][r], &s->named[DURABLE][g][r], 0);
    } else if (at <= areas) {
        cut_superblock(s, i, &seen->area[at - 1], &durable->area[at - 1]);
    } else {
        const int c = (at - 1 - areas) / config.slots, slot = (at - 1 - areas) % config.slots;
        cut_slot(s, i, &seen->slot[c][slot], &durable->slot[c][slot]);
    }
}

void power_cut(void)
{
    state s = now;
    cut(&s, 0);
}

/* ---- which commit is in force ---- */

static const superblock *newest(const content *f)
{
    const superblock *found = &f->area[0];
    for (int i = 1; i < area_count(); i++)
        if (order_of(&f->area[i]) > order_of(found))
            found = &f->area[i];
    return found->number ? found : NULL;
}

static u8 newest_number(const content *f)
{
    return newest(f) ? newest(f)->number : 0;
}

/* The superblock with that number, where it can be in force. */
static const superblock *find(const content *f, u8 number)
{
    const superblock *found = NULL;
    for (int i = 0; i < area_count(); i++) {
        const superblock *super = &f->area[i];
        if (!super->number || super->number != number)
            continue;
        /* With one slot, what follows one that is not dirty has been written over nothing. */
        if (config.slots == 1 && super != newest(f) && (super->dirty || is(NEWEST_ONLY)))
            continue;
        if (!found || order_of(super) > order_of(found))
            found = super;
    }
    return found;
}

static const content *seen_of(const state *s, int g, int r)
{
    return &s->file[g][r].side[SEEN];
}

/* The newest commit that all ranks have; 0: none. */
static u8 common(const state *s, int g)
{
    for (u8 number = newest_number(seen_of(s, g, 0)); number; number--) {
        int have = 0;
        for (int r = 0; r < config.worlds[g]; r++)
            have += s->named[SEEN][g][r] && find(seen_of(s, g, r), number);
        if (have == config.worlds[g])
            return number;
    }
    return 0;
}

/* As common, where the smallest of the newest has to be it. */
static u8 least_newest(const state *s, int g)
{
    u8 least = 255;
    for (int r = 0; r < config.worlds[g]; r++)
        if (newest_number(seen_of(s, g, r)) < least)
            least = newest_number(seen_of(s, g, r));
    for (int r = 0; r < config.worlds[g]; r++)
        if (!find(seen_of(s, g, r), least))
            return 0;
    return least;
}

static u8 highest(const state *s, int g)
{
    u8 most = 0;
    for (int r = 0; r < config.worlds[g]; r++)
        if (newest_number(seen_of(s, g, r)) > most)
            most = newest_number(seen_of(s, g, r));
    return most;
}

/* One slot: what is found is being written over. */
static int dirty(const state *s, int g)
{
    int found = 0;
    for (int r = 0; config.slots == 1 && r < config.worlds[g]; r++)
        found |=
            s->named[SEEN][g][r] && newest(seen_of(s, g, r)) && newest(seen_of(s, g, r))->dirty;
    return found && !is(DIRTY_TAKEN) && !is(BEFORE_DIRTY_TAKEN);
}

static const superblock *taken(const content *f, u8 number)
{
    const superblock *super = find(f, is(NEWEST_OF_EACH) ? newest_number(f) : number);
    /* The other one with the same number. */
    for (int i = 0; super && is(BEFORE_DIRTY_TAKEN) && i < area_count(); i++)
        if (f->area[i].number == super->number && !f->area[i].dirty)
            return &f->area[i];
    return super;
}

static int holds(const content *f, const superblock *super)
{
    for (int c = 0; c < config.chunks; c++)
        if (f->slot[c][super->slot[c]] != super->val[c])
            return 0;
    return 1;
}

/* 1: the ranks go on from this commit; 0: a violation; -1: refused, as it may be. */
static int recover(state *s, u8 *number)
{
    const int g = s->force - 1;
    const int refused = dirty(s, g);
    for (int r = 0; r < config.worlds[g]; r++)
        if (!s->named[SEEN][g][r])
            return fail("a file that the manifest names is missing");
    *number = is(NUMBER_AGAIN) || is(NUMBER_IS_STEP) ? least_newest(s, g) : common(s, g);
    for (int r = 0; r < config.worlds[g]; r++) {
        const content *f = seen_of(s, g, r);
        const superblock *super = taken(f, *number);
        if (refused || !super)
            return s->risk ? -1 : fail("no commit is on all ranks, or it is refused");
        if (r == 0) {
            s->pos = super->pos;
            memcpy(s->val, super->val, sizeof s->val);
        }
        if (super->pos != s->pos || memcmp(super->val, s->val, sizeof s->val))
            return fail("ranks resume different commits");
        if (!holds(f, super))
            return fail("a slot of the commit does not hold its data");
        s->rank[r].area = (u8)(super - f->area);
        memcpy(s->rank[r].cur, super->slot, sizeof super->slot);
        if (is(NEWEST_STAYS))
            s->rank[r].area = (u8)(newest(f) - f->area);
    }
    if (s->pos != s->acked && s->pos != s->inflight && s->pos != s->reshaped)
        return fail("an older commit than the one agreed on comes back");
    return 1;
}

/* ---- the older ones ---- */

/* That all ranks keep, beside the commit found, the i-th (from 1): one superblock each, or NULL. */
static int kept(const state *s, int i, const superblock *found[RANKS])
{
    const int g = s->force - 1;
    const content *first = seen_of(s, g, 0);
    int number = first->area[s->rank[0].area].number;
    while (i && --number > 0) {
        int have = 0;
        for (int r = 0; r < config.worlds[g]; r++) {
            const content *f = seen_of(s, g, r);
            found[r] = find(f, (u8)number);
            have += found[r] &&
                    (is(OLDEST_OFFERED) || guards(f, s->rank[r].area, (u8)(found[r] - f->area)));
        }
        i -= have == config.worlds[g];
    }
    return !i;
}

/* Each of those that were promised, in that order and whole, and no other one. */
static int check_older(const state *s)
{
    u8 promised[OLDER + 1] = {0};
    int count = 0;
    if (config.slots <= 2)
        return 1;
    if (s->older_force == s->force) {
        if (s->pos != s->acked)
            promised[count++] = s->acked;
        for (int i = 0; i < config.slots - 2 && count < config.slots - 2; i++)
            promised[count++] = s->older[i];
    }
    for (int i = 0; i <= OLDER; i++) {
        const superblock *found[RANKS];
        const int is_kept = kept(s, i + 1, found);
        if (!is_kept && !promised[i])
            return 1;
        if (!is_kept)
            return fail("an older commit that was to be kept is lost");
        for (int r = 0; r < config.worlds[s->force - 1]; r++)
            if (found[r]->pos != promised[i])
                return fail("an older commit is offered that is not one of those kept");
            else if (!holds(seen_of(s, s->force - 1, r), found[r]))
                return fail("an older commit that is kept is not whole");
    }
    return 1;
}

/* Takes up the back-th of them; 0: there is none. */
static int go_back(state *s, int back, u8 *number)
{
    const superblock *found[RANKS];
    if (!kept(s, back, found))
        return 0;
    for (int r = 0; r < config.worlds[s->force - 1]; r++) {
        memcpy(s->rank[r].cur, found[r]->slot, sizeof found[r]->slot);
        if (is(BACK_IN_FORCE))
            s->rank[r].area = (u8)(found[r] - seen_of(s, s->force - 1, r)->area);
    }
    memcpy(s->val, found[0]->val, sizeof s->val);
    *number = found[0]->number;
    return 1;
}

/* ---- a job begins ---- */

void restart(start how, int back)
{
    state s = now;
    u8 number = 0, past = 0;
    memset(s.rank, 0, sizeof s.rank);
    s.running = 1;
    s.force = s.manifest[SEEN];
    if (s.force == TORN || (!s.force && s.acked)) {
        fail(s.force ? "the manifest is not whole" : "there is no manifest any more");
        SAY("start");
        emit(&s);
        return;
    }
    s.own = s.force ? (u8)(s.force + (how == RESHAPE)) : 1;
    s.world = config.worlds[s.own - 1];
    const int found = s.force ? recover(&s, &number) : 1;
    if (found < 0)
        return;
    if (!found || (s.force && !check_older(&s))) {
        SAY("resume of generation %d", s.force);
        emit(&s);
        return;
    }
    s.found = s.pos;
    past = is(NUMBER_AGAIN) || s.own != s.force ? number : highest(&s, s.own - 1);
    if (back && !go_back(&s, back, &number))
        return;
    s.number = (u8)(1 + (back && is(BACK_NUMBER) ? number : past));
    if (is(NUMBER_IS_STEP))
        s.number = number;
    if (!s.force || how == OVER || back)
        s.pos = (u8)(s.last_id + 1);
    if (!s.force || how == OVER)
        memset(s.val, s.pos, (size_t)config.chunks);
    for (int r = 0; r < RANKS; r++) {
        rank *k = &s.rank[r];
        k->pc = r >= s.world ? DEAD : r ? B_LOCK : OPEN;
        if (s.own != s.force)
            k->area = NONE;
        if (s.own != s.force || how == OVER)
            memset(k->cur, NONE, sizeof k->cur);
    }
    SAY("%s%s",
        how == RESHAPE ? "resume in another shape"
        : how == OVER  ? "start over"
                       : "resume",
        back ? ", going back" : "");
    emit(&s);
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Which states count as one. Contents and positions of the run are numbers that are only compared
 * with each other; commit numbers are only compared in order; slots, areas and ranks have names
 * that mean nothing; and of what nobody can find any more, nothing is left but that it is there. */
#include <stdlib.h>
#include <string.h>

#include "property/commit_internal.h"

/* ---- contents, positions ---- */

typedef struct names {
    u8 to[256];
    u8 next;
} names;

static void rename_id(names *n, u8 *id)
{
    if (*id == 0 || *id >= OLD)
        return;
    if (!n->to[*id])
        n->to[*id] = n->next++;
    *id = n->to[*id];
}

static void rename_file(names *n, file *f)
{
    for (int side = 0; side < 2; side++) {
        content *at = &f->side[side];
        for (int i = 0; i < area_count(); i++) {
            for (int c = 0; c < config.chunks; c++)
                rename_id(n, &at->area[i].val[c]);
            rename_id(n, &at->area[i].pos);
        }
        for (int c = 0; c < config.chunks; c++)
            for (int i = 0; i < config.slots; i++)
                rename_id(n, &at->slot[c][i]);
    }
}

static void rename_run(names *n, state *s)
{
    rename_id(n, &s->acked);
    rename_id(n, &s->inflight);
    rename_id(n, &s->reshaped);
    for (int i = 0; i < OLDER; i++)
        rename_id(n, &s->older[i]);
    rename_id(n, &s->found);
    rename_id(n, &s->pos);
    for (int c = 0; c < config.chunks; c++)
        rename_id(n, &s->val[c]);
    rename_id(n, &s->late_val);
}

/* ---- commit numbers ---- */

static void each_superblock(state *s, void (*visit)(superblock *, u8 *), u8 *arg)
{
    for (int g = 0; g < GENS; g++)
        for (int r = 0; r < RANKS; r++)
            for (int side = 0; side < 2; side++)
                for (int i = 0; i < area_count(); i++)
                    visit(&s->file[g][r].side[side].area[i], arg);
}

static void note_number(superblock *super, u8 *used)
{
    used[super->number] = 1;
}

static void change_number(superblock *super, u8 *to)
{
    super->number = to[super->number];
}

/* Only the order of commit numbers matters where a new one is above all others. */
static void rename_numbers(state *s)
{
    u8 used[256] = {0}, to[256] = {0}, next = 1;
    if (is(NUMBER_AGAIN) || is(NUMBER_IS_STEP) || is(BACK_NUMBER))
        return;
    used[s->number] = 1;
    each_superblock(s, note_number, used);
    for (int i = 1; i < 256; i++)
        if (used[i])
            to[i] = next++;
    s->number = to[s->number];
    each_superblock(s, change_number, to);
}

/* ---- what can still make a difference ---- */

/* Finding a commit other than these is a violation, whatever its slots hold. */
static int may_be_found(const state *s, u8 pos)
{
    for (int i = 0; i < OLDER; i++)
        if (pos == s->older[i])
            return 1;
    return pos == s->acked || pos == s->inflight || pos == s->reshaped ||
           (s->running && pos == s->pos);
}

static int alive_in(const state *s, int g, int r)
{
    return s->running && s->own == g + 1 && s->rank[r].pc != DEAD;
}

/* Of a commit that must not be found any more only that it is there, of a slot whether it holds
 * what somebody says it holds. */
static void forget(state *s, int g, int r)
{
    enum { CLAIMS = 2 * SLOTS + 1 };
    file *f = &s->file[g][r];
    u8 claims[CHUNKS][SLOTS][CLAIMS] = {0};
    if ((!s->named[DURABLE][g][r] && !s->named[SEEN][g][r]) ||
        (s->manifest[DURABLE] != g + 1 && s->manifest[SEEN] != g + 1 && s->own != g + 1))
        *f = (file){0};
    for (int i = 0; i < 2 * area_count(); i++) {
        superblock *super = &f->side[i % 2].area[i / 2];
        if (!super->number)
            *super = (superblock){0};
        else if (!may_be_found(s, super->pos))
            *super = (superblock){.number = super->number, .dirty = super->dirty, .pos = OLD};
        for (int c = 0; super->number && super->pos != OLD && c < config.chunks; c++)
            claims[c][super->slot[c]][i] = super->val[c];
    }
    for (int c = 0; c < config.chunks; c++) {
        if (alive_in(s, g, r) && s->rank[r].cur[c] != NONE)
            claims[c][s->rank[r].cur[c]][CLAIMS - 1] = s->val[c];
        for (int i = 0; i < config.slots; i++) {
            int claimed = 0;
            for (int j = 0; j < CLAIMS; j++)
                claimed |= claims[c][i][j];
            for (int side = 0; side < 2; side++) {
                u8 *slot = &f->side[side].slot[c][i];
                if (!claimed)
                    *slot = 0;
                else if (!memchr(claims[c][i], *slot, CLAIMS) || !*slot)
                    *slot = TORN;
            }
        }
    }
}

/* ---- slots, areas ---- */

static void swap_place(u8 *area, int j)
{
    if (*area == j || *area == j - 1)
        *area = (u8)(*area == j ? j - 1 : j);
}

/* Areas: the newest first, as seen, and of those equal there, as on disk. */
static void sort_areas(file *f, rank *k)
{
    for (int i = 1; i < area_count(); i++)
        for (int j = i; j > 0; j--) {
            superblock *seen = &f->side[SEEN].area[j], *durable = &f->side[DURABLE].area[j];
            int more = order_of(seen) - order_of(seen - 1);
            if (!more)
                more = order_of(durable) - order_of(durable - 1);
            if (more <= 0)
                break;
            const superblock a = *seen, b = *durable;
            *seen = *(seen - 1);
            *durable = *(durable - 1);
            *(seen - 1) = a;
            *(durable - 1) = b;
            if (k) {
                swap_place(&k->area, j);
                if (k->pc == SUPER && k->at)
                    swap_place(&k->to, j);
            }
        }
}

typedef struct places {
    u8 to[SLOTS], used, next;
} places;

static void place(places *p, u8 slot)
{
    if (slot >= SLOTS || p->used >> slot & 1)
        return;
    p->used |= (u8)(1 << slot);
    p->to[slot] = p->next++;
}

/* Slots: in the order in which they are named. */
static void sort_slots(file *f, rank *k, int c)
{
    places p = {0};
    for (int side = SEEN; side >= DURABLE; side--)
        for (int i = 0; i < area_count(); i++) {
            const superblock *super = &f->side[side].area[i];
            if (super->number && super->pos != OLD)
                place(&p, super->slot[c]);
        }
    if (k)
        place(&p, k->cur[c]);
    for (u8 i = 0; i < config.slots; i++)
        place(&p, i);
    for (int side = 0; side < 2; side++) {
        u8 old[SLOTS];
        memcpy(old, f->side[side].slot[c], sizeof old);
        for (int i = 0; i < config.slots; i++)
            f->side[side].slot[c][p.to[i]] = old[i];
        for (int i = 0; i < area_count(); i++) {
            superblock *super = &f->side[side].area[i];
            if (super->number && super->pos != OLD)
                super->slot[c] = p.to[super->slot[c]];
        }
    }
    if (k && k->cur[c] != NONE)
        k->cur[c] = p.to[k->cur[c]];
}

/* ---- ranks ---- */

typedef struct member {
    rank rank;
    file key; /* its file, with those contents that have a name already, and one name for others */
    u8 named[2], number;
} member;

static int compare_members(const void *a, const void *b)
{
    return memcmp(a, b, sizeof(member) - 1);
}

/* Rank 0 of a running job has a part of its own; the others have not, and neither have the files of
 * ranks that are not there. */
static void sort_ranks(const names *n, state *s, int g)
{
    enum { OTHER = 250 };
    const int runs = s->running && s->own == g + 1, first = runs;
    member members[RANKS];
    names key = *n;
    const state old = *s;
    if (config.worlds[g] - first < 2)
        return;
    for (int id = 0; id < 256; id++)
        if (!key.to[id])
            key.to[id] = OTHER;
    memset(members, 0, sizeof members);
    for (int r = first; r < config.worlds[g]; r++) {
        members[r].number = (u8)r;
        if (runs)
            members[r].rank = s->rank[r];
        members[r].key = s->file[g][r];
        rename_file(&key, &members[r].key);
        for (int side = 0; side < 2; side++)
            members[r].named[side] = s->named[side][g][r];
    }
    qsort(members + first, (size_t)(config.worlds[g] - first), sizeof *members, compare_members);
    for (int r = first; r < config.worlds[g]; r++) {
        const int from = members[r].number;
        if (runs)
            s->rank[r] = old.rank[from];
        s->file[g][r] = old.file[g][from];
        for (int side = 0; side < 2; side++)
            s->named[side][g][r] = old.named[side][g][from];
    }
}

static int anywhere(const state *s, u8 pos)
{
    for (int g = 0; g < GENS; g++)
        for (int r = 0; r < RANKS; r++)
            for (int side = 0; side < 2; side++)
                for (int i = 0; i < area_count(); i++)
                    if (s->file[g][r].side[side].area[i].pos == pos)
                        return 1;
    return 0;
}

void normalise(state *s)
{
    names n = {.next = 1};
    int alive = 0, stepping = 0;
    for (int r = 0; r < RANKS; r++) {
        const u8 pc = s->rank[r].pc;
        if (pc == DEAD || r >= s->world)
            memset(&s->rank[r], 0, sizeof s->rank[r]);
        alive += s->rank[r].pc != DEAD;
        stepping += pc == STEP || pc == MARK_STEP || pc == MARK_STEP_FLUSH;
    }
    if (!alive) {
        s->running = s->world = s->own = s->force = s->pos = s->number = s->found = 0;
        memset(s->val, 0, sizeof s->val);
        if (!anywhere(s, s->inflight))
            s->inflight = 0;
        if (!anywhere(s, s->reshaped))
            s->reshaped = 0;
    }
    if (!stepping)
        s->mask = 0;
    for (int g = 0; g < GENS; g++)
        for (int r = 0; r < RANKS; r++) {
            rank *k = alive_in(s, g, r) ? &s->rank[r] : NULL;
            forget(s, g, r);
            sort_areas(&s->file[g][r], k);
            for (int c = 0; !is(LATE_WRITES) && c < config.chunks; c++)
                sort_slots(&s->file[g][r], k, c);
        }
    rename_numbers(s);
    rename_run(&n, s);
    for (int g = 0; !is(LATE_WRITES) && g < GENS; g++)
        sort_ranks(&n, s, g);
    for (int g = 0; g < GENS; g++)
        for (int r = 0; r < RANKS; r++)
            rename_file(&n, &s->file[g][r]);
    s->last_id = (u8)(n.next - 1);
}

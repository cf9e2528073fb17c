/* SPDX-License-Identifier: Apache-2.0 */
/* The commit protocol as a state machine: what a rank does, what a crash or a power cut leaves, and
 * what a resume then finds. commit_model.h says how it is searched.
 *
 * A location (slot, superblock, directory entry) has what is visible and what is durable. A write
 * changes the former, a flush makes both equal, and a power cut leaves one of the two or something
 * torn, each location for itself. Contents are numbers: one for each step, the same on all ranks,
 * because all ranks step together. */
#include "property/commit_model.h"

#include <stdio.h>
#include <string.h>

enum { NONE = 2, OLD = 254, TORN = 255 };

/* Where a rank is. B_ are barriers: agreements of all ranks. */
enum {
    DEAD,
    OPEN, /* rank 0: has the lock and the manifest */
    B_LOCK,
    SWEEP, /* rank 0: removes what no manifest names */
    MAKE,
    MAKE_FLUSH,
    MAKE_DIR,
    SYNC,
    B_OPEN,
    IDLE,
    STEP,
    WRITE,
    FLUSH,
    B_DATA,
    SUPER,
    SUPER_FLUSH,
    B_SUPER,
    RENAME,
    RENAME_DIR,
    B_MANIFEST,
    CLEAN
};

static const struct {
    const char *name, *what;
} mutations[MUTATIONS] = {
    [AS_BUILT] = {"none", "the protocol as built"},
    [DATA_NOT_FLUSHED] = {"data-not-flushed", "superblock written without a flush of the slots"},
    [DATA_NOT_AGREED] = {"data-not-agreed", "superblock written before the status was agreed"},
    [SUPER_NOT_FLUSHED] = {"super-not-flushed", "commit agreed without a flush of superblocks"},
    [SUPER_NOT_AGREED] = {"super-not-agreed", "slots reused before all superblocks are agreed"},
    [SLOT_IN_PLACE] = {"slot-in-place", "a step writes the slot that the superblock names"},
    [SUPER_IN_PLACE] = {"super-in-place", "the superblock in force overwritten in place"},
    [NEWEST_OF_EACH] = {"newest-of-each", "resume takes the newest of each rank"},
    [NEWEST_STAYS] = {"newest-stays-in-force", "after going back, the newer superblock stays in "
                                               "force in its file"},
    [NUMBER_IS_STEP] = {"number-is-step", "a commit is known by its step, not by its number"},
    [NUMBER_AGAIN] = {"number-again", "the number of an abandoned commit is given again"},
    [RESUME_NOT_FLUSHED] = {"resume-not-flushed", "slots reused before what was found is flushed"},
    [MANIFEST_FIRST] = {"manifest-first", "the manifest appears before the first commit"},
    [SWITCH_FIRST] = {"switch-first", "the manifest is switched before the new files' commit"},
    [CLEAN_FIRST] = {"clean-first", "old files removed before the switch"},
    [MANIFEST_NOT_FLUSHED] = {"manifest-not-flushed", "manifest renamed without a flush of it"},
    [MAKE_DIR_NOT_FLUSHED] = {"make-dir-not-flushed", "files made without a directory flush"},
    [RENAME_DIR_NOT_FLUSHED] = {"rename-dir-not-flushed", "manifest put in place without a "
                                                          "directory flush"},
    [OPEN_DIR_NOT_FLUSHED] = {"open-dir-not-flushed", "manifest that was found not flushed before "
                                                      "others' files are removed"},
    [OPEN_NOT_LOCKED] = {"open-not-locked", "files removed or emptied while rank 0 of another job "
                                            "lives"},
};

static model_config config;
static model_visit visit;
static int tracing;
static char label[120];
static const char *violation;
static state now; /* the state being expanded */

#define SAY(...)                                                                                   \
    do {                                                                                           \
        if (tracing)                                                                               \
            snprintf(label, sizeof label, __VA_ARGS__);                                            \
    } while (0)

const char *model_name(mutation m)
{
    return mutations[m].name;
}

const char *model_what(mutation m)
{
    return mutations[m].what;
}

const char *model_label(void)
{
    return label;
}

static int is(mutation m)
{
    return config.mutation == m;
}

static int fail(const char *why)
{
    violation = why;
    return 0;
}

/* ---- one form for states that differ in names only ---- */

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

static void rename_ids(state *s)
{
    names n = {.next = 1};
    rename_id(&n, &s->acked);
    rename_id(&n, &s->inflight);
    rename_id(&n, &s->found);
    rename_id(&n, &s->pos);
    for (int c = 0; c < config.chunks; c++)
        rename_id(&n, &s->val[c]);
    for (int g = 0; g < GENS; g++)
        for (int r = 0; r < RANKS; r++)
            for (int side = 0; side < 2; side++) {
                content *f = &s->file[g][r].side[side];
                for (int c = 0; c < config.chunks; c++) {
                    for (int a = 0; a < 2; a++) {
                        rename_id(&n, &f->area[a].val[c]);
                        rename_id(&n, &f->slot[c][a]);
                    }
                }
                rename_id(&n, &f->area[0].pos);
                rename_id(&n, &f->area[1].pos);
            }
    s->last_id = (u8)(n.next - 1);
}

/* Only the order of commit numbers matters where a new one is above all others. */
static void rename_numbers(state *s)
{
    u8 used[256] = {0}, to[256] = {0}, next = 1;
    if (is(NUMBER_AGAIN) || is(NUMBER_IS_STEP))
        return;
    used[s->number] = 1;
    for (int g = 0; g < GENS; g++)
        for (int r = 0; r < RANKS; r++)
            for (int i = 0; i < 4; i++)
                used[s->file[g][r].side[i / 2].area[i % 2].number] = 1;
    for (int i = 1; i < 256; i++)
        if (used[i])
            to[i] = next++;
    s->number = to[s->number];
    for (int g = 0; g < GENS; g++)
        for (int r = 0; r < RANKS; r++)
            for (int i = 0; i < 4; i++) {
                u8 *number = &s->file[g][r].side[i / 2].area[i % 2].number;
                *number = to[*number];
            }
}

/* Finding a commit other than these is a violation, whatever its slots hold. */
static int may_be_found(const state *s, u8 pos)
{
    return pos == s->acked || pos == s->inflight || (s->running && pos == s->pos);
}

/* Reduces a file to what can still make a difference: of a commit that must not be found any more
 * only that it is there, of a slot whether it holds what somebody says it holds. */
static void forget(state *s, int g, int r)
{
    file *f = &s->file[g][r];
    u8 claims[CHUNKS][2][6] = {0};
    const int live = s->running && s->own == g + 1 && s->rank[r].pc != DEAD;
    if ((!s->named[DURABLE][g][r] && !s->named[SEEN][g][r]) ||
        (s->manifest[DURABLE] != g + 1 && s->manifest[SEEN] != g + 1 && s->own != g + 1))
        *f = (file){0};
    for (int i = 0; i < 4; i++) {
        superblock *super = &f->side[i / 2].area[i % 2];
        if (!super->number)
            *super = (superblock){0};
        else if (!may_be_found(s, super->pos))
            *super = (superblock){.number = super->number, .pos = OLD};
        for (int c = 0; super->number && super->pos != OLD && c < config.chunks; c++)
            claims[c][super->slot[c]][i] = super->val[c];
    }
    for (int c = 0; c < config.chunks; c++) {
        if (live && s->rank[r].cur[c] != NONE)
            claims[c][s->rank[r].cur[c]][4] = s->val[c];
        for (int i = 0; i < 2; i++) {
            int claimed = 0;
            for (int j = 0; j < 5; j++)
                claimed |= claims[c][i][j];
            for (int side = 0; side < 2; side++) {
                u8 *slot = &f->side[side].slot[c][i];
                if (!claimed)
                    *slot = 0;
                else if (!memchr(claims[c][i], *slot, 5) || !*slot)
                    *slot = TORN;
            }
        }
    }
}

static void swap_bytes(void *a, void *b, size_t bytes)
{
    u8 *x = a, *y = b;
    for (size_t i = 0; i < bytes; i++) {
        const u8 t = x[i];
        x[i] = y[i];
        y[i] = t;
    }
}

static void flip(u8 *slot)
{
    if (*slot != NONE)
        *slot ^= 1;
}

/* Neither slots nor superblocks have a first: whichever is named first, and the newer, is. */
static void sort_places(state *s, int g, int r)
{
    file *f = &s->file[g][r];
    superblock *areas[] = {&f->side[SEEN].area[0], &f->side[SEEN].area[1],
                           &f->side[DURABLE].area[0], &f->side[DURABLE].area[1]};
    rank *k = s->running && s->own == g + 1 && s->rank[r].pc != DEAD ? &s->rank[r] : NULL;
    const int order = areas[0]->number != areas[1]->number ? areas[0]->number - areas[1]->number
                                                           : areas[2]->number - areas[3]->number;
    if (order < 0) {
        swap_bytes(areas[0], areas[1], sizeof(superblock));
        swap_bytes(areas[2], areas[3], sizeof(superblock));
        if (k)
            flip(&k->area);
    }
    for (int c = 0; c < config.chunks; c++) {
        u8 first = NONE;
        for (int i = 0; i < 4 && first == NONE; i++)
            if (areas[i]->number && areas[i]->pos != OLD)
                first = areas[i]->slot[c];
        if (first == NONE && k)
            first = k->cur[c] != NONE ? k->cur[c] : k->kept[c];
        if (first != 1)
            continue;
        for (int i = 0; i < 4; i++)
            if (areas[i]->number && areas[i]->pos != OLD)
                flip(&areas[i]->slot[c]);
        for (int side = 0; side < 2; side++)
            swap_bytes(&f->side[side].slot[c][0], &f->side[side].slot[c][1], 1);
        if (k) {
            flip(&k->cur[c]);
            flip(&k->kept[c]);
        }
    }
}

static int anywhere(const state *s, u8 pos)
{
    for (int g = 0; g < GENS; g++)
        for (int r = 0; r < RANKS; r++)
            for (int i = 0; i < 4; i++)
                if (s->file[g][r].side[i / 2].area[i % 2].pos == pos)
                    return 1;
    return 0;
}

static void normalise(state *s)
{
    int alive = 0, stepping = 0;
    for (int r = 0; r < RANKS; r++) {
        if (s->rank[r].pc == DEAD || r >= s->world)
            memset(&s->rank[r], 0, sizeof s->rank[r]);
        alive += s->rank[r].pc != DEAD;
        stepping += s->rank[r].pc == STEP;
    }
    if (!alive) {
        s->running = s->world = s->own = s->force = s->pos = s->number = s->found = 0;
        memset(s->val, 0, sizeof s->val);
        if (!anywhere(s, s->inflight))
            s->inflight = 0;
    }
    if (!stepping)
        s->mask = 0;
    for (int g = 0; g < GENS; g++)
        for (int r = 0; r < RANKS; r++) {
            forget(s, g, r);
            sort_places(s, g, r);
        }
    rename_numbers(s);
    state other = *s;
    rename_ids(s);
    /* Ranks 1 and 2 do the same where both are in all worlds. */
    if (config.worlds[0] < 3 || (config.worlds[1] && config.worlds[1] < 3))
        return;
    swap_bytes(&other.rank[1], &other.rank[2], sizeof(rank));
    for (int g = 0; g < GENS; g++) {
        swap_bytes(&other.file[g][1], &other.file[g][2], sizeof(file));
        for (int side = 0; side < 2; side++)
            swap_bytes(&other.named[side][g][1], &other.named[side][g][2], 1);
    }
    rename_ids(&other);
    if (memcmp(&other, s, sizeof other) < 0)
        *s = other;
}

static void emit(state *s)
{
    const char *why = violation;
    violation = NULL;
    normalise(s);
    visit(s, why);
}

/* ---- crash, power cut ---- */

static void kill_rank(int r)
{
    state s = now;
    s.rank[r].pc = DEAD;
    SAY("rank %d is killed", r);
    emit(&s);
}

/* Each pending location on its own, from the i-th on. */
static void cut(state *s, int i)
{
    const int per_file = 2 + 2 * config.chunks, files = GENS * RANKS;
    if (i == files * (per_file + 1) + 1) {
        state copy = *s;
        SAY("power cut (manifest %d)", s->manifest[SEEN]);
        emit(&copy);
        return;
    }
    if (i == files * (per_file + 1)) {
        const u8 seen = s->manifest[SEEN], durable = s->manifest[DURABLE];
        s->manifest[SEEN] = durable;
        cut(s, i + 1);
        if (seen != durable) {
            s->manifest[SEEN] = s->manifest[DURABLE] = is(MANIFEST_NOT_FLUSHED) ? TORN : seen;
            cut(s, i + 1);
        }
        s->manifest[SEEN] = seen;
        s->manifest[DURABLE] = durable;
        return;
    }
    const int which = i / (per_file + 1), at = i % (per_file + 1);
    const int g = which / RANKS, r = which % RANKS;
    u8 *seen_name = &s->named[SEEN][g][r], *durable_name = &s->named[DURABLE][g][r];
    content *seen = &s->file[g][r].side[SEEN], *durable = &s->file[g][r].side[DURABLE];
    if (at == per_file) {
        const u8 a = *seen_name, b = *durable_name;
        *seen_name = b;
        cut(s, i + 1);
        if (a != b) {
            *seen_name = *durable_name = a;
            cut(s, i + 1);
        }
        *seen_name = a;
        *durable_name = b;
    } else if (at < 2) {
        const superblock a = seen->area[at], b = durable->area[at];
        const int pending = memcmp(&a, &b, sizeof a) != 0;
        seen->area[at] = b;
        cut(s, i + 1);
        if (pending && a.number) {
            seen->area[at] = durable->area[at] = a;
            cut(s, i + 1);
        }
        if (pending && b.number) {
            seen->area[at] = durable->area[at] = (superblock){0};
            cut(s, i + 1);
        }
        seen->area[at] = a;
        durable->area[at] = b;
    } else {
        u8 *x = &seen->slot[(at - 2) / 2][at % 2], *y = &durable->slot[(at - 2) / 2][at % 2];
        const u8 a = *x, b = *y;
        *x = b;
        cut(s, i + 1);
        if (a != b && a != TORN) {
            *x = *y = a;
            cut(s, i + 1);
        }
        if (a != b && b != TORN) {
            *x = *y = TORN;
            cut(s, i + 1);
        }
        *x = a;
        *y = b;
    }
}

/* ---- what a resume finds ---- */

static const superblock *find(const content *f, u8 number)
{
    for (int a = 0; a < 2; a++)
        if (f->area[a].number && f->area[a].number == number)
            return &f->area[a];
    return NULL;
}

static u8 newest(const content *f)
{
    return f->area[0].number > f->area[1].number ? f->area[0].number : f->area[1].number;
}

/* The newest commit that all ranks have; 0: none. */
static u8 common(const state *s, int g)
{
    for (u8 number = newest(&s->file[g][0].side[SEEN]); number; number--) {
        int have = 0;
        for (int r = 0; r < config.worlds[g]; r++)
            have += s->named[SEEN][g][r] && find(&s->file[g][r].side[SEEN], number);
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
        if (newest(&s->file[g][r].side[SEEN]) < least)
            least = newest(&s->file[g][r].side[SEEN]);
    for (int r = 0; r < config.worlds[g]; r++)
        if (!find(&s->file[g][r].side[SEEN], least))
            return 0;
    return least;
}

/* Position and states of the run, or a violation. */
static int recover(state *s, u8 *number)
{
    const int g = s->force - 1;
    *number = is(NUMBER_AGAIN) || is(NUMBER_IS_STEP) ? least_newest(s, g) : common(s, g);
    for (int r = 0; r < config.worlds[g]; r++) {
        const content *f = &s->file[g][r].side[SEEN];
        if (!s->named[SEEN][g][r])
            return fail("a file that the manifest names is missing");
        const superblock *super = find(f, is(NEWEST_OF_EACH) ? newest(f) : *number);
        if (!super)
            return fail("no commit is on all ranks");
        if (r == 0) {
            s->pos = super->pos;
            memcpy(s->val, super->val, sizeof s->val);
        }
        if (super->pos != s->pos || memcmp(super->val, s->val, sizeof s->val))
            return fail("ranks resume different commits");
        for (int c = 0; c < config.chunks; c++)
            if (f->slot[c][super->slot[c]] != super->val[c])
                return fail("a slot of the commit does not hold its data");
        s->rank[r].area = (u8)(super - f->area);
        for (int c = 0; c < config.chunks; c++)
            s->rank[r].cur[c] = s->rank[r].kept[c] = super->slot[c];
        if (is(NEWEST_STAYS)) {
            const superblock *own = find(f, newest(f));
            s->rank[r].area = (u8)(own - f->area);
            for (int c = 0; c < config.chunks; c++)
                s->rank[r].kept[c] = own->slot[c];
        }
    }
    if (s->pos != s->acked && s->pos != s->inflight)
        return fail("an older commit than the one agreed on comes back");
    return 1;
}

static u8 highest(const state *s, int g)
{
    u8 most = 0;
    for (int r = 0; r < config.worlds[g]; r++)
        if (newest(&s->file[g][r].side[SEEN]) > most)
            most = newest(&s->file[g][r].side[SEEN]);
    return most;
}

typedef enum start { SAME, RESHAPE, OVER } start;

static void restart(start how)
{
    state s = now;
    u8 number = 0;
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
    if (s.force && !recover(&s, &number)) {
        SAY("resume of generation %d", s.force);
        emit(&s);
        return;
    }
    s.found = s.pos;
    s.number = (u8)(1 + (is(NUMBER_AGAIN) || s.own != s.force ? number : highest(&s, s.own - 1)));
    if (is(NUMBER_IS_STEP))
        s.number = number;
    if (!s.force || how == OVER) {
        s.pos = (u8)(s.last_id + 1);
        memset(s.val, s.pos, (size_t)config.chunks);
    }
    for (int r = 0; r < RANKS; r++) {
        rank *k = &s.rank[r];
        k->pc = r >= s.world ? DEAD : r ? B_LOCK : OPEN;
        if (s.own != s.force) {
            k->area = NONE;
            memset(k->kept, NONE, sizeof k->kept);
        }
        if (s.own != s.force || how == OVER)
            memset(k->cur, NONE, sizeof k->cur);
    }
    SAY(how == RESHAPE ? "resume in another shape" : how == OVER ? "start over" : "resume");
    emit(&s);
}

/* ---- what a rank does ---- */

static void flush_dir(state *s)
{
    memcpy(s->named[DURABLE], s->named[SEEN], sizeof s->named[SEEN]);
    s->manifest[DURABLE] = s->manifest[SEEN];
}

/* Rank 0 removes one file of a generation that is neither in force nor its own. */
static int remove_one(state *s)
{
    for (int g = 0; g < GENS; g++)
        for (int r = 0; r < RANKS; r++)
            if (g + 1 != s->own && g + 1 != s->force && s->named[SEEN][g][r]) {
                s->named[SEEN][g][r] = 0;
                SAY("rank 0 removes generation %d of rank %d", g + 1, r);
                return 1;
            }
    return 0;
}

/* Begins, then ends writing the next chunk that is to be written; 0: there is none. */
static int write_chunk(state *s, int r)
{
    rank *k = &s->rank[r];
    content *f = &s->file[s->own - 1][r].side[SEEN];
    for (; k->at < 2 * config.chunks; k->at++) {
        const int c = k->at / 2;
        if (k->at % 2) {
            f->slot[c][k->cur[c]] = s->val[c];
            SAY("rank %d ends writing chunk %d", r, c);
            k->at++;
            return 1;
        }
        if (k->pc == STEP ? !(s->mask >> c & 1) : k->cur[c] != NONE) {
            k->at++;
            continue;
        }
        if (k->cur[c] == NONE || k->cur[c] == k->kept[c])
            k->cur[c] = k->kept[c] == 0;
        if (is(SLOT_IN_PLACE) && k->kept[c] != NONE)
            k->cur[c] = k->kept[c];
        f->slot[c][k->cur[c]] = TORN;
        SAY("rank %d begins to write chunk %d", r, c);
        k->at++;
        return 1;
    }
    k->at = 0;
    return 0;
}

static void write_super(state *s, int r)
{
    rank *k = &s->rank[r];
    content *f = &s->file[s->own - 1][r].side[SEEN];
    const int area = k->area == NONE ? 0 : is(SUPER_IN_PLACE) ? k->area : 1 - k->area;
    if (!k->at) {
        f->area[area] = (superblock){0};
        k->at = 1;
        SAY("rank %d begins to write its superblock", r);
        return;
    }
    k->at = 0;
    superblock *to = &f->area[area];
    to->number = s->number;
    to->pos = s->pos;
    memcpy(to->val, s->val, sizeof to->val);
    memcpy(to->slot, k->cur, sizeof to->slot);
    memcpy(k->kept, k->cur, sizeof k->kept);
    k->area = (u8)area;
    k->pc = is(SUPER_NOT_FLUSHED) ? B_SUPER : SUPER_FLUSH;
    SAY("rank %d ends writing its superblock", r);
}

static void flush_file(state *s, int r)
{
    file *f = &s->file[s->own - 1][r];
    f->side[DURABLE] = f->side[SEEN];
}

static u8 after_lock(const state *s)
{
    return s->own != s->force ? MAKE : is(RESUME_NOT_FLUSHED) ? B_OPEN : SYNC;
}

static void advance(int r)
{
    state s = now;
    rank *k = &s.rank[r];
    SAY("%s", "");
    switch (k->pc) {
    case OPEN:
        if (!is(OPEN_DIR_NOT_FLUSHED))
            flush_dir(&s);
        k->pc = B_LOCK;
        break;
    case SWEEP:
        if (!remove_one(&s))
            k->pc = after_lock(&s);
        break;
    case MAKE:
        s.named[SEEN][s.own - 1][r] = 1;
        memset(&s.file[s.own - 1][r].side[SEEN], 0, sizeof(content));
        k->pc = MAKE_FLUSH;
        SAY("rank %d makes its file of generation %d", r, s.own);
        break;
    case MAKE_FLUSH:
        flush_file(&s, r);
        k->pc = is(MAKE_DIR_NOT_FLUSHED) ? B_OPEN : MAKE_DIR;
        SAY("rank %d flushes its file", r);
        break;
    case MAKE_DIR:
        if (r == 0 && ((is(MANIFEST_FIRST) && !s.force) || (is(SWITCH_FIRST) && s.force)))
            s.manifest[SEEN] = s.own;
        flush_dir(&s);
        k->pc = B_OPEN;
        SAY("rank %d flushes the directory", r);
        break;
    case SYNC:
        flush_file(&s, r);
        k->pc = B_OPEN;
        SAY("rank %d flushes what it found", r);
        break;
    case STEP:
        if (!write_chunk(&s, r))
            k->pc = IDLE;
        break;
    case WRITE:
        if (!write_chunk(&s, r))
            k->pc = is(DATA_NOT_FLUSHED) ? B_DATA : FLUSH;
        break;
    case FLUSH:
        flush_file(&s, r);
        k->pc = is(DATA_NOT_AGREED) ? SUPER : B_DATA;
        SAY("rank %d flushes its slots", r);
        break;
    case SUPER:
        write_super(&s, r);
        break;
    case SUPER_FLUSH:
        flush_file(&s, r);
        k->pc = B_SUPER;
        SAY("rank %d flushes its superblock", r);
        break;
    case RENAME:
        s.manifest[SEEN] = s.own;
        k->pc = is(RENAME_DIR_NOT_FLUSHED) ? B_MANIFEST : RENAME_DIR;
        SAY("rank 0 puts the manifest of generation %d in place", s.own);
        break;
    case RENAME_DIR:
        flush_dir(&s);
        k->pc = B_MANIFEST;
        SAY("rank 0 flushes the directory");
        break;
    case CLEAN:
        if (!remove_one(&s))
            k->pc = IDLE;
        break;
    default:
        if (!(k->pc == B_SUPER && is(SUPER_NOT_AGREED)))
            return;
        /* The next step comes without waiting for anybody. */
        s.file[s.own - 1][r].side[SEEN].slot[0][k->kept[0] == 0] = TORN;
        k->cur[0] = k->kept[0] == 0;
        SAY("rank %d reuses a slot", r);
    }
    emit(&s);
}

/* A disk that is full, or bad, ends the commit on all ranks. */
static void write_error(int r)
{
    state s = now;
    if (s.rank[r].pc != WRITE && s.rank[r].pc != FLUSH)
        return;
    s.rank[r].failed = 1;
    s.rank[r].pc = is(DATA_NOT_AGREED) ? B_SUPER : B_DATA;
    SAY("rank %d cannot write its slots", r);
    emit(&s);
}

/* ---- what ranks do together ---- */

static void all_to(state *s, u8 first, u8 others)
{
    for (int r = 0; r < s->world; r++) {
        s->rank[r].pc = r ? others : first;
        s->rank[r].at = 0;
    }
}

static void acknowledge(state *s)
{
    s->acked = s->pos;
    s->inflight = 0;
}

static void refused(state *s)
{
    for (int r = 0; r < s->world; r++)
        for (int a = 0; a < 2; a++) {
            const superblock *super = &s->file[s->own - 1][r].side[SEEN].area[a];
            if (!is(NUMBER_IS_STEP) && !is(NUMBER_AGAIN) && super->number == s->number)
                fail("a commit that was refused is in a superblock");
        }
    all_to(s, DEAD, DEAD);
    SAY("all ranks learn of the error");
}

static void begin_commit(state *s)
{
    s->inflight = s->pos;
    if (is(NUMBER_IS_STEP) && s->number == 0)
        s->number = 1;
    all_to(s, WRITE, WRITE);
}

/* From idle: a step of all chunks, of the first one, of none; a commit. */
static void choose(void)
{
    for (int mask = (1 << config.chunks) - 1; mask >= 0; mask = mask > 1 ? 1 : mask - 1) {
        state s = now;
        s.mask = (u8)mask;
        s.pos = (u8)(s.last_id + 1);
        for (int c = 0; c < CHUNKS; c++)
            if (mask >> c & 1)
                s.val[c] = s.pos;
        if (is(NUMBER_IS_STEP) && mask && s.number < 250)
            s.number++;
        if (mask)
            all_to(&s, STEP, STEP);
        SAY(mask == 0 ? "a step is skipped" : mask == 1 ? "a step of chunk 0" : "a step");
        emit(&s);
    }
    state s = now;
    begin_commit(&s);
    SAY("commit");
    emit(&s);
}

static void together(void)
{
    state s = now;
    const u8 pc = s.rank[0].pc;
    int failed = 0;
    for (int r = 0; r < s.world; r++) {
        if (s.rank[r].pc != pc)
            return;
        failed += s.rank[r].failed;
    }
    SAY("%s", "");
    switch (pc) {
    case B_LOCK:
        all_to(&s, SWEEP, after_lock(&s));
        break;
    case B_OPEN:
        if (s.own == s.force) {
            s.acked = s.found;
            s.inflight = s.found = 0;
            all_to(&s, IDLE, IDLE);
        } else if (s.force) {
            begin_commit(&s);
        } else {
            all_to(&s, IDLE, IDLE);
        }
        break;
    case IDLE:
        choose();
        return;
    case B_DATA:
        if (failed)
            refused(&s);
        else
            all_to(&s, SUPER, SUPER);
        break;
    case B_SUPER:
        if (failed) {
            refused(&s);
            break;
        }
        if (!is(NUMBER_IS_STEP))
            s.number++;
        if (s.own == s.force) {
            acknowledge(&s);
            all_to(&s, IDLE, IDLE);
            SAY("the commit is agreed");
            break;
        }
        for (int r = 0; is(CLEAN_FIRST) && s.force && r < RANKS; r++)
            s.named[SEEN][s.force - 1][r] = 0;
        all_to(&s, RENAME, B_MANIFEST);
        break;
    case B_MANIFEST:
        acknowledge(&s);
        s.force = s.own;
        all_to(&s, CLEAN, IDLE);
        SAY("the manifest is agreed");
        break;
    default:
        return;
    }
    emit(&s);
}

/* Another job begins while ranks of this one live: before it is refused, it has removed or emptied
 * files that nobody holds. Rank 0's lock comes first. */
static void intrude(void)
{
    const u8 m = now.manifest[SEEN];
    if ((now.rank[0].pc != DEAD && !is(OPEN_NOT_LOCKED)) || m == TORN)
        return;
    for (int g = 0; g < GENS; g++)
        for (int r = 0; r < RANKS; r++) {
            const int held = g + 1 == now.own && now.rank[r].pc != DEAD;
            if (held || g + 1 == m || !now.named[SEEN][g][r])
                continue;
            state s = now;
            if (!is(OPEN_DIR_NOT_FLUSHED))
                flush_dir(&s);
            s.named[SEEN][g][r] = 0;
            SAY("another job removes generation %d of rank %d", g + 1, r);
            emit(&s);
        }
}

static int is_private(u8 pc)
{
    return pc == MAKE_FLUSH || pc == SYNC || pc == STEP || pc == WRITE || pc == FLUSH ||
           pc == SUPER || pc == SUPER_FLUSH;
}

void model_begin(const model_config *c, state *first)
{
    config = *c;
    memset(first, 0, sizeof *first);
}

void model_expand(const state *s, int trace, model_visit each)
{
    now = *s;
    visit = each;
    tracing = trace;
    if (!now.running) {
        restart(SAME);
        if (now.manifest[SEEN] && now.manifest[SEEN] != TORN) {
            if (config.over)
                restart(OVER);
            if (now.manifest[SEEN] < GENS && config.worlds[now.manifest[SEEN]])
                restart(RESHAPE);
        }
        state copy = now;
        cut(&copy, 0);
        return;
    }
    /* What a rank does in its own file commutes with all that others do: one order is enough. */
    for (int r = 0; r < now.world; r++)
        if (is_private(now.rank[r].pc)) {
            kill_rank(r);
            advance(r);
            write_error(r);
            return;
        }
    for (int r = 0; r < now.world; r++)
        if (now.rank[r].pc != DEAD) {
            kill_rank(r);
            advance(r);
        }
    intrude();
    together();
}

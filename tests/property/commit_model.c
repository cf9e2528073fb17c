/* SPDX-License-Identifier: Apache-2.0 */
/* The commit protocol as a state machine: what a rank does, and what ranks do together.
 * commit_model.h says how it is searched.
 *
 * A location (slot, superblock, directory entry) has what is visible and what is durable. A write
 * changes the former, a flush makes both equal, and a power cut leaves one of the two or something
 * torn, each location for itself. Contents are numbers: one for each step, the same on all ranks,
 * because all ranks step together. */
#include <string.h>

#include "property/commit_internal.h"

model_config config;
state now;
char label[120];
int tracing;
static model_visit visit;
static const char *violation;

const char *model_label(void)
{
    return label;
}

int is(mutation m)
{
    return config.mutation == m;
}

int fail(const char *why)
{
    violation = why;
    return 0;
}

void emit(state *s)
{
    const char *why = violation;
    violation = NULL;
    normalise(s);
    visit(s, why);
}

/* ---- slots and areas ---- */

int area_count(void)
{
    return config.slots < 2 ? 2 : config.slots;
}

int order_of(const superblock *super)
{
    return 2 * super->number + super->dirty;
}

u8 next_area(const content *f, u8 force)
{
    int empty = -1, oldest = -1, newest = -1;
    for (int i = 0; i < area_count(); i++) {
        const int order = order_of(&f->area[i]);
        if (i == force)
            continue;
        if (force != NONE && order > order_of(&f->area[force])) {
            if (!is(ABANDONED_STAYS))
                return (u8)i;
        } else if (!order) {
            empty = empty < 0 ? i : empty;
            continue;
        }
        if (oldest < 0 || order < order_of(&f->area[oldest]))
            oldest = i;
        if (newest < 0 || order > order_of(&f->area[newest]))
            newest = i;
    }
    return (u8)(empty >= 0 ? empty : is(NEWER_REPLACED) ? newest : oldest);
}

int guards(const content *f, u8 force, u8 area)
{
    if (force == NONE || !f->area[area].number ||
        order_of(&f->area[area]) > order_of(&f->area[force]))
        return 0;
    return area == force || (area != next_area(f, force) && !is(OLDER_NOT_GUARDED));
}

/* Where a change of chunk c goes. */
static u8 target(const state *s, int r, int c)
{
    const rank *k = &s->rank[r];
    const content *f = &s->file[s->own - 1][r].side[SEEN];
    int guarded = 0;
    if (config.slots == 1)
        return 0;
    if (is(SLOT_IN_PLACE) && k->area != NONE)
        return f->area[k->area].slot[c];
    for (u8 i = 0; i < area_count(); i++)
        if (guards(f, k->area, i))
            guarded |= 1 << f->area[i].slot[c];
    if (k->cur[c] != NONE && !(guarded >> k->cur[c] & 1))
        return k->cur[c];
    u8 slot = 0;
    while (guarded >> slot & 1)
        slot++;
    return slot;
}

/* ---- what a rank does ---- */

static void kill_rank(int r)
{
    state s = now;
    rank *k = &s.rank[r];
    if (is(LATE_WRITES) && (k->pc == STEP || k->pc == WRITE) && k->at % 2) {
        s.late = (u8)(r + 1);
        s.late_chunk = k->at / 2;
        s.late_slot = k->cur[s.late_chunk];
        s.late_val = s.val[s.late_chunk];
    }
    k->pc = DEAD;
    SAY("rank %d is killed", r);
    emit(&s);
}

static void arrive_late(void)
{
    state s = now;
    s.file[0][s.late - 1].side[SEEN].slot[s.late_chunk][s.late_slot] = s.late_val;
    SAY("a write of rank %d, which was killed, arrives", s.late - 1);
    s.late = s.late_chunk = s.late_slot = s.late_val = 0;
    emit(&s);
}

static void flush_dir(state *s)
{
    memcpy(s->named[DURABLE], s->named[SEEN], sizeof s->named[SEEN]);
    s->manifest[DURABLE] = s->manifest[SEEN];
}

/* Rank 0 removes a file, any of those of generations that are neither in force nor its own; 0:
 * there is none. */
static int remove_files(void)
{
    int any = 0;
    for (int g = 0; g < GENS; g++)
        for (int r = 0; r < RANKS; r++)
            if (g + 1 != now.own && g + 1 != now.force && now.named[SEEN][g][r]) {
                state s = now;
                s.named[SEEN][g][r] = 0;
                SAY("rank 0 removes generation %d of rank %d", g + 1, r);
                emit(&s);
                any = 1;
            }
    return any;
}

/* One slot: what is there is to be written over, and no superblock says so yet. */
static int unmarked(const state *s, int r)
{
    const rank *k = &s->rank[r];
    const content *f = &s->file[s->own - 1][r].side[SEEN];
    return config.slots == 1 && !is(NOT_MARKED) && k->area != NONE && !f->area[k->area].dirty;
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
        s->risk = config.slots == 1;
        if (unmarked(s, r)) {
            f->area[next_area(f, k->area)] = (superblock){0};
            k->pc = k->pc == STEP ? MARK_STEP : MARK_WRITE;
            SAY("rank %d begins to say that its slot is written over", r);
            return 1;
        }
        k->cur[c] = target(s, r, c);
        f->slot[c][k->cur[c]] = TORN;
        SAY("rank %d begins to write chunk %d", r, c);
        k->at++;
        return 1;
    }
    k->at = 0;
    return 0;
}

static void end_mark(state *s, int r)
{
    rank *k = &s->rank[r];
    content *f = &s->file[s->own - 1][r].side[SEEN];
    const u8 area = next_area(f, k->area);
    f->area[area] = f->area[k->area];
    f->area[area].dirty = 1;
    k->area = area;
    if (is(MARK_NOT_FLUSHED))
        k->pc = k->pc == MARK_STEP ? STEP : WRITE;
    else
        k->pc = k->pc == MARK_STEP ? MARK_STEP_FLUSH : MARK_WRITE_FLUSH;
    SAY("rank %d ends saying so", r);
}

static void write_super(state *s, int r)
{
    rank *k = &s->rank[r];
    content *f = &s->file[s->own - 1][r].side[SEEN];
    if (!k->at) {
        k->to = is(SUPER_IN_PLACE) && k->area != NONE ? k->area : next_area(f, k->area);
        f->area[k->to] = (superblock){0};
        k->at = 1;
        SAY("rank %d begins to write its superblock", r);
        return;
    }
    k->at = 0;
    superblock *to = &f->area[k->to];
    to->number = s->number;
    to->dirty = 0;
    to->pos = s->pos;
    memcpy(to->val, s->val, sizeof to->val);
    memcpy(to->slot, k->cur, sizeof to->slot);
    k->area = k->to;
    k->to = 0;
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
        if (remove_files())
            return;
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
    case MARK_STEP:
    case MARK_WRITE:
        end_mark(&s, r);
        break;
    case MARK_STEP_FLUSH:
    case MARK_WRITE_FLUSH:
        flush_file(&s, r);
        k->pc = k->pc == MARK_STEP_FLUSH ? STEP : WRITE;
        SAY("rank %d flushes that", r);
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
        if (remove_files())
            return;
        k->pc = IDLE;
        break;
    default:
        if (!(k->pc == B_SUPER && is(SUPER_NOT_AGREED)))
            return;
        /* The next step comes without waiting for anybody. */
        k->cur[0] = target(&s, r, 0);
        s.file[s.own - 1][r].side[SEEN].slot[0][k->cur[0]] = TORN;
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

/* pos is what a resume must find from now on, and those before it, as many as are kept. */
static void acknowledge(state *s, u8 pos)
{
    if (s->older_force != s->own)
        memset(s->older, 0, sizeof s->older);
    else if (pos != s->acked && config.slots > 2) {
        memmove(s->older + 1, s->older, (size_t)(config.slots - 3));
        s->older[0] = s->acked;
    }
    s->older_force = config.slots > 2 ? s->own : 0;
    s->acked = pos;
    s->inflight = s->reshaped = s->risk = 0;
}

static void refused(state *s)
{
    for (int r = 0; r < s->world; r++)
        for (int a = 0; a < area_count(); a++) {
            const superblock *super = &s->file[s->own - 1][r].side[SEEN].area[a];
            if (!is(NUMBER_IS_STEP) && !is(NUMBER_AGAIN) && !is(BACK_NUMBER) &&
                super->number == s->number)
                fail("a commit that was refused is in a superblock");
        }
    all_to(s, DEAD, DEAD);
    SAY("all ranks learn of the error");
}

static void begin_commit(state *s)
{
    /* Also where nothing has changed since the last one. */
    if (s->pos == s->acked)
        s->pos = (u8)(s->last_id + 1);
    if (s->force && s->own != s->force)
        s->reshaped = s->pos;
    else
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
            acknowledge(&s, s.found);
            s.found = 0;
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
            acknowledge(&s, s.pos);
            all_to(&s, IDLE, IDLE);
            SAY("the commit is agreed");
            break;
        }
        for (int r = 0; is(CLEAN_FIRST) && s.force && r < RANKS; r++)
            s.named[SEEN][s.force - 1][r] = 0;
        all_to(&s, RENAME, B_MANIFEST);
        break;
    case B_MANIFEST:
        acknowledge(&s, s.pos);
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
    return pc == MAKE_FLUSH || pc == SYNC || pc == FLUSH || pc == SUPER || pc == SUPER_FLUSH ||
           (pc >= STEP && pc <= MARK_WRITE_FLUSH);
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
    if (now.late)
        arrive_late();
    if (!now.running) {
        restart(SAME, 0);
        const int found = now.manifest[SEEN] && now.manifest[SEEN] != TORN;
        const int reshape = found && now.manifest[SEEN] < GENS && config.worlds[now.manifest[SEEN]];
        if (found && config.over)
            restart(OVER, 0);
        for (int back = 0; reshape && back <= config.slots - 2; back++)
            restart(RESHAPE, back);
        for (int back = 1; found && back <= config.slots - 2; back++)
            restart(SAME, back);
        if (reshape && config.slots == 1)
            restart(RESHAPE, 0);
        power_cut();
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

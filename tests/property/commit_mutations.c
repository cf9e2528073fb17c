/* SPDX-License-Identifier: Apache-2.0 */
/* The protocol with one rule broken: what these are called and do. docs/commit.md names them, too.
 */
#include "property/commit_model.h"

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
    [LATE_WRITES] = {"late-writes",
                     "a resume begins before the writes of the process before it have "
                     "arrived"},
    [OLDER_NOT_GUARDED] = {"older-not-guarded",
                           "a step writes a slot that an older commit kept names"},
    [NEWER_REPLACED] = {"newer-replaced", "a superblock goes over the newest of the older ones"},
    [ABANDONED_STAYS] = {"abandoned-stays",
                         "a superblock goes over the oldest, not over one that was "
                         "abandoned"},
    [OLDEST_OFFERED] = {"oldest-offered", "the commit that is replaced next is one to go back to"},
    [BACK_IN_FORCE] = {"back-in-force",
                       "going back puts the older commit in force without a commit"},
    [BACK_NUMBER] = {"back-number", "after going back numbers go on from the older commit's"},
    [NOT_MARKED] = {"not-marked", "the one slot is written over without a word"},
    [MARK_NOT_FLUSHED] = {"mark-not-flushed",
                          "the one slot is written over before the superblock that "
                          "says so is flushed"},
    [DIRTY_TAKEN] = {"dirty-taken", "a dirty superblock is resumed"},
    [BEFORE_DIRTY_TAKEN] = {"before-dirty-taken", "the superblock before a dirty one is resumed"},
    [NEWEST_ONLY] = {"newest-only",
                     "with one slot only the newest superblock counts, though nothing "
                     "was written over"},
};

const char *model_name(mutation m)
{
    return mutations[m].name;
}

const char *model_what(mutation m)
{
    return mutations[m].what;
}

u8 model_slots(mutation m)
{
    return m >= NOT_MARKED ? 1 : m >= OLDER_NOT_GUARDED ? 3 : 2;
}

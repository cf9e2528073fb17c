/* SPDX-License-Identifier: Apache-2.0 */
/* The directories a run makes, to be taken away again when it fails before it wrote anything. */
#ifndef ZS_CLI_OUTDIR_H
#define ZS_CLI_OUTDIR_H

#include "zspill.h"

enum { ZS_OUTDIR_MADE_MAX = 32 };

typedef struct zs_outdir {
    char *made[ZS_OUTDIR_MADE_MAX]; /* outermost first */
    size_t count;
} zs_outdir;

/* Makes path and its parents where missing, and checks that files can be made in it. option: for
 * messages. */
zs_status zs_outdir_make(zs_outdir *dirs, const char *option, const char *path);
/* Removes those that were made and are empty. */
void zs_outdir_remove(zs_outdir *dirs);
void zs_outdir_free(zs_outdir *dirs);

#endif

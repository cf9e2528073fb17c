/* SPDX-License-Identifier: Apache-2.0 */
/* Finds and opens what libzspill loads at run time: libzspill-mpi.so, libzspill-cuda.so. */
#ifndef ZS_BASE_PLUGIN_H
#define ZS_BASE_PLUGIN_H

#include "zspill.h"

typedef struct zs_plugin_spec {
    const char *what;     /* "CUDA" */
    const char *file;     /* "libzspill-cuda.so" */
    const char *variable; /* environment variable that names another file */
    const char *folder;   /* where a build tree has it, from its top: "device/cuda" */
    const char *missing;  /* what to do when there is none */
    const char *broken;   /* what to do when it is there and cannot be loaded */
} zs_plugin_spec;

/* Looked for beside the program or library, in its build tree, in the library folder it is
 * installed with, then where the loader looks. The handle is never closed: what these libraries
 * bring with them does not survive being unloaded. ZS_ERR_UNSUPPORTED: there is none, or it cannot
 * be loaded.
 */
zs_status zs_plugin_open(const zs_plugin_spec *spec, void **handle);

#endif

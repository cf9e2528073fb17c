/* SPDX-License-Identifier: Apache-2.0 */
/* Opens libzspill-cuda.so; what is inside it is in device/cuda/ and kernels/cuda/. */
#include "device/cuda.h"

#include <dlfcn.h>
#include <pthread.h>

#include "base/plugin.h"
#include "base/status.h"
#include "device/host.h"

static const zs_plugin_spec spec = {
    .what = "CUDA",
    .file = "libzspill-cuda.so",
    .variable = "ZSPILL_CUDA_LIB",
    .folder = "device/cuda",
    .missing = "build zspill where nvcc is (-Dcuda=enabled), or set ZSPILL_CUDA_LIB to it",
    .broken = "install NVIDIA's driver and the CUDA libraries it was built with",
};

static const zs_cuda_host host = {
    .version = ZS_CUDA_VERSION,
    .vfail = zs_vfail,
    .vfail_prefix = zs_vfail_prefix,
    .host_alloc = zs_host_alloc,
    .host_free = zs_host_free,
    .mem_alloc = zs_mem_alloc,
    .mem_free = zs_mem_free,
};

static zs_status enter(const zs_cuda_plugin **out)
{
    void *handle;
    *out = NULL;
    ZS_CHECK(zs_plugin_open(&spec, &handle));
    zs_cuda_entry entry = (zs_cuda_entry)(uintptr_t)dlsym(handle, ZS_CUDA_ENTRY);
    const zs_cuda_plugin *plugin = entry ? entry(&host) : NULL;
    if (!plugin || plugin->version != ZS_CUDA_VERSION)
        return zs_fail(ZS_ERR_UNSUPPORTED,
                       "the CUDA plug-in has no " ZS_CUDA_ENTRY " of version %d: it belongs to "
                       "another version of zspill than " ZS_VERSION "; install both from one build",
                       (int)ZS_CUDA_VERSION);
    *out = plugin;
    return ZS_OK;
}

/* Ranks as threads open their devices at once; the plug-in keeps what its entry was given. */
zs_status zs_cuda_open(const zs_cuda_plugin **out)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static const zs_cuda_plugin *opened;
    zs_status status = ZS_OK;
    pthread_mutex_lock(&lock);
    if (!opened)
        status = enter(&opened);
    *out = opened;
    pthread_mutex_unlock(&lock);
    return status;
}

zs_status zs_device_open_cuda(int ordinal, zs_device **out)
{
    const zs_cuda_plugin *plugin;
    int count;
    *out = NULL;
    ZS_CHECK(zs_cuda_open(&plugin));
    ZS_CHECK(plugin->device_count(&count));
    if (ordinal < 0 || ordinal >= count)
        return zs_fail(ZS_ERR_ARG,
                       "CUDA device %d is not there: this process sees %d, counted from 0 "
                       "(CUDA_VISIBLE_DEVICES hides others)",
                       ordinal, count);
    return plugin->device_open(ordinal, out);
}

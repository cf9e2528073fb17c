/* SPDX-License-Identifier: Apache-2.0 */
/* Host memory for streaming: what every device's host_alloc begins with. */
#ifndef ZS_DEVICE_HOST_H
#define ZS_DEVICE_HOST_H

#include "zspill.h"

/* Zeroed, page-aligned, huge pages where possible, MADV_DONTFORK. bytes 0: NULL. */
zs_status zs_host_alloc(size_t bytes, void **out);
void zs_host_free(void *ptr, size_t bytes);

#endif

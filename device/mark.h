/* SPDX-License-Identifier: Apache-2.0 */
/* A place in a stream that other streams, or the host, wait for: an event that is made when it is
 * first needed and knows whether there is anything to wait for. Zero it before first use. Costs
 * nothing on a device whose work is done when its call returns. */
#ifndef ZS_DEVICE_MARK_H
#define ZS_DEVICE_MARK_H

#include "device/device.h"

typedef struct zs_mark {
    zs_event *event;
    zs_stream *stream;
    int set;
} zs_mark;

/* Behind all that is queued on stream by now. */
zs_status zs_mark_set(zs_device *device, zs_mark *mark, zs_stream *stream);
/* What is queued on stream from now on runs after the mark. Nothing is queued where stream is the
 * mark's own, or the mark was never set. */
zs_status zs_mark_wait(zs_device *device, const zs_mark *mark, zs_stream *stream);
/* The calling thread waits. */
zs_status zs_mark_sync(zs_device *device, const zs_mark *mark);
/* *done: 1 when zs_mark_sync would not wait. */
zs_status zs_mark_done(zs_device *device, const zs_mark *mark, int *done);
void zs_mark_close(zs_device *device, zs_mark *mark);

#endif

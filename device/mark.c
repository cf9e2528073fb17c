/* SPDX-License-Identifier: Apache-2.0 */
#include "device/mark.h"

#include "base/status.h"

zs_status zs_mark_set(zs_device *device, zs_mark *mark, zs_stream *stream)
{
    if (device->host_access)
        return ZS_OK;
    if (!mark->event)
        ZS_CHECK(device->ops->event_open(device, &mark->event));
    ZS_CHECK(device->ops->event_record(device, mark->event, stream));
    mark->stream = stream;
    mark->set = 1;
    return ZS_OK;
}

zs_status zs_mark_wait(zs_device *device, const zs_mark *mark, zs_stream *stream)
{
    if (!mark->set || mark->stream == stream)
        return ZS_OK;
    return device->ops->event_wait(device, mark->event, stream);
}

zs_status zs_mark_sync(zs_device *device, const zs_mark *mark)
{
    return mark->set ? device->ops->event_sync(device, mark->event) : ZS_OK;
}

zs_status zs_mark_done(zs_device *device, const zs_mark *mark, int *done)
{
    *done = 1;
    return mark->set ? device->ops->event_done(device, mark->event, done) : ZS_OK;
}

void zs_mark_close(zs_device *device, zs_mark *mark)
{
    if (mark->event)
        device->ops->event_close(device, mark->event);
    *mark = (zs_mark){0};
}

/* SPDX-License-Identifier: Apache-2.0 */
/* ZS_EMU_RECORD=FILE: what the program queued, in the order of its calls, one JSON object a line,
 * for whoever replays it with a machine's speeds. Fields: "device", "stream" (a number; 0: the host
 * itself did it), "op", and by op:
 *
 *   kernel        "name", "grid", "block", "numbers": the arguments that are no pointers
 *   copy          "kind": "h2d", "d2h", "d2d" or "h2h"; "bytes"
 *   memset        "bytes"
 *   record, wait  "event": a number that stands for one recording, not for the event object
 *   gemm          "m", "n", "k", "batch", "bytes": read and written
 *   nccl          "kind", "bytes": of the send or receive buffer, the larger; "ranks"
 *   group         "operations": so many of the "nccl" before it on this stream begin here, together
 *   event_sync, stream_sync   the host waits; "event" or "of"
 *
 * Recording takes a lock, which hides races from ThreadSanitizer. */
#include <cstdio>
#include <mutex>

#include "tests/emu/emu.h"

static FILE *open_file()
{
    const char *path = getenv("ZS_EMU_RECORD");
    FILE *file = path ? fopen(path, "a") : nullptr;
    if (path && !file)
        emu_die("cannot write ZS_EMU_RECORD=%s", path);
    return file;
}

static FILE *file()
{
    static FILE *f = open_file();
    return f;
}

bool emu_recording()
{
    return file() != nullptr;
}

void emu_write_record(int device, uint64_t stream, const emu_record &record)
{
    static std::mutex lock;
    std::lock_guard<std::mutex> guard(lock);
    fprintf(file(), "{\"device\":%d,\"stream\":%llu,\"op\":\"%s\"%s%s}\n", device,
            (unsigned long long)stream, record.operation, record.fields.empty() ? "" : ",",
            record.fields.c_str());
    fflush(file());
}

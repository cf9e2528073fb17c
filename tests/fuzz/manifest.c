/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/crc32c.h"
#include "fuzz/fuzz.h"
#include "offload/store.h"
#include "zero/manifest.h"

const char *const fuzz_words[] = {"flat ",
                                  "param ",
                                  "flats ",
                                  "world 0",
                                  "slots 16",
                                  "\n",
                                  " ",
                                  "bf16",
                                  "18446744073709551615",
                                  "99999999999999999999",
                                  "-1",
                                  "crc32c 0\n",
                                  NULL};

static size_t seal(char *text, size_t length)
{
    return length + (size_t)sprintf(text + length, "crc32c %x\n", zs_crc32c(0, text, length));
}

size_t fuzz_seed(size_t i, uint8_t *out)
{
    static const char *const seeds[] = {
        "zspill manifest 2\nfingerprint 1f\nrun a5\ngeneration 2\nworld 3\nchunk_numel 4096\n"
        "slots 2\nreplicated 0\nflats 2\nflat 2 fp32\nparam 10 a b\nparam 4096 c\nflat 1 bf16\n"
        "param 7 d\n",
        "zspill manifest 2\nfingerprint 0\nrun 1\ngeneration 1\nworld 1\nchunk_numel 4096\n"
        "slots 1\nreplicated 1\nflats 0\n",
        "zspill manifest 2\nfingerprint 0\nrun 1\ngeneration 1\nworld 64\nchunk_numel 4096\n"
        "slots 5\nreplicated 0\nflats 1\nflat 1 fp16\nparam 1 e\n"};
    if (i >= sizeof seeds / sizeof *seeds)
        return 0;
    strcpy((char *)out, seeds[i]);
    return seal((char *)out, strlen(seeds[i]));
}

static void try_text(const char *text)
{
    zs_manifest *m;
    if (zs_manifest_parse(text, "fuzz", &m)) {
        if (m || !*zs_last_error())
            abort();
        return;
    }
    if (m->world < 1 || !m->generation || m->slots < 1 || m->slots > ZS_STORE_SLOTS_MOST ||
        !zs_manifest_same_shape(m, m))
        abort();
    size_t bytes = 0;
    for (size_t f = 0; f < m->flat_count; f++)
        for (size_t p = 0; p < m->flats[f].count; p++)
            bytes += strlen(m->flats[f].names[p]);
    if (bytes > strlen(text))
        abort();
    zs_manifest_free(&m);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char *text = malloc(size + 32);
    if (!text)
        abort();
    memcpy(text, data, size);
    text[size] = 0;
    try_text(text);
    /* Again with the checksum put right, so that what is behind it is reached. */
    char *last = strstr(text, "crc32c");
    seal(text, last ? (size_t)(last - text) : strlen(text));
    try_text(text);
    free(text);
    return 0;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Each file here but driver.c is a target in libFuzzer's form and can be linked with
 * -fsanitize=fuzzer by clang; driver.c runs it with any compiler on mutations of its seeds. */
#ifndef ZS_TESTS_FUZZ_H
#define ZS_TESTS_FUZZ_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { FUZZ_SEED_MAX = 1 << 14 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
/* Writes seed i to out (FUZZ_SEED_MAX bytes) and returns its length; 0 past the last one. */
size_t fuzz_seed(size_t i, uint8_t *out);
/* For seeds: a safetensors file of this header and data_bytes zeros, which start at *data. Returns
 * its length. */
static inline size_t fuzz_safetensors(const char *header, size_t data_bytes, uint8_t *out,
                                      uint8_t **data)
{
    const size_t length = strlen(header);
    memset(out, 0, 8 + length + data_bytes);
    out[0] = (uint8_t)length;
    out[1] = (uint8_t)(length >> 8);
    memcpy(out + 8, header, length);
    *data = out + 8 + length;
    return 8 + length + data_bytes;
}
/* Words of the format, for mutations; ends with NULL. */
extern const char *const fuzz_words[];

#endif

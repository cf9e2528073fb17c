/* SPDX-License-Identifier: Apache-2.0 */
/* CRC-32C (Castagnoli, reflected 0x82F63B78, initial and final ~0): SSE4.2 where there is one, else
 * a table. */
#ifndef ZS_BASE_CRC32C_H
#define ZS_BASE_CRC32C_H

#include <stddef.h>
#include <stdint.h>

/* crc: 0 to start, else the value so far. crc32c("123456789") = 0xE3069283. */
uint32_t zs_crc32c(uint32_t crc, const void *data, size_t bytes);
/* The same without special instructions; for tests. */
uint32_t zs_crc32c_table(uint32_t crc, const void *data, size_t bytes);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* A 64-bit mixing hash: counter-based random bits, and identities that are compared at resume. */
#ifndef ZS_CLI_HASH_H
#define ZS_CLI_HASH_H

#include <stdint.h>

/* The state of a hash after one more word; splitmix64's finalizer. */
static inline uint64_t zs_hash(uint64_t state, uint64_t word)
{
    uint64_t z = (state ^ word) * UINT64_C(0x9E3779B97F4A7C15) + UINT64_C(0x9E3779B97F4A7C15);
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return z ^ (z >> 31);
}

#endif

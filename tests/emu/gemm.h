/* SPDX-License-Identifier: Apache-2.0 */
/* The arithmetic of the emulated cuBLAS, on packed copies. */
#ifndef ZS_EMU_GEMM_H
#define ZS_EMU_GEMM_H

#include <cstddef>

/* c[j * m + i] = sum over l of a[l * m + i] * b[l * n + j], l upwards, in fp32. */
void emu_gemm(size_t m, size_t n, size_t k, const float *a, const float *b, float *c);

#endif

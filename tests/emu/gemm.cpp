/* SPDX-License-Identifier: Apache-2.0 */
/* See gemm.h. Compiled without sanitizers, which see the program's own matrices when they are
 * packed and unpacked: here they would cost time only. */
#include "tests/emu/gemm.h"

constexpr size_t ROWS = 16, COLUMNS = 4;

/* A tile of ROWS x COLUMNS stays in registers. */
static void tile(size_t m, size_t n, size_t k, const float *__restrict a, const float *__restrict b,
                 float *__restrict c)
{
    float sum[COLUMNS][ROWS] = {};
    for (size_t l = 0; l < k; l++)
        for (size_t j = 0; j < COLUMNS; j++)
            for (size_t i = 0; i < ROWS; i++)
                sum[j][i] += a[l * m + i] * b[l * n + j];
    for (size_t j = 0; j < COLUMNS; j++)
        for (size_t i = 0; i < ROWS; i++)
            c[j * m + i] = sum[j][i];
}

static void edge(size_t m, size_t n, size_t k, size_t rows, size_t columns,
                 const float *__restrict a, const float *__restrict b, float *__restrict c)
{
    for (size_t j = 0; j < columns; j++) {
        float sum[ROWS] = {};
        for (size_t l = 0; l < k; l++)
            for (size_t i = 0; i < rows; i++)
                sum[i] += a[l * m + i] * b[l * n + j];
        for (size_t i = 0; i < rows; i++)
            c[j * m + i] = sum[i];
    }
}

void emu_gemm(size_t m, size_t n, size_t k, const float *a, const float *b, float *c)
{
    for (size_t i = 0; i < m; i += ROWS)
        for (size_t j = 0; j < n; j += COLUMNS) {
            const size_t rows = m - i < ROWS ? m - i : ROWS;
            const size_t columns = n - j < COLUMNS ? n - j : COLUMNS;
            if (rows == ROWS && columns == COLUMNS)
                tile(m, n, k, a + i, b + j, c + j * m + i);
            else
                edge(m, n, k, rows, columns, a + i, b + j, c + j * m + i);
        }
}

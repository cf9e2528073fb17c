/* SPDX-License-Identifier: Apache-2.0 */
/* The record of every allocation: tier, purpose, bytes now, peak. Thread-safe. */
#ifndef ZS_BASE_LEDGER_H
#define ZS_BASE_LEDGER_H

#include "zspill.h"

typedef struct zs_ledger zs_ledger;

zs_status zs_ledger_open(zs_ledger **out);
void zs_ledger_close(zs_ledger **ledger);
/* purpose is copied (at most 39 bytes are kept). A sum below zero is ZS_ERR_MISUSE. */
zs_status zs_ledger_add(zs_ledger *ledger, zs_tier tier, const char *purpose, int64_t delta);
/* As zs_memory_report. Rows in the order in which their purposes first appeared. */
void zs_ledger_rows(const zs_ledger *ledger, zs_memory_row *rows, size_t capacity, size_t *count);

#endif

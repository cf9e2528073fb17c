/* SPDX-License-Identifier: Apache-2.0 */
/* SIGINT and SIGTERM: the first asks the training loop to stop after its step, the second exits at
 * once with 128 + signal. */
#ifndef ZS_CLI_SIGNALS_H
#define ZS_CLI_SIGNALS_H

void zs_signals_install(void);
/* The signal that asked for a stop; 0: none so far. */
int zs_signals_stop(void);

#endif

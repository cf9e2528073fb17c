/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/signals.h"

#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

/* Several rank threads look, and the handler runs on any of them. */
static atomic_int stop_signal;

static void handle(int number)
{
    int none = 0;
    if (!atomic_compare_exchange_strong(&stop_signal, &none, number))
        _exit(128 + number);
}

void zs_signals_install(void)
{
    struct sigaction action;
    memset(&action, 0, sizeof(action));
    action.sa_handler = handle;
    action.sa_flags = SA_RESTART;
    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
}

int zs_signals_stop(void)
{
    return atomic_load(&stop_signal);
}

/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/util.h"
#include "cli/blas.h"
#include "cli/cli.h"
#include "zspill.h"

typedef struct command {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *help;
} command;

static const command commands[] = {
    {"train", zs_cli_train, "fine-tune a model, or evaluate it (--steps 0)"},
    {"doctor", zs_cli_doctor, "what this machine offers, and what to fix"},
    {"inspect", zs_cli_inspect, "what a model directory, a safetensors file or a checkpoint holds"},
    {"export", zs_cli_export, "a model directory, and states by parameter, from a run's state"},
    {"import", zs_cli_import, "a run's state from such states, in a shape of choice"},
};

static void print_help(FILE *stream)
{
    fprintf(stream, "zspill %s: ZeRO-sharded, offloaded, streaming fine-tuning\n\nusage:\n",
            zs_version());
    for (size_t i = 0; i < ZS_COUNT(commands); i++)
        fprintf(stream, "  zspill %-8s ...  %s\n", commands[i].name, commands[i].help);
    fprintf(stream, "  zspill --version\n\n`zspill COMMAND --help` lists a command's options.\n");
}

static int dispatch(int argc, char **argv)
{
    const char *names[ZS_COUNT(commands)];
    if (argc < 2) {
        print_help(stderr);
        return ZS_EXIT_USAGE;
    }
    if (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h") || !strcmp(argv[1], "help")) {
        print_help(stdout);
        return ZS_EXIT_OK;
    }
    if (!strcmp(argv[1], "--version")) {
        printf("zspill %s\n", zs_version());
        return ZS_EXIT_OK;
    }
    for (size_t i = 0; i < ZS_COUNT(commands); i++) {
        names[i] = commands[i].name;
        if (!strcmp(argv[1], commands[i].name))
            return commands[i].run(argc - 1, argv + 1);
    }
    const char *near = zs_cli_nearest(argv[1], names, ZS_COUNT(names));
    if (near)
        zs_cli_error("unknown command '%s': did you mean '%s'?", argv[1], near);
    else
        zs_cli_error("unknown command '%s': `zspill --help` lists them", argv[1]);
    return ZS_EXIT_USAGE;
}

/* A file opened later must not become what printf writes to. Read-only: printing then fails, as it
 * should. */
static void fill_standard_streams(void)
{
    int fd;
    do
        fd = open("/dev/null", O_RDONLY);
    while (fd >= 0 && fd <= STDERR_FILENO);
    if (fd >= 0)
        close(fd);
}

int main(int argc, char **argv)
{
    fill_standard_streams();
    if (zs_blas_mend(argv) != ZS_OK) {
        zs_cli_error("%s", zs_last_error());
        return ZS_EXIT_FAILED;
    }
    /* A closed pipe is to be an error like a full disk, not a silent death. */
    signal(SIGPIPE, SIG_IGN);
    int code = dispatch(argc, argv);
    errno = 0;
    if (fflush(stdout) || ferror(stdout)) {
        if (code == ZS_EXIT_OK) {
            zs_cli_error("cannot write to standard output%s%s", errno ? ": " : "",
                         errno ? strerror(errno) : "");
            code = ZS_EXIT_FAILED;
        }
    }
    return code;
}

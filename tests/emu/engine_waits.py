# SPDX-License-Identifier: Apache-2.0
"""Under ThreadSanitizer: the engine's job on emulated devices, with one stream's wait for an event
left out each time. Most are covered by another wait of the same phase (the second unit's weights
are behind the mark that the first one's acquire waited for), so not each omission is a race; but
some must be, in every quarter of the job behind the loading, and with all waits there must be none."""

import os
import re
import subprocess
import sys

PARTS = 4


def run(program, skip=None):
    env = dict(os.environ, TSAN_OPTIONS="exitcode=66")
    if skip:
        env["ZS_EMU_SKIP_WAIT"] = str(skip)
    # world, stage, states on the host, parameters on the device, Adam on the device
    done = subprocess.run(
        [program, "1", "1", "1", "0", "1"], env=env, capture_output=True, text=True, timeout=120
    )
    return done.stdout, "WARNING: ThreadSanitizer: data race" in done.stderr


def main():
    program = sys.argv[1]
    text, race = run(program)
    waits = int(re.search(r"^waits (\d+)$", text, re.MULTILINE).group(1))
    if race:
        sys.exit("a race is reported though no wait is left out")
    found = [0] * PARTS
    first = waits // 5  # loading waits on the host, too
    for n in range(first, waits + 1, 3):
        found[min((n - first) * PARTS // (waits - first), PARTS - 1)] += run(program, n)[1]
    print(f"emulated: {waits} waits, reported by quarter of the job: {found}")
    if not all(found):
        sys.exit("a quarter of the job has no wait whose omission is reported")


main()

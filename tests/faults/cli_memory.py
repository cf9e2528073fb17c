#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`zspill train` whose memory runs out at the n-th allocation: it ends with exit code 1 and one
message, or goes on where it could do without; never by a signal, never hanging, whichever rank it
hit. With memory again it goes on to the bits of an undisturbed run.

cli_memory.py [EVERY]: only each EVERY-th n, 1 for all of them (an hour); without, about 20 of them."""

import os
import shutil
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "engine"))
from cli_support import BUILD, STATE_STEPS, StateCase, main, read_rows, run  # noqa: E402

SHIM = os.path.join(BUILD, "tests", "faults", "libshort_memory.so")
EVERY = int(sys.argv.pop()) if sys.argv[1:] else 0
SHORT_RUNS = 20


class Memory(StateCase):
    def run_short(self, when, *args, **kwargs):
        env = {**os.environ, "LD_PRELOAD": SHIM}
        env.update(ZSPILL_TEST_MEMORY=when, ZSPILL_TEST_MEMORY_COUNT=self.path("count"))
        return run(*args, env=env, **kwargs)

    def count(self, *args):
        done = self.run_short("999999999", *args)
        self.assertEqual(done.returncode, 0, done.stderr)
        with open(self.path("count")) as file:
            return int(file.read())

    def check(self, when, step, *args):
        """One run with little memory, and what is left of it."""
        rows = self.path("rows.jsonl")
        shutil.rmtree(self.path("out"), ignore_errors=True)
        shutil.rmtree(self.path("states"), ignore_errors=True)
        args = ("--metrics", rows, *args)
        if os.path.exists(rows):
            os.remove(rows)
        if step:
            self.good(*self.nvme("--metrics", rows, steps=step))
        try:
            done = self.run_short(when, *self.nvme(*args, steps=STATE_STEPS), timeout=60)
        except subprocess.TimeoutExpired as late:
            self.fail(f"hangs: {late.stderr}")
        self.assertIn(done.returncode, (0, 1), done.stderr)
        if done.returncode:
            message = done.stderr.splitlines()[-1] if done.stderr else ""
            self.assertRegex(message, "^zspill: .*(memory|temporarily unavailable)", done.stderr)
            self.messages.add(message)
            done = self.good(*self.nvme("--metrics", rows, "--resume", steps=STATE_STEPS))
            if step:
                self.assertIn("resumed at step ", done.stdout)
        self.assertEqual(self.weights(), self.undisturbed())
        self.assertEqual([row["step"] for row in read_rows(rows)], list(range(1, STATE_STEPS + 1)))

    def each(self, total, step, *args):
        self.assertGreater(total, 200)
        self.messages = set()
        for number in range(1, total + 1, EVERY or total // SHORT_RUNS):
            for when in (f"{number}", f"{number}+"):
                with self.subTest(allocation=when):
                    self.check(when, step, *args)
        self.assertGreater(len(self.messages), 5)

    def test_from_the_start(self):
        self.undisturbed()
        self.each(self.count(*self.nvme("--metrics", self.path("m"), steps=STATE_STEPS)), 0)

    def test_change_of_shape(self):
        self.undisturbed()
        self.good(*self.nvme())
        args = ("--resume", "--zero-stage", 3)
        self.each(self.count(*self.nvme("--metrics", self.path("m"), *args, steps=STATE_STEPS)), 3, *args)


if __name__ == "__main__":
    main()

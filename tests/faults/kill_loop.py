#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""SIGKILL at random instants, each followed by a resume: the end must be that of the undisturbed run.

usage: kill_loop.py [--kills N] [--seed N]     (ZSPILL_KILLS: how many, default 20)
"""

import argparse
import os
import random
import subprocess
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "engine"))
# pylint: disable=wrong-import-position
from cli_support import Case, PROGRAM, command, read_rows, read_safetensors, run, unittest

STEPS = 24
KILLS = int(os.environ.get("ZSPILL_KILLS") or 20)
SEED = int(os.environ.get("ZSPILL_KILL_SEED") or time.time_ns() % 1000000)
# The same global batch of 4 rows in other worlds: ranks, micro-batch, accumulation.
WORLDS = [(1, 4, 1), (2, 2, 1), (2, 1, 2), (4, 1, 1), (1, 2, 2)]


class KillLoop(Case):
    def setUp(self):
        super().setUp()
        self.random = random.Random(f"{SEED} {self.id()}")
        self.kills = 0

    def tokens(self):
        """Rows of which every sixth step's have no counted token."""
        rows = [[(7 * r + 3 * i) % 256 for i in range(24)] for r in range(48)]
        labels = [[-100] * 24 if r // 4 % 6 == 2 else row for r, row in enumerate(rows)]
        return self.write_tokens("t.safetensors", rows, labels=labels)

    def call(self, out, states, *more, steps=STEPS, data=None):
        where = ("--offload-optimizer", "nvme:" + self.path(states)) if states else ()
        args = ["--steps", steps, "--metrics", self.path(out + ".jsonl"), "--resume", *where, *more]
        return self.small(*args, out=out, data=data)

    def losses(self, out):
        return [(r["step"], r["loss"], r.get("skipped", False)) for r in read_rows(self.path(out + ".jsonl"))]

    def model(self, out):
        return read_safetensors(self.path(out, "model.safetensors"))

    @staticmethod
    def differing(one, other):
        """Names of the tensors that differ: a diff of their bytes would take for ever."""
        return [name for name in {**one, **other} if one.get(name) != other.get(name)]

    def run_and_kill(self, call, longest):
        """0: it came to its end before the kill."""
        with subprocess.Popen(
            command(*call), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        ) as process:
            try:
                process.wait(self.random.uniform(0, longest))
            except subprocess.TimeoutExpired:
                process.kill()
            errors = process.stderr.read()
        if process.returncode == 0:
            return 0
        self.assertEqual(process.returncode, -9, f"seed {SEED}, kill {self.kills}: {errors}")
        self.kills += 1
        return 1

    def loop(self, kills, *args, data=None, nvme=True):
        begin = time.monotonic()
        self.good(*self.call("whole", nvme and "whole-states", *args, data=data))
        longest = 0.6 * (time.monotonic() - begin)
        attempt = 0
        while self.kills < kills:
            out, states = f"out{attempt}", nvme and f"states{attempt}"
            call = self.call(out, states, *args, data=data)
            while self.kills < kills and self.run_and_kill(call, longest):
                pass
            self.good(*call)
            self.assertEqual(self.losses(out), self.losses("whole"), f"seed {SEED}")
            self.assertEqual(self.differing(self.model(out), self.model("whole")), [], f"seed {SEED}")
            self.good("inspect", "--verify", self.path(states or out + "/state"))
            attempt += 1

    def share(self, part):
        return max(KILLS * part // 20, 2)

    def test_every_step(self):
        self.loop(
            self.share(6),
            *("--ranks", 2, "--micro-batch", 2, "--zero-stage", 3, "--dtype", "bf16"),
        )

    def test_every_n(self):
        self.loop(
            self.share(3),
            *("--ranks", 2, "--micro-batch", 2, "--zero-stage", 2, "--durability", "every=3"),
        )

    def test_partly_resident(self):
        # Masters are the fp32 working copies; only the moments are streamed.
        self.loop(self.share(3), *("--ranks", 2, "--micro-batch", 2, "--zero-stage", 1))

    def test_host(self):
        self.loop(
            self.share(2),
            *("--ranks", 2, "--micro-batch", 2, "--zero-stage", 2, "--durability", "step"),
            *("--offload-optimizer", "host"),
            nvme=False,
        )

    def test_skipped_steps(self):
        self.loop(
            self.share(3),
            *("--ranks", 2, "--micro-batch", 2, "--zero-stage", 3, "--shuffle", "off"),
            *("--seq-len", 24),
            data=self.tokens(),
        )
        skipped = [step for step, _, skip in self.losses("whole") if skip]
        self.assertEqual(skipped, [3, 9, 15, 21])

    # ---- another shape at each resume ----

    def state(self):
        """Where the state is; None: nothing is committed."""
        where = self.path("out", "state")
        if os.path.exists(where + ".path"):
            with open(where + ".path") as file:
                where = file.read().strip()
        return where if os.path.exists(os.path.join(where, "zspill.manifest")) else None

    def committed(self):
        """(step, tensors) of the state, as export sees it; (0, {}): none."""
        where = self.state()
        if not where:
            return 0, {}
        states = self.path("states.safetensors")
        done = self.good("export", where, "--model", self.config, "--states", states)
        return int(done.stdout.split("states of step ")[1].split(")")[0]), read_safetensors(states)

    def shape(self):
        ranks, micro, accum = self.random.choice(WORLDS)
        place = self.random.choice(["nvme:" + self.path("a"), "nvme:" + self.path("b"), "host", "none"])
        return (
            *("--ranks", ranks, "--micro-batch", micro, "--grad-accum", accum),
            *("--zero-stage", self.random.randrange(4), "--offload-optimizer", place),
            *("--dtype", self.random.choice(["fp32", "bf16"]), "--durability", "step"),
            *("--io-engine", self.random.choice(["auto", "posix"])),
        )

    def test_change_of_shape(self):
        begin = time.monotonic()
        self.good(*self.call("whole", "whole-states", "--ranks", 2, "--micro-batch", 2))
        longest = 0.8 * (time.monotonic() - begin)
        last = 0
        steps = 10**6  # it never comes to its end by itself
        while self.kills < self.share(3) or not last:
            call = self.call("out", None, *self.shape(), steps=steps)
            self.assertEqual(self.run_and_kill(call, longest), 1)
            step, bits = self.committed()
            self.assertGreaterEqual(step, last, f"seed {SEED}: a commit was lost")
            last = step
            if not step:
                longest *= 1.5  # killed before the first commit: one must come, however slow the machine
            else:
                # Taken over in another shape, without a step: the same bits.
                shape = self.shape()
                self.good(*self.call("out", None, *shape, steps=step))
                where = f"seed {SEED}, kill {self.kills}, taken over at step {step} by {shape}"
                again, same = self.committed()
                self.assertEqual((again, self.differing(same, bits)), (step, []), where)
        self.good("inspect", "--verify", self.state())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=KILLS)
    parser.add_argument("--seed", type=int, default=SEED)
    known, rest = parser.parse_known_args()
    globals().update(KILLS=known.kills, SEED=known.seed)
    if not os.path.exists(PROGRAM):
        print(f"skipped: {PROGRAM} is not built")
        sys.exit(77)
    print(f"{KILLS} kills, seed {SEED}", flush=True)
    unittest.main(argv=[sys.argv[0], *rest])


if __name__ == "__main__":
    main()

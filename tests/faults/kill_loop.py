#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""SIGKILL at random instants, or the power failing at random operations, each followed by a resume: the
end must be that of the undisturbed run.

usage: kill_loop.py [--power] [--kills N] [--seed N]     (ZSPILL_KILLS: how many, default 20)

  --power  not at an instant, but at the n-th change of a file: of what is not flushed, each write stays,
           goes, or is torn at 512 bytes (docs/faults.md)
"""

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "engine"))
# pylint: disable=wrong-import-position
from cli_support import Case, PROGRAM, command, read_rows, read_safetensors, run, unittest

STEPS = 24
KILLS = int(os.environ.get("ZSPILL_KILLS") or 20)
SEED = int(os.environ.get("ZSPILL_KILL_SEED") or time.time_ns() % 1000000)
POWER = False
TOTALS = []  # of the loops that came to their end
# The same global batch of 4 rows in other worlds: ranks, micro-batch, accumulation.
WORLDS = [(1, 4, 1), (2, 2, 1), (2, 1, 2), (4, 1, 1), (1, 2, 2)]


class Kill:
    """At an instant."""

    def __init__(self, rng):
        self.random = rng
        self.reach = None  # seconds

    def measure(self, seconds, share):
        self.reach = share * seconds

    def later(self):
        self.reach *= 1.5

    def strike(self, call, early):
        """The exit code, what was said, and what was done to it; early: as likely as not while it opens."""
        with subprocess.Popen(
            command(*call), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        ) as process:
            after = self.random.uniform(0, self.reach / 4 if early and self.random.random() < 0.5 else self.reach)
            try:
                process.wait(after)
            except subprocess.TimeoutExpired:
                process.kill()
            errors = process.stderr.read()
        return process.returncode, errors, f"killed after {after:.3f} s"


class PowerCut:
    """At a change of a file: a write, a flush, a rename, an allocation."""

    def __init__(self, rng):
        self.random = rng
        self.reach = 400  # changes: about 24 steps of two ranks

    def measure(self, seconds, share):
        pass

    def later(self):
        self.reach *= 2

    def strike(self, call, early):
        reach = min(self.reach, 50) if early and self.random.random() < 0.5 else self.reach
        change, seed = self.random.randint(1, reach), self.random.randrange(10**6)
        faults = f"change@{change}=cut:kill;seed={seed}"
        done = run(*call, env={**os.environ, "ZSPILL_FAULTS": faults})
        if done.returncode == 0:
            self.reach = max(change, 40)
        return done.returncode, done.stderr, faults


class KillLoop(Case):
    def setUp(self):
        super().setUp()
        self.random = random.Random(f"{SEED} {self.id()}")
        self.blow = (PowerCut if POWER else Kill)(self.random)
        self.kills = 0
        self.said = ""  # by the run that was killed last
        self.newest = 0  # number of the newest commit, before that run

    def tokens(self):
        """Rows of which every sixth step's have no counted token."""
        rows = [[(7 * r + 3 * i) % 256 for i in range(24)] for r in range(48)]
        labels = [[-100] * 24 if r // 4 % 6 == 2 else row for r, row in enumerate(rows)]
        return self.write_tokens("t.safetensors", rows, labels=labels)

    def call(self, out, states, *more, steps=STEPS, data=None):
        where = ("--offload-optimizer", "nvme:" + self.path(states)) if states else ()
        args = ["--steps", steps, "--metrics", self.path(out + ".jsonl"), "--resume", *where, *more]
        args += ["--log-level", "debug"]
        return self.small(*args, out=out, data=data)

    def losses(self, out):
        return [(r["step"], r["loss"], r.get("skipped", False)) for r in read_rows(self.path(out + ".jsonl"))]

    def model(self, out):
        return read_safetensors(self.path(out, "model.safetensors"))

    @staticmethod
    def differing(one, other):
        """Names of the tensors that differ: a diff of their bytes would take for ever."""
        return [name for name in {**one, **other} if one.get(name) != other.get(name)]

    def commit(self, where):
        """(number, step) of the newest commit that all ranks have; (0, 0): none is there."""
        if not where or not os.path.exists(os.path.join(where, "zspill.manifest")):
            return 0, 0
        text = self.good("inspect", where).stdout
        return tuple(map(int, re.search(r"^ +(\d+)  step (\d+) \(newest\)$", text, re.M).groups()))

    def check_newest(self, where, how):
        """What the run said was durable is what all ranks have, or else the one that followed."""
        said = [int(n) for n in re.findall(r": commit (\d+) of step \d+ is durable in ", self.said)]
        number, step = self.commit(where)
        if said:
            self.assertIn(number - max(said), (0, 1), how)
        self.assertGreaterEqual(number, self.newest, how)
        self.newest = number
        return step

    def check_recovered(self, out, where, every, how):
        """A step's row is written before its commit: the one before it must have come through. A
        skipped step is not counted as one of the state's."""
        rows = self.path(out + ".jsonl")
        rows = read_rows(rows) if os.path.exists(rows) else []
        last = (rows[-1]["step"] - 1) // every * every if rows else 0
        wanted = sum(1 for row in rows if row["step"] <= last and not row.get("skipped"))
        self.assertGreaterEqual(self.check_newest(where, how), wanted, how)

    def run_and_kill(self, call, early=False):
        """What was done to it; None: it came to its end before."""
        code, self.said, how = self.blow.strike(call, early)
        if code == 0:
            return None
        how = f"seed {SEED}, blow {self.kills}: {how}"
        self.assertEqual(code, -9, f"{how}: {self.said}")
        self.kills += 1
        return how

    def check_end(self, out, how):
        self.assertEqual(self.losses(out), self.losses("whole"), how)
        self.assertEqual(self.differing(self.model(out), self.model("whole")), [], how)

    def loop(self, kills, *args, data=None, nvme=True, every=1):
        begin = time.monotonic()
        self.good(*self.call("whole", nvme and "whole-states", *args, data=data))
        self.blow.measure(time.monotonic() - begin, 0.6)
        attempt = 0
        while self.kills < kills:
            out, states = f"out{attempt}", nvme and f"states{attempt}"
            where = self.path(states or out + "/state")
            call = self.call(out, states, *args, data=data)
            self.newest = 0
            while self.kills < kills and (how := self.run_and_kill(call)):
                self.check_recovered(out, where, every, how)
            self.good(*call)
            self.check_end(out, f"seed {SEED}")
            self.good("inspect", "--verify", where)
            attempt += 1
        TOTALS.append(self.kills)

    def share(self, part):
        return max(KILLS * part // 20, 2)

    def test_every_step(self):
        self.loop(
            self.share(4),
            *("--ranks", 2, "--micro-batch", 2, "--zero-stage", 3, "--dtype", "bf16"),
        )

    def test_every_n(self):
        self.loop(
            self.share(3),
            *("--ranks", 2, "--micro-batch", 2, "--zero-stage", 2, "--durability", "every=3"),
            every=3,
        )

    def test_partly_resident(self):
        # Masters are the fp32 working copies; only the moments are streamed.
        self.loop(self.share(2), *("--ranks", 2, "--micro-batch", 2, "--zero-stage", 1))

    def test_host(self):
        self.loop(
            self.share(2),
            *("--ranks", 2, "--micro-batch", 2, "--zero-stage", 2, "--durability", "step"),
            *("--offload-optimizer", "host"),
            nvme=False,
        )

    def test_skipped_steps(self):
        self.loop(
            self.share(2),
            *("--ranks", 2, "--micro-batch", 2, "--zero-stage", 3, "--shuffle", "off"),
            *("--seq-len", 24),
            data=self.tokens(),
        )
        skipped = [step for step, _, skip in self.losses("whole") if skip]
        self.assertEqual(skipped, [3, 9, 15, 21])

    # ---- committed at the end only ----

    def at_exit(self, kills, *more):
        """Yields each killed run, in a copy of what was left at step STEPS / 2."""
        args = ("--ranks", 2, "--micro-batch", 2, "--zero-stage", 3, "--durability", "exit", *more)
        self.good(*self.call("whole", "whole-states", *args))
        begin = time.monotonic()
        self.good(*self.call("half", "half-states", *args, steps=STEPS // 2))
        self.blow.measure(time.monotonic() - begin, 0.8)
        half = self.commit(self.path("half-states"))
        while self.kills < kills:
            for name in ("out", "states"):
                shutil.rmtree(self.path(name), ignore_errors=True)
            for name in ("half-states", "half.jsonl"):
                to = self.path(name.replace("half-", "").replace("half", "out"))
                (shutil.copytree if os.path.isdir(self.path(name)) else shutil.copy)(self.path(name), to)
            call = self.call("out", "states", *args)
            self.newest = half[0]
            how = self.run_and_kill(call)
            if how:
                yield call, how, half
        TOTALS.append(self.kills)

    def test_exit(self):
        for call, how, half in self.at_exit(self.share(1)):
            self.assertIn(self.check_newest(self.path("states"), how), (half[1], STEPS), how)
            self.good(*call)
            self.check_end("out", how)

    def test_one_slot(self):
        # What was written over is refused, what was not is as good as two slots.
        refused = 0
        for call, how, _ in self.at_exit(self.share(2), "--slots", 1):
            done = run(*call)
            if done.returncode == 0:
                self.check_end("out", how)
                continue
            refused += 1
            self.assertEqual(done.returncode, 1, how + done.stderr)
            self.assertRegex(done.stderr, "has one slot for each chunk, and its process ended after it had begun", how)
        print(f"one slot: {refused} of {self.kills} refused", flush=True)

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
            *("--io-engine", self.random.choice(["auto", "posix"]), "--keep", self.random.randrange(2)),
        )

    def test_change_of_shape(self):
        begin = time.monotonic()
        self.good(*self.call("whole", "whole-states", "--ranks", 2, "--micro-batch", 2))
        self.blow.measure(time.monotonic() - begin, 0.8)
        steps = 10**6  # it never comes to its end by itself
        while self.kills < self.share(4) or not self.newest:
            call = self.call("out", None, *self.shape(), steps=steps)
            how = self.run_and_kill(call, early=True)
            self.assertIsNotNone(how)
            self.check_newest(self.state(), how)
            step, bits = self.committed()
            if not step:
                self.blow.later()  # killed before the first commit: one must come, however slow the machine
            else:
                # Taken over in another shape, without a step: the same bits.
                shape = self.shape()
                self.good(*self.call("out", None, *shape, steps=step))
                where = f"{how}, taken over at step {step} by {shape}"
                again, same = self.committed()
                self.assertEqual((again, self.differing(same, bits)), (step, []), where)
                self.newest = self.commit(self.state())[0]
        self.good("inspect", "--verify", self.state())
        TOTALS.append(self.kills)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=KILLS)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--power", action="store_true")
    known, rest = parser.parse_known_args()
    globals().update(KILLS=known.kills, SEED=known.seed, POWER=known.power)
    if not os.path.exists(PROGRAM):
        print(f"skipped: {PROGRAM} is not built")
        sys.exit(77)
    what = "power cuts" if POWER else "kills"
    print(f"{KILLS} {what}, seed {SEED}", flush=True)
    done = unittest.main(argv=[sys.argv[0], *rest], exit=False)
    good = done.result.wasSuccessful()
    print(f"{sum(TOTALS)} {what} in the loops that came to their end, all recovered")
    sys.exit(not good)


if __name__ == "__main__":
    main()

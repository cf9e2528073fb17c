#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`zspill train` under ZSPILL_FAULTS: what it says, that the last commit is still there, and that the
resumed run ends where an undisturbed one does."""

import os
import signal
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "engine"))
from cli_support import Case, main, run  # noqa: E402

STEPS = 6


class Faults(Case):
    def train(self, faults="", out="out", ranks=2, **kwargs):
        args = self.small(
            "--steps", STEPS, "--micro-batch", 2, "--ranks", ranks, "--zero-stage", 3, "--out",
            self.path(out), "--offload-optimizer", "nvme:" + self.path(out + "-state"),
            "--offload-params", "nvme:" + self.path(out + "-params"), *kwargs.pop("more", ()),
        )
        return run(*args, env={**os.environ, "ZSPILL_FAULTS": faults}, **kwargs)

    def weights(self, out):
        with open(self.path(out, "model.safetensors"), "rb") as file:
            return file.read()

    def expected(self):
        done = self.train(out="whole")
        self.assertEqual(done.returncode, 0, done.stderr)
        return self.weights("whole")

    def resumes(self, expected, out="out"):
        done = self.train(out=out, more=["--resume"])
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(self.weights(out), expected)

    def test_messages(self):
        cases = {
            "write=EOOPS": "ZSPILL_FAULTS: fault 'write=EOOPS': after = use an errno",
            "allocate@2=ENOSPC": "No space left on device; free some space",
            "write@60=EIO,file=.state": "Input/output error",
            "read@3=EIO,file=.params": "Input/output error",
            "sync@9=EIO,file=.state": "Input/output error",
            "write@60=ENOSPC,file=.state": "No space left on device",
            "rename@1=EROFS": "zspill.manifest' cannot be put in place: Read-only file system",
        }
        expected = self.expected()
        for number, (faults, message) in enumerate(cases.items()):
            with self.subTest(faults=faults):
                out = f"out{number}"
                done = self.train(faults, out=out)
                self.assertEqual(done.returncode, 1, done.stderr)
                self.assertIn(message, done.stderr)
                self.resumes(expected, out)

    def test_weather(self):
        """What is not an error changes nothing."""
        expected = self.expected()
        for number, faults in enumerate(
            (
                "read@5/7=EAGAIN;write@5/7=EAGAIN",
                "read@3/5=short;write@2/3=short",
                "read@2/9=delay:2;sync@3=EINTR",
            )
        ):
            out = f"out{number}"
            done = self.train(faults, out)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(self.weights(out), expected)

    def test_power_cuts(self):
        expected = self.expected()
        killed = 0
        for seed in range(10):
            out = f"out{seed}"
            done = self.train(f"change@{3 + 11 * seed}=cut:kill;seed={seed}", out)
            killed += done.returncode == -signal.SIGKILL
            self.assertIn(done.returncode, (0, -signal.SIGKILL), done.stderr)
            self.resumes(expected, out)
        self.assertGreater(killed, 1)


if __name__ == "__main__":
    main()

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
    def train(self, faults="", out="out", ranks=2, steps=STEPS, **kwargs):
        args = self.small(
            "--steps", steps, "--micro-batch", 2, "--ranks", ranks, "--zero-stage", 3, "--out",
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
            "write@50=EDQUOT,file=.state": "Disk quota exceeded",
            "write@50+=EAGAIN,file=.state": "Resource temporarily unavailable",
            "read@9+=EAGAIN": "Resource temporarily unavailable",
            "sync@15=ENOSPC,file=.state": "No space left on device; what was written since",
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

    def test_messages_at_resume(self):
        cases = {
            "read@2=EIO,file=.state": "Input/output error",
            "read@3=flip,file=.state": "the file or the disk is damaged",
            "write@1=EIO,file=.params": "writing ",
            "sync@1=EIO": "Input/output error",
        }
        expected = self.expected()
        done = self.train(steps=3)
        self.assertEqual(done.returncode, 0, done.stderr)
        for faults, message in cases.items():
            with self.subTest(faults=faults):
                done = self.train(faults, more=["--resume"])
                self.assertEqual(done.returncode, 1, done.stderr)
                self.assertIn(message, done.stderr)
                self.assertNotIn("step 4/", done.stdout)
        self.resumes(expected)

    def test_bits_that_flip_on_the_medium(self):
        """Who reads the commit that was written so says so; what is not in force harms nobody."""
        expected, refused = self.expected(), 0
        for number in range(12, 20):
            out = f"out{number}"
            done = self.train(f"write@{number}=flip,file=rank00001.state", out, steps=3)
            self.assertEqual(done.returncode, 0, done.stderr)
            done = self.train(out=out, more=["--resume"])
            if done.returncode == 0:
                self.assertEqual(self.weights(out), expected)
                continue
            refused += 1
            self.assertEqual(done.returncode, 1, done.stderr)
            self.assertIn("rank00001.state': chunk ", done.stderr)
            self.assertIn("the file or the disk is damaged", done.stderr)
        self.assertIn(refused, range(1, 8))

    def test_reads_in_mid_run(self):
        """A ring that is too small for all states: each step reads them."""
        larger = self.write_config("larger.json", hidden_size=64, intermediate_size=96)
        more = ["--init", larger, "--buffer-bytes", 3 * 16 * 4096]
        done = self.train(out="whole", more=more)
        self.assertEqual(done.returncode, 0, done.stderr)
        cases = {
            "read@30=EIO,file=.state": r"reading \d+ bytes at offset \d+ of '.*state': Input/output",
            "read@40=flip,file=.state": "the file or the disk is damaged",
            "read@50+=EAGAIN,file=.state": "Resource temporarily unavailable",
        }
        for number, (faults, message) in enumerate(cases.items()):
            with self.subTest(faults=faults):
                out = f"out{number}"
                done = self.train(faults, out, more=more)
                self.assertEqual(done.returncode, 1, done.stderr)
                self.assertRegex(done.stderr, message)
                self.assertIn("step 1/", done.stdout)
                done = self.train(out=out, more=[*more, "--resume"])
                self.assertIn("resumed at step ", done.stdout)
                self.assertEqual(self.weights(out), self.weights("whole"))

    def test_weather(self):
        """What is not an error changes nothing."""
        expected = self.expected()
        for number, faults in enumerate(
            (
                "read@5/7=EAGAIN;write@5/7=EAGAIN",
                "read@3-400=EAGAIN;write@50-500=EAGAIN",
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

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`zspill train --device cuda` (emulated) against the host, and its refusals."""

import os
import sys
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "engine"))
from cli_support import Case, read_rows, run  # noqa: E402 pylint: disable=wrong-import-position


class Device(Case):
    def setUp(self):
        super().setUp()
        self.some = self.path("some.txt")
        with open(self.some, "w") as file:
            file.write("the quick brown fox jumps over the lazy dog\n" * 5)

    def losses(self, device, *more, env=None):
        """[(loss, grad_norm)] of each step, then the evaluation's loss."""
        metrics = self.path(device + ".jsonl")
        self.good(
            *self.small(
                "--device", device, "--steps", 4, "--micro-batch", 2, "--grad-accum", 2, "--shuffle", "off",
                "--metrics", metrics, "--eval-data", self.some, *more, out="out-" + device,
            ),
            env=env,
        )  # fmt: skip
        rows = read_rows(metrics)
        steps = [(row["loss"], row["grad_norm"]) for row in rows if "loss" in row]
        self.assertEqual(len(steps), 4)
        return [value for step in steps for value in step] + [rows[-1]["eval_loss"]]

    def same(self, got, want, tolerance):
        for a, b in zip(got, want):
            self.assertLessEqual(abs(a - b), tolerance * abs(b), (got, want))

    def test_as_the_host(self):
        for more in (("--zero-stage", 0), ("--ranks", 2, "--zero-stage", 3, "--offload-optimizer", "host")):
            with self.subTest(more=more):
                self.same(self.losses("cuda", *more), self.losses("cpu", *more), 1e-5)
                for device in ("cuda", "cpu"):
                    os.rename(self.path("out-" + device), self.path(f"{device}-{more[1]}"))

    def test_bf16(self):
        self.same(self.losses("cuda", "--dtype", "bf16"), self.losses("cpu", "--dtype", "bf16"), 2e-2)

    def test_resume(self):
        """A run that was stopped goes on as one that was not, to the bit."""
        whole = self.path("whole.jsonl"), self.path("parts.jsonl")
        self.good(*self.small("--device", "cuda", "--steps", 4, "--metrics", whole[0], out="whole"))
        args = self.small("--device", "cuda", "--schedule", "constant", out="parts")
        self.good(*args, "--steps", 2)
        self.good(*args, "--steps", 4, "--resume", "--metrics", whole[1])
        one, other = ([row["loss"] for row in read_rows(path) if "loss" in row] for path in whole)
        self.assertEqual(one[2:], other)

    def test_no_plugin(self):
        env = {**os.environ, "ZSPILL_CUDA_LIB": self.path("none.so")}
        self.bad(1, "--device cuda: ", *self.small("--device", "cuda", "--steps", 1), env=env)

    def test_no_such_device(self):
        env = {**os.environ, "ZS_EMU_DEVICES": "1"}
        args = self.small("--device", "cuda", "--ranks", 2, "--steps", 1)
        self.bad(1, "CUDA device 1 is not there: this process sees 1", *args, env=env)

    def test_no_memory(self):
        env = {**os.environ, "ZS_EMU_MEMORY": str(36 << 20)}
        args = self.small("--device", "cuda", "--micro-batch", 64, "--steps", 1)
        self.bad(1, "of device memory", *args, env=env)

    def test_bad_name(self):
        done = run(*self.small("--device", "gpu", "--steps", 1))
        self.assertEqual(done.returncode, 2)
        self.assertIn("cpu|cuda", done.stderr)


if __name__ == "__main__":
    unittest.main()

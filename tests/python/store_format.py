# SPDX-License-Identifier: Apache-2.0
"""What the program commits is what docs/format.md says: the stores of several worlds, stages and
tiers, read by read_store.py, against `zspill export`."""

import array
import os
import struct
import sys
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "engine"))
# pylint: disable=wrong-import-position
import read_store  # noqa: E402
from cli_support import Case, read_safetensors  # noqa: E402


def floats(tensor):
    dtype, _, data = tensor
    if dtype == "BF16":
        words = struct.unpack(f"<{len(data) // 2}H", data)
        return array.array("f", struct.pack(f"<{len(words)}I", *(word << 16 for word in words)))
    assert dtype == "F32"
    return array.array("f", data)


def to_bf16(values):
    """Rounded to nearest, ties to even."""
    out = array.array("f")
    for (bits,) in struct.iter_unpack("<I", values.tobytes()):
        bits = bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000
        out.frombytes(struct.pack("<I", bits))
    return out


class StoreFormat(Case):
    def check(self, *options, dtype="fp32"):
        self.good(*self.small("--steps", 3, "--dtype", dtype, *options))
        state = self.path("out", "state")
        commit, step, params = read_store.read(state)
        self.assertEqual(step, 3)
        self.assertGreaterEqual(commit, 1)
        states, out = self.path("states.safetensors"), self.path("exported")
        self.good("export", state, "--model", self.config, "--out", out, "--states", states)
        saved = read_safetensors(states)
        weights = read_safetensors(os.path.join(out, "model.safetensors"))
        self.assertEqual(set(weights), set(params))
        self.assertEqual(len(saved), 3 * len(params))
        for name, (kind, *arrays) in params.items():
            self.assertEqual(kind, dtype)
            for key, values in zip(("master", "exp_avg", "exp_avg_sq"), arrays):
                self.assertEqual(floats(saved[f"{name}.{key}"]).tobytes(), values.tobytes(), name)
            rounded = to_bf16(arrays[0]) if dtype == "bf16" else arrays[0]
            self.assertEqual(floats(weights[name]).tobytes(), rounded.tobytes(), name)
            self.assertTrue(any(arrays[1]) and any(arrays[2]), name)
        return state

    def test_one_rank(self):
        state = self.check()
        path = os.path.join(state, "zspill-rank00000.state")
        size = os.path.getsize(path)
        with open(path, "r+b") as file:
            for at in range(16384, size, 4096):
                file.seek(at)
                file.write(b"\xff" * 16)
        with self.assertRaises(AssertionError):
            read_store.read(state)

    def test_ranks_and_bf16(self):
        self.check("--ranks", 3, "--zero-stage", 3, dtype="bf16")

    def test_older_commits(self):
        options = ("--ranks", 2, "--zero-stage", 2, "--keep", 2, "--durability", "step")
        state = self.check(*options)
        newest, _, params = read_store.read(state)
        states = self.path("older.safetensors")
        for back in (1, 2):
            commit, step, older = read_store.read(state, newest - back)
            self.assertEqual((commit, step), (newest - back, 3 - back))
            args = ("export", state, "--model", self.config, "--states", states)
            self.good(*args, "--commit", commit)
            saved = read_safetensors(states)
            for name, (_, master, _, _) in older.items():
                self.assertEqual(floats(saved[f"{name}.master"]).tobytes(), master.tobytes(), name)
                self.assertNotEqual(master, params[name][1], name)

    def test_replicated(self):
        self.check("--ranks", 2, "--zero-stage", 0)


if __name__ == "__main__":
    unittest.main(verbosity=2)

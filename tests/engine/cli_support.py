# SPDX-License-Identifier: Apache-2.0
"""What the black-box tests of the program share: running it, small models and data for it."""

import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from data import data_path  # noqa: E402 pylint: disable=wrong-import-position,unused-import

BUILD = os.environ.get("ZSPILL_BUILD_ROOT", "build")
PROGRAM = os.path.join(BUILD, "cli", "zspill")
TIMEOUT = 300
STATE_SHAPE = ("--ranks", 2, "--micro-batch", 2, "--zero-stage", 2)
# docs/format.md
LABEL, SUPERBLOCKS, VERSION_AT = 0, 4096, 8
STATE_STEPS = 5

CONFIG = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    vocab_size=256,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    tie_word_embeddings=True,
    hidden_act="silu",
    initializer_range=0.05,
    torch_dtype="float32",
)


def command(*args):
    return [PROGRAM, *map(str, args)]


def run(*args, **kwargs):
    kwargs.setdefault("timeout", TIMEOUT)
    return subprocess.run(
        command(*args), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs
    )


def write_safetensors(path, tensors):
    """tensors: {name: (dtype, shape, bytes)}"""
    header, at, body = {}, 0, b""
    for name, (dtype, shape, data) in tensors.items():
        header[name] = dict(dtype=dtype, shape=shape, data_offsets=[at, at + len(data)])
        at += len(data)
        body += data
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + body)


def read_safetensors(path):
    """{name: (dtype, shape, bytes)}"""
    with open(path, "rb") as file:
        blob = file.read()
    (size,) = struct.unpack("<Q", blob[:8])
    header = json.loads(blob[8 : 8 + size])
    header.pop("__metadata__", None)
    return {
        name: (t["dtype"], t["shape"], blob[8 + size :][slice(*t["data_offsets"])])
        for name, t in header.items()
    }


def int32(rows):
    flat = [value for row in rows for value in row]
    return "I32", [len(rows), len(rows[0]) if rows else 0], struct.pack(f"<{len(flat)}i", *flat)


def read_rows(path):
    with open(path) as file:
        return [json.loads(line) for line in file]


class Case(unittest.TestCase):
    """Each test in a directory of its own, with a config.json and text to train on."""

    def setUp(self):
        self.dir = tempfile.mkdtemp(prefix="zspill-cli-")
        self.addCleanup(shutil.rmtree, self.dir, ignore_errors=True)
        self.config = self.write_config("config.json")
        self.text = self.path("text.txt")
        with open(self.text, "w") as file:
            for i in range(400):
                file.write(f"line {i}: the quick brown fox {i * i} jumps over the lazy dog\n")

    def path(self, *names):
        return os.path.join(self.dir, *names)

    def write_config(self, name, **changes):
        with open(self.path(name), "w") as file:
            json.dump({**CONFIG, **changes}, file)
        return self.path(name)

    def write_tokens(self, name, rows, **more):
        write_safetensors(
            self.path(name),
            {"input_ids": int32(rows), **{key: int32(v) for key, v in more.items()}},
        )
        return self.path(name)

    def small(self, *more, out="out", data=None):
        """Arguments of a run of a few seconds at most."""
        return [
            "train",
            "--init",
            self.config,
            "--data",
            data or self.text,
            "--out",
            self.path(out),
            "--seq-len",
            32,
            "--threads",
            1,
            "--lr",
            1e-3,
            *more,
        ]

    def good(self, *args, **kwargs):
        done = run(*args, **kwargs)
        self.assertEqual(done.returncode, 0, done.stderr + done.stdout)
        return done

    def bad(self, code, message, *args, left=(), **kwargs):
        """Fails with code and message, one line, and leaves nothing of `out` but `left`."""
        done = run(*args, **kwargs)
        self.assertEqual(done.returncode, code, done.stderr + done.stdout)
        self.assertIn(message, done.stderr)
        self.assertTrue(done.stderr.startswith("zspill: "), done.stderr)
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        out = self.path("out")
        self.assertEqual(sorted(os.listdir(out)) if os.path.isdir(out) else [], sorted(left))
        return done


class StateCase(Case):
    """Runs with states on disk, and ways into their files."""

    def nvme(self, *more, steps=3, out="out", states="states", shape=STATE_SHAPE):
        where = "nvme:" + self.path(states)
        return self.small("--steps", steps, *shape, "--offload-optimizer", where, *more, out=out)

    def rank(self, number, states="states"):
        return self.path(states, f"zspill-rank{number:05}.state")

    def flip(self, path, offset):
        with open(path, "r+b") as file:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 0x10]))

    def areas(self, path):
        """Offsets of the superblocks: the one in force, the other; and where chunks begin."""
        with open(path, "rb") as file:
            blob = file.read()
        (size,) = struct.unpack_from("<Q", blob, 16)
        at = [SUPERBLOCKS, SUPERBLOCKS + size]
        at.sort(key=lambda o: -struct.unpack_from("<Q", blob, o + 48)[0])
        return at[0], at[1], SUPERBLOCKS + 2 * size

    def refused(self, message, *args):
        """A resume that fails so, and changes nothing of what is committed."""
        states = self.path("states")
        before = {n: os.path.getsize(os.path.join(states, n)) for n in os.listdir(states)}
        done = run(*self.nvme("--resume", *args, steps=STATE_STEPS))
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        for word in [message] if isinstance(message, str) else message:
            self.assertIn(word, done.stderr)
        self.assertNotIn("step 4/5", done.stdout)
        after = {n: os.path.getsize(os.path.join(states, n)) for n in os.listdir(states)}
        self.assertEqual({n: after.get(n) for n in before}, before)
        return done

    def weights(self, out="out"):
        with open(self.path(out, "model.safetensors"), "rb") as file:
            return file.read()

    def undisturbed(self):
        """What a run of STATE_STEPS steps ends with."""
        if not os.path.exists(self.path("whole")):
            self.good(*self.small("--steps", STATE_STEPS, *STATE_SHAPE, out="whole"))
        return self.weights("whole")

    def goes_on(self, *args, step=3):
        """A resume at step that ends as the undisturbed run does."""
        done = self.good(*self.nvme("--resume", *args, steps=STATE_STEPS))
        self.assertIn(f"resumed at step {step}\n", done.stdout)
        self.assertEqual(self.weights(), self.undisturbed())
        return done


def main():
    if not os.path.exists(PROGRAM):
        print(f"skipped: {PROGRAM} is not built")
        sys.exit(77)
    unittest.main()

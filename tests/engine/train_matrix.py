#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The program at every stage, tier, I/O engine and world size: within a world, the metrics' losses and norms and the bytes of the
model it writes must not differ.

    train_matrix.py ZSPILL [WORLD ...]
"""

import json
import os
import subprocess
import sys
import tempfile

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 256,
    "hidden_size": 40,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
    "torch_dtype": "float32",
}


def shapes():
    for stage in range(4):
        for states in ("none", "host", "nvme"):
            for params in ("none", "host", "nvme") if stage == 3 else ("none",):
                engines = ("posix", "io_uring") if "nvme" in (states, params) else ("auto",)
                for engine in engines:
                    yield stage, states, params, engine


class Matrix:
    def __init__(self, program, folder):
        self.program = program
        self.folder = folder
        self.config = self.path("config.json")
        json.dump(CONFIG, open(self.config, "w"))
        self.text = self.path("text.txt")
        with open(self.text, "w") as f:
            f.write(
                "".join(
                    "%d squared is %d, and its cube %d.\n" % (i, i * i, i**3) for i in range(200)
                )
            )
        self.count = 0
        self.without_uring = False

    def path(self, *names):
        return os.path.join(self.folder, *names)

    def run(self, world, stage, states, params, engine, dtype):
        """(what the metrics say of the steps, the model's bytes)"""
        self.count += 1
        here = self.path("run%d" % self.count)
        os.mkdir(here)
        tier = lambda name, kind: name if name != "nvme" else "nvme:" + os.path.join(here, kind)
        command = [
            self.program,
            "train",
            "--init",
            self.config,
            "--data",
            self.text,
            "--out",
            os.path.join(here, "out"),
            "--ranks",
            str(world),
            "--zero-stage",
            str(stage),
            "--offload-optimizer",
            tier(states, "states"),
            "--io-engine",
            engine,
            "--seq-len",
            "24",
            "--micro-batch",
            "1",
            "--grad-accum",
            "2",
            "--steps",
            "3",
            "--lr",
            "0.01",
            "--dtype",
            dtype,
            "--grad-dtype",
            dtype,
            "--metrics",
            os.path.join(here, "metrics.jsonl"),
        ]
        if params != "none":
            command += ["--offload-params", tier(params, "params")]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode and engine == "io_uring" and "io_uring" in done.stderr:
            self.without_uring = True
            return None
        if done.returncode:
            raise SystemExit(
                "FAILED: %s\nexit code %d: %s" % (" ".join(command), done.returncode, done.stderr)
            )
        rows = [json.loads(line) for line in open(os.path.join(here, "metrics.jsonl"))]
        steps = [(r["step"], r["loss"], r["grad_norm"]) for r in rows if "loss" in r]
        if len(steps) != 3 or not steps[2][1] < steps[0][1]:
            raise SystemExit("FAILED: the loss does not fall: %s" % steps)
        with open(os.path.join(here, "out", "model.safetensors"), "rb") as f:
            model = f.read()
        subprocess.run(["rm", "-rf", here])
        return steps, model

    def world(self, world, dtype):
        base, runs = None, 0
        for shape in shapes():
            got = self.run(world, *shape, dtype)
            if got is None:
                continue
            runs += 1
            if base is None:
                base = got
            if got[0] != base[0]:
                raise SystemExit(
                    "FAILED: world %d, %s: %s, not %s" % (world, shape, got[0], base[0])
                )
            if got[1] != base[1]:
                raise SystemExit("FAILED: world %d, %s: other parameters" % (world, shape))
        print(
            "world %d, %s: %d runs equal, losses %s"
            % (world, dtype, runs, [s[1] for s in base[0]]),
            flush=True,
        )


def main():
    with tempfile.TemporaryDirectory(prefix="zspill-matrix-") as folder:
        matrix = Matrix(sys.argv[1], folder)
        for world in [int(w) for w in sys.argv[2:]] or [1, 2, 3, 4]:
            matrix.world(world, "bf16" if world == 2 else "fp32")
        if matrix.without_uring:
            print("without io_uring, which this machine does not offer")
    return 0


if __name__ == "__main__":
    sys.exit(main())

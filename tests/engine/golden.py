#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Whole training runs of the program against torch's, as recorded in ZSPILL_TEST_DATA/golden.

    golden.py [--device cuda] ZSPILL [tiny|masked|stories|arch|bf16|nll ...]

Python's standard library only. Exit code 77 where the data is not there.
"""

import json
import os
import struct
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from data import data_path  # noqa: E402 pylint: disable=wrong-import-position

TOLERANCE = 1e-4


def write_token_file(path, rows, labels):
    """A token file: a safetensors file with input_ids and labels, I32 [rows, seq]."""
    tensors = {"input_ids": rows} if labels is None else {"input_ids": rows, "labels": labels}
    header, data = {}, b""
    for name, values in tensors.items():
        flat = struct.pack("<%di" % (len(values) * len(values[0])), *[x for r in values for x in r])
        header[name] = {
            "dtype": "I32",
            "shape": [len(values), len(values[0])],
            "data_offsets": [len(data), len(data) + len(flat)],
        }
        data += flat
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + data)


def read_weights(path):
    """{name: (sum, L2 norm)} of an fp32 safetensors file."""
    out = {}
    with open(path, "rb") as f:
        (n,) = struct.unpack("<Q", f.read(8))
        header = json.loads(f.read(n))
        for name, t in header.items():
            if name == "__metadata__":
                continue
            assert t["dtype"] == "F32", (name, t["dtype"])
            begin, end = t["data_offsets"]
            f.seek(8 + n + begin)
            values = struct.unpack("<%df" % ((end - begin) // 4), f.read(end - begin))
            out[name] = (sum(values), sum(v * v for v in values) ** 0.5)
    return out


def rows_of(flat_steps, batch, seq):
    return [s[r * seq : (r + 1) * seq] for s in flat_steps for r in range(batch)]


class Failure(Exception):
    pass


def near(what, got, want, tolerance):
    worst = 0.0
    if len(got) != len(want):
        raise Failure("%s: %d values, not %d" % (what, len(got), len(want)))
    for i, (a, b) in enumerate(zip(got, want)):
        error = abs(a - b) / abs(b)
        worst = max(worst, error)
        if not error <= tolerance:
            raise Failure(
                "%s of step %d is %.9g, not %.9g: off by %.3g, more than %.3g"
                % (what, i + 1, a, b, error, tolerance)
            )
    return worst


class Runs:
    def __init__(self, program, device, data):
        self.program = program
        self.device = device
        self.data = data
        self.dir = tempfile.TemporaryDirectory(prefix="zspill-golden-")
        self.count = 0

    def path(self, name):
        return os.path.join(self.dir.name, name)

    def train(self, golden, model, labels, options):
        """One run; its step rows and the directory it wrote."""
        self.count += 1
        tokens, metrics = self.path("tokens.safetensors"), self.path("%d.jsonl" % self.count)
        out = self.path("out%d" % self.count)
        write_token_file(
            tokens, rows_of(golden["input_ids"], golden["batch"], golden["seq"]), labels
        )
        hyper = golden["hyper"]
        command = [
            self.program,
            "train",
            "--device",
            self.device,
            "--model",
            model,
            "--data",
            tokens,
            "--out",
            out,
            "--shuffle",
            "off",
            "--steps",
            str(golden["steps"]),
            "--lr",
            str(hyper["lr"]),
            "--beta1",
            str(hyper["betas"][0]),
            "--beta2",
            str(hyper["betas"][1]),
            "--eps",
            str(hyper["eps"]),
            "--weight-decay",
            str(hyper["weight_decay"]),
            "--clip",
            str(hyper["clip"]),
            "--schedule",
            "constant",
            "--warmup",
            "0",
            "--metrics",
            metrics,
        ] + options
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise Failure(
                "%s: exit code %d: %s" % (" ".join(command), done.returncode, done.stderr)
            )
        rows = [json.loads(line) for line in open(metrics)]
        return [r for r in rows if "loss" in r], out

    def compare(
        self,
        name,
        golden,
        model,
        options,
        loss_tolerance=TOLERANCE,
        norm_tolerance=TOLERANCE,
        ends=True,
    ):
        labels = golden["labels"]
        if labels == "input_ids":
            labels = None
        else:
            labels = rows_of(labels, golden["batch"], golden["seq"])
        rows, out = self.train(golden, model, labels, options)
        want = golden["float64"]
        loss = near("%s: loss" % name, [r["loss"] for r in rows], want["loss"], loss_tolerance)
        norm = near(
            "%s: grad_norm" % name,
            [r["grad_norm"] for r in rows],
            want["grad_norm"],
            norm_tolerance,
        )
        if ends:
            got = read_weights(os.path.join(out, "model.safetensors"))
            if set(got) != set(want["end_sum_and_norm"]):
                raise Failure(
                    "%s: parameters %s differ" % (name, set(got) ^ set(want["end_sum_and_norm"]))
                )
            for p, (total, length) in want["end_sum_and_norm"].items():
                # A sum may cancel to nearly nothing: measured against the norm, as all elements could be wrong alike.
                if abs(got[p][0] - total) > 1e-3 * max(abs(total), length):
                    raise Failure("%s: sum of %s is %.9g, not %.9g" % (name, p, got[p][0], total))
                if abs(got[p][1] - length) > 1e-3 * length:
                    raise Failure("%s: norm of %s is %.9g, not %.9g" % (name, p, got[p][1], length))
        print("%-60s loss within %.2g, grad_norm within %.2g" % (name, loss, norm), flush=True)

    def golden(self, name):
        return json.load(open(os.path.join(self.data, "golden", name + ".json")))

    def model(self, name):
        return os.path.join(self.data, "models", name)

    def stages_and_ranks(self, golden_name, model):
        golden = self.golden(golden_name)
        for stage in range(4):
            for ranks, micro, accum in ((1, 4, 2), (2, 2, 2), (4, 2, 1)):
                self.compare(
                    "%s, stage %d, %d ranks" % (golden_name, stage, ranks),
                    golden,
                    self.model(model),
                    [
                        "--dtype",
                        "fp32",
                        "--zero-stage",
                        str(stage),
                        "--ranks",
                        str(ranks),
                        "--micro-batch",
                        str(micro),
                        "--grad-accum",
                        str(accum),
                    ],
                )

    def tiny(self):
        self.stages_and_ranks("TinyStories-656K", "TinyStories-656K")

    def masked(self):
        self.stages_and_ranks("TinyStories-656K.masked", "TinyStories-656K")

    def stories(self):
        self.stages_and_ranks("stories260K", "stories260K")

    def bf16(self):
        for name, model in (
            ("TinyStories-656K", "TinyStories-656K"),
            ("stories260K", "stories260K"),
        ):
            golden = self.golden(name)
            allowed = golden["bfloat16_max_relative_error"]["master"]
            self.compare(
                name + ", bf16 weights, fp32 master",
                golden,
                self.model(model),
                ["--dtype", "bf16", "--zero-stage", "3", "--ranks", "2", "--micro-batch", "4"],
                3 * allowed["loss"],
                3 * allowed["grad_norm"],
                ends=False,
            )

    def arch(self):
        root = os.path.join(self.data, "golden", "arch")
        for name in sorted(os.listdir(root)):
            golden = json.load(open(os.path.join(root, name, "golden.json")))
            self.compare(
                name,
                golden,
                os.path.join(root, name),
                ["--dtype", "fp32", "--zero-stage", "3", "--ranks", "2", "--micro-batch", "2"],
            )

    def nll(self):
        """The mean NLL of the texts in models/golden.json."""
        golden = json.load(open(os.path.join(self.data, "models", "golden.json")))
        for name, g in golden.items():
            check_nll(self, name, g)


def check_nll(runs, name, g):
    tokens = runs.path("nll.safetensors")
    write_token_file(tokens, [g["text_ids"]], None)
    done = subprocess.run(
        [
            runs.program,
            "train",
            "--device",
            runs.device,
            "--model",
            runs.model(name),
            "--eval-data",
            tokens,
            "--steps",
            "0",
            "--dtype",
            "fp32",
            "--out",
            runs.path("nll-" + name),
        ],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise Failure("%s: exit code %d: %s" % (name, done.returncode, done.stderr))
    words = done.stdout.split()
    got = float(words[words.index("eval_loss") + 1])
    if abs(got - g["text_mean_nll_float64"]) > 1e-4:
        raise Failure("%s: mean NLL is %.9g, not %.9g" % (name, got, g["text_mean_nll_float64"]))
    print("%-60s mean NLL %.7f, off by %.2g" % (name, got, abs(got - g["text_mean_nll_float64"])))


def main():
    args, device = sys.argv[1:], "cpu"
    if args[0] == "--device":
        device, args = args[1], args[2:]
    program, names = args[0], args[1:]
    if not data_path("golden"):
        print("skipped: no golden runs in the folder of ZSPILL_TEST_DATA")
        return 77
    runs = Runs(program, device, data_path())
    for name in names or ["nll", "arch", "tiny", "masked", "stories", "bf16"]:
        try:
            getattr(runs, name)()
        except Failure as failure:
            print("FAILED: %s" % failure)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Bad files: code 1, a message that names the thing and the fix, nothing left in --out."""

import os
import resource
import shutil
import signal
import subprocess

from cli_support import (
    TIMEOUT,
    Case,
    command,
    data_path,
    main,
    read_rows,
    read_safetensors,
    write_safetensors,
)


class BadInput(Case):
    def model(self, change):
        """A model directory made by the program, its tensors changed."""
        self.good(*self.small("--steps", 1, out="model"))
        path = self.path("model", "model.safetensors")
        tensors = read_safetensors(path)
        change(tensors)
        write_safetensors(path, tensors)
        shutil.rmtree(self.path("model", "state"))

    def refused_model(self, message):
        args = self.small()
        args[1:3] = ["--model", self.path("model")]
        for ranks in (1, 3):
            self.bad(1, message, *args, "--ranks", ranks)

    def test_missing_tensor(self):
        self.model(lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
        self.refused_model("model.layers.1.mlp.up_proj.weight")

    def test_wrong_shape(self):
        def change(tensors):
            dtype, shape, data = tensors["model.norm.weight"]
            tensors["model.norm.weight"] = dtype, [shape[0] // 2, 2], data

        self.model(change)
        self.refused_model("model.norm.weight")

    def test_wrong_dtype(self):
        def change(tensors):
            _, shape, data = tensors["model.norm.weight"]
            tensors["model.norm.weight"] = "I32", shape, data

        self.model(change)
        self.refused_model("model.norm.weight")

    def test_truncated_model(self):
        self.model(lambda t: None)
        with open(self.path("model", "model.safetensors"), "r+b") as file:
            file.truncate(os.path.getsize(file.name) - 2)
        self.refused_model("model.safetensors")

    def test_missing_model(self):
        args = self.small()
        args[1:3] = ["--model", self.path("nothing")]
        self.bad(1, self.path("nothing", "config.json"), *args)
        os.mkdir(self.path("nothing"))
        shutil.copy(self.config, self.path("nothing", "config.json"))
        self.bad(1, self.path("nothing"), *args)

    def test_config(self):
        self.config = self.write_config("strange.json", model_type="mamba")
        self.bad(1, "mamba", *self.small())
        self.config = self.write_config("strange.json", hidden_act="gelu")
        self.bad(1, "hidden_act", *self.small())

    def test_data(self):
        rows = [[1] * 32 for _ in range(6)]
        rows[4][7] = 256
        tokens = self.write_tokens("tokens.safetensors", rows)
        for ranks in (1, 2):
            self.bad(
                1,
                "id 256 in row 4, column 7 is outside the model's vocabulary of 256",
                *self.small("--ranks", ranks, data=tokens),
            )
        rows[4][7] = 2
        tokens = self.write_tokens("tokens.safetensors", rows)
        self.bad(
            1,
            "has 6 rows of 32 tokens, fewer than the 8 of a step (2 ranks x --micro-batch 2 "
            "x --grad-accum 2)",
            *self.small("--ranks", 2, "--micro-batch", 2, "--grad-accum", 2, data=tokens),
        )
        tokens = self.write_tokens("long.safetensors", [[1] * 65])
        args = self.small(data=tokens)
        del args[args.index("--seq-len") : args.index("--seq-len") + 2]
        self.bad(1, "has rows of 65 tokens but the model has 64 positions", *args)
        self.bad(1, "has rows of 65 tokens, not --seq-len 32", *self.small(data=tokens))
        tokens = self.write_tokens("none.safetensors", [])
        self.bad(1, "is empty", *self.small(data=tokens))
        open(self.path("empty.txt"), "w").close()
        self.bad(1, "empty.txt is empty", *self.small(data=self.path("empty.txt")))
        self.bad(1, "--data", *self.small(data=self.path("missing.txt")))
        self.bad(
            1, "--seq-len 65 is longer than the model's 64 positions", *self.small("--seq-len", 65)
        )
        self.config = self.write_config("tiny.json", vocab_size=255)
        self.bad(1, "needs a vocabulary of 256, the model has 255", *self.small())

    def test_nothing_to_predict(self):
        rows = [[1] * 8 for _ in range(4)]
        args = self.small("--eval-data")
        del args[args.index("--seq-len") : args.index("--seq-len") + 2]
        for more in (
            dict(labels=[[-100] * 8] * 4),
            dict(labels=[[1] + [-100] * 7] * 4),
            dict(position_ids=[[0] * 8] * 4),
        ):
            tokens = self.write_tokens("masked.safetensors", rows, **more)
            self.bad(1, "--eval-data " + tokens + " has no counted token", *args, tokens)
            args[args.index("--data") + 1] = tokens
            self.bad(1, "--data " + tokens + " has no counted token", *args[:-1])
            args[args.index("--data") + 1] = self.text
        tokens = self.write_tokens("narrow.safetensors", [[1]] * 4)
        self.bad(1, "rows of 1 token leave nothing to predict: prepare it with", *args, tokens)
        self.bad(1, "nothing to predict: give a --seq-len", *self.small("--seq-len", 1))

    def test_pipes(self):
        os.mkfifo(self.path("pipe"))
        self.bad(1, "is not a file", *self.small(data=self.path("pipe")), timeout=20)
        self.bad(
            2, "is not a regular file", *self.small("--config", self.path("pipe")), timeout=20
        )
        self.bad(2, "is not a regular file", *self.small("--config", self.dir))
        self.bad(1, "--eval-data", *self.small("--eval-data", self.path("pipe")), timeout=20)
        self.bad(1, "cannot be created", *self.small("--trace", self.path("pipe")), timeout=20)
        self.good(*self.small("--steps", 1, "--metrics", "/dev/null"))

    def test_outputs_over_inputs(self):
        with open(self.text) as file:
            text = file.read()
        os.link(self.text, self.path("link"))
        for option in ("--metrics", "--trace"):
            for path in (self.text, self.path("link")):
                self.bad(1, "is --data's file and would be overwritten", *self.small(option, path))
            self.bad(1, "is --init's file", *self.small(option, self.config))
        new = self.path("new")
        self.bad(1, "is --metrics's file", *self.small("--metrics", new, "--trace", new))
        self.assertFalse(os.path.exists(new))
        with open(self.text) as file:
            self.assertEqual(file.read(), text)

    def test_evaluation_data(self):
        tokens = self.write_tokens("masked.safetensors", [[1] * 8], labels=[[-100] * 8])
        self.bad(
            1,
            "has no counted token",
            "train",
            "--init",
            self.config,
            "--steps",
            0,
            "--eval-data",
            tokens,
        )

    def test_output(self):
        self.bad(1, "Not a directory: choose another directory", *self.small(out="text.txt"))
        self.bad(1, "Not a directory: choose another directory", *self.small(out="text.txt/below"))
        self.bad(
            1,
            "--metrics /does/not/exist cannot be written",
            *self.small("--metrics", "/does/not/exist"),
        )
        self.bad(1, "/does/not/exist", *self.small("--trace", "/does/not/exist"))
        self.bad(1, "cannot be written to", *self.small("--offload-optimizer", "nvme:/proc/none"))
        args = self.small(out="model")
        os.mkdir(self.path("model"))
        shutil.copy(self.config, self.path("model", "config.json"))
        args[1:3] = ["--model", self.path("model")]
        with open(self.path("model", "model.safetensors"), "wb") as file:
            file.write(b"\2\0\0\0\0\0\0\0{}")
        self.bad(1, "is --model's directory: choose another", *args)

    def test_disk_too_small(self):
        def limit():
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))

        for ranks in (1, 2):
            self.bad(1, "free some space", *self.small("--ranks", ranks), preexec_fn=limit)

    def test_weights_not_finite(self):
        def change(tensors):
            dtype, shape, data = tensors["model.norm.weight"]
            tensors["model.norm.weight"] = dtype, shape, b"\xff" * len(data)

        self.model(change)
        args = self.small("--steps", 20, "--metrics", self.path("m.jsonl"), "--log-level", "error")
        args[1:3] = ["--model", self.path("model")]
        done = self.bad(1, "finite", *args)
        self.assertIn("skipped: the gradient norm is not finite", done.stdout)
        rows = read_rows(self.path("m.jsonl"))
        self.assertEqual(
            [(r["loss"], r["grad_norm"], r["skipped"]) for r in rows], [(None, None, True)] * 4
        )

    def test_one_rank_fails_at_start(self):
        os.makedirs(self.path("states"))
        with open(self.path("states", "zspill-rank00001.state"), "w") as file:
            file.write("something else\n" * 1000)
        self.bad(
            1,
            "rank 1: '" + self.path("states", "zspill-rank00001.state"),
            *self.small("--ranks", 3, "--offload-optimizer", "nvme:" + self.path("states")),
        )
        self.assertEqual(os.listdir(self.path("states")), ["zspill-rank00001.state"])

    def test_one_rank_fails_later(self):
        with open(self.text) as file:
            text = file.read()
        with open(self.text, "w") as file:
            file.write(text * 10)
        call = self.small("--ranks", 2, "--shuffle", "off", "--zero-stage", 3)
        with subprocess.Popen(
            command(*call), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            process.stdout.readline()
            os.truncate(self.text, 7001 * 32)
            _, errors = process.communicate(timeout=TIMEOUT)
        self.assertEqual(process.returncode, 1, errors)
        self.assertEqual(
            errors,
            f"zspill: rank 1: --data {self.text}: reading at byte {7001 * 32} "
            "failed: the file became shorter\n",
        )
        self.assertFalse(os.path.exists(self.path("out")))

    def test_closed_pipe(self):
        with subprocess.Popen(
            command(*self.small("--steps", 50)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            process.stdout.close()
            errors = process.stderr.read()
            process.wait(timeout=TIMEOUT)
        self.assertEqual(process.returncode, 1)
        self.assertEqual(errors, "zspill: cannot write to standard output: Broken pipe\n")

    def test_safetensors_cases(self):
        folder = data_path("safetensors_cases")
        if not folder:
            self.skipTest("no safetensors_cases in the folder of ZSPILL_TEST_DATA")
        for name in sorted(os.listdir(folder)):
            if "bad_" not in name:
                continue
            with self.subTest(name):
                os.makedirs(self.path("model"), exist_ok=True)
                shutil.copy(self.config, self.path("model", "config.json"))
                path = self.path("model", "model.safetensors")
                shutil.copyfile(os.path.join(folder, name), path)
                args = self.small()
                args[1:3] = ["--model", self.path("model")]
                self.bad(1, "model.safetensors", *args)
                tokens = shutil.copyfile(os.path.join(folder, name), self.path("t.safetensors"))
                self.bad(1, "t.safetensors", *self.small(data=tokens))


if __name__ == "__main__":
    main()

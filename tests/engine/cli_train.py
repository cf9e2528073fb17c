#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`zspill train` from outside: metrics, evaluation, stopping and resuming."""

import json
import math
import os
import shutil
import signal
import subprocess

from cli_support import Case, command, main, read_rows, read_safetensors, run

STEPS = 40
SLOW = ("--steps", STEPS, "--micro-batch", 8, "--grad-accum", 12)  # time enough for a signal


class Train(Case):
    def weights(self, out="out"):
        with open(self.path(out, "model.safetensors"), "rb") as file:
            return file.read()

    def losses(self, path):
        return [(r["step"], r["loss"], r["grad_norm"]) for r in read_rows(path) if "loss" in r]

    def metrics(self, *args, name="m.jsonl", **kwargs):
        self.good(*self.small(*args, "--metrics", self.path(name), **kwargs))
        return self.losses(self.path(name))

    def test_a_run(self):
        done = self.good(
            *self.small(
                "--steps",
                8,
                "--warmup",
                4,
                "--micro-batch",
                4,
                "--metrics",
                self.path("m.jsonl"),
                "--trace",
                self.path("t.json"),
                "--eval-data",
                self.text,
                "--eval-every",
                4,
            )
        )
        rows = read_rows(self.path("m.jsonl"))
        steps = [r for r in rows if "loss" in r]
        self.assertEqual([r["step"] for r in steps], list(range(1, 9)))
        self.assertEqual([r["lr"] for r in steps[:6]], [0, 2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3])
        for row in steps:
            self.assertNotIn("eval_loss", row)
            self.assertTrue(0 < row["loss"] < 6 and 0 < row["grad_norm"])
            self.assertEqual((row["tokens"], row["targets"]), (4 * 32, 4 * 31))
            self.assertAlmostEqual(row["tokens_per_s"] * row["seconds"], row["tokens"], 3)
            self.assertEqual(sorted(row["tiers"]), ["device", "host", "nvme"])
            self.assertIn("optimizer states", [r["purpose"] for r in row["ledger"]])
        self.assertAlmostEqual(steps[0]["loss"], math.log(256), 0)
        evaluations = [r for r in rows if "eval_loss" in r]
        self.assertEqual([r["step"] for r in evaluations], [4, 8])
        self.assertLess(evaluations[1]["eval_loss"], evaluations[0]["eval_loss"])
        self.assertNotIn("grad_norm", evaluations[0])
        for words in (
            "step 8/8  loss ",
            " grad_norm ",
            "tokens/s",
            "GFLOP/s",
            "left 0:00:00",
            "optimizer states",
            "eval_loss ",
        ):
            self.assertIn(words, done.stdout)
        self.assertEqual(done.stderr, "")
        with open(self.path("t.json")) as file:
            spans = [e["name"] for e in json.load(file)["traceEvents"] if e["ph"] == "X"]
        for name, count in (
            ("rows", 8),
            ("forward and backward", 8),
            ("step", 8),
            ("adam", 8),
            ("evaluation", 2),
            ("commit", 1),
        ):
            self.assertGreaterEqual(spans.count(name), count, name)
        tensors = read_safetensors(self.path("out", "model.safetensors"))
        self.assertEqual(tensors["model.embed_tokens.weight"][:2], ("F32", [256, 32]))
        self.assertNotIn("lm_head.weight", tensors)
        with open(self.path("out", "config.json")) as file:
            self.assertEqual(json.load(file)["hidden_size"], 32)

    def stopped_then_resumed(self, *args):
        whole = self.metrics(*SLOW, *args, name="whole.jsonl", out="whole")
        if "--offload-optimizer" in args:
            shutil.rmtree(self.path("states"))
        call = self.small(*SLOW, *args, "--metrics", self.path("m.jsonl"), "--resume")
        with subprocess.Popen(
            command(*call), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            for line in process.stdout:
                if line.startswith(f"step 3/{STEPS} "):
                    process.send_signal(signal.SIGTERM)
                    break
            rest, errors = process.communicate(timeout=300)
        self.assertEqual(process.returncode, 0, errors)
        self.assertIn("stopped after step ", rest)
        self.assertFalse(os.path.exists(self.path("out", "model.safetensors")))
        taken = len(self.losses(self.path("m.jsonl")))
        self.assertTrue(3 <= taken < STEPS, taken)
        done = self.good(*call)
        self.assertIn(f"resumed at step {taken}\n", done.stdout)
        self.assertEqual(self.losses(self.path("m.jsonl")), whole)
        self.assertEqual(self.weights(), self.weights("whole"))

    def test_stop_and_resume(self):
        self.stopped_then_resumed("--schedule", "cosine", "--warmup", 5)

    def test_stop_and_resume_sharded(self):
        self.stopped_then_resumed(
            "--ranks",
            2,
            "--zero-stage",
            3,
            "--offload-optimizer",
            "nvme:" + self.path("states"),
            "--dtype",
            "bf16",
        )

    def test_second_signal(self):
        # The second signal may end the process between a rank's end and its join.
        options = os.environ.get("TSAN_OPTIONS", "") + " report_thread_leaks=0"
        with subprocess.Popen(
            command(*self.small(*SLOW)),
            env=dict(os.environ, TSAN_OPTIONS=options),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            process.stdout.readline()
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=60)
        self.assertIn(process.returncode, (130, 143), errors)

    def test_killed_then_resumed(self):
        whole = self.metrics(*SLOW, name="whole.jsonl", out="whole")
        call = self.small(*SLOW, "--save-every", 2, "--metrics", self.path("m.jsonl"), "--resume")
        with subprocess.Popen(
            command(*call), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as process:
            for line in process.stdout:
                if line.startswith(f"step 6/{STEPS} "):
                    process.kill()
                    break
            process.communicate(timeout=60)
        self.assertEqual(process.returncode, -signal.SIGKILL)
        done = self.good(*call)
        self.assertIn("resumed at step ", done.stdout)
        self.assertEqual(self.losses(self.path("m.jsonl")), whole)
        self.assertEqual(self.weights(), self.weights("whole"))

    def test_state_removed_meanwhile(self):
        call = self.small(*SLOW, "--save-every", 1, "--ranks", 2)
        with subprocess.Popen(
            command(*call), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            for line in process.stdout:
                if line.startswith(f"step 3/{STEPS} "):
                    break
            shutil.rmtree(self.path("out", "state"))
            _, errors = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 1, errors)
        self.assertIn("was removed while in use", errors)
        self.assertFalse(os.path.exists(self.path("out")))

    def test_two_runs_into_one_directory(self):
        call = self.small(*SLOW, "--offload-optimizer", "nvme:" + self.path("one"))
        with subprocess.Popen(
            command(*call), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as process:
            process.stdout.readline()
            done = run(*self.small("--offload-optimizer", "nvme:" + self.path("two")))
            process.kill()
            process.communicate(timeout=60)
        self.assertEqual(done.returncode, 1)
        self.assertIn("out is held by another run: end it, or choose another", done.stderr)

    def test_closed_standard_streams(self):
        """No file of the run may become what printf writes to."""

        def close():
            for fd in range(3):
                os.close(fd)

        call = command(*self.small("--steps", 2, "--metrics", self.path("m.jsonl")))
        self.assertEqual(subprocess.Popen(call, preexec_fn=close).wait(timeout=60), 1)
        for folder, _, names in os.walk(self.dir):
            for name in names:
                with open(os.path.join(folder, name), "rb") as file:
                    self.assertNotIn(b"step 1/2  loss", file.read(), name)
        self.good(*self.small("--steps", 2, "--resume"))

    def test_finished_run(self):
        call = self.small("--steps", 3)
        self.good(*call, "--resume")  # no state yet: starts afresh
        weights = self.weights()
        os.remove(self.path("out", "model.safetensors"))
        done = self.good(*call, "--resume")
        self.assertEqual(self.weights(), weights)
        self.assertNotIn("step 3/3  loss", done.stdout)
        longer = self.good(*self.small("--steps", 5), "--resume")
        self.assertIn("step 4/5", longer.stdout)
        self.assertNotIn("step 3/5", longer.stdout)
        self.good(*self.small("--steps", 5, out="whole"))
        self.assertEqual(self.weights(), self.weights("whole"))
        shutil.rmtree(self.path("whole"))

    def test_refused_resumes(self):
        call = self.small("--steps", 2)
        self.good(*call)
        left = os.listdir(self.path("out"))
        self.bad(1, "(--resume resumes it, --out chooses the directory)", *call, left=left)
        self.bad(1, "--seed was 0, now 7", *call, "--resume", "--seed", 7, left=left)
        self.bad(
            1,
            "the global batch (ranks x micro-batch x grad-accum) was 1, now 2",
            *call,
            "--resume",
            "--grad-accum",
            2,
            left=left,
        )
        self.bad(1, "--seq-len was 32, now 16", *call, "--resume", "--seq-len", 16, left=left)
        self.bad(1, "--shuffle was on", *call, "--resume", "--shuffle", "off", left=left)
        with open(self.text, "a") as file:
            file.write("more\n")
        self.bad(1, "--data differs from that of the run", *call, "--resume", left=left)
        self.config = self.write_config("other.json", rope_theta=20000.0)
        self.bad(1, "cannot resume from", *self.small("--steps", 2), "--resume", left=left)
        with open(self.path("out", "model.safetensors"), "rb") as file:
            self.assertTrue(file.read())

    def test_evaluation(self):
        self.good(*self.small("--steps", 2))
        tokens = self.write_tokens(
            "e.safetensors", [[(7 * r + i) % 256 for i in range(24)] for r in range(7)]
        )
        losses = []
        for args in (
            (),
            ("--ranks", 2, "--micro-batch", 3),
            ("--ranks", 3, "--zero-stage", 3),
            ("--micro-batch", 16),
        ):
            done = self.good(
                "train",
                "--model",
                self.path("out"),
                "--steps",
                0,
                "--threads",
                1,
                "--eval-data",
                tokens,
                *args,
            )
            self.assertIn(f"{7 * 23} tokens", done.stdout)
            losses.append(float(done.stdout.split()[1]))
        for loss in losses:
            self.assertAlmostEqual(loss, losses[0], 5)
        self.assertEqual(
            sorted(os.listdir(self.path("out"))), ["config.json", "model.safetensors", "state"]
        )

    def test_rows_in_file_order(self):
        rows = [[(31 * r + i * i) % 256 for i in range(32)] for r in range(16)]
        tokens = self.write_tokens("t.safetensors", rows)
        args = ("--steps", 5, "--shuffle", "off")
        one = self.metrics(*args, "--micro-batch", 4, data=tokens, out="a")
        two = self.metrics(*args, "--ranks", 2, "--grad-accum", 2, data=tokens, out="b")
        for a, b in zip(one, two):
            self.assertAlmostEqual(a[1], b[1], 5)
        # The fifth step begins the file anew.
        turned = self.write_tokens("u.safetensors", rows[4:] + rows[:4])
        other = self.metrics(*args, "--micro-batch", 4, data=turned, out="c")
        self.assertNotAlmostEqual(one[0][1], other[0][1], 3)
        self.assertEqual(len({round(loss, 4) for _, loss, _ in one}), 5)

    def test_epochs(self):
        tokens = self.write_tokens("t.safetensors", [[r] * 32 for r in range(1, 11)])
        steps = self.metrics("--epochs", 3, "--micro-batch", 4, data=tokens)
        self.assertEqual(len(steps), 30 // 4)

    def test_step_without_counted_tokens(self):
        rows = [[r] * 8 for r in range(1, 5)]
        labels = [[-100] * 8, rows[1], rows[2], rows[3]]
        tokens = self.write_tokens("t.safetensors", rows, labels=labels)
        args = self.small(
            "--steps",
            4,
            "--shuffle",
            "off",
            "--metrics",
            self.path("m.jsonl"),
            "--warmup",
            2,
            data=tokens,
        )
        del args[args.index("--seq-len") : args.index("--seq-len") + 2]
        done = self.good(*args)
        rows = read_rows(self.path("m.jsonl"))
        self.assertIsNone(rows[0]["loss"])
        self.assertTrue(rows[0]["skipped"])
        self.assertEqual([r["lr"] for r in rows], [0, 0, 5e-4, 1e-3])
        self.assertIn("skipped: no counted token", done.stdout)

    def test_config_file(self):
        with open(self.path("options.json"), "w") as file:
            json.dump({"steps": 3, "zero_stage": 1, "micro-batch": 2}, file)
        steps = self.metrics("--config", self.path("options.json"), "--steps", 2)
        self.assertEqual(len(steps), 2)


if __name__ == "__main__":
    main()

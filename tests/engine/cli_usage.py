#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Usage errors end with code 2, failures with 1; each names the thing and the fix."""

import json
import os
import subprocess

from cli_support import Case, PROGRAM, main, run


class Usage(Case):
    def test_commands(self):
        self.bad(2, "unknown command 'trian': did you mean 'train'?", "trian")
        self.bad(2, "unknown command 'qqq': `zspill --help` lists them", "qqq")
        done = run()
        self.assertEqual(done.returncode, 2)
        self.assertIn("usage:", done.stderr)
        for word in ("train", "doctor", "inspect"):
            self.assertIn(word, self.good("--help").stdout)
        version = self.good("--version").stdout
        with open(os.path.join(os.environ.get("ZSPILL_SOURCE_ROOT", "."), "VERSION")) as file:
            self.assertEqual(version, f"zspill {file.read().strip()}\n")

    def test_train_help_lists_defaults(self):
        text = self.good("train", "--help").stdout
        for words in (
            "--zero-stage 0..3",
            "--offload-params none|host|nvme:DIR",
            "(default: 0.999)",
            "--schedule constant|linear|cosine",
            "--timeout SECONDS",
        ):
            self.assertIn(words, text)

    def test_options(self):
        small = self.small()
        self.bad(
            2,
            "unknown option '--zero-stge': did you mean '--zero-stage'?",
            *small,
            "--zero-stge",
            1,
        )
        self.bad(2, "--ranks 0 is out of range: 1 to 64", *small, "--ranks", 0)
        self.bad(2, "--ranks 65 is out of range: 1 to 64", *small, "--ranks", 65)
        self.bad(2, "--threads 65 is out of range: 0 to 64", *small, "--threads", 65)
        self.bad(
            2,
            "--offload-params needs --zero-stage 3, not 2",
            *small,
            "--offload-params",
            "host",
            "--zero-stage",
            2,
        )
        self.bad(
            2,
            "--reduce boundary needs --zero-stage 0 or 1",
            *small,
            "--reduce",
            "boundary",
            "--zero-stage",
            3,
        )
        self.bad(2, "--model and --init contradict each other", *small, "--model", self.dir)
        self.bad(
            2, "--steps and --epochs contradict each other", *small, "--steps", 1, "--epochs", 1
        )
        self.bad(2, "--warmup 3 is longer than --steps 2", *small, "--steps", 2, "--warmup", 3)
        self.bad(2, "--steps 0 only evaluates: give --eval-data too", *small, "--steps", 0)

    def test_config_file(self):
        path = self.path("options.json")
        for options, message in (
            (dict(zero_stagee=1), "unknown option 'zero_stagee': did you mean 'zero-stage'?"),
            (dict(ranks=0), "--ranks 0 is out of range"),
            (dict(eps="small"), "--eps 'small' is not a number"),
        ):
            with open(path, "w") as file:
                json.dump(options, file)
            self.bad(2, message, *self.small(), "--config", path)
        self.bad(2, "/does/not/exist", *self.small(), "--config", "/does/not/exist")

    def test_doctor(self):
        done = self.good("doctor", "--size", 8, self.dir)
        for key in (
            "kernels",
            "cores",
            "memory",
            "memlock",
            "io_uring",
            "O_DIRECT",
            "disk speed",
            "CUDA",
            "MPI",
            "BLAS",
        ):
            self.assertIn(f"\n{key} ", done.stdout)
        self.assertEqual([n for n in os.listdir(self.dir) if "doctor" in n], [])
        done = run("doctor", "--size", 0, self.path("missing"))
        self.assertEqual(done.returncode, 1)
        self.assertIn(self.path("missing"), done.stderr)
        self.bad(2, "'--sise' is not an option", "doctor", "--sise", 3)
        self.bad(2, "'-3' is no size in mebibytes", "doctor", "--size", "-3")

    def test_doctor_sees_devices(self):
        emulated = os.path.join(os.environ["ZSPILL_BUILD_ROOT"], "tests/emu/libzspill-cuda.so")
        if not os.path.exists(emulated):
            self.skipTest("the emulated CUDA plug-in is not built")
        for library, count, lines in (
            (emulated, "2", ("CUDA .*: emulation", "GPUs .*cuda:0 is emulated", " +cuda:1 is ")),
            (emulated, "0", ("CUDA .*: emulation", "GPUs .*CUDA_VISIBLE_DEVICES")),
            ("/does/not/exist", "2", ("CUDA .*not usable: ZSPILL_CUDA_LIB=/does/not/exist",)),
        ):
            env = dict(os.environ, ZSPILL_CUDA_LIB=library, ZS_EMU_DEVICES=count)
            done = subprocess.run(
                [PROGRAM, "doctor", "--size", "0", self.dir],
                env=env,
                stdout=subprocess.PIPE,
                text=True,
                timeout=60,
            )
            self.assertEqual(done.returncode, 0)
            for line in lines:
                self.assertRegex(done.stdout, f"(?m)^{line}")

    def test_standard_output_full(self):
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                [PROGRAM, "train", "--help"],
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                timeout=60,
            )
        self.assertEqual(done.returncode, 1)
        self.assertIn("cannot write to standard output", done.stderr)


if __name__ == "__main__":
    main()

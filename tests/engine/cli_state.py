#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""State from outside: resumes in other shapes, export and import, verification. What is refused:
tests/faults/cli_damage.py and cli_machine.py."""

import os
import re
import subprocess

from cli_support import STATE_SHAPE, StateCase, command, main, read_safetensors, run


class State(StateCase):
    def export(self, states, name="s.safetensors"):
        args = ["export", self.path(states), "--model", self.config, "--states", self.path(name)]
        self.good(*args)
        return read_safetensors(self.path(name))

    # ---- shapes ----

    def test_resume_in_other_shapes(self):
        self.good(*self.nvme(steps=2))
        before = self.export("states")
        for shape in (
            ("--ranks", 4, "--zero-stage", 3, "--dtype", "bf16", "--io-engine", "posix"),
            ("--ranks", 1, "--micro-batch", 4),
            ("--ranks", 2, "--grad-accum", 2, "--zero-stage", 1, "--durability", "exit", "--slots", 1),
        ):
            done = self.good(*self.nvme("--resume", steps=2, shape=shape))
            self.assertIn("resumed at step 2", done.stdout)
            self.assertEqual(self.export("states"), before)
        self.assertIn("1 slot(s) a chunk", self.good("inspect", self.path("states")).stdout)

    def test_refused_in_other_shapes(self):
        """No file is taken over in the new shape, or moved to the new place, before it is refused."""
        self.undisturbed()
        self.good(*self.nvme(steps=3))
        rows = [[(5 * r + i) % 256 for i in range(32)] for r in range(32)]
        other = self.write_tokens("other.safetensors", rows)
        files = self.contents()
        for message, args, steps in (
            ("the global batch (ranks x micro-batch x grad-accum) was 4, now 3", ("--ranks", 3, "--micro-batch", 1), 5),
            ("the global batch (ranks x micro-batch x grad-accum) was 4, now 2", ("--ranks", 1, "--zero-stage", 3), 5),
            ("--seed was 0, now 7", ("--ranks", 1, "--micro-batch", 4, "--seed", 7), 5),
            ("--shuffle was on", ("--dtype", "bf16", "--shuffle", "off"), 5),
            ("--data differs", ("--zero-stage", 0, "--data", other), 5),
            ("it is at step 3, and --steps is 2", ("--ranks", 4, "--micro-batch", 1), 2),
            ("it is at step 3, and --steps is 2", (), 2),
        ):
            for place in ("states", "elsewhere"):
                done = run(*self.nvme("--resume", *args, steps=steps, states=place))
                self.assertEqual(done.returncode, 1)
                self.assertIn("cannot resume from " + self.path("states"), done.stderr)
                self.assertIn(message, done.stderr)
                after = self.contents()
                changed = [n for n in {**files, **after} if files.get(n) != after.get(n)]
                self.assertEqual(changed, [], (args, place))
        self.goes_on("--zero-stage", 0)

    def contents(self):
        """{path: bytes} of everything in the test's directory."""
        files = {}
        for where, _, names in os.walk(self.dir):
            for name in names:
                with open(os.path.join(where, name), "rb") as file:
                    files[os.path.join(where, name)] = file.read()
        return files

    def test_resume_in_another_place(self):
        whole = self.small("--steps", 6, *STATE_SHAPE, out="whole")
        self.good(*whole)
        self.good(*self.nvme(steps=2))
        call = self.small("--steps", 4, *STATE_SHAPE, "--offload-optimizer", "host", "--resume")
        done = self.good(*call)
        self.assertIn(f"moved the state from {self.path('states')} to ", done.stdout)
        self.assertEqual(os.listdir(self.path("states")), [])
        done = self.good(*self.nvme("--resume", steps=6, states="other"))
        self.assertIn("resumed at step 4", done.stdout)
        self.assertEqual(
            read_safetensors(self.path("out", "model.safetensors")),
            read_safetensors(self.path("whole", "model.safetensors")),
        )
        self.good(*self.nvme(steps=1, out="second", states="theirs"))
        done = run(*self.nvme("--resume", steps=7, states="theirs"))
        self.assertEqual(done.returncode, 1)
        self.assertIn("holds the state of another run than", done.stderr)

    # ---- export, import ----

    def test_export_and_import(self):
        self.good(*self.nvme("--dtype", "bf16", steps=3))
        self.good(
            *("export", "--state", self.path("states"), "--model", self.config),
            *("--out", self.path("x"), "--states", self.path("s.safetensors")),
        )
        for name in ("model.safetensors", "config.json"):
            with open(self.path("out", name), "rb") as a, open(self.path("x", name), "rb") as b:
                self.assertEqual(a.read(), b.read())
        args = ["export", self.path("states"), "--model", self.config, "--out", self.path("y")]
        self.good(*args, "--dtype", "fp32")
        states = read_safetensors(self.path("s.safetensors"))
        for name, (dtype, shape, data) in read_safetensors(self.path("y", "model.safetensors")).items():
            self.assertEqual(states[name + ".master"], (dtype, shape, data))
            self.assertEqual(states[name + ".exp_avg_sq"][:2], ("F32", shape))
        self.good(
            *("import", self.path("s.safetensors"), "--model", self.path("x")),
            *("--state", self.path("again"), "--ranks", 3, "--zero-stage", 3, "--dtype", "bf16"),
        )
        self.assertEqual(self.export("again", "t.safetensors"), states)
        models = []
        for at, out in (("states", "out"), ("again", "out2")):
            done = self.good(*self.nvme("--resume", "--dtype", "bf16", steps=6, states=at, out=out))
            self.assertIn("resumed at step 3", done.stdout)
            models.append(read_safetensors(self.path(out, "model.safetensors")))
        self.assertEqual(models[0], models[1])

    def test_export_and_import_refusals(self):
        self.good(*self.nvme(steps=1))
        other = self.write_config("other.json", num_hidden_layers=1, hidden_size=64)
        states, x = self.path("states"), self.path("x")
        made = self.path("s.safetensors")
        self.export("states")
        for message, args in (
            ("holds no state: there is no zspill.manifest", ["export", self.dir, "--model", self.config, "--out", x]),
            ("has 16384 elements, and 8192 in the state", ["export", states, "--model", other, "--out", x]),
            ("has not the shape of the model's weight", ["import", made, "--model", other, "--state", x]),
            ("holds the state of an earlier run", ["import", made, "--model", self.config, "--state", states]),
            ('has no metadata "zspill.fingerprint"', ["import", self.path("out"), "--model", self.config, "--state", x]),
        ):
            done = run(*args)
            self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
            self.assertIn(message, done.stderr)
            self.assertFalse(os.path.exists(x))
        for args in (["export", states], ["import", made], ["export", states, "--modle", "x"]):
            self.assertEqual(run(*args).returncode, 2)

    # ---- older commits ----

    def commits(self):
        """[(number, step)], newest first."""
        listed = self.good("inspect", self.path("states")).stdout
        return [tuple(map(int, found)) for found in re.findall(r"^  (\d+)  step (\d+)", listed, re.M)]

    def test_keep(self):
        keep = ("--keep", 2)
        states, model = self.path("states"), self.path("out", "model.safetensors")
        self.good(*self.nvme(steps=4, out="first", states="four"))
        four = self.export("four")
        self.good(*self.nvme(*keep, steps=6))
        whole = read_safetensors(model)
        kept = self.commits()
        self.assertEqual([step for _, step in kept], [6, 5, 4])
        for number, step in kept:
            done = self.good("inspect", "--verify", "--commit", number, states)
            self.assertIn(f"commit       {number}, step {step},", done.stdout)
            self.good("inspect", "--verify", "--commit", number, self.rank(1))
        newest, oldest = kept[0][0], kept[-1][0]
        args = ("export", states, "--model", self.config, "--states", self.path("s.safetensors"))
        self.good(*args, "--commit", oldest)
        self.assertEqual(read_safetensors(self.path("s.safetensors")), four)
        # What is asked for is there or refused; and what is refused changes nothing.
        says = [f"commit {oldest - 1} is not kept in", f"there are {newest}, {newest - 1}, {oldest}: take one"]
        self.refused(says[0], *keep, "--resume-commit", oldest - 1)
        for more in (("inspect", "--verify", states), args):
            done = run(*more, "--commit", oldest - 1)
            self.assertEqual(done.returncode, 1)
            self.assertIn(says[0], done.stderr)
            self.assertIn(says[1], done.stderr)
        done = run(*self.nvme("--resume", "--resume-commit", 1, steps=5, out="other", states="new"))
        self.assertIn("holds no state to take commit 1 from", done.stderr)
        self.refused("the global batch", "--ranks", 2, "--micro-batch", 1, "--resume-commit", oldest)
        self.assertEqual(self.commits(), kept)
        # Back to step 4: from then on that is the newest, also after a crash.
        back = self.nvme("--resume", "--resume-commit", oldest, "--durability", "exit", steps=10**6)
        with subprocess.Popen(command(*back), stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout:
                if line.startswith("step 5/"):
                    break
            process.kill()
            process.communicate()
        self.assertEqual(self.commits(), [(newest + 1, 4), *kept[:2]])
        done = self.good(*self.nvme("--resume", steps=6))
        self.assertIn("resumed at step 4", done.stdout)
        self.assertEqual(read_safetensors(model), whole)
        self.assertEqual([step for _, step in self.commits()], [6, 5, 4])
        # In another shape only the one that is taken over is left, with a number above all others.
        numbers = [number for number, _ in self.commits()]
        shape = ("--ranks", 1, "--micro-batch", 4, "--zero-stage", 0)
        done = self.good(*self.nvme("--resume", "--resume-commit", numbers[1], steps=5, shape=shape))
        self.assertIn("resumed at step 5", done.stdout)
        self.assertIn("4 slot(s) a chunk", self.good("inspect", states).stdout)
        after = self.commits()
        self.assertEqual({step for _, step in after}, {5})
        self.assertGreater(min(number for number, _ in after), max(numbers))
        self.good(*self.nvme("--resume", "--keep", 0, steps=6, shape=shape))
        self.assertIn("2 slot(s) a chunk", self.good("inspect", states).stdout)

    # ---- verification ----

    def test_verify(self):
        self.good(*self.nvme())
        done = self.good("inspect", "--verify", self.path("states"))
        self.assertIn("verified     24 checksums", done.stdout)
        self.assertEqual(done.stderr, "")
        with open(self.rank(1), "rb") as file:
            blob = file.read()
        _, _, chunks = self.areas(self.rank(1))
        hits = 0
        for at in range(chunks, len(blob), 4096):
            self.flip(self.rank(1), at)
            done = run("inspect", "--verify", self.path("states"))
            one = run("inspect", "--verify", self.rank(1))
            self.assertEqual(one.returncode, done.returncode)
            if done.returncode:
                hits += 1
                self.assertIn(f"{self.rank(1)}': chunk ", done.stdout)
                place = re.search(r"at offset (\d+): the checksum is wrong", done.stdout)
                self.assertTrue(0 <= at - int(place.group(1)) < 4096 * 4)
                self.assertIn("1 of 24 arrays are damaged", done.stderr)
            self.flip(self.rank(1), at)
        self.assertGreater(hits, 11)  # each array; half of the pages are the other slot's
        os.remove(self.rank(1))
        done = run("inspect", "--verify", self.path("states"))
        self.assertEqual(done.returncode, 1)
        self.assertIn("which the manifest beside it names as rank 1's", done.stderr)
        self.assertEqual(run("inspect", "--verify", self.config).returncode, 1)

    # ---- one slot ----

    def test_one_slot_killed(self):
        one = ("--durability", "exit", "--slots", 1)
        self.good(*self.nvme(*one))
        call = self.nvme("--resume", *one, steps=10**6)
        with subprocess.Popen(command(*call), stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout:
                if line.startswith("step 4/"):
                    process.kill()
            process.communicate()
        words = ["has one slot for each chunk", "begun to write over step 3", "start afresh"]
        self.refused(words, *one)
        self.refused(words)  # in another shape, too
        self.assertIn("being written over", self.good("inspect", self.path("states")).stdout)


if __name__ == "__main__":
    main()

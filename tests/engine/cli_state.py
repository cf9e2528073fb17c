#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""State from outside: resumes in other shapes, export and import, verification, refusals."""

import os
import re
import shlex
import shutil
import struct
import subprocess

from cli_support import Case, PROGRAM, command, main, read_safetensors, run

SHAPE = ("--ranks", 2, "--micro-batch", 2, "--zero-stage", 2)
# docs/format.md
LABEL, SUPERBLOCKS, VERSION_AT, RUN_AT = 0, 4096, 8, 96


class State(Case):
    def nvme(self, *more, steps=3, out="out", states="states", shape=SHAPE):
        where = "nvme:" + self.path(states)
        return self.small("--steps", steps, *shape, "--offload-optimizer", where, *more, out=out)

    def rank(self, number, states="states"):
        return self.path(states, f"zspill-rank{number:05}.state")

    def export(self, states, name="s.safetensors"):
        args = ["export", self.path(states), "--model", self.config, "--states", self.path(name)]
        self.good(*args)
        return read_safetensors(self.path(name))

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
        done = run(*self.nvme("--resume", *args, steps=5))
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        for word in [message] if isinstance(message, str) else message:
            self.assertIn(word, done.stderr)
        self.assertNotIn("step 4/5", done.stdout)
        after = {n: os.path.getsize(os.path.join(states, n)) for n in os.listdir(states)}
        self.assertEqual({n: after.get(n) for n in before}, before)
        return done

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
        done = run(*self.nvme("--resume", "--ranks", 1, steps=5))
        self.assertEqual(done.returncode, 1)
        self.assertIn("the global batch (ranks x micro-batch x grad-accum) was 4, now 2", done.stderr)
        self.assertEqual(self.export("states"), before)

    def test_resume_in_another_place(self):
        whole = self.small("--steps", 6, *SHAPE, out="whole")
        self.good(*whole)
        self.good(*self.nvme(steps=2))
        call = self.small("--steps", 4, *SHAPE, "--offload-optimizer", "host", "--resume")
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

    # ---- refusals ----

    def test_missing_rank(self):
        self.good(*self.nvme())
        os.rename(self.rank(1), self.path("kept"))
        self.refused("names a store of rank 1 that holds no commit: restore the file from a copy")
        self.refused("cannot be opened", "--ranks", 1, "--micro-batch", 4)
        os.rename(self.path("kept"), self.rank(1))
        self.good(*self.nvme("--resume", steps=5))

    def test_other_run(self):
        self.good(*self.nvme())
        self.good(*self.nvme(out="second", states="theirs"))
        os.rename(self.rank(1), self.path("kept"))
        shutil.copy(self.rank(1, "theirs"), self.rank(1))
        for args in ((), ("--ranks", 1, "--micro-batch", 4)):
            self.refused("belongs to another run than the manifest beside it", *args)
        os.rename(self.path("kept"), self.rank(1))
        self.good(*self.nvme("--resume", steps=5))

    def test_truncated(self):
        self.good(*self.nvme())
        shutil.copy(self.rank(0), self.path("kept"))
        os.truncate(self.rank(0), os.path.getsize(self.rank(0)) - 1)
        for args in ((), ("--ranks", 1, "--micro-batch", 4)):
            self.refused("it was truncated: restore the file from a copy", *args)
        shutil.copy(self.path("kept"), self.rank(0))
        self.good(*self.nvme("--resume", steps=5))

    def test_older_version(self):
        self.good(*self.nvme())
        for area in self.areas(self.rank(0))[:2]:
            with open(self.rank(0), "r+b") as file:
                file.seek(area + VERSION_AT)
                file.write(struct.pack("<I", 1))
        self.refused(["no superblock is whole", "its format is version 1, this zspill reads version 2"])
        manifest = self.path("states", "zspill.manifest")
        with open(manifest) as file:
            text = file.read()
        with open(manifest, "w") as file:
            file.write(text.replace("zspill manifest 2", "zspill manifest 1"))
        self.refused("another version of zspill wrote it")

    def test_flipped_bits(self):
        self.good(*self.nvme())
        force, older, chunks = self.areas(self.rank(0))
        self.flip(self.rank(0), LABEL)
        self.refused("is not a zspill store and will not be overwritten")
        self.flip(self.rank(0), LABEL)
        self.flip(self.rank(0), LABEL + 16)
        self.refused("its label (the first 64 bytes) is damaged")
        self.flip(self.rank(0), LABEL + 16)
        for area in (force, older):
            self.flip(self.rank(0), area + 200)
        self.refused(["no superblock is whole: restore the file from a copy", "its checksum is"])
        self.flip(self.rank(0), older + 200)
        # The other ranks' newest is one that this file has not any more: the one before serves.
        done = self.good(*self.nvme("--resume", steps=2))
        self.assertIn("resumed at step 2", done.stdout)
        self.assertIn("superblock", done.stderr)
        self.flip(self.path("states", "zspill.manifest"), 40)
        self.refused("zspill.manifest'")
        self.flip(self.path("states", "zspill.manifest"), 40)
        done = self.good("inspect", "--verify", self.path("states"))
        places = [at for at in range(chunks, os.path.getsize(self.rank(0)), 4096) if self.damages(at)]
        self.assertGreater(len(places), 11)
        self.flip(self.rank(0), places[-1])
        done = run(*self.nvme("--resume", steps=5))
        self.assertEqual(done.returncode, 1)
        self.assertIn(self.rank(0), done.stderr)
        self.assertIn("checksum", done.stderr)
        self.flip(self.rank(0), places[-1])
        self.good(*self.nvme("--resume", steps=5))

    def damages(self, at):
        self.flip(self.rank(0), at)
        code = run("inspect", "--verify", self.rank(0)).returncode
        self.flip(self.rank(0), at)
        return code == 1

    def test_two_processes(self):
        call = self.nvme("--resume", steps=10**6)
        with subprocess.Popen(command(*call), stdout=subprocess.PIPE, text=True) as process:
            process.stdout.readline()
            self.refused([f"is held by process {process.pid}", "end it"], "--out", self.path("second"))
            for args in (("inspect", "--verify"), ("export", "--model", self.config, "--out", self.path("x"))):
                done = run(*args, self.path("states"))
                self.assertEqual(done.returncode, 1)
                self.assertIn(f"is held by process {process.pid}", done.stderr)
            process.kill()
            process.communicate()
        self.good("inspect", "--verify", self.path("states"))

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

    def mounted(self, options, *args, before=""):
        """Runs args with a tmpfs of its own on `disk`; None: this machine does not let us."""
        os.makedirs(self.path("disk"), exist_ok=True)
        disk = shlex.quote(self.path("disk"))
        words = " ".join(shlex.quote(str(a)) for a in args)
        script = f"mount -t tmpfs -o size=4m tmpfs {disk} || exit 77\n{before}\n{options} exec {words}"
        done = subprocess.run(
            ["unshare", "-rm", "sh", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, check=False,
        )
        return None if done.returncode == 77 or "unshare" in done.stderr else done

    def test_disk_too_small_and_read_only(self):
        big = self.write_config("big.json", hidden_size=256, intermediate_size=512)
        args = [PROGRAM, *self.nvme("--init", big, states="disk/s")]
        done = self.mounted("", *args)
        if done is None:
            self.skipTest("no mount namespaces here")
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("bytes (4.00 MiB) are free", done.stderr)
        disk = shlex.quote(self.path("disk"))
        done = self.mounted(
            f"mount -o remount,ro {disk} &&", PROGRAM, *self.nvme("--resume", steps=5, states="disk/s"),
            before=" ".join(map(shlex.quote, map(str, [PROGRAM, *self.nvme(states="disk/s")]))),
        )
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("cannot be written to: Read-only file system", done.stderr)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""State that is damaged, not whole, or not this run's: what `zspill train --resume` says, and that
it ends as an undisturbed run does once the files are what they were."""

import os
import re
import shutil
import struct
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "engine"))
from cli_support import LABEL, VERSION_AT, StateCase, main, run  # noqa: E402

ALONE = ("--ranks", 1, "--micro-batch", 4)
ARRAYS = ("master", "exp_avg", "exp_avg_sq")


class Damage(StateCase):
    def setUp(self):
        super().setUp()
        self.undisturbed()
        self.good(*self.nvme())
        shutil.copytree(self.path("states"), self.path("kept"))

    def restore(self):
        shutil.rmtree(self.path("states"))
        shutil.copytree(self.path("kept"), self.path("states"))

    def flipped_back(self, message, *places):
        """Refused with those bits flipped, and as if nothing had been without."""
        for path, at in places:
            self.flip(path, at)
        self.refused(message)
        for path, at in places:
            self.flip(path, at)
        self.goes_on()
        self.restore()

    # ---- bits ----

    def test_label(self):
        rank = self.rank(0)
        self.flipped_back("is not a zspill store and will not be overwritten", (rank, LABEL))
        for at in (16, 24, 32, 40):
            self.flipped_back("its label (the first 64 bytes) is damaged", (rank, LABEL + at))

    def test_superblocks(self):
        force, older, _ = self.areas(self.rank(0))
        words = ["no superblock is whole: restore the file from a copy", "its checksum is"]
        self.flipped_back(words, (self.rank(0), force + 200), (self.rank(0), older + 200))
        self.flip(self.rank(0), older + 200)
        self.assertIn("is not whole", self.goes_on().stderr)
        self.restore()
        # The others' newest is one that this file has not any more: the one before serves.
        self.flip(self.rank(0), force + 200)
        self.assertIn("is not whole", self.goes_on(step=2).stderr)

    def test_manifest(self):
        manifest = self.path("states", "zspill.manifest")
        for at in (0, 20, 40, os.path.getsize(manifest) - 3):
            self.flipped_back(f"manifest '{manifest}'", (manifest, at))

    def test_chunks(self):
        rank = self.rank(0)
        seen, damaging, harmless = set(), [], []
        for at in range(self.areas(rank)[2], os.path.getsize(rank), 4096):
            self.flip(rank, at)
            done = run("inspect", "--verify", rank)
            self.flip(rank, at)
            if done.returncode == 0:
                harmless.append(at)
                continue
            damaging.append(at)
            chunk, array = re.search(r"chunk (\d+), (\w+), at offset", done.stdout).groups()
            if (chunk, array) not in seen and chunk in ("0", "3"):
                words = [rank, f"chunk {chunk}", array, "offset", "checksum"]
                self.flipped_back(words, (rank, at))
            seen.add((chunk, array))
        self.assertEqual({array for _, array in seen}, set(ARRAYS))
        # The slots that are not in force, and what fills the last page of an array.
        padding = [at + 4095 for at in damaging if self.is_padding(at + 4095)]
        self.assertTrue(padding)
        for at in harmless + padding + [LABEL + 100]:
            self.flip(rank, at)
        self.assertEqual(self.goes_on().stderr, "")

    def is_padding(self, at):
        self.flip(self.rank(0), at)
        code = run("inspect", "--verify", self.rank(0)).returncode
        self.flip(self.rank(0), at)
        return code == 0

    # ---- files ----

    def test_truncated(self):
        size = os.path.getsize(self.rank(0))
        for length in (size - 1, size // 2, 9000, 100):
            os.truncate(self.rank(0), length)
            for args in ((), ALONE):
                self.refused("it was truncated: restore the file from a copy", *args)
            self.restore()
        os.truncate(self.rank(0), 0)
        done = run(*self.nvme("--resume", steps=5))
        self.assertEqual(done.returncode, 1)
        self.assertIn("names a store of rank 0 that holds no commit: restore the file", done.stderr)
        self.restore()
        self.goes_on()

    def test_missing(self):
        os.rename(self.rank(1), self.path("away"))
        self.refused("names a store of rank 1 that holds no commit: restore the file from a copy")
        self.refused("cannot be opened", *ALONE)
        os.rename(self.path("away"), self.rank(1))
        self.goes_on()

    def test_other_run(self):
        self.good(*self.nvme(out="second", states="theirs"))
        shutil.copy(self.rank(1, "theirs"), self.rank(1))
        for args in ((), ALONE):
            self.refused("belongs to another run than the manifest beside it", *args)
        self.restore()
        self.goes_on()

    def test_not_asked_to_resume(self):
        before = sorted(os.listdir(self.path("states")))
        done = run(*self.nvme(steps=5))
        self.assertEqual(done.returncode, 1)
        words = "holds the state of an earlier run: resume it, or use another directory"
        self.assertIn(words, done.stderr)
        self.assertEqual(sorted(os.listdir(self.path("states"))), before)
        other = self.write_config("other.json", hidden_size=64)
        self.refused("resume with the model, data and options it was made with", "--init", other)
        self.goes_on()

    def test_other_geometry(self):
        shutil.copy(self.rank(0), self.rank(1))
        self.refused("belongs to rank 0, this is rank 1: restore the file's name")
        self.restore()
        self.good(*self.nvme("--resume", *ALONE))
        name = "zspill-rank00000.g2.state"
        os.rename(self.path("states", name), self.path("away"))
        shutil.copy(self.rank(0, "kept"), self.path("states", name))
        self.refused("was written by a world of 2 ranks, this run has 1", *ALONE)
        os.rename(self.path("away"), self.path("states", name))
        self.goes_on()

    def test_other_versions(self):
        for version in (1, 9):
            for area in self.areas(self.rank(0))[:2]:
                with open(self.rank(0), "r+b") as file:
                    file.seek(area + VERSION_AT)
                    file.write(struct.pack("<I", version))
            words = f"its format is version {version}, this zspill reads version 2"
            self.refused(["no superblock is whole", words])
            self.restore()
            manifest = self.path("states", "zspill.manifest")
            with open(manifest) as file:
                text = file.read()
            with open(manifest, "w") as file:
                file.write(text.replace("zspill manifest 2", f"zspill manifest {version}"))
            self.refused("another version of zspill wrote it")
            self.restore()
        self.goes_on()


if __name__ == "__main__":
    main()

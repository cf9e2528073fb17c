# SPDX-License-Identifier: Apache-2.0
# needs: numpy
"""Commits that a crash left on some ranks only: the files of two ranks put together from different
instants, as a crash in the middle of a commit leaves them, and resumed."""

import os
import shutil
import sys
import tempfile
import unittest

import driver
import numpy as np
from zspill import _lib as zs

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "consumer"))
from installation import Installation  # pylint: disable=wrong-import-position


class Abandoned(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.temporary = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.temporary.cleanup)
        installed = Installation(os.path.join(cls.temporary.name, "installed"))
        cls.lib = zs.load(installed.library)

    def setUp(self):
        self.folder = tempfile.mkdtemp(dir=self.temporary.name)
        self.state = os.path.join(self.folder, "state")

    def keep(self, rank, name):
        shutil.copy(self.file(rank), os.path.join(self.folder, f"{name}-{rank}"))

    def put(self, rank, name):
        shutil.copy(os.path.join(self.folder, f"{name}-{rank}"), self.file(rank))

    def file(self, rank):
        return os.path.join(self.state, f"zspill-rank{rank:05d}.state")

    def run_job(self, steps, at=None, resume=1, load=False):
        """Resumes at step `at`, steps, commits: weights and user bytes found, before and after."""

        def body(_, comm):
            config = {"zero_stage": 2, "optimizer_tier": zs.NVME, "state_dir": self.state}
            job = driver.Job(self.lib, comm, **config, resume=resume)
            try:
                found = None
                if at is None or load:
                    job.load()
                if at is not None:
                    found = job.resume()
                    job.done = at
                before = job.weights()
                job.run(steps)
                if steps:
                    job.commit(b"%d" % job.done)
                return found, before, job.weights()
            finally:
                job.close()

        return driver.in_threads(self.lib, 2, body)[0]

    def commits_in_step(self):
        """Commits of steps 2 and 6; rank 0 has both, rank 1 had a crash before the second."""
        _, _, two = self.run_job(2, resume=0)
        self.keep(1, "two")
        _, _, six = self.run_job(4, at=2)
        self.keep(0, "six")
        self.put(1, "two")
        return two, six

    def same(self, weights, expected):
        for name in driver.SHAPES:
            np.testing.assert_array_equal(weights[name], expected[name])

    def test_goes_back(self):
        two, _ = self.commits_in_step()
        found, before, _ = self.run_job(0, at=2)
        self.assertEqual(found, b"2")
        self.same(before, two)

    def test_weights_loaded_before_resume(self):
        two, _ = self.commits_in_step()
        found, before, _ = self.run_job(0, at=2, load=True)
        self.assertEqual(found, b"2")
        self.same(before, two)

    def test_number_is_not_given_again(self):
        two, _ = self.commits_in_step()
        self.run_job(1, at=2)
        # As if rank 0 had ended before its superblock of step 3: step 6 is what it still has.
        self.put(0, "six")
        found, before, _ = self.run_job(0, at=2)
        self.assertEqual(found, b"2")
        self.same(before, two)
        _, _, seven = self.run_job(5, at=2)
        found, before, _ = self.run_job(0, at=7)
        self.assertEqual(found, b"7")
        self.same(before, seven)

    def test_started_over_half(self):
        self.run_job(2, resume=0)
        self.keep(1, "two")
        _, _, three = self.run_job(1, at=2)
        self.keep(1, "three")
        self.run_job(1)  # without resuming
        # As if rank 1 had ended before its superblock.
        self.put(1, "three")
        found, before, _ = self.run_job(0, at=3)
        self.assertEqual(found, b"3")
        self.same(before, three)


if __name__ == "__main__":
    unittest.main(verbosity=2)

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`mpiexec zspill train --comm mpi`: the same bits as ranks as threads, and ranks that die."""
import os
import shutil
import signal
import subprocess
import sys
import time

from cli_support import PROGRAM, Case, command, main

MPIEXEC = shutil.which("mpiexec")


def launch(*args):
    return [MPIEXEC, "-n", "2", *command(*args)]


def rank_of(pid):
    """The rank of a process of the program, None of another."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            variables = dict(v.split(b"=", 1) for v in file.read().split(b"\0") if b"=" in v)
        if os.path.realpath(os.readlink(f"/proc/{pid}/exe")) != os.path.realpath(PROGRAM):
            return None
        return int(variables[b"PMI_RANK"])
    except (OSError, KeyError):
        return None


def descendants(pid):
    found = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
        for thread in threads:
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                for child in map(int, file.read().split()):
                    found += [child, *descendants(child)]
    except OSError:
        pass
    return found


class Mpi(Case):
    def launch(self, *args):
        return subprocess.run(launch(*args), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              text=True, timeout=120)

    def text_of(self, name):
        if not os.path.exists(self.path(name)):
            return ""
        with open(self.path(name)) as file:
            return file.read()

    def test_same_bits_as_threads(self):
        args = ("--steps", 4, "--zero-stage", 3, "--grad-accum", 2)
        done = self.launch(*self.small(*args, "--comm", "mpi", out="mpi"))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stdout.count("step 4/4 "), 1)
        self.good(*self.small(*args, "--ranks", 2, out="threads"))
        with open(self.path("mpi", "model.safetensors"), "rb") as one, \
                open(self.path("threads", "model.safetensors"), "rb") as other:
            self.assertEqual(one.read(), other.read())

    def test_said_once(self):
        done = self.launch(*self.small("--comm", "mpi", "--ranks", 3))
        self.assertEqual(done.returncode, 2)
        self.assertEqual(done.stderr.count("--ranks 3, but MPI started 2"), 1, done.stderr)
        done = self.launch(*self.small("--comm", "mpi", data=self.path("missing")))
        self.assertEqual(done.returncode, 1)
        self.assertEqual(done.stderr.count("zspill: "), 1, done.stderr)

    def test_stopped(self):
        call = self.small("--comm", "mpi", "--save-every", 100)
        with subprocess.Popen(launch(*call), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              text=True) as process:
            process.stdout.readline()
            for pid in descendants(process.pid):
                if rank_of(pid) == 1:
                    os.kill(pid, signal.SIGTERM)
            out, errors = process.communicate(timeout=120)
        self.assertEqual(process.returncode, 0, errors)
        self.assertIn("stopped after step ", out)

    def test_killed_rank(self):
        # Hydra would end the survivor itself, by signals and by closing its output: told not to, and
        # with shells that outlive the ranks, it leaves that to us.
        call = command(*self.small("--comm", "mpi", "--epochs", 1000, "--timeout", 3))
        script = f'trap "" USR1; cd {self.dir}; "$@" >out.$PMI_RANK 2>err.$PMI_RANK; sleep 1'
        with subprocess.Popen([MPIEXEC, "-disable-auto-cleanup", "-n", "2", "sh", "-c", script, "-",
                               *call], stdout=subprocess.DEVNULL,
                              stderr=subprocess.DEVNULL) as process:
            deadline = time.monotonic() + 60
            while not self.text_of("out.0") and time.monotonic() < deadline:
                time.sleep(0.05)
            for pid in descendants(process.pid):
                if rank_of(pid) == 1:
                    os.kill(pid, signal.SIGKILL)
            process.wait(timeout=120)
        errors = self.text_of("err.0")
        self.assertTrue(errors.startswith("zspill: rank 0: "), errors)
        self.assertEqual(errors.count("\n"), 1, errors)
        # What the dead rank left was never committed: a new run may take its place.
        self.assertEqual(os.listdir(self.path("out", "state")), ["zspill-rank00001.state"])
        self.good(*self.small("--ranks", 2, "--steps", 2))


if __name__ == "__main__":
    if not MPIEXEC or not os.environ.get("ZSPILL_MPI_LIB") or b"HYDRA" not in subprocess.run(
            [MPIEXEC, "--version"], stdout=subprocess.PIPE, check=False).stdout:
        print("skipped: no MPICH mpiexec, or no MPI plug-in in this build")
        sys.exit(77)
    main()

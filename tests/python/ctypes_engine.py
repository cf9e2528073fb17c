# SPDX-License-Identifier: Apache-2.0
# needs: numpy
"""The installed shared library driven by ctypes alone: worlds of one, of two threads and of two
processes, stages 1 to 3, states in memory and on disk, against numpy's AdamW; errors; fork."""

import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from ctypes import byref, c_uint64, c_void_p

import driver
import numpy as np
from zspill import _lib as zs

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "consumer"))
from installation import Installation  # pylint: disable=wrong-import-position

STEPS = 20
TOLERANCE = 1e-6


def tier_config(tier, stage, folder):
    config = {"zero_stage": stage, "optimizer_tier": tier}
    if tier == zs.NVME:
        config["state_dir"] = os.path.join(folder, "state")
        if stage == 3:
            config["param_tier"] = zs.NVME
            config["param_dir"] = os.path.join(folder, "params")
    return config


def train(lib, comm, stage, tier, folder):
    """One rank's whole run: weights, norm of the last step, ledger."""
    job = driver.Job(lib, comm, **tier_config(tier, stage, folder))
    try:
        job.load()
        info = job.run(STEPS)
        return job.weights(), info.grad_norm, job.ledger()
    finally:
        job.close()


def process_main(library, connection, rank, stage, tier, folder, results):
    """A rank that is a process: hands back what train returns, or the error's text."""
    try:
        lib = zs.load(library)
        over = zs.Collectives(lib, driver.PipeTransport(connection, rank), rank, 2)
        out = train(lib, over.comm, stage, tier, folder)
        over.close()
        results.send(out)
    except BaseException as error:  # pylint: disable=broad-except
        results.send(repr(error))


def fork_main(library, folder):
    """A process of its own: forks in mid-step, as a DataLoader does, goes on, commits, and dies
    without closing anything while its children live. Its children wait for the end of stdin."""
    lib = zs.load(library)
    comm = c_void_p()
    lib.zs_comm_open_self(byref(comm))
    job = driver.Job(lib, comm, **tier_config(zs.NVME, 3, folder), buffer_bytes=1 << 20)
    job.load()
    job.run(2)
    job.micro_batch()
    # One child between backward and step, one while another thread is inside the library.
    children = [fork_child(lib, job)]
    job.step()
    worker = threading.Thread(target=job.run, args=(STEPS - 4,))
    worker.start()
    children.append(fork_child(lib, job))
    worker.join()
    job.run(1)
    job.commit(b"position 20")
    difference = driver.largest_difference(job.weights(), driver.adamw(1, STEPS)[0])
    print(f"parent {difference} {' '.join(str(child) for child in children)}", flush=True)
    os._exit(9)


def fork_child(lib, job):
    """Forks; the child prints what each call answered and which store files it has open."""
    child = os.fork()
    if child:
        return child
    answers = []
    value = c_uint64()
    grad = np.zeros(driver.SHAPES["block.weight"], np.float32)
    for name, call in {
        "ready": lambda: lib.zs_grad_ready(
            job.engine, job.params["block.weight"], driver.address(grad), zs.FP32
        ),
        "step": lambda: lib.zs_step(job.engine, None, None),
        "commit": lambda: lib.zs_state_commit(job.engine, None, 0),
        "acquire": lambda: lib.zs_unit_acquire(job.engine, job.units["block"]),
        "local": lambda: lib.zs_param_local(
            job.engine, job.params["block.weight"], byref(value), byref(value)
        ),
    }.items():
        try:
            call()
            answers.append(f"{name}:ok")
        except zs.ZspillError as error:
            answers.append(f"{name}:{error.name}:{len(error.message) > 0}")
    job.close()
    open_files = []
    for number in os.listdir("/proc/self/fd"):
        try:
            open_files.append(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:
            pass
    held = [name for name in open_files if "/state" in name or "/params" in name]
    os.write(1, f"child {' '.join(answers)} holds {held}\n".encode())
    os.read(0, 1)
    os._exit(0)


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class Engine(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.temporary = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.temporary.cleanup)
        installed = Installation(os.path.join(cls.temporary.name, "installed"))
        cls.library = installed.library
        cls.lib = zs.load(cls.library)
        cls.expected = {world: driver.adamw(world, STEPS) for world in (1, 2)}

    def setUp(self):
        self.folder = tempfile.mkdtemp(dir=self.temporary.name)

    def same_as_numpy(self, world, weights, norm):
        expected, expected_norm = self.expected[world]
        self.assertLess(driver.largest_difference(weights, expected), TOLERANCE)
        self.assertLess(abs(norm - expected_norm), 1e-5 * expected_norm)

    def check_ledger(self, tier, ledger):
        self.assertGreater(ledger[tier, "optimizer states"][0], 0)
        for other in {zs.DEVICE, zs.HOST, zs.NVME} - {tier}:
            self.assertNotIn((other, "optimizer states"), ledger)
        purposes = {purpose for _, purpose in ledger}
        self.assertLessEqual({"parameters", "gradients", "optimizer states"}, purposes)
        for row, (now, peak) in ledger.items():
            self.assertLessEqual(now, peak, row)

    def cases(self):
        """(stage, tier, folder) of every case."""
        for stage in (1, 2, 3):
            for tier in (zs.HOST, zs.NVME):
                folder = os.path.join(self.folder, f"stage {stage}, tier {tier}")
                os.mkdir(folder)
                yield stage, tier, folder

    def self_comm(self):
        comm = c_void_p()
        self.lib.zs_comm_open_self(byref(comm))
        self.addCleanup(self.lib.zs_comm_close, byref(comm))
        return comm

    def test_world_of_one(self):
        bits = set()
        for stage, tier, folder in self.cases():
            weights, norm, ledger = train(self.lib, self.self_comm(), stage, tier, folder)
            self.same_as_numpy(1, weights, norm)
            self.check_ledger(tier, ledger)
            bits.add(b"".join(weights[name].tobytes() for name in sorted(weights)))
        self.assertEqual(len(bits), 1, "stages and tiers differ in bits")

    def test_world_of_two_threads(self):
        for stage, tier, folder in self.cases():
            results = driver.in_threads(
                self.lib, 2, lambda _, comm: train(self.lib, comm, stage, tier, folder)
            )
            for weights, norm, ledger in results:
                self.same_as_numpy(2, weights, norm)
                self.check_ledger(tier, ledger)

    def test_two_processes_over_callbacks(self):
        context = multiprocessing.get_context("spawn")
        for stage, tier, folder in self.cases():
            ends = context.Pipe()
            ranks = []
            for rank in range(2):
                mine, theirs = context.Pipe()
                process = context.Process(
                    target=process_main,
                    args=(self.library, ends[rank], rank, stage, tier, folder, theirs),
                )
                process.start()
                theirs.close()
                ranks.append((process, mine))
            # Only the ranks hold the pipe between them: when one dies the other is told.
            for end in ends:
                end.close()
            for process, results in ranks:
                got = results.recv()
                process.join()
                self.assertNotIsInstance(got, str, got)
                self.same_as_numpy(2, got[0], got[1])
                self.check_ledger(tier, got[2])

    def raises(self, name, call, *words):
        with self.assertRaises(zs.ZspillError) as caught:
            call()
        self.assertEqual(caught.exception.name, name, str(caught.exception))
        for word in words:
            self.assertIn(word, caught.exception.message)
        self.assertNotIn("\n", caught.exception.message)

    def test_errors(self):
        comm = self.self_comm()
        config = tier_config(zs.NVME, 2, self.folder)
        job = driver.Job(self.lib, comm, **config)
        self.addCleanup(job.close)
        job.load()
        self.raises("ZS_ERR_MISUSE", job.step, "grad")
        self.raises(
            "ZS_ERR_LOCKED", lambda: driver.Job(self.lib, comm, **config), config["state_dir"]
        )
        self.raises(
            "ZS_ERR_ARG",
            lambda: driver.Job(self.lib, comm, zero_stage=1, optimizer_tier=zs.NVME),
            "state_dir",
        )
        self.raises("ZS_ERR_ARG", lambda: driver.Job(self.lib, comm, zero_stage=4), "4")
        job.micro_batch()
        job.step()  # the engine is none the worse for it

    def test_names_are_unique(self):
        class Doubled(driver.Job):
            def register(self):
                super().register()
                self.param("block.bias", (3,), 0)

        self.raises("ZS_ERR_ARG", lambda: Doubled(self.lib, self.self_comm()), "block.bias")

    def test_failing_callback(self):
        class Broken(driver.PipeTransport):
            def all_gather(self, send):
                raise ConnectionError("the cable is cut")

            all_to_all = all_gather

            def barrier(self):
                raise ConnectionError("the cable is cut")

        over = zs.Collectives(self.lib, Broken(None, 0), 0, 2)
        self.addCleanup(over.close)
        self.raises(
            "ZS_ERR_COMM",
            lambda: driver.Job(self.lib, over.comm),
            "ConnectionError: the cable is cut",
        )

    def test_fork(self):
        parent = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), "fork", self.library, self.folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            lines = [parent.stdout.readline() for _ in range(3)]
            self.assertEqual(parent.wait(), 9, lines)
            refused = " ".join(
                f"{name}:ZS_ERR_FORKED:True" for name in "ready step commit acquire local".split()
            )
            told = sorted(line.split()[0] for line in lines if line)
            self.assertEqual(told, ["child", "child", "parent"], lines)
            for line in lines:
                if line.startswith("child"):
                    self.assertEqual(line, f"child {refused} holds []\n")
                else:
                    _, difference, *children = line.split()
            self.assertLess(float(difference), TOLERANCE)
            self.assertTrue(all(is_running(int(child)) for child in children), children)
            job = driver.Job(
                self.lib, self.self_comm(), **tier_config(zs.NVME, 3, self.folder), resume=1
            )
            self.addCleanup(job.close)
            self.assertEqual(job.resume(), b"position 20")
            self.assertLess(
                driver.largest_difference(job.weights(), self.expected[1][0]), TOLERANCE
            )
            job.done = STEPS
            job.run(1)
            self.assertTrue(all(is_running(int(child)) for child in children), children)
        finally:
            parent.stdin.close()
            parent.stdout.close()
        for child in children:
            deadline = time.monotonic() + 30
            while is_running(int(child)) and time.monotonic() < deadline:
                time.sleep(0.05)
            self.assertFalse(is_running(int(child)))


if __name__ == "__main__":
    if sys.argv[1:2] == ["fork"]:
        fork_main(*sys.argv[2:])
    else:
        unittest.main()

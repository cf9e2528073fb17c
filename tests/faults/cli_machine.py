#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the machine denies `zspill train`: room on a real disk, a directory that may be written,
memory to lock, system calls, another process's state. What cannot be denied here is skipped."""

import ctypes
import os
import platform
import resource
import shlex
import shutil
import struct
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "engine"))
from cli_support import (  # noqa: E402
    PROGRAM, STATE_STEPS, TIMEOUT, StateCase, command, main, run,
)

NOBODY = 65534
# include/uapi/asm-generic/unistd.h and arch/x86/entry/syscalls/syscall_64.tbl
IO_SETUP = {"x86_64": 206, "aarch64": 0}.get(platform.machine())
IO_URING_SETUP = 425
EPERM, EAGAIN, ENOSYS = 1, 11, 38


def forbid(calls):
    """From now on each of these system calls fails with its errno, as under a container's profile."""
    load, jump_equal, answer = 0x20, 0x15, 0x06  # linux/bpf_common.h: the number; is it; return
    errno, allow = 0x00050000, 0x7FFF0000  # linux/seccomp.h
    code = [struct.pack("<HBBI", load, 0, 0, 0)]
    for call, error in calls.items():
        code.append(struct.pack("<HBBI", jump_equal, 0, 1, call))
        code.append(struct.pack("<HBBI", answer, 0, 0, errno | error))
    code.append(struct.pack("<HBBI", answer, 0, 0, allow))
    text = ctypes.create_string_buffer(b"".join(code))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(code), ctypes.addressof(text)))
    libc = ctypes.CDLL(None, use_errno=True)
    zero = ctypes.c_ulong(0)
    if libc.prctl(38, ctypes.c_ulong(1), zero, zero, zero):  # PR_SET_NO_NEW_PRIVS
        raise OSError(ctypes.get_errno(), "PR_SET_NO_NEW_PRIVS")
    if libc.prctl(22, ctypes.c_ulong(2), program, zero, zero):  # PR_SET_SECCOMP, a filter
        raise OSError(ctypes.get_errno(), "PR_SET_SECCOMP")


def run_without(calls, *args):
    return run(*args, preexec_fn=lambda: forbid(calls))


class Machine(StateCase):
    # ---- disks ----

    def mounted(self, *script, size="4m"):
        """Runs a shell script with a small file system of its own on `disk`."""
        os.makedirs(self.path("disk"), exist_ok=True)
        disk = shlex.quote(self.path("disk"))
        begin = f"mount -t tmpfs -o size={size} tmpfs {disk} || exit 77; cd {disk}"
        done = subprocess.run(
            ["unshare", "-rm", "bash", "-c", "\n".join([begin, *script])], stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, check=False, timeout=TIMEOUT,
        )
        if done.returncode == 77 or "unshare" in done.stderr:
            self.skipTest(f"no mount namespaces here: {done.stderr}")
        return done

    def call(self, *args, **kwargs):
        """For a script: a run with its states on `disk`."""
        kwargs.setdefault("states", "disk/s")
        return " ".join(shlex.quote(a) for a in command(*self.nvme(*args, **kwargs)))

    def test_disk_too_small(self):
        big = self.write_config("big.json", hidden_size=256, intermediate_size=512)
        done = self.mounted(self.call("--init", big))
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("bytes (4.00 MiB) are free", done.stderr)

    def test_disk_too_small_to_keep(self):
        done = self.mounted(self.call("--keep", 14) + " && exit 4", self.call("--keep", 1), size="1m")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stderr, r"needs \d+ bytes .*, but \d+ bytes .* are free")
        self.assertIn("or keep fewer than 14 older commits", done.stderr)

    def test_disk_too_small_for_another_shape(self):
        expected = self.undisturbed()
        other = ("--zero-stage", 0)
        done = self.mounted(
            self.call() + " || exit 3",
            "dd if=/dev/zero of=ballast bs=4096 2>/dev/null",
            self.call("--resume", *other, steps=STATE_STEPS) + " && exit 4",
            "ls s >&2; rm ballast",
            self.call("--resume", *other, steps=STATE_STEPS),
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stderr, r"g2\.state' needs \d+ bytes .*, but \d+ bytes .* are free")
        self.assertNotIn("g2.state\n", done.stderr)
        self.assertIn("resumed at step 3", done.stdout)
        self.assertEqual(self.weights(), expected)

    def test_disk_full_in_mid_run(self):
        """What was copied without its zeros has no room of its own for the slots not yet used."""
        expected = self.undisturbed()
        done = self.mounted(
            self.call("--durability", "exit", steps=1) + " || exit 3",
            "cp -r --sparse=always s t && rm -r s && mv t s || exit 4",
            "dd if=/dev/zero of=ballast bs=4096 2>/dev/null",
            self.call("--resume", steps=STATE_STEPS) + " && exit 5",
            "rm ballast",
            self.call("--resume", steps=STATE_STEPS),
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stderr, r"writing \d+ bytes at offset \d+ of '.*state': No space left")
        self.assertIn("resumed at step 1\n", done.stdout)
        self.assertEqual(self.weights(), expected)

    def test_disk_full_at_the_end(self):
        expected = self.undisturbed()
        self.good(*self.nvme())
        states = sum(os.path.getsize(self.rank(r)) for r in range(2)) // 1024
        left = states + len(expected) // 4096 + 16  # a quarter of the model, and small files
        out = os.path.join("disk", "out")
        done = self.mounted(
            f"dd if=/dev/zero of=ballast bs=1024 count=$((4096 - {left})) 2>/dev/null",
            self.call(steps=STATE_STEPS, out=out) + " && exit 3",
            "rm ballast",
            self.call("--resume", steps=STATE_STEPS, out=out) + " || exit 4",
            f"cp out/model.safetensors {shlex.quote(self.path('model.safetensors'))}",
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stderr, r"model\.safetensors.*(No space left|are free)")
        with open(self.path("model.safetensors"), "rb") as file:
            self.assertEqual(file.read(), expected)

    def test_read_only(self):
        expected = self.undisturbed()
        done = self.mounted(
            self.call() + " || exit 3",
            "cd /; mount -o remount,ro " + shlex.quote(self.path("disk")),
            self.call("--resume", steps=STATE_STEPS) + " && exit 4",
            "mount -o remount,rw " + shlex.quote(self.path("disk")),
            self.call("--resume", steps=STATE_STEPS),
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("cannot be written to: Read-only file system: choose another", done.stderr)
        self.assertIn("resumed at step 3\n", done.stdout)
        self.assertEqual(self.weights(), expected)

    # ---- an ordinary user ----

    def as_nobody(self, *args, **kwargs):
        """Root may write anywhere and lock any memory: run as somebody who may not."""
        if os.getuid() != 0:
            return run(*args, **kwargs)
        user = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
        if not shutil.which(user[0]) or subprocess.run(
            [*user, PROGRAM, "--version"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=False
        ).returncode:
            self.skipTest("no other user here that may run the program")
        return subprocess.run(
            [*user, *command(*args)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            check=False, timeout=TIMEOUT, **kwargs,
        )

    def give(self, uid):
        """Everything below to that user, where we are root."""
        for root, dirs, files in os.walk(self.dir):
            for name in [".", *dirs, *files]:
                if os.getuid() == 0:
                    os.chown(os.path.join(root, name), uid, uid)

    def test_directory_not_writable(self):
        self.undisturbed()
        self.good(*self.nvme())
        self.give(NOBODY)
        for mode, args in ((0o555, ("--resume",)), (0o555, ("--resume", "--ranks", 1, "--micro-batch", 4))):
            os.chmod(self.path("states"), mode)
            done = self.as_nobody(*self.nvme(*args, steps=STATE_STEPS))
            os.chmod(self.path("states"), 0o755)
            self.assertEqual(done.returncode, 1, done.stderr)
            self.assertIn("cannot be written to: Permission denied: choose another", done.stderr)
        os.mkdir(self.path("locked"), 0o555)
        done = self.as_nobody(*self.nvme(states="locked/s"))
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("Permission denied", done.stderr)
        self.give(0)
        self.goes_on()

    def test_no_memory_to_lock(self):
        if "usable" not in self.doctor("io_uring"):
            self.skipTest("no io_uring here")
        expected = self.undisturbed()
        self.give(NOBODY)
        none = dict(preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0)))
        done = self.as_nobody(*self.nvme("--io-engine", "io_uring"), **none)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertRegex(done.stderr, r"RLIMIT_MEMLOCK .*ulimit -l")
        self.assertIn("RLIMIT_MEMLOCK", self.doctor("io_uring", self.as_nobody, **none))
        self.assertIn("ulimit -l unlimited", self.doctor("memlock", self.as_nobody, **none))
        done = self.as_nobody(*self.nvme(steps=STATE_STEPS), **none)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(self.weights(), expected)

    # ---- system calls ----

    def doctor(self, key, runner=run, **kwargs):
        done = runner("doctor", "--size", 0, self.dir, **kwargs)
        self.assertEqual(done.returncode, 0, done.stderr)
        return next(line for line in done.stdout.splitlines() if line.split()[0] == key)

    def without(self, calls, engine, reason, taken):
        """By name the engine is an error; else the next one serves, with the same bits."""
        expected = self.undisturbed()
        try:
            done = run_without(calls, *self.nvme("--io-engine", engine))
        except subprocess.SubprocessError:
            self.skipTest("no seccomp filters here")
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn(reason, done.stderr)
        self.assertFalse(os.path.exists(self.path("states")))
        runner = lambda *args: run_without(calls, *args)  # noqa: E731
        self.assertIn(reason, self.doctor(engine, runner))
        self.assertIn(taken, self.doctor("I/O", runner))
        done = run_without(calls, *self.nvme(steps=STATE_STEPS))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(self.weights(), expected)

    def test_io_uring_forbidden(self):
        if "usable" not in self.doctor("io_uring"):
            self.skipTest("no io_uring here")
        taken = "libaio" if "usable" in self.doctor("libaio") else "posix"
        reason = "io_uring is forbidden, most likely by a seccomp profile (EPERM)"
        self.without({IO_URING_SETUP: EPERM}, "io_uring", reason, taken)

    def test_io_uring_hidden(self):
        if "usable" not in self.doctor("io_uring"):
            self.skipTest("no io_uring here")
        taken = "libaio" if "usable" in self.doctor("libaio") else "posix"
        reason = "io_uring is not in this kernel or hidden by a seccomp profile (ENOSYS)"
        self.without({IO_URING_SETUP: ENOSYS}, "io_uring_plain", reason, taken)

    def test_aio_contexts_exhausted(self):
        """Really to use up fs.aio-max-nr would hit whatever else runs here: the kernel's answer."""
        if IO_SETUP is None or "usable" not in self.doctor("libaio"):
            self.skipTest("no libaio here")
        calls = {IO_URING_SETUP: EPERM, IO_SETUP: EAGAIN}
        self.without(calls, "libaio", "as root: sysctl fs.aio-max-nr=1048576", "posix")

    # ---- processes ----

    def check_held(self, pid):
        words = [f"is held by process {pid}", "end it"]
        self.refused(words, "--out", self.path("second"))
        for args in (
            ("inspect", "--verify"),
            ("export", "--model", self.config, "--out", self.path("x")),
        ):
            done = run(*args, self.path("states"))
            self.assertEqual(done.returncode, 1)
            self.assertIn(words[0], done.stderr)

    def test_two_processes(self):
        call = self.nvme("--resume", steps=10**6)
        with subprocess.Popen(command(*call), stdout=subprocess.PIPE, text=True) as process:
            try:
                self.assertTrue(any(line.startswith("step ") for line in process.stdout))
                self.check_held(process.pid)
            finally:
                process.kill()
                process.communicate()
        self.good("inspect", "--verify", self.path("states"))


if __name__ == "__main__":
    main()

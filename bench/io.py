# SPDX-License-Identifier: Apache-2.0
"""Each rung of the I/O ladder against fio: same file, block size and depth, turn and turn about.

Prints, for each rung and kind of pass, the median of ours / fio within a pair, the 10th and 90th
percentile of it, and both medians in GB/s."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

ENGINES = {
    "io_uring": ["--ioengine=io_uring", "--fixedbufs=1", "--registerfiles=1"],
    "io_uring_plain": ["--ioengine=io_uring"],
    "libaio": ["--ioengine=libaio"],
    "posix": ["--ioengine=psync"],
}
POSIX_THREADS = 8  # io/posix.c
MODES = {"read": ["--rw=read"], "write": ["--rw=write"], "mixed": ["--rw=rw", "--rwmixread=50"]}


def fio(path, engine, mode, mib, depth, small):
    command = ["fio", "--name=pass", f"--filename={path}", "--bs=512k", "--direct=1", "--thread"]
    command += ["--scramble_buffers=0"]  # ours does not touch what it writes, either
    command += ENGINES[engine] + MODES[mode] + ["--group_reporting", "--output-format=json"]
    if engine == "posix":
        # As many threads as ours, each with a part of the file.
        part = mib // POSIX_THREADS
        command += [f"--numjobs={POSIX_THREADS}", f"--size={part}m", f"--offset_increment={part}m"]
        if not small:  # a buffer of one block is no huge page: only the first of these four is used
            command += ["--iodepth=4", "--iomem_align=2m"]
    else:
        command += [f"--iodepth={depth}", f"--size={mib}m"]
    # What fio takes its buffers from then asks for huge pages, as zspill does for its own.
    tunables = f"glibc.malloc.hugetlb={0 if small else 1}"
    environment = dict(os.environ, GLIBC_TUNABLES=tunables)
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment)
    # fio notes before the JSON that psync has no depth.
    job = json.loads(done.stdout[done.stdout.index(b"{") :])["jobs"][0]
    moved = job["read"]["io_bytes"] + job["write"]["io_bytes"]
    seconds = max(
        job[way]["io_bytes"] / job[way]["bw_bytes"] for way in ("read", "write") if job[way]["bw_bytes"]
    )
    return moved / seconds / 1e9


def ours(program, path, engine, mode, mib, depth, small):
    command = [program, path, engine, mode, str(mib), str(depth)] + ["small"] * small
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return float(done.stdout.split()[0])


def fresh(program, path, args):
    """What writing to allocated extents costs the first time."""
    rows = []
    for _ in range(args.pairs):
        command = [program, path, "auto", "fresh", str(args.mib), str(args.depth)]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        rows.append([1 / float(speed) for speed in done.stdout.split()])
    print(f"a new file of {args.mib} MiB, written and flushed three times, {args.pairs} files")
    print(f"{'time':<8}{'s/GB':>8}{'of the third':>14}{'p10':>7}{'p90':>7}")
    for i, name in enumerate(("first", "second", "third")):
        ratios = [row[i] / row[2] for row in rows]
        print(
            f"{name:<8}{statistics.median(row[i] for row in rows):>8.3f}"
            f"{statistics.median(ratios):>14.3f}"
            f"{percentile(ratios, 0.1):>7.2f}{percentile(ratios, 0.9):>7.2f}"
        )


def percentile(values, part):
    values = sorted(values)
    return values[min(len(values) - 1, int(part * len(values)))]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("build", help="build directory")
    parser.add_argument("dir", nargs="?", default=".", help="where the file goes")
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--depth", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--small-pages", action="store_true", help="buffers of small pages on both sides")
    parser.add_argument("--fresh", action="store_true", help="first writes to a file, in place of fio")
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--modes", default=",".join(MODES))
    args = parser.parse_args()
    program = os.path.join(args.build, "bench", "bench-io")
    worst = None
    with tempfile.TemporaryDirectory(prefix="zspill-bench-", dir=args.dir) as folder:
        path = os.path.join(folder, "file")
        if args.fresh:
            fresh(program, path, args)
            return
        print(f"{args.mib} MiB, 512 KiB blocks, depth {args.depth}, {args.pairs} pairs")
        print(f"{'engine':<16}{'pass':<8}{'ours/fio':>9}{'p10':>7}{'p90':>7}{'ours':>8}{'fio':>8}  GB/s")
        for engine in args.engines.split(","):
            for mode in args.modes.split(","):
                pairs = []
                for turn in range(args.pairs + 1):
                    if turn % 2:
                        b = fio(path, engine, mode, args.mib, args.depth, args.small_pages)
                        a = ours(program, path, engine, mode, args.mib, args.depth, args.small_pages)
                    else:
                        a = ours(program, path, engine, mode, args.mib, args.depth, args.small_pages)
                        b = fio(path, engine, mode, args.mib, args.depth, args.small_pages)
                    if turn:  # the first is for warming up
                        pairs.append((a, b))
                ratios = [a / b for a, b in pairs]
                middle = statistics.median(ratios)
                worst = middle if worst is None else min(worst, middle)
                print(
                    f"{engine:<16}{mode:<8}{middle:>9.3f}{percentile(ratios, 0.1):>7.2f}"
                    f"{percentile(ratios, 0.9):>7.2f}{statistics.median(a for a, _ in pairs):>8.2f}"
                    f"{statistics.median(b for _, b in pairs):>8.2f}",
                    flush=True,
                )
    print(f"least median: {worst:.3f} (target 0.95)")


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The real libzspill-cuda.so as a file: what it exports and needs, and what ptxas says about its
kernels. No GPU is asked. With --table: the registers of each kernel, for docs/results.md.

usage: plugin.py [--table] LIBRARY ARCHITECTURES FILE.ptxas..."""

import ctypes
import os
import re
import subprocess
import sys

ENTRY = "zs_cuda_entry_1"
# What NVIDIA's libraries are linked for, and what any C++ code needs.
NEEDED = re.compile(
    r"lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s|nccl|cublas|cublasLt)\.so\.\d+|ld-linux.*\.so\.\d+"
)
# Whose kernels wait for memory only: a spill would be more of it.
NO_SPILLS = ("adam", "elementwise", "norm")


def output(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def symbols(library, *options):
    """Names of nm, without versions; those of weak references are left out."""
    lines = [line.split() for line in output("nm", "-D", *options, library).splitlines()]
    return {line[-1].split("@")[0] for line in lines if line[-2] not in "wvA"}


def check_file(library):
    exported = symbols(library, "--defined-only")
    needed = re.findall(r"NEEDED.*\[(.*)\]", output("readelf", "-d", library))
    wrong = [f"exports {name}" for name in sorted(exported ^ {ENTRY})]
    wrong += [f"needs the library {name}" for name in needed if not NEEDED.fullmatch(name)]
    wrong += [
        f"lacks {name}"
        for name in sorted(symbols(library, "--undefined-only"))
        if name.startswith(("zs_", "__cuda", "cuda"))
    ]
    try:
        ctypes.CDLL(library, os.RTLD_NOW)  # every symbol is found
    except OSError as error:
        wrong.append(f"cannot be loaded: {error}")
    return wrong


def read_report(path):
    """{(kernel, architecture): (registers, stack, spilled bytes)}"""
    found, kernel = {}, None
    with open(path, encoding="utf-8") as file:
        for line in file:
            if match := re.search(r"Compiling entry function '(\w+)' for '(\w+)'", line):
                kernel = match.groups()
            elif match := re.search(r"(\d+) bytes stack frame, (\d+) .* (\d+) bytes spill", line):
                stack, stores, loads = map(int, match.groups())
            elif match := re.search(r"Used (\d+) registers", line):
                found[kernel] = (int(match.group(1)), stack, stores + loads)
    return found


def plain(mangled):
    """adam<fp32, bf16>"""
    name = output("c++filt", mangled).strip().removeprefix("void ")
    return re.sub(r"\(.*|zs_", "", name)


def main():
    table = sys.argv[1] == "--table"
    library, archs, *reports = sys.argv[1 + table :]
    archs = archs.split(",")
    wrong = check_file(library)
    for path in sorted(reports):
        found = read_report(path)
        room = os.path.basename(path).removesuffix(".ptxas")
        names = sorted({name for name, _ in found}, key=plain)
        if not names:
            wrong.append(f"{path} names no kernel")
        for name in names:
            cells = []
            for arch in archs:
                if (name, arch) not in found:
                    wrong.append(f"{plain(name)} is not compiled for {arch}")
                    continue
                registers, stack, spilled = found[name, arch]
                cells.append(f"{registers}" + (f" ({spilled} B spilled)" if spilled else ""))
                if room in NO_SPILLS and (stack or spilled):
                    wrong.append(
                        f"{plain(name)} for {arch}: {stack} bytes of stack, {spilled} spilled"
                    )
            if table:
                print(f"| `{plain(name)}` | {' | '.join(cells)} |")
    for line in wrong:
        print(f"FAIL {os.path.basename(library)}: {line}")
    print(f"{len(reports)} files of kernels, {len(archs)} architectures: {len(wrong)} failures")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Checks that the C files are formatted as .clang-format says."""

import os
import shutil
import subprocess
import sys

FOLDERS = "base bench cli device include io kernels model offload tests zero".split()


def main():
    root = os.environ.get("ZSPILL_SOURCE_ROOT") or os.path.join(os.path.dirname(__file__), "../..")
    program = os.environ.get("CLANG_FORMAT", "clang-format")
    if shutil.which(program) is None:
        print(f"{program} is not installed (Debian package clang-format)")
        return 77
    # Versions differ in what they make of the same settings; Debian 12's is the one that decides.
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    if "version 14." not in version.stdout:
        print(f"needs clang-format 14, not {version.stdout.strip()}")
        return 77
    files = sorted(
        os.path.join(folder, name)
        for top in FOLDERS
        for folder, _, names in os.walk(os.path.join(root, top))
        for name in names
        if name.endswith((".c", ".cu", ".h"))
    )
    if not files:
        print("no C files found")
        return 1
    run = subprocess.run([program, "--style=file", "--dry-run", "-Werror", *files], check=False)
    print(f"{len(files)} files looked at")
    return 1 if run.returncode else 0


if __name__ == "__main__":
    sys.exit(main())

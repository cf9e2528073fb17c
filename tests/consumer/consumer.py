# SPDX-License-Identifier: Apache-2.0
"""Builds consumer.c against an installation with what pkg-config says, shared and static, and runs
it."""

import os
import subprocess
import sys
import tempfile

from installation import Installation

SOURCE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "consumer.c")


def run(*command, **env):
    done = subprocess.run(
        command, env=dict(os.environ, **env), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}"
    return done.stdout


def main():
    compiler = os.environ.get("ZSPILL_CC", "cc").split()
    with tempfile.TemporaryDirectory() as folder:
        installed = Installation(os.path.join(folder, "installed"))
        version = installed.pkg_config("--modversion")[0]
        headers = os.listdir(os.path.dirname(installed.find("zspill.h")))
        assert headers == ["zspill.h"], f"one header is installed, not {headers}"
        flags = ["-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]
        flags += installed.pkg_config("--cflags")

        shared = os.path.join(folder, "shared")
        run(*compiler, *flags, SOURCE, "-o", shared, *installed.pkg_config("--libs"), "-lm")
        needed = run("objdump", "-p", shared)
        soname = f"libzspill.so.{version.split('.')[0]}"
        assert soname in needed, f"the program does not ask for {soname}:\n{needed}"
        out = run(shared, os.path.join(folder, "one"), LD_LIBRARY_PATH=os.path.dirname(installed.library))
        print(out, end="")
        assert f"zspill {version}\n" in out, f"pkg-config says {version}"

        # The archive in place of -lzspill: the linker takes the shared library where it has both.
        static = os.path.join(folder, "static")
        libs = installed.pkg_config("--static", "--libs")
        archive = installed.find("libzspill.a")
        libs = [archive if lib == "-lzspill" else lib for lib in libs]
        assert archive in libs, f"pkg-config --static does not name the library: {libs}"
        run(*compiler, *flags, SOURCE, "-o", static, *libs, "-lm")
        assert "libzspill" not in run("objdump", "-p", static), "not linked statically"
        print(run(static, os.path.join(folder, "two")), end="")

        # A C++ compiler reads the header too.
        if os.path.exists("/usr/bin/c++"):
            source = os.path.join(folder, "header.cpp")
            with open(source, "w", encoding="utf-8") as file:
                file.write("#include <zspill.h>\nint main() { return zs_version() == nullptr; }\n")
            run("/usr/bin/c++", "-Wall", "-Wextra", "-Werror", *flags[5:], "-fsyntax-only", source)
    return 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Runs a test script with the first Python that has what its "# needs:" line names; exits 77
(skipped) when there is none. Scripts called torch_* run with ZSPILL_TORCH_PYTHON only."""

import os
import re
import subprocess
import sys


def needs_of(script):
    with open(script, encoding="utf-8") as file:
        match = re.search(r"^# needs: (.+)$", file.read(), re.MULTILINE)
    return match.group(1).split() if match else []


def has(python, modules):
    code = "; ".join(f"import {name}" for name in modules) or "pass"
    try:
        return (
            subprocess.run([python, "-c", code], capture_output=True, check=False).returncode == 0
        )
    except OSError:
        return False


def main():
    script = sys.argv[1]
    torch = os.environ.get("ZSPILL_TORCH_PYTHON")
    live = os.path.basename(script).startswith("torch_")
    if live and not torch:
        print("ZSPILL_TORCH_PYTHON is not set; scripts/test.sh --torch makes it")
        return 77
    needs = needs_of(script)
    if live:
        # Asked for by name: what it lacks is a failure, not a reason to skip.
        pythons = [torch]
    else:
        pythons = [python for python in (torch, sys.executable, "/usr/bin/python3") if python]
        pythons = [python for python in pythons if has(python, needs)]
    if not pythons:
        print(f"no Python here has {', '.join(needs)}")
        return 77
    root = os.environ["ZSPILL_SOURCE_ROOT"]
    path = [os.path.join(root, "python"), os.path.join(root, "tests", "python")]
    if os.environ.get("PYTHONPATH"):
        path.append(os.environ["PYTHONPATH"])
    os.environ["PYTHONPATH"] = os.pathsep.join(path)
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.stdout.flush()
    os.execv(pythons[0], [pythons[0], script, *sys.argv[2:]])


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""nvcc.py REPORT COMMAND...: runs nvcc; what ptxas says about each kernel goes to the file REPORT."""
import subprocess
import sys

done = subprocess.run(sys.argv[2:], stderr=subprocess.PIPE, text=True, check=False)
told = done.stderr.splitlines(keepends=True)
report = [line for line in told if line.startswith(("ptxas info", "    "))]
if done.returncode or len(report) != len(told):
    sys.stderr.write("".join(line for line in told if line not in report))
with open(sys.argv[1], "w", encoding="utf-8") as file:
    file.writelines(report)
sys.exit(done.returncode)

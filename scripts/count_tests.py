# SPDX-License-Identifier: Apache-2.0
"""Adds up meson's test logs: prints the output of tests that failed, why tests were skipped, and
last the line "N passed, N failed, N skipped". Exit code 1 when anything failed or nothing ran."""

import argparse
import json
import os
import sys

PASSED = {"OK", "EXPECTEDFAIL"}


def output_of(test):
    return "\n".join(part.rstrip() for part in (test.get("stdout"), test.get("stderr")) if part)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--broken", type=int, default=0, help="configurations that did not build")
    parser.add_argument("logs", nargs="*", help="NAME testlog.json, in turn")
    args = parser.parse_args()
    passed, failed, skipped = 0, args.broken, 0
    for name, path in zip(args.logs[::2], args.logs[1::2]):
        if not os.path.exists(path):
            print(f"== {name}: no test log was written")
            failed += 1
            continue
        with open(path, encoding="utf-8") as file:
            for line in file:
                test = json.loads(line)
                if test["result"] in PASSED:
                    passed += 1
                elif test["result"] == "SKIP":
                    skipped += 1
                    lines = output_of(test).splitlines()
                    why = lines[-1].removeprefix("skipped: ") if lines else "?"
                    print(f"== {name}: {test['name']} skipped: {why}")
                else:
                    failed += 1
                    lines = output_of(test).splitlines()
                    print(f"== {name}: {test['name']} {test['result']} ({test['duration']:.1f} s)")
                    print("\n".join(lines[-200:]))
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())

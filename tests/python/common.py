# SPDX-License-Identifier: Apache-2.0
"""What the Python tests share."""

import os
import sys

SKIPPED = 77


def skip(reason):
    print(reason)
    sys.exit(SKIPPED)


def test_data():
    """The folder of inputs that are not part of the project; without it the test is skipped."""
    beside = os.path.join(os.environ["ZSPILL_SOURCE_ROOT"], "..", "shared")
    folder = os.environ.get("ZSPILL_TEST_DATA") or beside
    if not os.path.isdir(folder):
        skip("ZSPILL_TEST_DATA names no folder")
    return os.path.abspath(folder)

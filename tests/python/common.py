# SPDX-License-Identifier: Apache-2.0
"""What the Python tests share."""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from data import data_path  # pylint: disable=wrong-import-position

SKIPPED = 77


def skip(reason):
    print(reason)
    sys.exit(SKIPPED)


def test_data():
    """The folder of inputs that are not part of the project; without it the test is skipped."""
    folder = data_path()
    if not folder:
        skip("ZSPILL_TEST_DATA names no folder")
    return folder

# SPDX-License-Identifier: Apache-2.0
"""Inputs that are no part of the project: in the folder that ZSPILL_TEST_DATA names, or in shared/
beside the checkout. Tests without them skip. tests/data.h is the same for C."""

import os


def data_path(*names):
    """The path of names in the folder; None: not there."""
    beside = os.path.join(os.environ.get("ZSPILL_SOURCE_ROOT", "."), "..", "shared")
    path = os.path.join(os.environ.get("ZSPILL_TEST_DATA") or beside, *names)
    return os.path.abspath(path) if os.path.exists(path) else None

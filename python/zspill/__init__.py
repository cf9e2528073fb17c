# SPDX-License-Identifier: Apache-2.0
"""zspill from Python: the C library through ctypes, and data preparation."""

from ._lib import ZspillError, load

__all__ = ["ZspillError", "load"]

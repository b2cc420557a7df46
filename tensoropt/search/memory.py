"""The share of this machine's memory that tables may use, and the error raised before they exceed it."""

from __future__ import annotations

import os

from tensoropt.errors import TensorOptError


class TableTooLargeError(TensorOptError, MemoryError):
    """Raised for tables that would not fit in the memory allowed for them."""


def memory_allowance() -> int:
    """The bytes that tables may use: half of the machine's currently free memory."""
    # Half is an assumption: it leaves room for index arrays, messages, and other programs.
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2

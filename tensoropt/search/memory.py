"""What tables may take of this machine's memory, and the error that says so before it is taken."""

from __future__ import annotations

import os

from tensoropt.errors import TensorOptError


class TableTooLargeError(TensorOptError, MemoryError):
    """Tables that would not fit in the memory allowed for them."""


def memory_allowance() -> int:
    """Bytes that tables may take: half of what the machine has free now."""
    # Half is an assumption: it leaves room for index arrays, messages, and whatever else runs.
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2

"""How this process's memory allocator treats what tensors leave behind.

A training step makes and frees the same tensors every time. GPU memory freed by one step is kept for the
next by PyTorch's own allocator; on CPUs the C library gives large pieces back to the system, which clears
and maps them again, page by page, when the next step asks for them. A lowered plan frees each tensor after
its last use, so more often than a module whose locals live until it returns: a GPT-2 with 32 MiB of logits
took 44,000 page faults per step, 20,000 as plain PyTorch, and was 6 to 8 % slower for that alone.
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
"""Parameters of mallopt(3)."""
_SETTINGS = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_")


@cache
def keep_freed_memory() -> bool:
    """Let the C library keep what this process frees, so that a step finds the memory of the last one.

    For processes that are ranks, and those that are measured in their place. The process stays as large
    as it has ever been. Nothing happens where a person has set the allocator by environment variables, and
    with other C libraries than glibc; another allocator that was loaded before it is not affected.

    Returns:
        whether it was set, now or before.
    """
    if not sys.platform.startswith("linux") or any(name in os.environ for name in _SETTINGS):
        return False
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        return False
    # No mmap: every piece comes from the heap, where freed ones are joined and used again; no trimming of it.
    return bool(set_option(_M_MMAP_MAX, 0) and set_option(_M_TRIM_THRESHOLD, -1))

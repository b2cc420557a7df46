"""The setting that makes this process's memory allocator keep the memory that tensors free.

A training step creates and frees the same tensors every time. On GPUs PyTorch's own allocator keeps the
memory that one step freed for the next. On CPUs the C library returns large blocks to the system, which
clears and maps them again, page by page, when the next step requests them. A lowered plan frees each tensor
after its last use, and therefore more often than a module whose locals live until it returns: a GPT-2 with 32
MiB of logits took 44,000 page faults per step, 20,000 as plain PyTorch, and was 6 to 8 % slower for that
reason alone.
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
    """Make the C library keep the memory that this process frees, so each step reuses that of the last one.

    For processes that are ranks, and for those that are measured in their place. The process stays as large
    as it has ever been. Nothing happens if a person has configured the allocator through environment
    variables, or with a C library other than glibc; another allocator that was preloaded is not affected.

    Returns:
        whether it is set, by this call or an earlier one.
    """
    if not sys.platform.startswith("linux") or any(name in os.environ for name in _SETTINGS):
        return False
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        return False
    # No mmap: every block comes from the heap, where freed blocks are merged and reused; the heap is never
    # trimmed.
    return bool(set_option(_M_MMAP_MAX, 0) and set_option(_M_TRIM_THRESHOLD, -1))

"""The parts of CUDA that PyTorch itself asks for, for a PyTorch without CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

CAPABILITY = (8, 0)
"""The compute capability of fake devices: that of an A100, whose attention kernels they use."""

_KEPT_WHOLE = ("silu_backward",)
"""Composites with a kernel of their own on CUDA: without it they come apart into operators that make more
tensors than the kernel does. Recurrent layers, which cuDNN runs whole, still come apart into cells."""


@contextmanager
def cuda_operators() -> Iterator[None]:
    """Keep operators with CUDA kernels whole for a block, and let fake devices report their capability."""
    library = torch.library.Library("aten", "IMPL")
    for name in _KEPT_WHOLE:
        library.impl(name, _computed, "CUDA")
    try:
        with mock.patch.object(torch.cuda, "get_device_capability", return_value=CAPABILITY):
            yield
    finally:
        library._destroy()


def _computed(*_: Any, **__: Any) -> None:
    raise RuntimeError("fake CUDA devices compute nothing: only fake tensors live there")

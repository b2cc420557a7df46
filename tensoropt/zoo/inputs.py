"""Example inputs: random, of the right shapes, on the device that is the current default."""

from __future__ import annotations

import torch
from torch import Tensor


def tokens(vocabulary: int, *shape: int) -> Tensor:
    """int64 token numbers in ``[0, vocabulary)``."""
    return torch.randint(0, vocabulary, shape)


def images(batch: int, channels: int, size: int) -> Tensor:
    """float32 ``(batch, channels, size, size)``, unit normal like a normalised photograph."""
    return torch.randn(batch, channels, size, size)

"""The FLOP of operators: PyTorch's counts, and our own for those that it lacks."""

from __future__ import annotations

from typing import Any

from torch.utils.flop_counter import flop_registry

from tensoropt.ops import registry


def flops_of(operator: Any) -> Any:
    """The function that counts an operator's FLOP, called with its arguments and ``out_val``; None if its
    FLOP are not counted."""
    return registry.flops_of(operator._schema.name) or flop_registry.get(operator._overloadpacket)

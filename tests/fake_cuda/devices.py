"""Which operators make tensors on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class MadeOnTheCpu(TorchDispatchMode):
    """Notes the operators that give a tensor on the CPU, whose operands are none."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        results = [v for v in torch.utils._pytree.tree_leaves(found) if isinstance(v, torch.Tensor)]
        if any(value.device.type == "cpu" for value in results):
            self.operators.add(str(func))
        return found

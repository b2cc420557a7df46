"""Fake tensors lie in as much memory as the results of real kernels."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tensoropt.profiling.kernel_storages import KernelStorages
from tests.sharding.calls import CALLS, IMAGE, Call

FOLDED = (
    lambda m, x: functional.fold(functional.unfold(x * m.w, 3, padding=1), (12, 16), 3, padding=1),
    (IMAGE,),
    {"w": (16,)},
)


class Storages(TorchDispatchMode):
    """Bytes of the storages of all results, by operator."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, list[int]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [t.untyped_storage().nbytes() for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        if func.namespace == "aten" and func is not torch.ops.aten.detach.default:
            self.found.append((str(func), sizes))
        return result


def storages(call: Any, *, fake: bool) -> list[tuple[str, list[int]]]:
    function, args, parameters = call
    torch.manual_seed(0)
    with contextlib.ExitStack() as stack:
        if fake:
            mode = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            stack.enter_context(KernelStorages())
            args = tuple(mode.from_tensor(value) for value in args)
        model, watch = Call(function, parameters), Storages()
        with watch:
            model(*args).square().sum().backward()
    return watch.found


@pytest.mark.parametrize("name", [*CALLS, "folded"])
def test_storages_are_those_of_real_kernels(name: str) -> None:
    call = FOLDED if name == "folded" else CALLS[name]
    assert storages(call, fake=True) == storages(call, fake=False)

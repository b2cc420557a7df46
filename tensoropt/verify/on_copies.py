"""Collectives on tensors in the host's memory, run so that nothing keeps the tensors alive afterwards.

Gloo's threads that carry out collectives release their tensors some time after they reported completion, on a
busy machine after the next operators have run. Then the tensors would count as memory that a plan needs, in
one run and not in the next. So gloo gets copies here.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map_only

_LEFT = frozenset({"send", "recv_", "wait_tensor"})
"""Messages have no thread, and wait for the other side: run at once, two ranks would wait for each other."""


def is_collective(func: Any, args: Any) -> bool:
    """Return whether an operator is a collective on tensors in the host's memory."""
    if func.namespace not in ("c10d", "_c10d_functional") or func._schema.name.split("::")[1] in _LEFT:
        return False
    tensors = _tensors(args)
    # Functional collectives that write in place after all are nothing that plans issue.
    return (
        bool(tensors)
        and not func._schema.is_mutable
        and all(t.device.type == "cpu" and not isinstance(t, FakeTensor) for t in tensors)
    )


def run_on_copies(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a collective (:func:`is_collective`) to its end, and return its result."""
    copies, named = tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
    result = func(*copies, **named)
    if func.namespace == "_c10d_functional":
        return tree_map_only(torch.Tensor, _arrived, result)
    written, work = result if isinstance(result, tuple) else (None, result)
    dist.Work.unbox(work).wait()
    # The first argument is what collectives write, whatever their kind.
    for own, copy in zip(_tensors(args[0]), _tensors(copies[0]), strict=True):
        own.copy_(copy)
    # Waiting for gloo's own work once more would copy what it reduced once more, into the copies.
    over = _over()
    return over if written is None else (args[0], over)


def _over() -> torch.ScriptObject:
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    future.set_result([])
    return _create_work_from_future(future).boxed()


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _arrived(value: torch.Tensor) -> torch.Tensor:
    arrived: torch.Tensor = torch.ops._c10d_functional.wait_tensor(value)
    return arrived.clone()

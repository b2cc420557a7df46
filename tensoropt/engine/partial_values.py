"""Numbers that scripts compute from a sharded plan's parameters: always values, never one rank's share.

PyTorch's result of computing with shards is often a DTensor of shares that are still to be summed (a penalty,
and the loss that it is added to), and reading it silently gives the rank's own share. Scalars that are to be
differentiated are summed as soon as they are made: every rank makes them, and a single rank may then print
them. Others are summed when they are read, which all ranks have to do; a rank that reads alone gets an error
that says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from tensoropt.engine.together import JobRanks

_aten = torch.ops.aten
_SUMS = (
    _aten.sum.default, _aten.sum.dim_IntList, _aten.mean.default, _aten.mean.dim, _aten.dot.default,
    _aten.linalg_vector_norm.default, _aten.prod.default, _aten.max.default, _aten.min.default,
)  # fmt: skip
"""Operators whose result may be a scalar of shares."""
_WHOLE = (
    _aten.mse_loss.default, _aten.mse_loss_backward.default, _aten.smooth_l1_loss.default,
    _aten.smooth_l1_loss_backward.default, _aten.huber_loss.default, _aten.huber_loss_backward.default,
)  # fmt: skip
"""Operators that divide by a count, for which PyTorch takes that of the shard where shards are unlike."""
_of_mesh: dict[DeviceMesh, JobRanks] = {}


def read_whole(mesh: DeviceMesh, together: JobRanks) -> None:
    """Make numbers computed from DTensors of a mesh the same on all ranks from now on; those of other meshes
    stay as they are."""
    _of_mesh[mesh] = together
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    if _aten._local_scalar_dense.default in handlers:
        return
    handlers |= dict.fromkeys(_SUMS, _summed) | dict.fromkeys(_WHOLE, _on_whole)
    handlers[_aten._local_scalar_dense.default] = _number
    DTensor.__format__ = _formatted(DTensor.__format__)  # type: ignore[assignment, method-assign]


def _number(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return ``item()`` of a DTensor."""
    (value,) = args
    together = _of_mesh.get(value.device_mesh)
    if together is None or all(placement.is_replicate() for placement in value.placements):
        return value._local_tensor.item()
    together.meet(
        "reading a sum or norm of parameters or gradients; read it on every rank, and print it on one"
    )
    with torch.no_grad():
        return _replicated(value)._local_tensor.item()


def _summed(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return an operator's result, summed if it is a scalar of shares with a gradient."""
    found = _as_pytorch(op, args, kwargs)
    if not isinstance(found, DTensor) or found.dim() or not torch.is_grad_enabled():
        return found
    together = _of_mesh.get(found.device_mesh)
    if together is None or not any(placement.is_partial() for placement in found.placements):
        return found
    if not any(isinstance(value, torch.Tensor) and value.requires_grad for value in args):
        return found
    together.meet("a sum or norm of parameters or gradients; compute it on every rank, and print it on one")
    return _replicated(found)


def _on_whole(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if any(isinstance(value, DTensor) and value.device_mesh in _of_mesh for value in args):
        args = tuple(_replicated(value) if isinstance(value, DTensor) else value for value in args)
    return _as_pytorch(op, args, kwargs)


def _replicated(value: DTensor) -> DTensor:
    return value.redistribute(placements=[Replicate()] * value.device_mesh.ndim)


def _as_pytorch(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the operator's result without a handler."""
    dispatcher: Any = DTensor._op_dispatcher
    info = dispatcher.unwrap_to_op_info(op, args, kwargs)
    sharding = info.output_sharding = dispatcher.sharding_propagator.propagate_op_sharding(info.schema)
    local = dispatcher._dispatch_get_local_results_slow_path(op, args, info)
    return dispatcher.wrap(local, sharding.output_spec)


def _formatted(others: Callable[[DTensor, str], str]) -> Callable[[DTensor, str], str]:
    def formatted(value: DTensor, specification: str) -> str:
        """Format a value as f-strings show plain scalars."""
        if value.dim() or value.device_mesh not in _of_mesh:
            return others(value, specification)
        return format(value.detach().item(), specification)

    return formatted

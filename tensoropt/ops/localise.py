"""Conversion of an operator, given the loop that each mesh axis splits, to the call for one shard."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import torch

from tensoropt.graph import Operator
from tensoropt.ops.calls import LocalCall, OperatorShard
from tensoropt.ops.overloads import FUNCTIONS
from tensoropt.ops.registry import draws_of, resolve_function, spec_of


def localise(shard: OperatorShard) -> LocalCall:
    """Return the call that computes this rank's shard of the operator."""
    call = _localised(shard)
    tensors = shard.atoms.graph.tensors
    if not call.collectives or any(tensors[name].requires_grad for name in shard.op.outputs):
        return call
    # Nothing comes back to a tensor without a gradient (a teacher's batch norm).
    return replace(
        call, collectives=tuple(collective for collective in call.collectives if not collective.backward)
    )


def _localised(shard: OperatorShard) -> LocalCall:
    op = shard.op
    whole = LocalCall(op.target, op.args, op.kwargs, op.name)
    # Discovery tried the operator's own call on pieces; a rule's localiser knows the rule's loops only.
    if shard.space.discovered:
        return _averaged(shard, whole)
    localiser = spec_of(op.target).localiser
    if localiser is not None:
        return localiser(shard, whole)
    if draws_numbers(op):
        # Discovery kept it whole: all ranks draw from one seed.
        return LocalCall("kernels.seeded", op.args, op.kwargs, op.name, (op.target,))
    return whole


def _averaged(shard: OperatorShard, call: LocalCall) -> LocalCall:
    """Return a call that divides averages over split loops by the number of shards, so that they add up."""
    parts = [prod(shard.mesh[a] for a in shard.split(o.means)) for o in shard.space.writes]
    if all(count == 1 for count in parts):
        return call
    return replace(call, function="kernels.divided", static=(call.function, tuple(parts)))


def draws_numbers(op: Operator) -> bool:
    """Return whether PyTorch's own call of an operator draws random numbers."""
    # Capture refuses a model's own function that does, and a saved graph names such a function without
    # containing it.
    if op.target.startswith(f"{FUNCTIONS}."):
        return False
    if torch.Tag.nondeterministic_seeded not in getattr(resolve_function(op.target), "tags", ()):
        return False
    draws = draws_of(op.target)
    return True if draws is None else draws(op)

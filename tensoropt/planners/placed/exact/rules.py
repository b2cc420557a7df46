"""The rules of an integer program for placements, and a check of its memory rule for a given placement.

By the memory rule, the stored and saved bytes of a device are at most a limit. Each tensor counts once per
device that holds it, in whole units (:func:`unit_bytes`) rounded down; the limit is rounded up. The program
states the same rule over literals (:meth:`.program.PlacementProgram._keep`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tensoropt.placement import PlacedTensor, PlacementProblem

_UNIT_BYTES = 1024
"""The unit of memory in bytes, so that the solver's integers stay small; an assumption."""

_FINENESS = 2**20
"""The least number of units in all stored and saved bytes, so that rounding hides nothing of small models."""


@dataclass(frozen=True)
class Rules:
    """The constraints of a program besides dependences, transfer times and capacity.

    Attributes:
        exclusive: whether a device, and a lane of a link, does one thing at a time; False in NetSplit's
            program as published and in its extension of Pesto's.
        backward: whether backward is scheduled as well; False in NetSplit's extension of Pesto's program.
        balance: the largest share of all stored and saved bytes that one device may hold; 1 for no rule.
    """

    exclusive: bool = True
    backward: bool = True
    balance: float = 1.0


def lasting_bytes(problem: PlacementProblem) -> NDArray[np.float64]:
    """Return (n,) the bytes that each operator stores and saves, without tensors between operators."""
    return problem.stored_bytes + problem.training * problem.kept_bytes


def kept_tensors(problem: PlacementProblem) -> list[PlacedTensor]:
    """Return the tensors between operators that are saved from forward to backward."""
    return [tensor for tensor in problem.tensors if problem.training and tensor.kept_by]


def _all_once_bytes(problem: PlacementProblem) -> float:
    """Return the bytes that the model stores and saves, the base of ``Rules.balance``; each tensor once."""
    apart = sum(tensor.bytes for tensor in kept_tensors(problem) if not tensor.stored)
    return float(lasting_bytes(problem).sum()) + float(apart)


def unit_bytes(problem: PlacementProblem) -> int:
    """Return the memory rule's unit: 1024 bytes, or for small models 2**-20 of all stored and saved bytes."""
    return min(_UNIT_BYTES, max(1, int(_all_once_bytes(problem) // _FINENESS)))


def most_units(problem: PlacementProblem, rules: Rules, capacity_bytes: Sequence[float]) -> list[int]:
    """Return the limit of each device's stored and saved bytes, in :func:`unit_bytes`, rounded up."""
    own = float(lasting_bytes(problem).sum())
    most = own + sum(tensor.bytes for tensor in kept_tensors(problem))
    if rules.balance < 1:
        most = min(most, rules.balance * _all_once_bytes(problem))
    unit = unit_bytes(problem)
    # Left-hand sides are rounded down and these up, so that nothing that fits is excluded.
    return [math.ceil(min(float(capacity), most) / unit) for capacity in capacity_bytes]


def lasting_units(problem: PlacementProblem, device: Sequence[int]) -> NDArray[np.int64]:
    """Return (devices,) the stored and saved bytes of each device, in :func:`unit_bytes`, rounded down."""
    lasting, own = np.zeros(problem.devices.count, dtype=np.int64), lasting_bytes(problem)
    unit = unit_bytes(problem)
    # Not ``lasting[device] +=``, which would count only one operator of each device.
    np.add.at(lasting, list(device), (own // unit).astype(np.int64))
    for tensor in kept_tensors(problem):
        # On its producer's device a stored tensor is the parameter itself, which is part of ``own``.
        counted = {device[tensor.producer]} if tensor.stored else set()
        lasting[list({device[o] for o in tensor.kept_by} - counted)] += int(tensor.bytes // unit)
    return lasting


def obeys(problem: PlacementProblem, device: Sequence[int], rules: Rules) -> bool:
    """Return whether a placement keeps the stored and saved bytes of each device within its limit."""
    limits = most_units(problem, rules, problem.devices.capacity_bytes.tolist())
    return bool((lasting_units(problem, device) <= limits).all())

"""A step of several micro-batches as a step of a larger problem: every operator once for each of them.

Devices run all forwards, micro-batch after micro-batch, then all backwards in the same order of
micro-batches, then the optimizer once (GPipe: Huang et al., NeurIPS 2019). So the simulation of a step need
not know about micro-batches.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import numpy as np

from tensoropt.placement.problem import PlacedTensor, Placement, PlacementProblem
from tensoropt.types import Floats


def repeat_problem(problem: PlacementProblem) -> PlacementProblem:
    """Return the problem of a one-batch step in which everything occurs once for each of its micro-batches.

    Operator ``o`` of micro-batch ``i`` is operator ``i * n + o``, and likewise for tensors. What is stored,
    and the optimizer's step over it, occurs once, with the first micro-batch.
    """

    count = problem.micro_batches

    def each(values: Floats) -> Floats:
        return np.concatenate([values] * count)

    def once(values: Floats) -> Floats:
        return np.concatenate([values, *[np.zeros_like(values)] * (count - 1)])

    size, peaks, handed = problem.size, problem.update_peak_bytes, problem.handed_peak_bytes
    copies = range(count)
    return replace(
        problem,
        names=problem.names * count,
        forward_s=each(problem.forward_s),
        backward_s=each(problem.backward_s),
        update_s=once(problem.update_s),
        parameter_bytes=once(problem.parameter_bytes),
        gradient_bytes=once(problem.gradient_bytes),
        optimizer_bytes=once(problem.optimizer_bytes),
        kept_bytes=each(problem.kept_bytes),
        forward_peak_bytes=each(problem.forward_peak_bytes),
        backward_peak_bytes=each(problem.backward_peak_bytes),
        tensors=tuple(
            _shifted(tensor, i * size, i * len(problem.tensors)) for i in copies for tensor in problem.tensors
        ),
        update_peak_bytes=None if peaks is None else once(peaks),
        handed_peak_bytes=None if handed is None else each(handed),
        # An operator lies where its parameters do, in every micro-batch.
        together=tuple(
            tuple(i * size + o for i in copies for o in operators) for operators in problem.together
        ),
        pinned=tuple((i * size + o, allowed) for i in copies for o, allowed in problem.pinned),
        micro_batches=1,
    )


def _shifted(tensor: PlacedTensor, operators: int, tensors: int) -> PlacedTensor:
    """Return the tensor in a later micro-batch, whose operators and tensors have numbers higher by so
    much."""
    return replace(
        tensor,
        producer=tensor.producer + operators,
        readers=tuple(r + operators for r in tensor.readers),
        kept_by=tuple(o + operators for o in tensor.kept_by),
        lies_in=None if tensor.lies_in is None else tensor.lies_in + tensors,
        gradients_in={r + operators: t + tensors for r, t in tensor.gradients_in.items()},
        gradient_extents={r + operators: size for r, size in tensor.gradient_extents.items()},
    )


def repeat_placement(placement: Placement, count: int) -> Placement:
    """Return the placement of the problem that :func:`repeat_problem` makes: each device runs its order once
    for every micro-batch."""
    size = len(placement.device)

    def repeated(order: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(chain.from_iterable((i * size + o for o in order) for i in range(count)))

    return Placement(
        placement.device * count,
        tuple(map(repeated, placement.forward)),
        # Given even if it mirrors forward: the reverse of everything would begin with the last micro-batch.
        tuple(map(repeated, placement.backward_orders)),
    )

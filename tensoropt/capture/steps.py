"""One training step that leaves the model's state unchanged, and the differences between two such steps.

If NaN and infinity are not at the same positions in both steps, the difference is infinite: ``max`` keeps
infinity, but not NaN.
"""

from __future__ import annotations

import contextlib
import copy
import math
import pickle
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from tensoropt.graph import OperatorGraph

LEAST_SCALE = 1e-30
"""The least value by which a difference is divided to make it relative."""
LEAST_OUTPUT = 1e-12
"""The least value by which a difference of a model's outputs or loss is divided."""
GRADIENT_FLOOR = 1e-3
"""The least value by which a difference of gradients is divided, as a share of the largest element of all
gradients: the gradients of BERT's key biases are near 0."""
ROUNDING_FACTOR = 10.0
"""A difference counts as rounding up to this factor times the effect of a rounding error in every parameter;
an assumption."""
_UNIT = {"float64": 1e-15, "float32": 1e-7, "float16": 1e-3, "bfloat16": 8e-3}
"""The relative rounding error of one value, by the narrowest dtype in the graph; widest dtype first."""


class Worst(NamedTuple):
    size: float
    name: str


def worst(differences: Mapping[str, float]) -> Worst:
    """Return the largest difference and its name; 0 and "" if there are no differences."""
    name = max(differences, key=differences.__getitem__, default="")
    return Worst(differences[name], name) if name else Worst(0.0, "")


def difference(got: Tensor, want: Tensor, whole: Tensor | None = None, floor: float = 0.0) -> float:
    """Return the largest absolute difference, divided by the larger of ``floor`` and the largest finite
    absolute value of ``whole``.

    Args:
        got: the result.
        want: the expected result.
        whole: the whole tensor if ``want`` is a piece; by default ``want``.

    Returns:
        0 for equal and for empty tensors; inf for different shapes, and if NaN or infinity is in only one of
        the two tensors at some position.
    """
    if got.shape != want.shape:
        return math.inf
    if not want.numel():
        return 0.0
    # The expected value may be on the CPU, where the unsplit model's results are kept.
    actual, wanted = wide(got), wide(want.to(got.device))
    finite = wanted.isfinite()
    # NaN equals nothing, itself included.
    alike = (actual == wanted) | (actual.isnan() & wanted.isnan())
    if bool(((~finite | ~actual.isfinite()) & ~alike).any()):
        return math.inf
    # If both have the same infinity, the difference would be NaN, which `max` passes on.
    apart = torch.where(finite, actual - wanted, 0.0).abs().max()
    return float(apart) / max(largest(want if whole is None else whole), floor, LEAST_SCALE)


def largest(value: Tensor) -> float:
    if not value.numel():
        return 0.0
    numbers = wide(value)
    return float(torch.where(numbers.isfinite(), numbers, 0.0).abs().max())


def largest_of(values: Iterable[Tensor]) -> float:
    """Return the largest finite absolute value of several tensors, or 0."""
    return max(map(largest, values), default=0.0)


def wide(value: Tensor) -> Tensor:
    value = value.detach()
    # A lazily conjugated tensor has no real view before it is resolved.
    return (torch.view_as_real(value.resolve_conj()) if value.is_complex() else value).double()


_SEED = 0
"""The seed for numbers that are drawn while a model is captured."""


@contextlib.contextmanager
def seeded(seed: int = _SEED, model: nn.Module | None = None) -> Iterator[Callable[[], bool]]:
    """While open, seed Python's and numpy's global generators, and let modules that have own generators draw
    from copies; restore all at the end.

    Yields:
        A function that returns whether a number has been drawn so far.
    """
    kinds = (random.Random, np.random.Generator, np.random.RandomState)
    fields = [vars(module) for module in (() if model is None else model.modules())]
    own = [(holder, name, v) for holder in fields for name, v in holder.items() if isinstance(v, kinds)]
    copies = {id(generator): copy.deepcopy(generator) for _, _, generator in own}
    saved, saved_numpy = random.getstate(), np.random.get_state()

    def state() -> bytes:
        return pickle.dumps((random.getstate(), np.random.get_state(), [*copies.values()]))

    try:
        for holder, name, generator in own:
            holder[name] = copies[id(generator)]
        random.seed(seed)
        np.random.seed(seed % 2**32)
        begun = state()
        yield lambda: state() != begun
    finally:
        random.setstate(saved)
        np.random.set_state(saved_numpy)
        for holder, name, generator in own:
            holder[name] = generator


DRAWN = (
    "forward draws numbers from Python's or numpy's random module; the graph repeats the run with "
    f"seed {_SEED} in every step (layers that this run dropped stay dropped); for numbers that change from "
    "step to step, multiply by a mask made with torch.rand"
)


@contextlib.contextmanager
def unchanged(model: nn.Module, *, values: bool = False) -> Iterator[None]:
    """On exit, restore the attributes of a model's modules and the contents of their lists, dicts and sets.

    Args:
        values: whether values of parameters and buffers are restored, too, if code wrote into them.
    """
    modules = list(model.modules())
    attributes = [dict(vars(module)) for module in modules]
    found = (value for fields in attributes for value in fields.values())
    contents = {id(value): (value, value.copy()) for value in found if type(value) in (dict, list, set)}
    stored = [*model.parameters(), *model.buffers()] if values else []
    copies = [(tensor, tensor.detach().clone()) for tensor in stored]
    try:
        yield
    finally:
        for module, before in zip(modules, attributes, strict=True):
            vars(module).clear()
            vars(module).update(before)
        for holder, before in contents.values():
            if isinstance(holder, list):
                holder[:] = before
            else:
                holder.clear()
                holder.update(before)
        with torch.no_grad():
            # By value, because kernels of norms change statistics without increasing a version.
            for tensor, value in copies:
                if not torch.equal(tensor, value):
                    tensor.copy_(value)


@dataclass(frozen=True)
class ModelStep:
    """The losses of a model's calls, the gradients of the first loss, and the buffers after the last call."""

    losses: Sequence[Tensor]
    gradients: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]

    @property
    def finite(self) -> bool:
        return all(bool(value.isfinite().all()) for value in (*self.losses, *self.gradients.values()))


class Apart(NamedTuple):
    """The largest relative difference between two steps' losses, gradients and buffers, with the names of the
    gradient and the buffer that differ most."""

    loss: float
    gradient: Worst
    buffer: Worst


def run_step(
    run: Callable[[], Tensor], parameters: Mapping[str, nn.Parameter], model: nn.Module, calls: int = 1
) -> ModelStep:
    """Run a step of a model, and restore the model's state afterwards.

    Args:
        run: function that returns the loss of one call.
        parameters: the trained parameters, by name; a parameter without a gradient gets a gradient of zeros.
        calls: number of calls of ``run``; each call reads the buffers that the previous call wrote.
    """
    with torch.random.fork_rng(devices=[]), unchanged(model, values=True), torch.enable_grad():
        torch.manual_seed(0)
        losses = [run()]
        found = torch.autograd.grad(losses[0], list(parameters.values()), allow_unused=True)
        losses += [run() for _ in range(calls - 1)]
        buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    pairs = zip(parameters.items(), found, strict=True)
    gradients = {name: torch.zeros_like(p) if g is None else g for (name, p), g in pairs}
    return ModelStep([loss.detach() for loss in losses], gradients, buffers)


def apart(actual: ModelStep, expected: ModelStep, floor: float | None = None) -> Apart:
    """Return the largest relative differences between two steps; buffers that only one step has are left out.

    Args:
        floor: least value by which differences of gradients are divided; by default ``GRADIENT_FLOOR`` times
            the largest element of the expected gradients.
    """
    if floor is None:
        floor = GRADIENT_FLOOR * largest_of(expected.gradients.values())
    losses = zip(actual.losses, expected.losses, strict=True)
    gradients = {
        name: difference(actual.gradients[name], value, floor=floor)
        for name, value in expected.gradients.items()
    }
    buffers = {
        name: difference(actual.buffers[name], value, floor=GRADIENT_FLOOR)
        for name, value in expected.buffers.items()
        if name in actual.buffers
    }
    loss = max((difference(made, wanted, floor=LEAST_OUTPUT) for made, wanted in losses), default=0.0)
    return Apart(loss, worst(gradients), worst(buffers))


def rounding(
    run: Callable[[], Tensor],
    parameters: Mapping[str, nn.Parameter],
    model: nn.Module,
    expected: ModelStep,
    graph: OperatorGraph,
) -> Apart:
    """Return the differences that rounding explains: ``ROUNDING_FACTOR`` times those between the model's own
    steps without and with a random rounding error in every parameter."""
    unit = _UNIT[precision(graph)]
    generator = torch.Generator().manual_seed(0)
    changes = []
    with unchanged(model, values=True):
        for _ in range(2):
            with torch.no_grad():
                for p in parameters.values():
                    p.mul_(1 + unit * torch.randn(p.shape, generator=generator).to(p))
            changes.append(apart(run_step(run, parameters, model, len(expected.losses)), expected))
    loss, gradient, buffer = (max(sizes) for sizes in zip(*changes, strict=True))
    gradient, buffer = (Worst(ROUNDING_FACTOR * one.size, one.name) for one in (gradient, buffer))
    return Apart(ROUNDING_FACTOR * loss, gradient, buffer)


def precision(graph: OperatorGraph) -> str:
    """Return the narrowest floating-point dtype in a graph."""
    used = {tensor.dtype for tensor in graph.tensors.values()}
    return next((dtype for dtype in reversed(_UNIT) if dtype in used), "float32")

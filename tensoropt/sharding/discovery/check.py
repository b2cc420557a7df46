"""The rule checker: it runs an operator whole and in pieces, and checks whether the pieces recombine.

A rule claims how every operand is placed on a mesh axis for each of its choices, forward and backward. The
claim is tested in the way it will be used: operands are cut (or turned into summands) according to their
placements, every rank runs the call that :func:`tensoropt.ops.localise.localise` gives it, outputs and input
gradients are reassembled according to *their* placements, and the result must equal that of the whole
operator. Kernels that communicate run on one thread per rank, and what they send must be what they declared,
because that is what is priced.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tensoropt.graph import FLOATING, Operator, OperatorGraph
from tensoropt.ops.atom_graph import AtomGraph
from tensoropt.ops.calls import MICRO_AXIS, InnerCollective, LocalCall, OperatorShard
from tensoropt.ops.context import SingleDevice
from tensoropt.ops.index_space import NONE
from tensoropt.ops.layouts import Layout, layout_names
from tensoropt.ops.localise import draws_numbers, localise
from tensoropt.ops.registry import bind, spec_of
from tensoropt.sharding.discovery.pieces import Coordinate, difference, distribute
from tensoropt.sharding.discovery.samples import sample_inputs
from tensoropt.sharding.discovery.thread_ranks import ThreadedRanks
from tensoropt.sharding.reshard.steps import forward_placements, gradient_placements

Tensors = dict[str, torch.Tensor]
_TOLERANCE = {
    torch.float64: 1e-8,
    torch.complex128: 1e-8,
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
    torch.bfloat16: 4e-2,
    torch.float16: 4e-3,
}
"""Relative errors that count as rounding. The numbers are assumptions: far above a type's precision, because
sums of pieces round in another order, and far below what a wrong claim gives."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A rule's claim that does not hold.

    Attributes:
        choices, mesh: how the operator was split.
        tensor: the output, or the operand with a wrong gradient; "" for the operator as a whole.
        kind: ``value``, ``gradient``, ``shape``, ``collectives`` or ``error``.
        detail: what went wrong.
    """

    operator: str
    target: str
    choices: tuple[str, ...]
    mesh: tuple[int, ...]
    tensor: str
    kind: str
    detail: str

    def __str__(self) -> str:
        split = " x ".join(f"{c}/{n}" for c, n in zip(self.choices, self.mesh, strict=True) if n > 1)
        what = f"{self.kind} of {self.tensor or 'the call'}"
        return f"{self.operator} ({self.target}) split {split or 'nowhere'}: {what}: {self.detail}"


class _Wrong(Exception):  # noqa: N818 - carries a finding, never escapes this module
    def __init__(self, kind: str, tensor: str, detail: str):
        super().__init__(detail)
        self.kind, self.tensor, self.detail = kind, tensor, detail


@dataclass(frozen=True)
class _Run:
    """The results of one rank (or of the whole operator): outputs by name, gradients by operand name."""

    outputs: Tensors
    gradients: Tensors


def check_choices(
    op: Operator,
    atoms: AtomGraph,
    choices: tuple[int, ...],
    mesh: tuple[int, ...],
    seed: int = 0,
    scale: float = 1.0,
) -> Mismatch | None:
    """Check that splitting ``op`` gives the same as the whole operator; return None, or the first claim that
    fails.

    Args:
        scale: the scale of operands and of the outputs' gradients; an operator with thresholds (a backward
            that clips) behaves differently for large ones.
    """
    try:
        _check(op, atoms, choices, mesh, seed, scale)
    except _Wrong as wrong:
        dims = atoms.spaces[op.name].dims
        names = tuple(dims[c].name if c >= 0 else layout_names((c,))[0] for c in choices)
        return Mismatch(op.name, op.target, names, mesh, wrong.tensor, wrong.kind, wrong.detail)
    return None


def _check(
    op: Operator,
    atoms: AtomGraph,
    choices: tuple[int, ...],
    mesh: tuple[int, ...],
    seed: int,
    scale: float,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    values, whole, gradients = _whole(op, atoms, generator, len(mesh), scale)
    split = OperatorShard(op, atoms, choices, mesh)
    reads = {o.tensor: split.layout(o, written=False) for o in split.space.reads}
    writes = {o.tensor: split.layout(o, written=True) for o in split.space.writes}
    ranks = list(itertools.product(*(range(size) for size in mesh)))

    def spread(tensors: Tensors, layouts: dict[str, Layout]) -> dict[Coordinate, Tensors]:
        spread: dict[Coordinate, Tensors] = {at: {} for at in ranks}
        for name, value in tensors.items():
            for at, piece in distribute(value, atoms.atoms[name], layouts[name], mesh, generator).items():
                spread[at][name] = piece
        return spread

    # Operands have forward placements and gradients of outputs have gradient placements: a claim has both
    # halves, and each is tested with the pieces that the executor would have.
    inputs = spread(values, {n: forward_placements(layout) for n, layout in reads.items()})
    incoming = spread(gradients, {n: gradient_placements(layout) for n, layout in writes.items()})
    runs = _run_ranks(op, atoms, choices, mesh, inputs, incoming)
    # The coarsest type among inputs and outputs determines the amount of rounding.
    tolerance = max([_TOLERANCE.get(v.dtype, 0.0) for v in (*values.values(), *whole.outputs.values())])

    def compare(kind: str, name: str, value: torch.Tensor, layout: Layout) -> None:
        pieces = {at: (run.outputs if kind == "value" else run.gradients)[name] for at, run in runs.items()}
        found = difference(value, pieces, atoms.atoms[name], layout, mesh, tolerance)
        if found is not None:
            raise _Wrong(kind if found[0] == "value" else found[0], name, found[1])

    for name, value in whole.outputs.items():
        if not _is_read(atoms.graph, name):
            continue  # nothing depends on its placement: it is for the operator's own backward
        compare("value", name, value, forward_placements(writes[name]))
    for name, value in whole.gradients.items():
        compare("gradient", name, value, gradient_placements(reads[name]))


# -- running --------------------------------------------------------------------------------------


def _whole(
    op: Operator, atoms: AtomGraph, generator: torch.Generator, axes: int, scale: float
) -> tuple[Tensors, _Run, Tensors]:
    """The inputs, the whole operator's run on them, and the gradient given to each of its outputs."""
    graph = atoms.graph
    split = OperatorShard(op, atoms, (NONE,) * axes, (1,) * axes, (0,) * axes)
    local = localise(split)
    random = local.is_kernel and (spec_of(op.target).random or draws_numbers(op))
    # PyTorch's own call of a random operator would draw other numbers than the pieces, whose kernels draw by
    # position; everything else is compared with PyTorch's own call.
    call = local if random else LocalCall(op.target, op.args, op.kwargs, op.name)
    values: Tensors = {}
    error: Exception | None = None
    for exact in (True, False):  # some calls exist only in the graph's own precision
        values = sample_inputs(op, graph, generator, exact=exact)
        if scale != 1.0:
            values = {
                name: value * scale if value.is_floating_point() and name not in graph.constants else value
                for name, value in values.items()
            }
        try:
            outputs = _outputs(op, bind(call, SingleDevice()), call, values)
            break
        except RuntimeError as failed:
            error = failed
    else:
        raise _Wrong("error", "", f"the whole operator fails: {error}")
    gradients = {
        name: (scale * torch.randn(value.shape, generator=generator, dtype=_widest(value))).to(value.dtype)
        for name, value in outputs.items()
        if _carries_gradient(graph, name)
    }
    run = _execute(op, graph, call, values, gradients, SingleDevice())
    return values, run, gradients


def _widest(value: torch.Tensor) -> torch.dtype:
    return torch.complex128 if value.is_complex() else torch.float64


def _carries_gradient(graph: OperatorGraph, name: str) -> bool:
    return _is_read(graph, name) and graph.tensors[name].requires_grad


def _is_read(graph: OperatorGraph, name: str) -> bool:
    return name in graph.consumers or name in graph.outputs or name in graph.mutations.values()


def _outputs(op: Operator, function: Callable[..., Any], call: LocalCall, tensors: Tensors) -> Tensors:
    args, kwargs = call.arguments(tensors.__getitem__)
    result = function(*args, **kwargs)
    parts = (
        [result] if isinstance(result, torch.Tensor) else [r for r in result if isinstance(r, torch.Tensor)]
    )
    return dict(zip(op.outputs, parts, strict=False))


def _execute(
    op: Operator, graph: OperatorGraph, call: LocalCall, values: Tensors, gradients: Tensors, context: Any
) -> _Run:
    leaves = {n: v.detach().requires_grad_(graph.tensors[n].requires_grad) for n, v in values.items()}
    outputs = _outputs(op, bind(call, context), call, leaves)
    missing = set(op.outputs) - set(outputs)
    if missing:
        raise _Wrong("error", "", f"the call does not give {sorted(missing)}")
    wanted = {n: v for n, v in leaves.items() if v.requires_grad}
    given = [n for n in gradients if outputs[n].requires_grad]
    found: Tensors = {}
    if wanted and given:
        if isinstance(context, ThreadedRanks.Context):
            # Everything that this rank's kernels send from now on belongs to backward.
            context.backward = True
        for name in given:
            if gradients[name].shape != outputs[name].shape:
                shapes = f"{tuple(outputs[name].shape)} instead of {tuple(gradients[name].shape)}"
                raise _Wrong("shape", name, shapes)
        results = torch.autograd.grad(
            [outputs[n] for n in given],
            list(wanted.values()),
            [gradients[n] for n in given],
            allow_unused=True,
        )
        found = {
            n: torch.zeros_like(leaf) if g is None else g
            for (n, leaf), g in zip(wanted.items(), results, strict=True)
        }
    elif wanted and gradients:
        # The outputs do not depend differentiably on any operand: the gradients are zeros, also on the
        # pieces.
        found = {n: torch.zeros_like(leaf) for n, leaf in wanted.items()}
    return _Run({n: v.detach() for n, v in outputs.items()}, found)


def _run_ranks(
    op: Operator,
    atoms: AtomGraph,
    choices: tuple[int, ...],
    mesh: tuple[int, ...],
    inputs: dict[Coordinate, Tensors],
    incoming: dict[Coordinate, Tensors],
) -> dict[Coordinate, _Run]:
    calls = {at: localise(OperatorShard(op, atoms, choices, mesh, at)) for at in inputs}
    ranks = ThreadedRanks(mesh)

    def work(context: ThreadedRanks.Context) -> _Run:
        at = context.at
        return _execute(op, atoms.graph, calls[at], inputs[at], incoming[at], context)

    try:
        # Only kernels communicate; other calls need no neighbour and run one after another.
        runs = ranks.run(work, parallel=any(call.is_kernel for call in calls.values()))
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        raise _Wrong("error", "", f"{type(error).__name__}: {error}") from error
    element = max(
        [atoms.graph.tensors[n].element_bytes for n in op.inputs() if _floating(atoms.graph, n)], default=8
    )
    for at, call in calls.items():
        declared = Counter(_declared(c) for c in call.collectives)
        # The engine takes sums over micro-batches in time, and nothing is sent for them.
        sent = Counter(s.described(element) for s in ranks.sent[at] if s.axes != (MICRO_AXIS,))
        if sent != declared:
            raise _Wrong("collectives", "", f"sends {dict(sent)}, declares {dict(declared)}")
    return runs


def _declared(collective: InnerCollective) -> tuple[str, tuple[int, ...], int, bool]:
    return collective.kind, collective.axes, collective.bytes, collective.backward


def _floating(graph: OperatorGraph, name: str) -> bool:
    return graph.tensors[name].dtype in FLOATING

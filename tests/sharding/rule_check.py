"""The rule checker: an operator is run whole and in pieces, which have to recombine."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import torch

from tensoropt.graph import FLOATING, Operator, OperatorGraph
from tensoropt.ops.calls import BY_VALUES, MICRO_AXIS, RING_SEND, InnerCollective, LocalCall, OperatorShard
from tensoropt.ops.index_space import NONE, AtomGraph
from tensoropt.ops.kernels import SingleDevice
from tensoropt.ops.layouts import PARTIAL, Atoms, Layout, chunk, flat_index, layout_names
from tensoropt.ops.localise import draws_numbers, localise
from tensoropt.ops.registry import bind, spec_of
from tensoropt.sharding.discovery.check import _ROUNDING, close
from tensoropt.sharding.discovery.probes import sample_inputs
from tensoropt.sharding.reshard.steps import forward_placements, gradient_placements
from tests.engine.threads import in_threads

_Coordinate = tuple[int, ...]


def _distribute(
    value: torch.Tensor, atoms: Atoms, placements: Layout, mesh: Sequence[int], generator: torch.Generator
) -> dict[_Coordinate, torch.Tensor]:
    """Return every rank's piece of ``value``: slices where sharded, random summands where partial."""
    partial = [axis for axis, code in enumerate(placements) if code == PARTIAL and mesh[axis] > 1]
    members = list(itertools.product(*(range(mesh[axis]) for axis in partial)))
    summands = {m: _noise(value, generator) for m in members[1:]}
    # Noise rather than zeros on the other ranks exposes a kernel that mistakes a partial sum for the whole.
    summands[members[0]] = value - sum(summands.values()) if summands else value
    ranks = itertools.product(*(range(size) for size in mesh))
    return {at: shard(summands[tuple(at[a] for a in partial)], atoms, placements, mesh, at) for at in ranks}


def _noise(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if value.is_floating_point() or value.is_complex():
        return torch.randn(value.shape, generator=generator, dtype=value.dtype)
    return torch.randint(0, 5, value.shape, generator=generator, dtype=value.dtype)


def shard(
    value: torch.Tensor, atoms: Atoms, placements: Layout, mesh: Sequence[int], at: _Coordinate
) -> torch.Tensor:
    """Return the part of ``value`` at coordinate ``at``."""
    flat = value.reshape([size for dim in atoms for size in dim])
    for axis, code in enumerate(placements):
        if code >= 0:
            start, length = chunk(flat.shape[code], mesh[axis], at[axis])
            flat = flat.narrow(code, start, length)
    sizes = iter(flat.shape)
    # A copy, so that an operator that reads beyond a piece (by strides) does not find the whole.
    piece = flat.reshape([prod(next(sizes) for _ in dim) for dim in atoms])
    return piece.clone(memory_format=torch.contiguous_format)


def difference(
    whole: torch.Tensor,
    pieces: Mapping[_Coordinate, torch.Tensor],
    atoms: Atoms,
    placements: Layout,
    mesh: Sequence[int],
    tolerance: float,
) -> tuple[str, str] | None:
    """Return how the pieces differ from ``whole``, as (``shape`` or ``value``, details), or None."""
    partial = [axis for axis, code in enumerate(placements) if code == PARTIAL]
    label = "x".join(layout_names(placements))
    for at, piece in pieces.items():
        expected = shard(whole, atoms, placements, mesh, at)
        if piece.shape != expected.shape:
            return "shape", f"{tuple(piece.shape)} instead of {tuple(expected.shape)} as {label}"
        members = itertools.product(*(range(n) if a in partial else (at[a],) for a, n in enumerate(mesh)))
        total = sum((pieces[m] for m in members), torch.zeros_like(piece)) if partial else piece
        if not close(total, expected, tolerance):
            return "value", f"rank {at} is {_far(total, expected)} off as {label}"
    return None


def _far(actual: torch.Tensor, expected: torch.Tensor) -> str:
    wide = torch.complex128 if actual.is_complex() or expected.is_complex() else torch.float64
    actual, expected = actual.to(wide), expected.to(wide)
    return f"{100 * float((actual - expected).norm() / expected.norm().clamp_min(1e-300)):.3g} %"


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Sent:
    kind: str
    axes: tuple[int, ...]
    elements: int
    integer_bytes: int
    backward: bool

    def described(self, element_bytes: int) -> tuple[str, tuple[int, ...], int, bool]:
        size = self.integer_bytes or self.elements * element_bytes
        return self.kind, self.axes, 0 if self.kind == BY_VALUES else size, self.backward


class _ThreadedRanks:
    """All ranks of a mesh as threads; collectives meet at a barrier, in the same order on every rank."""

    def __init__(self, mesh: Sequence[int]):
        self.mesh = tuple(mesh)
        self.places = list(itertools.product(*(range(size) for size in mesh)))
        self.sent: dict[tuple[int, ...], list[_Sent]] = {at: [] for at in self.places}
        self._barrier = threading.Barrier(len(self.places))
        self._board: dict[tuple[int, ...], Any] = {}

    def run(self, work: Callable[[Context], T], *, parallel: bool) -> dict[tuple[int, ...], T]:
        """Call ``work(context)`` on every rank, in turn unless ``parallel``; re-raise the first error."""
        contexts = [_ThreadedRanks.Context(self, at) for at in self.places]
        if not parallel or len(contexts) == 1:
            return {context.at: work(context) for context in contexts}
        found = in_threads(len(contexts), lambda rank: work(contexts[rank]), self._barrier.abort)
        return dict(zip(self.places, found, strict=True))

    class Context:
        def __init__(self, ranks: _ThreadedRanks, at: tuple[int, ...], seed: int = 0, step: int = 0):
            self.ranks, self.at, self.seed, self.step = ranks, at, seed, step
            self.device = torch.get_default_device()
            self.backward = self.alone = False

        def coordinate(self, axes: tuple[int, ...]) -> int:
            return flat_index(self.ranks.mesh, self.at, axes)

        def all_reduce(self, value: torch.Tensor, axes: tuple[int, ...], op: str = "sum") -> torch.Tensor:
            with self._posted("all_reduce", value, value, axes) as of_group:
                values = torch.stack(of_group)
                return values.amax(0) if op == "max" else values.sum(0)

        def all_to_all(
            self,
            value: torch.Tensor,
            axes: tuple[int, ...],
            sent: Sequence[int] | None = None,
            received: Sequence[int] | None = None,
        ) -> torch.Tensor:
            size = prod(self.ranks.mesh[axis] for axis in axes)
            parts = value.detach().split(list(sent) if sent is not None else len(value) // size)
            kind = "all_to_all" if sent is None else BY_VALUES
            with self._posted(kind, value, parts, axes) as of_group:
                return torch.cat([theirs[self.coordinate(axes)] for theirs in of_group])

        def send_around(self, value: torch.Tensor, axes: tuple[int, ...]) -> Callable[[], torch.Tensor]:
            with self._posted(RING_SEND, value, value, axes) as of_group:
                received = of_group[self.coordinate(axes) - 1].clone()
            return lambda: received

        @contextlib.contextmanager
        def _posted(
            self, kind: str, value: torch.Tensor, given: Any, axes: tuple[int, ...]
        ) -> Iterator[list[Any]]:
            """Record a collective, and yield the contributions of the group's ranks, in order."""
            ranks = self.ranks
            bytes_ = 0 if value.is_floating_point() else value.numel() * value.element_size()
            ranks.sent[self.at].append(_Sent(kind, axes, value.numel(), bytes_, self.backward))
            ranks._board[self.at] = given.detach() if isinstance(given, torch.Tensor) else given
            ranks._barrier.wait()
            # All values are posted now. The second wait keeps a fast rank from posting its next value before
            # the slow ones have read this one.
            group = [
                p for p in ranks.places if all(p[a] == self.at[a] for a in range(len(p)) if a not in axes)
            ]
            yield [ranks._board[p] for p in group]
            ranks._barrier.wait()

        def total(self, name: str, value: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
            return self.all_reduce(value, axes)


_Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A rule's claim that does not hold.

    Attributes:
        tensor: the output, or the operand with a wrong gradient; "" for neither.
        kind: ``value``, ``gradient``, ``shape``, ``collectives`` or ``error``.
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
        claim = f"{self.kind} of {self.tensor or 'the call'}"
        return f"{self.operator} ({self.target}) split {split or 'nowhere'}: {claim}: {self.detail}"


class _Wrong(Exception):  # noqa: N818 - carries a finding, never escapes this module
    def __init__(self, kind: str, tensor: str, detail: str):
        super().__init__(detail)
        self.kind, self.tensor, self.detail = kind, tensor, detail


@dataclass(frozen=True)
class _Run:
    """The results of one rank, or of the whole operator: outputs and gradients by name."""

    outputs: _Tensors
    gradients: _Tensors


def check_choices(
    op: Operator, atoms: AtomGraph, choices: tuple[int, ...], mesh: tuple[int, ...]
) -> Mismatch | None:
    """Check that splitting ``op`` gives the whole operator's results; return the first claim that fails."""
    try:
        _check(op, atoms, choices, mesh)
    except _Wrong as wrong:
        dims = atoms.spaces[op.name].dims
        names = tuple(dims[c].name if c >= 0 else layout_names((c,))[0] for c in choices)
        return Mismatch(op.name, op.target, names, mesh, wrong.tensor, wrong.kind, wrong.detail)
    return None


def _check(op: Operator, atoms: AtomGraph, choices: tuple[int, ...], mesh: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    values, whole, gradients = _whole(op, atoms, generator, len(mesh))
    split = OperatorShard(op, atoms, choices, mesh)
    reads = {o.tensor: split.layout(o, written=False) for o in split.space.reads}
    writes = {o.tensor: split.layout(o, written=True) for o in split.space.writes}
    ranks = list(itertools.product(*(range(size) for size in mesh)))

    def spread(tensors: _Tensors, layouts: dict[str, Layout]) -> dict[_Coordinate, _Tensors]:
        spread: dict[_Coordinate, _Tensors] = {at: {} for at in ranks}
        for name, value in tensors.items():
            for at, piece in _distribute(value, atoms.atoms[name], layouts[name], mesh, generator).items():
                spread[at][name] = piece
        return spread

    # Operands have forward placements and gradients of outputs have gradient placements: a claim has both
    # halves, and each is tested with the pieces that the executor would have.
    inputs = spread(values, {n: forward_placements(layout) for n, layout in reads.items()})
    incoming = spread(gradients, {n: gradient_placements(layout) for n, layout in writes.items()})
    runs = _run_ranks(op, atoms, choices, mesh, inputs, incoming)
    # The coarsest type among inputs and outputs determines the amount of rounding.
    tolerance = max([_ROUNDING.get(v.dtype, 0.0) for v in (*values.values(), *whole.outputs.values())])

    def compare(kind: str, name: str, value: torch.Tensor, layout: Layout) -> None:
        pieces = {at: (run.outputs if kind == "value" else run.gradients)[name] for at, run in runs.items()}
        mismatch = difference(value, pieces, atoms.atoms[name], layout, mesh, tolerance)
        if mismatch is not None:
            raise _Wrong(kind if mismatch[0] == "value" else mismatch[0], name, mismatch[1])

    for name, value in whole.outputs.items():
        if not _is_read(atoms.graph, name):
            continue  # nothing depends on its placement: it is for the operator's own backward
        compare("value", name, value, forward_placements(writes[name]))
    for name, value in whole.gradients.items():
        compare("gradient", name, value, gradient_placements(reads[name]))


# -- running --------------------------------------------------------------------------------------


def _whole(
    op: Operator, atoms: AtomGraph, generator: torch.Generator, axes: int
) -> tuple[_Tensors, _Run, _Tensors]:
    graph = atoms.graph
    split = OperatorShard(op, atoms, (NONE,) * axes, (1,) * axes, (0,) * axes)
    local = localise(split)
    random = local.is_kernel and (spec_of(op.target).random or draws_numbers(op))
    # PyTorch's own call of a random operator would draw other numbers than the pieces, whose kernels draw by
    # position; everything else is compared with PyTorch's own call.
    call = local if random else LocalCall(op.target, op.args, op.kwargs, op.name)
    values: _Tensors = {}
    error: Exception | None = None
    for exact in (True, False):  # some calls exist only in the graph's own precision
        values = sample_inputs(op, graph, generator, exact=exact)

        try:
            outputs = _outputs(op, bind(call, SingleDevice()), call, values)
            break
        except (RuntimeError, ValueError, TypeError) as failed:
            error = failed
    else:
        raise _Wrong("error", "", f"the whole operator fails: {error}")
    wide = {n: torch.complex128 if value.is_complex() else torch.float64 for n, value in outputs.items()}
    gradients = {
        name: torch.randn(value.shape, generator=generator, dtype=wide[name]).to(value.dtype)
        for name, value in outputs.items()
        if _is_read(graph, name) and graph.tensors[name].requires_grad
    }
    run = _execute(op, graph, call, values, gradients, SingleDevice())
    return values, run, gradients


def _is_read(graph: OperatorGraph, name: str) -> bool:
    return name in graph.consumers or name in graph.outputs or name in graph.mutations.values()


def _outputs(op: Operator, function: Callable[..., Any], call: LocalCall, tensors: _Tensors) -> _Tensors:
    args, kwargs = call.arguments(tensors.__getitem__)
    result = function(*args, **kwargs)
    parts = (
        [result] if isinstance(result, torch.Tensor) else [r for r in result if isinstance(r, torch.Tensor)]
    )
    return dict(zip(op.outputs, parts, strict=False))


def _execute(
    op: Operator, graph: OperatorGraph, call: LocalCall, values: _Tensors, gradients: _Tensors, context: Any
) -> _Run:
    leaves = {n: v.detach().requires_grad_(graph.tensors[n].requires_grad) for n, v in values.items()}
    outputs = _outputs(op, bind(call, context), call, leaves)
    missing = set(op.outputs) - set(outputs)
    if missing:
        raise _Wrong("error", "", f"the call does not give {sorted(missing)}")
    wanted = {n: v for n, v in leaves.items() if v.requires_grad}
    given = [n for n in gradients if outputs[n].requires_grad]
    results: Sequence[torch.Tensor | None] = [None] * len(wanted)
    if wanted and given:
        if isinstance(context, _ThreadedRanks.Context):
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
    # Operands on which no output depends have gradients of zeros, also on the pieces.
    operand_gradients = {
        n: torch.zeros_like(leaf) if g is None else g
        for (n, leaf), g in zip(wanted.items(), results, strict=True)
        if gradients
    }
    return _Run({n: v.detach() for n, v in outputs.items()}, operand_gradients)


def _run_ranks(
    op: Operator,
    atoms: AtomGraph,
    choices: tuple[int, ...],
    mesh: tuple[int, ...],
    inputs: dict[_Coordinate, _Tensors],
    incoming: dict[_Coordinate, _Tensors],
) -> dict[_Coordinate, _Run]:
    calls = {at: localise(OperatorShard(op, atoms, choices, mesh, at)) for at in inputs}
    ranks = _ThreadedRanks(mesh)

    def work(context: _ThreadedRanks.Context) -> _Run:
        at = context.at
        return _execute(op, atoms.graph, calls[at], inputs[at], incoming[at], context)

    try:
        # Only kernels communicate; other calls need no neighbour and run one after another.
        runs = ranks.run(work, parallel=any(call.is_kernel for call in calls.values()))
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        raise _Wrong("error", "", f"{type(error).__name__}: {error}") from error
    operands = (atoms.graph.tensors[n] for n in op.inputs())
    element = max((t.element_bytes for t in operands if t.dtype in FLOATING), default=8)
    for at, call in calls.items():
        declared = Counter(_declared(c) for c in call.collectives)
        # The engine takes sums over micro-batches in time, and nothing is sent for them.
        sent = Counter(s.described(element) for s in ranks.sent[at] if s.axes != (MICRO_AXIS,))
        if sent != declared:
            raise _Wrong("collectives", "", f"sends {dict(sent)}, declares {dict(declared)}")
    return runs


def _declared(collective: InnerCollective) -> tuple[str, tuple[int, ...], int, bool]:
    size = 0 if collective.kind == BY_VALUES else collective.bytes
    return collective.kind, collective.axes, size, collective.backward

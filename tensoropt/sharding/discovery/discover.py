"""Discovery: how an operator without a rule splits, determined by running it.

A probe of the operator on small random tensors is run whole and in pieces. A way to cut its operands is kept
if the pieces' outputs recombine (concatenation, sum, mean, or each equal to the whole), and if the rule
checker (:mod:`tensoropt.sharding.discovery.check`) confirms outputs *and* gradients: on several shapes and
seeds, in two parts and in single elements (so that any atom of a loop may be cut), and for two loops at a
time. Operators that draw random numbers, keep a state or write to their operands are refused.

The findings are kept in a store, under the operator's signature; findings from a store are checked once more
before they are used, because the operator's code may have changed since.

A user's own operator may hang or crash: it is tried in a fork of this process, which may be lost. That is
recorded too, and not tried a second time until the store forgets it.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from tensoropt.errors import MeasurementError
from tensoropt.graph import FLOATING, Operator, OperatorGraph, Ref, map_refs
from tensoropt.ops.atom_graph import AtomGraph
from tensoropt.ops.builder import Builder
from tensoropt.ops.index_space import NONE, IndexSpace, LoopDim, Operand
from tensoropt.ops.layouts import PARTIAL
from tensoropt.ops.overloads import FUNCTIONS
from tensoropt.ops.registry import resolve_function
from tensoropt.ranks.timeouts import call_in_fork
from tensoropt.sharding.discovery.additive import adds_up
from tensoropt.sharding.discovery.check import check_choices
from tensoropt.sharding.discovery.probe_operators import ProbeOperator, probes_of, value_matters

VERSION = 2
"""A part of every key; increased when the search method changes."""
MOST_TIES = 64
"""The most ways to cut a dim together with dims of other operands that are tried. The number is an
assumption: it only keeps operators with many operands of equal dims from taking forever."""
TRIAL_S = 60.0
"""The seconds that all runs of a user's own operator may take; most finish in a fraction of one."""
SCALES = (1.0, 1e-3, 1e3)
"""The scales of operands and gradients at which a user's own operator is tried: clipping, rounding or
normalising shows at one of them, or is assumed absent. The numbers are an assumption."""
SUM, WHOLE, MEAN = -1, -2, -3
"""The treatment of an output that the loop does not index: parts add up, are equal, or are averaged."""
_KINDS = {SUM: "sum", WHOLE: "whole", MEAN: "mean"}
LOST = "lost"
"""The field of a record with the reason why the operator could not be tried."""


class Kept(Protocol):
    """A place that keeps findings between processes (the profile store is one implementation)."""

    def get(self, key: str, kind: str) -> Any: ...

    def put(self, key: str, record: Any, kind: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Split:
    """One loop: for each distinct operand, in order of first use, the dim that it cuts (None: none), and for
    each output the dim along which it is concatenated, or SUM, WHOLE or MEAN."""

    reads: tuple[int | None, ...]
    writes: tuple[int, ...]

    def __str__(self) -> str:
        cut = ", ".join(f"operand {i} dim {d}" for i, d in enumerate(self.reads) if d is not None)
        return f"{cut} -> {', '.join(_KINDS.get(w, f'dim {w}') for w in self.writes)}"


@dataclass(frozen=True)
class Discovery:
    """The findings about one operator.

    Attributes:
        splits: loops that may be split, each alone or together with any other.
        linear: whether a partial sum may pass through.
        additive: whether the backward of a sum of gradients is the sum of their backwards, as for everything
            that autograd differentiates; a user's own backward may clip or normalise.
        refused: the reason why no search was made, or "".
        lost: whether that is because the operator hung or crashed when it was tried.
    """

    splits: tuple[Split, ...] = ()
    linear: bool = False
    additive: bool = True
    refused: str = ""
    lost: bool = False

    def __str__(self) -> str:
        return self.refused or "; ".join(map(str, self.splits)) or "no split recombines"

    def to_record(self) -> dict[str, Any]:
        """Return the findings as plain data for a store; refusals other than a lost operator are not kept."""
        if self.lost:
            return {LOST: self.refused}
        splits = [[list(s.reads), list(s.writes)] for s in self.splits]
        # Recorded only if it is not additive: older records lack the field.
        return {"splits": splits, "linear": self.linear} | ({} if self.additive else {"additive": False})

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Discovery:
        """Inverse of :meth:`to_record`."""
        if LOST in record:
            return cls(refused=record[LOST], lost=True, additive=False)
        splits = tuple(Split(tuple(r), tuple(w)) for r, w in record["splits"])
        return cls(splits, bool(record["linear"]), bool(record.get("additive", True)))


def discover(op: Operator, graph: OperatorGraph, kept: Kept | None = None) -> Discovery:
    """Return how the operator splits; see the module.

    Args:
        kept: a store that is searched first and written to afterwards.
    """
    key = signature(op, graph)
    record = kept.get(key, kind="discovery") if kept is not None else None
    before = Discovery.from_record(record) if record is not None else None
    if not _is_defined(op):
        # A saved graph only names it; the findings from when it was saved are all there is.
        return before or Discovery(refused="it is the model's own, which is not loaded here", additive=False)
    refused = _refusal(op)
    if refused:
        return Discovery(refused=refused)
    if before is not None and before.lost:
        return before
    # The fork is for users' own operators, which may hang or crash; PyTorch's own are trusted not to.
    found = (_tried if _is_pytorchs(op) else _tried_apart)(op, graph, before)
    if found.refused and not _is_pytorchs(op):
        found = replace(found, additive=False)  # unknown: a user's own may do anything
    # Other refusals are quickly repeated, but a lost operator may take all of TRIAL_S once more.
    if kept is not None and found != before and (found.lost or not found.refused):
        kept.put(key, found.to_record(), kind="discovery")
    return found


def _tried(op: Operator, graph: OperatorGraph, before: Discovery | None) -> Discovery:
    """Return the findings ``before`` if they still hold, otherwise new findings."""
    probes = list(probes_of(op, graph))
    if not probes:
        return Discovery(refused="it does not run on small random tensors")
    additive = _is_pytorchs(op) or all(adds_up(probe, SCALES) for probe in probes)
    alike = before is not None and before.additive == additive
    if before is not None and alike and all(_holds(p, before.splits, before.linear) for p in probes):
        return before
    refused = "; ".join({r for r in map(_unsteady, probes) if r})
    if refused:
        return Discovery(refused=refused)
    found = _search(probes)
    splits = tuple(split for split in found.splits if _fits(op, graph, split))
    return replace(found, splits=splits, additive=additive)


def _fits(op: Operator, graph: OperatorGraph, split: Split) -> bool:
    """Whether all dims of a loop have the same length at the operator's own sizes, which perhaps no probe
    had."""
    read = zip(dict.fromkeys(op.inputs()), split.reads, strict=True)
    sizes = {graph.tensors[name].shape[dim] for name, dim in read if dim is not None}
    written = zip(op.outputs, split.writes, strict=True)
    return len(sizes | {graph.tensors[name].shape[dim] for name, dim in written if dim >= 0}) == 1


def _tried_apart(op: Operator, graph: OperatorGraph, before: Discovery | None) -> Discovery:
    """Like :func:`_tried`, but in a fork. A process that ran a backward on a GPU cannot be forked for another
    one (PyTorch's engine refuses); in that case the operator is tried in this process."""

    def child() -> Discovery | None:
        torch.set_num_threads(1)  # this process's OpenMP threads do not exist in its fork
        try:
            # The smallest possible backward: it raises if autograd's engine does not survive the fork.
            torch.zeros((), requires_grad=True).exp().backward()
        except RuntimeError:
            return None
        return _tried(op, graph, before)

    try:
        found = call_in_fork(child, TRIAL_S)
    except MeasurementError as error:
        return Discovery(refused=f"tried on small tensors, {error}", lost=True)
    return found if found is not None else _tried(op, graph, before)


def discovered_space(op: Operator, graph: OperatorGraph, found: Discovery) -> IndexSpace:
    """The index space of an operator, given these findings."""
    builder = Builder(op, graph)
    names = tuple(dict.fromkeys(op.inputs()))
    reads: list[list[Any]] = [[None] * len(graph.tensors[n].shape) for n in names]
    writes: list[list[Any]] = [[None] * len(graph.tensors[n].shape) for n in op.outputs]
    whole: list[list[int]] = [[] for _ in op.outputs]
    means: list[list[int]] = [[] for _ in op.outputs]
    for split in found.splits:
        operand, dim = next((i, d) for i, d in enumerate(split.reads) if d is not None)
        loop = builder.loop(f"found{operand}_{dim}", graph.tensors[names[operand]].shape[dim])
        for position, cut in enumerate(split.reads):
            if cut is not None:
                reads[position][cut] = loop
        for position, written in enumerate(split.writes):
            if written >= 0:
                writes[position][written] = loop
            elif written == WHOLE:
                whole[position].append(loop)
            elif written == MEAN:
                means[position].append(loop)
    for name, labels in zip(names, reads, strict=True):
        builder.read(Ref(name), labels)
    for index, labels in enumerate(writes):
        builder.write(labels, index, synced=whole[index], means=means[index])
    builder.linear = found.linear
    space = builder.build(known=bool(found.splits))
    return replace(space, discovered=bool(found.splits), additive=found.additive)


def signature(op: Operator, graph: OperatorGraph) -> str:
    """A key of the operator's call: its target, its arguments, and the properties of its operands."""
    number: dict[str, int] = {}

    def named(name: str) -> str:
        tensor, known = graph.tensors[name], name in number
        index = number.setdefault(name, len(number))
        value = graph.constants.get(name)
        digest = _digest(value) if value is not None and not known and value_matters(tensor, value) else ""
        return f"<{index} {tensor.shape} {tensor.dtype} {tensor.requires_grad} {digest}>"

    call = repr((map_refs(op.args, named), sorted(map_refs(tuple(op.kwargs.items()), named))))
    digest = hashlib.sha256(call.encode()).hexdigest()[:32]
    return f"{VERSION}/torch-{torch.__version__}/{op.target}/{digest}"


def _digest(value: torch.Tensor) -> str:
    return hashlib.sha256(value.contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def _is_defined(op: Operator) -> bool:
    try:
        resolve_function(op.target)
    except AttributeError:
        return False
    return True


def _is_pytorchs(op: Operator) -> bool:
    return op.target.startswith("aten.")


# -- refusals -------------------------------------------------------------------------------------


def _refusal(op: Operator) -> str:
    function = resolve_function(op.target)
    if torch.Tag.nondeterministic_seeded in getattr(function, "tags", ()):
        return "it draws random numbers"
    schema = getattr(function, "_schema", None)
    if schema is None or schema.is_mutable:
        return "it writes to its operands"
    return ""


def _unsteady(probe: ProbeOperator) -> str:
    """Reason why a probe's results are unreliable: they vary, carry no information, or an operand changes."""
    # Seeding must not change the numbers that the user's script draws afterwards.
    with torch.random.fork_rng(devices=[]):
        values = probe.values(0)
        before = {name: value.clone() for name, value in values.items()}
        runs = []
        for seed in range(3):
            torch.manual_seed(seed)
            runs.append(probe.run(values))
    if any(not torch.equal(before[n], v) for n, v in values.items()):
        return "it writes to its operands"
    first = runs[0]
    if any(v.is_floating_point() and v.numel() and bool(v.isnan().all()) for v in first):
        return "it gives nothing but NaN for random operands"  # pieces of which would equal anything
    same = all(_equal(a, b, 0.0) for run in runs[1:] for a, b in zip(first, run, strict=True))
    return "" if same else "it gives different results for the same operands"


# -- search ---------------------------------------------------------------------------------------


def _search(probes: Sequence[ProbeOperator]) -> Discovery:
    first = probes[0]
    found: list[Split] = []
    taken: set[tuple[int, int]] = set()
    written: set[tuple[int, int]] = set()
    for operand, tensor in enumerate(first.operands):
        for dim in range(len(tensor.shape)):
            # A dim belongs to only one loop, as in a rule.
            if (operand, dim) in taken or tensor.shape[dim] < 2:
                continue
            for split in _candidates(first, operand, dim, taken):
                cut = {(i, d) for i, d in enumerate(split.writes) if d >= 0}
                # A dim of an output also belongs to only one loop.
                if cut & written:
                    continue
                # Earlier loops were checked when they were added; the new one is checked alone and with each
                # of them.
                if all(_holds(probe, (*found, split), False, first=len(found)) for probe in probes):
                    found.append(split)
                    written |= cut
                    taken.update((i, d) for i, d in enumerate(split.reads) if d is not None)
                    break
    # A few samples prove that a partial sum passes a function's own backward only if nothing in it may depend
    # on the size of a value.
    linear = not first.op.target.startswith(f"{FUNCTIONS}.") and all(
        t.dtype in FLOATING for t in first.operands
    )
    linear = linear and all(_holds(probe, (), True) for probe in probes)
    return Discovery(tuple(found), linear)


def _candidates(probe: ProbeOperator, operand: int, dim: int, taken: set[tuple[int, int]]) -> Iterator[Split]:
    """Yield the ways to cut the dim, together with dims of other operands of equal length, whose outputs
    recombine."""
    size = probe.operands[operand].shape[dim]
    choices: list[list[int | None]] = []
    for index, other in enumerate(probe.operands):
        like = [d for d, s in enumerate(other.shape) if s == size and (index, d) not in taken]
        choices.append([dim] if index == operand else [None, *like])
    ways = itertools.islice(itertools.product(*choices), MOST_TIES)
    values = probe.values(0)
    whole = probe.run(values)
    for reads in ways:
        pieces = _pieces(probe, values, reads, size)
        if pieces is None:
            continue
        parts_of = zip(*pieces, strict=True)
        writes = [_recombined(w, parts, size) for w, parts in zip(whole, parts_of, strict=True)]
        if all(w is not None for w in writes):
            yield Split(tuple(reads), tuple(w for w in writes if w is not None))


def _pieces(
    probe: ProbeOperator, values: Mapping[str, torch.Tensor], reads: Iterable[int | None], size: int
) -> list[list[torch.Tensor]] | None:
    # Equal pieces only: whether a dim may be cut unevenly is not tested.
    parts = next(p for p in range(2, size + 1) if size % p == 0)
    cut = {
        t.name: values[t.name].chunk(parts, d) if d is not None else [values[t.name]] * parts
        for t, d in zip(probe.operands, reads, strict=True)
    }
    results = []
    for part in range(parts):
        try:
            results.append(probe.run({n: v[part].contiguous() for n, v in cut.items()}))
        except Exception:  # an unknown operator may raise anything; then this is no way to cut it
            return None
    return results if all(len(r) == len(probe.outputs) for r in results) else None


def _recombined(whole: torch.Tensor, parts: Sequence[torch.Tensor], size: int) -> int | None:
    """The dim along which the parts concatenate to the whole, or SUM, WHOLE, MEAN, or None.

    A loop has one size: a dim whose size differs from that of the cut dim (for example because each row is
    repeated) is not the loop's, although its pieces follow one another.
    """
    if len({p.shape for p in parts}) != 1:
        return None
    for dim in range(whole.dim()):
        shape = [s * len(parts) if i == dim else s for i, s in enumerate(parts[0].shape)]
        if list(whole.shape) == shape and shape[dim] == size and _equal(torch.cat(list(parts), dim), whole):
            return dim
    if parts[0].shape != whole.shape:
        return None
    if all(_equal(p, whole) for p in parts):
        return WHOLE
    if whole.dtype == torch.bool:
        return None
    # Whole comes before sum: parts that are all zero are both, and equal parts need no collective.
    total = torch.stack(list(parts)).sum(0).to(whole.dtype)
    if _equal(total, whole):
        return SUM
    exact = whole.is_floating_point() or whole.is_complex()
    return MEAN if exact and _equal(total / len(parts), whole) else None


def _equal(found: torch.Tensor, wanted: torch.Tensor, tolerance: float = 1e-4) -> bool:
    if found.shape != wanted.shape:
        return False
    inexact = wanted.is_floating_point() or wanted.is_complex()
    if not inexact or tolerance == 0.0:
        return bool(((found == wanted) | ((found != found) & (wanted != wanted))).all())
    # Sums of pieces round in another order; that 8 roundings are enough for half precision is an assumption.
    tolerance = max(tolerance, 8 * torch.finfo(wanted.dtype).eps)
    return torch.allclose(found, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)


# -- verification ---------------------------------------------------------------------------------


def _holds(
    probe: ProbeOperator,
    splits: Sequence[Split],
    linear: bool,
    *,
    first: int = 0,
    seeds: Sequence[int] = (1, 2),
) -> bool:
    """Whether loops from ``first`` on are right on this probe, forward and backward: each alone, in few parts
    and in single elements, and with every loop before it. Without gradients, the values decide."""
    space = _separate(discovered_space(probe.op, probe.graph, Discovery(tuple(splits), linear)), probe)
    atoms = {t.name: tuple((s,) if s > 1 else () for s in t.shape) for t in probe.graph.tensors.values()}
    graph = AtomGraph(probe.graph, {probe.op.name: space}, atoms)
    tries: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((NONE, PARTIAL), (1, 2))] if linear else []
    for loop in range(first, len(splits)):
        size = space.dims[loop].size
        # Axis 0 is the micro-batch axis, which these tries leave alone.
        tries += [((NONE, loop), (1, parts)) for parts in {_smallest_factor(size), size}]
        tries += [
            ((NONE, loop, other), (1, _smallest_factor(size), _smallest_factor(space.dims[other].size)))
            for other in range(loop)
        ]
    try:
        return all(
            check_choices(probe.op, graph, choices, mesh, seed, scale) is None
            for choices, mesh in tries
            for seed in seeds
            for scale in ((1.0,) if _is_pytorchs(probe.op) else SCALES)
        )
    except Exception:  # the operator's own, on pieces that it cannot handle
        return False


def _smallest_factor(size: int) -> int:
    return next(p for p in range(2, size + 1) if size % p == 0)


def _separate(space: IndexSpace, probe: ProbeOperator) -> IndexSpace:
    """The space with an unsplittable loop for every dim that has none, as in refined spaces."""
    dims = list(space.dims)

    def operand(old: Operand) -> Operand:
        shape = probe.graph.tensors[old.tensor].shape
        filled: list[tuple[int, ...]] = []
        for size, loops in zip(shape, old.dims, strict=True):
            if not loops and size > 1:
                dims.append(LoopDim(f"whole{len(dims)}", size, splittable=False))
                loops = (len(dims) - 1,)
            filled.append(loops)
        return replace(old, dims=tuple(filled))

    reads, writes = tuple(map(operand, space.reads)), tuple(map(operand, space.writes))
    return replace(space, dims=tuple(dims), reads=reads, writes=writes)

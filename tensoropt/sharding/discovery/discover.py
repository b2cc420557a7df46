"""Discovery: find how an operator without a sharding rule can be split, by running it.

The operator runs on small random operands, whole and in pieces. A split is accepted if outputs recombine
(concatenation, sum, mean or equality), and outputs and gradients agree for several shapes and seeds, for few
and many parts, and together with other splits.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tensoropt.errors import MeasurementError
from tensoropt.graph import FLOATING, Operator, OperatorGraph, Ref, Tensor, map_refs
from tensoropt.ops.index_space import Builder, IndexSpace
from tensoropt.ops.overloads import FUNCTIONS
from tensoropt.ops.registry import resolve_function
from tensoropt.ranks.worker_process import call_in_fork
from tensoropt.sharding.discovery.check import MOST_PARTS, SCALES, fewest_and_most, holds
from tensoropt.sharding.discovery.probes import (
    MEAN,
    SUM,
    WHOLE,
    Probe,
    Split,
    backward,
    call,
    dtype_of,
    is_pytorchs,
)

_PROBE_SIZES = (6, 8, 10, 12, 14, 18, 20)
"""Sizes of small dims: even, so that they can be halved, and distinct, so that a mix-up of dims shows."""
_LARGEST_PROBE = 1 << 17
"""The most elements an operand may have to run the operator at the model's sizes; an assumption."""


def _probes_of(op: Operator, graph: OperatorGraph) -> Iterator[Probe]:
    names = tuple(dict.fromkeys(op.inputs()))
    tensors = [graph.tensors[n] for n in names]
    sizes = sorted({size for t in tensors for size in t.shape if size > 1})
    # Indices and masks fit only the sizes that they were made for.
    bound = any(_value_matters(t, graph.constants.get(t.name)) for t in tensors)
    maps: list[dict[int, int]] = []
    # At least one probe size is left over, because the second set starts one further on. Two sets, so that a
    # coincidence at one set of sizes is not kept.
    if not bound and len(sizes) < len(_PROBE_SIZES):
        maps = [dict(zip(sizes, _PROBE_SIZES[start:], strict=False)) for start in (0, 1)]
    if all(t.elements <= _LARGEST_PROBE for t in tensors):
        maps.append({})
    for sized in maps:
        with suppress(Exception):  # sizes that depend on each other do not fit any others
            yield _probe(op, graph, tensors, sized)


def _probe(op: Operator, graph: OperatorGraph, tensors: Sequence[Tensor], sized: Mapping[int, int]) -> Probe:
    small = {
        t.name: replace(t, shape=tuple(sized.get(s, s) for s in t.shape), kind="input", key=None)
        for t in tensors
    }
    # A constant's values have its own shape; at other sizes random ones replace them.
    constants = {n: graph.constants[n] for n in small if n in graph.constants and not sized}
    draft = OperatorGraph(small, (), tuple(small), (), constants=constants)
    made = Probe(op, draft).run(Probe(op, draft).values(0))
    assert len(made) == len(op.outputs), f"{op.target} gives {len(made)} tensors"
    results = {
        name: replace(graph.tensors[name], shape=tuple(value.shape))
        for name, value in zip(op.outputs, made, strict=True)
    }
    if not sized:
        assert all(results[n].shape == graph.tensors[n].shape for n in op.outputs)
    alone = replace(draft, tensors={**small, **results}, operators=(op,), outputs=tuple(op.outputs))
    return Probe(op, alone)


def _value_matters(tensor: Tensor, value: Any) -> bool:
    return value is not None and not value.is_meta and tensor.dtype not in FLOATING


_TOLERANCE = 1e-4
"""The tolerated error relative to the largest value; an assumption."""


def _adds_up(probe: Probe, scales: Sequence[float]) -> bool:
    values = probe.values(0)
    generator = torch.Generator().manual_seed(0)
    made = probe.run(values)

    def drawn(scale: float) -> list[torch.Tensor]:
        noise = (torch.randn(m.shape, generator=generator, dtype=torch.float64) for m in made)
        return [(scale * value).to(m.dtype) for value, m in zip(noise, made, strict=True)]

    try:
        for scale in scales:
            first, second = drawn(scale), drawn(scale)
            both = [a + b for a, b in zip(first, second, strict=True)]
            total, *parts = (backward(probe, values, given)[1] for given in (both, first, second))
            if not all(_alike(whole, a + b) for whole, a, b in zip(total, *parts, strict=True)):
                return False
    except Exception:  # the operator's own
        return False
    return True


def _alike(actual: torch.Tensor, wanted: torch.Tensor) -> bool:
    if not wanted.numel():
        return True
    return bool((actual - wanted).abs().max() <= _TOLERANCE * wanted.abs().max() + 1e-30)


_VERSION = 2
"""A part of every key in the store; increased when the search method changes."""
_MOST_TIES = 64
"""The most combinations of operands' dims that are tried for one split; an assumption."""
_TRIAL_S = 60.0
"""The time limit in seconds for all runs of an operator in a fork; most take less than one second."""
_LOST = "lost"
"""The field of a stored record with the reason why the operator must not be tried again."""


class Kept(Protocol):
    """The interface of a store of findings on how operators can be split, such as the profile store."""

    def get(self, key: str, kind: str) -> Any: ...

    def put(self, key: str, record: Any, kind: str) -> None: ...


@dataclass(frozen=True)
class Discovery:
    """How one operator can be split, as found by running it.

    Attributes:
        splits: loops that may be split, alone or together.
        linear: whether partial sums of operands give partial sums of outputs.
        additive: whether backward is linear in the gradient; a user's own operator may clip or normalise.
        refused: the reason why the operator stays whole, or "".
        lost: whether it hung or crashed, so that it is not tried again.
        wrong: whether its fake kernel gives wrong sizes. This is not stored, as the kernel may be corrected.
    """

    splits: tuple[Split, ...] = ()
    linear: bool = False
    additive: bool = True
    refused: str = ""
    lost: bool = False
    wrong: bool = False

    def to_record(self) -> dict[str, Any]:
        """Return the findings as plain data for the store. Of an operator that hung or crashed (``lost``),
        this is only the reason ``refused``; of any other, ``refused`` and ``wrong`` are left out."""
        if self.lost:
            return {_LOST: self.refused}
        splits = [[list(s.reads), list(s.writes)] for s in self.splits]
        # Recorded only if it is not additive: older records lack the field.
        return {"splits": splits, "linear": self.linear} | ({} if self.additive else {"additive": False})

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Discovery:
        if _LOST in record:
            return cls(refused=record[_LOST], lost=True, additive=False)
        splits = tuple(Split(tuple(r), tuple(w)) for r, w in record["splits"])
        return cls(splits, bool(record["linear"]), bool(record.get("additive", True)))


def discover(op: Operator, graph: OperatorGraph, kept: Kept | None = None) -> Discovery:
    """Return how an operator can be split; findings in the store ``kept`` are checked, new ones stored."""
    key = signature(op, graph)
    record = kept.get(key, kind="discovery") if kept is not None else None
    before = Discovery.from_record(record) if record is not None else None
    try:
        refused = _refusal(op)
    except AttributeError:
        # A saved graph only names it; the findings from when it was saved are all there is.
        return before or Discovery(refused="the model that defines it is not loaded here", additive=False)
    if refused:
        return Discovery(refused=refused)
    if before is not None and before.lost:
        return before
    discovery = (_tried_apart if _may_crash(op, graph) else _tried)(op, graph, before)
    if discovery.refused and not is_pytorchs(op):
        discovery = replace(discovery, additive=False)  # unknown: a user's own may do anything
    # Other refusals are quickly repeated, but a lost operator may take all of TRIAL_S once more.
    if kept is not None and discovery != before and (discovery.lost or not discovery.refused):
        kept.put(key, discovery.to_record(), kind="discovery")
    return discovery


def _tried(op: Operator, graph: OperatorGraph, before: Discovery | None) -> Discovery:
    """Return the findings ``before`` if they still hold, otherwise new ones."""
    probes = list(_probes_of(op, graph))
    if not probes:
        return Discovery(refused="it does not run on small random tensors")
    additive = is_pytorchs(op) or all(_adds_up(probe, SCALES) for probe in probes)
    alike = before is not None and before.additive == additive
    means = before is not None and any(MEAN in split.writes for split in before.splits)
    if means and _drops_nan(probes[0]):
        before = None
    if before is not None and alike and all(holds(p, before.splits, before.linear) for p in probes):
        found = before
    else:
        refused = "; ".join({r for r in map(_unsteady, probes) if r})
        if refused:
            return Discovery(refused=refused)
        found = _search(probes)
        splits = tuple(split for split in found.splits if _fits(op, graph, split))
        found = replace(found, splits=splits, additive=additive)
    wrong = next(filter(None, (_fake_differs(op, graph, split) for split in found.splits)), "")
    return Discovery(refused=wrong, wrong=True, additive=additive) if wrong else found


def _fits(op: Operator, graph: OperatorGraph, split: Split) -> bool:
    read = zip(dict.fromkeys(op.inputs()), split.reads, strict=True)
    sizes = {graph.tensors[name].shape[dim] for name, dim in read if dim is not None}
    written = zip(op.outputs, split.writes, strict=True)
    return len(sizes | {graph.tensors[name].shape[dim] for name, dim in written if dim >= 0}) == 1


def _fake_differs(op: Operator, graph: OperatorGraph, split: Split) -> str:
    names = tuple(dict.fromkeys(op.inputs()))
    operand, dim = next((i, d) for i, d in enumerate(split.reads) if d is not None)
    size = graph.tensors[names[operand]].shape[dim]
    part = size // next(n for n in range(2, size + 1) if size % n == 0)

    def cut(name: str, dim: int | None) -> tuple[int, ...]:
        return tuple(part if d == dim else s for d, s in enumerate(graph.tensors[name].shape))

    shapes = {name: cut(name, dim) for name, dim in zip(names, split.reads, strict=True)}
    wanted = [cut(name, dim) for name, dim in zip(op.outputs, split.writes, strict=True)]
    try:
        with FakeTensorMode(), torch.no_grad():
            made = call(op, {n: torch.empty(shapes[n], dtype=dtype_of(graph.tensors[n])) for n in names})
    except Exception as error:  # the operator's own
        return f"its fake kernel fails for operands of {_listed(shapes.values())}: {error}"
    gives = [tuple(value.shape) for value in made]
    if gives == wanted:
        return ""
    return (
        f"for operands of {_listed(shapes.values())} its fake kernel gives {_listed(gives)}, where the "
        f"operator itself gives {_listed(wanted)}; take the sizes from the operands in register_fake"
    )


def _listed(shapes: Iterable[tuple[int, ...]]) -> str:
    return ", ".join("x".join(map(str, shape)) or "scalar" for shape in shapes)


def _tried_apart(op: Operator, graph: OperatorGraph, before: Discovery | None) -> Discovery:
    """Call :func:`_tried` in a fork, or in this process if its earlier GPU backward forbids forks."""

    def child() -> Discovery | None:
        torch.set_num_threads(1)  # this process's OpenMP threads do not exist in its fork
        try:
            # The smallest possible backward: it raises if autograd's engine does not survive the fork.
            torch.zeros((), requires_grad=True).exp().backward()
        except RuntimeError:
            return None
        return _tried(op, graph, before)

    try:
        discovery = call_in_fork(child, _TRIAL_S)
    except MeasurementError as error:
        return Discovery(refused=f"tried on small tensors, {error}", lost=True)
    return discovery if discovery is not None else _tried(op, graph, before)


def discovered_space(op: Operator, graph: OperatorGraph, discovery: Discovery) -> IndexSpace:
    builder = Builder(op, graph)
    names = tuple(dict.fromkeys(op.inputs()))
    reads: list[list[Any]] = [[None] * len(graph.tensors[n].shape) for n in names]
    writes: list[list[Any]] = [[None] * len(graph.tensors[n].shape) for n in op.outputs]
    whole: list[list[int]] = [[] for _ in op.outputs]
    means: list[list[int]] = [[] for _ in op.outputs]
    for split in discovery.splits:
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
    builder.linear = discovery.linear
    space = builder.build(known=bool(discovery.splits))
    return replace(space, discovered=bool(discovery.splits), additive=discovery.additive)


def signature(op: Operator, graph: OperatorGraph) -> str:
    """Return an operator's key in the store, from PyTorch's version, its target, its arguments, and its
    operands: shapes, dtypes, whether they require gradients, and values of non-float constants."""
    number: dict[str, int] = {}

    def named(name: str) -> str:
        tensor, listed = graph.tensors[name], name in number
        index = number.setdefault(name, len(number))
        value = graph.constants.get(name)
        digest = _digest(value) if value is not None and not listed and _value_matters(tensor, value) else ""
        return f"<{index} {tensor.shape} {tensor.dtype} {tensor.requires_grad} {digest}>"

    call = repr((map_refs(op.args, named), sorted(map_refs(tuple(op.kwargs.items()), named))))
    digest = hashlib.sha256(call.encode()).hexdigest()[:32]
    return f"{_VERSION}/torch-{torch.__version__}/{op.target}/{digest}"


def _digest(value: torch.Tensor) -> str:
    return hashlib.sha256(value.contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def _may_crash(op: Operator, graph: OperatorGraph) -> bool:
    """Return whether the operator may hang or crash: a user's own, or one that reads integers (pivots)."""
    return not is_pytorchs(op) or any(
        t.dtype not in FLOATING and t.dtype != "bool" and not t.dtype.startswith("complex")
        for t in (graph.tensors[name] for name in op.inputs())
    )


# -- refusals -------------------------------------------------------------------------------------


def _refusal(op: Operator) -> str:
    function = resolve_function(op.target)
    if torch.Tag.nondeterministic_seeded in getattr(function, "tags", ()):
        return "it draws random numbers"
    schema = getattr(function, "_schema", None)
    if schema is None or schema.is_mutable:
        return "it writes to its operands"
    return ""


def _unsteady(probe: Probe) -> str:
    # Seeding must not change the numbers that the user's script draws afterwards.
    with torch.random.fork_rng(devices=[]):
        values = probe.values(0)
        before = {name: value.clone() for name, value in values.items()}
        runs = []
        for seed in range(3):
            torch.manual_seed(seed)
            runs.append(probe.run(values))
    first = runs[0]
    if any(v.dtype is torch.complex32 for v in (*values.values(), *first)):
        return "PyTorch does not compare numbers of complex32"
    if any(not torch.equal(before[n], v) for n, v in values.items()):
        return "it writes to its operands"
    if any(v.is_floating_point() and v.numel() and bool(v.isnan().all()) for v in first):
        return "it gives nothing but NaN for random operands"  # pieces of which would equal anything
    same = all(_equal(a, b, 0.0) for run in runs[1:] for a, b in zip(first, run, strict=True))
    return "" if same else "it gives different results for the same operands"


# -- search ---------------------------------------------------------------------------------------


def _ignores(probe: Probe, operands: Collection[str]) -> bool:
    """Return whether results stay the same when the values of the operands change."""
    try:
        values = probe.values(0)
        other = probe.run({**values, **{name: probe.values(1)[name] for name in operands}})
        return all(_equal(a, b, 0.0) for a, b in zip(probe.run(values), other, strict=True))
    except Exception:  # the operator's own, on operands that it does not take
        return False


def _drops_nan(probe: Probe) -> bool:
    values, drawn = probe.values(0), torch.Generator().manual_seed(0)
    for value in filter(torch.is_floating_point, values.values()):
        # Few, and anywhere: a line of nothing but NaN has no mean, and would look as if NaN had passed.
        value.view(-1)[torch.rand(value.numel(), generator=drawn) < 0.2] = torch.nan
    try:
        made = probe.run(values)
    except Exception:  # the operator's own (decompositions refuse NaN): it may do anything with it
        return True
    return not any(bool(part.isnan().any()) for part in made)


def _search(probes: Sequence[Probe]) -> Discovery:
    first = probes[0]
    constant = _ignores(first, [t.name for t in first.operands])
    loops: list[Split] = []
    taken: set[tuple[int, int]] = set()
    written: set[tuple[int, int]] = set()
    for operand, tensor in enumerate(first.operands):
        # Random operands may not be what the operator takes: unsorted bounds of bins count nothing.
        ignored = constant or _ignores(first, [tensor.name])
        for dim in range(len(tensor.shape)):
            # A dim belongs to only one loop, as in a rule.
            if (operand, dim) in taken or tensor.shape[dim] < 2:
                continue
            for split in _candidates(first, operand, dim, taken):
                cut = {(i, d) for i, d in enumerate(split.writes) if d >= 0}
                # A dim of an output also belongs to only one loop.
                if cut & written:
                    continue
                # A constant output also adds up and is equal on all parts, so only its shape counts.
                if ignored and len(cut) < len(split.writes):
                    continue
                # Earlier loops were checked when they were added; the new one is checked alone and with each
                # of them.
                if all(holds(probe, (*loops, split), False, first=len(loops)) for probe in probes):
                    # Parts with unequal numbers of NaN have means of unequal weights. Only means (and
                    # linear functions) are asked: libraries of linear algebra may end the process on NaN.
                    if MEAN in split.writes and _drops_nan(first):
                        continue
                    loops.append(split)
                    written |= cut
                    taken.update((i, d) for i, d in enumerate(split.reads) if d is not None)
                    break
    # A few samples prove that a partial sum passes a function's own backward only if nothing in it may depend
    # on the size of a value.
    own = first.op.target.startswith(f"{FUNCTIONS}.")
    linear = not own and not constant and all(t.dtype in FLOATING for t in first.operands)
    linear = linear and all(holds(probe, (), True) for probe in probes) and not _drops_nan(first)
    return Discovery(tuple(loops), linear)


def _candidates(probe: Probe, operand: int, dim: int, taken: set[tuple[int, int]]) -> Iterator[Split]:
    size = probe.operands[operand].shape[dim]
    choices: list[list[int | None]] = []
    for index, other in enumerate(probe.operands):
        like = [d for d, s in enumerate(other.shape) if s == size and (index, d) not in taken]
        choices.append([dim] if index == operand else [None, *like])
    ways = itertools.islice(itertools.product(*choices), _MOST_TIES)
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
    probe: Probe, values: Mapping[str, torch.Tensor], reads: Iterable[int | None], size: int
) -> list[list[torch.Tensor]] | None:
    # Equal pieces only: whether a dim may be cut unevenly is not tested.
    parts = fewest_and_most(size)[0]
    if parts > MOST_PARTS:
        return None
    cut = {
        t.name: values[t.name].chunk(parts, d) if d is not None else [values[t.name]] * parts
        for t, d in zip(probe.operands, reads, strict=True)
    }
    # Copies: what reads beyond a piece (by strides) would find the whole there.
    copied = partial(torch.clone, memory_format=torch.contiguous_format)
    results = []
    for part in range(parts):
        try:
            results.append(probe.run({name: copied(pieces[part]) for name, pieces in cut.items()}))
        except Exception:  # an unknown operator may raise anything; then this is no way to cut it
            return None
    return results if all(len(r) == len(probe.outputs) for r in results) else None


def _recombined(whole: torch.Tensor, parts: Sequence[torch.Tensor], size: int) -> int | None:
    """Return how parts give the whole: the dim along which they concatenate, or SUM, WHOLE, MEAN, or None."""
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


def _equal(actual: torch.Tensor, wanted: torch.Tensor, tolerance: float = 1e-4) -> bool:
    if actual.shape != wanted.shape:
        return False
    inexact = wanted.is_floating_point() or wanted.is_complex()
    if not inexact or tolerance == 0.0:
        return bool(((actual == wanted) | ((actual != actual) & (wanted != wanted))).all())
    # Sums of pieces round in another order; that 8 roundings are enough for half precision is an assumption.
    tolerance = max(tolerance, 8 * torch.finfo(wanted.dtype).eps)
    return torch.allclose(actual, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)

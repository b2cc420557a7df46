"""Regions: repeated blocks of a model, of which backward may recompute all or some groups.

If all groups are recomputed, only the block's inputs are saved. Its forward, with resharding, then runs again
just before its backward (Chen et al., arXiv 1604.06174, section 4).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from tensoropt.ops.overloads import resolve_overload
from tensoropt.sharding.groups import Group, GroupGraph

_MIN_GROUPS = 3
"""The fewest groups of a block, as smaller ones save little besides their input; an assumption."""


@dataclass(frozen=True)
class Region:
    """A block that may be recomputed wholly or in part.

    Attributes:
        name: the module path (``transformer.h.0``), followed by ``#2``, ... if the block runs several times.
        groups: in execution order.
        rest: the groups after the last one that saves anything; recomputed only if all groups are.
    """

    name: str
    groups: tuple[str, ...]
    rest: tuple[str, ...] = ()


def find_regions(graph: GroupGraph) -> tuple[Region, ...]:
    """Return the blocks of a training graph that can be recomputed, in execution order; none for inference.

    Blocks are submodules with a number in their path, such as layers, of which there are at least two. If
    such lists are nested, the level is chosen at which recomputing all blocks needs the least memory: their
    inputs, activations outside of blocks, and the largest block.
    """
    if not graph.atoms.graph.training:
        return ()
    if graph.regions is not None:
        return tuple(_region(graph, name, groups) for name, groups in graph.regions)
    return _best_level(graph, lambda groups: _has_backward(graph, groups))


def repeated_blocks(graph: GroupGraph) -> tuple[Region, ...]:
    """Return the repeated blocks of a training graph, including those before the first trained parameter."""
    return _best_level(graph, lambda _: True) if graph.atoms.graph.training else ()


def _best_level(graph: GroupGraph, wanted: Callable[[Sequence[Group]], bool]) -> tuple[Region, ...]:
    levels = (_blocks(graph, depth, wanted) for depth in range(_deepest(graph)))
    several = [blocks for blocks in levels if len(blocks) > 1]
    return min(several, key=lambda blocks: _bytes_when_recomputed(graph, blocks), default=())


def _region(graph: GroupGraph, name: str, groups: tuple[str, ...]) -> Region:
    needy = [i for i, group in enumerate(groups) if needs_kept(graph, graph.group_of[group])]
    return Region(name, groups, groups[needy[-1] + 1 :] if needy else ())


def region_of(regions: Iterable[Region]) -> dict[str, Region]:
    return {name: region for region in regions for name in region.groups}


def left_as_views(group: Group) -> frozenset[str]:
    """Return the tensors that a group reads and of which its results may be views.

    If such a tensor is recomputed, so is this group: its saved result would keep the tensor's storage.
    """
    views = {name: frozenset((name,)) for name in group.reads}
    for op in group.operators:
        of = frozenset[str]().union(*(views.get(name, ()) for name in op.inputs()))
        if of and _may_return_a_view(op.target):
            views.update(dict.fromkeys(op.outputs, of))
    return frozenset[str]().union(*(views.get(name, ()) for name in group.writes if name not in group.reads))


def fitting_once(graph: GroupGraph, region: Region, once: Collection[str]) -> frozenset[str]:
    """Return the groups of ``once`` that can run once, as they return no views of recomputed tensors. Groups
    of ``region.rest`` count as in ``once``, too, unless ``once`` is empty."""
    once = {*once, *region.rest} if once else frozenset[str]()
    fitting = set[str]()
    made_again = set[str]()
    for name in region.groups:
        group = graph.group_of[name]
        if name in once and made_again.isdisjoint(left_as_views(group)):
            fitting.add(name)
        else:
            made_again.update(group.writes)
    return frozenset(fitting)


_SOMETIMES_VIEWS = frozenset(("reshape", "contiguous", "flatten", "to", "_to_copy", "dropout"))
"""Operators that return their input, or a view, for some arguments."""


def _may_return_a_view(target: str) -> bool:
    # The others are our kernels and operators of libraries, which return new tensors.
    if not target.startswith("aten."):
        return False
    overload: Any = resolve_overload(target)
    return bool(overload.is_view) or overload._opname in _SOMETIMES_VIEWS


def _deepest(graph: GroupGraph) -> int:
    return max((sum(map(str.isdigit, _path(g))) for g in graph.groups), default=0)


def _path(group: Group) -> list[str]:
    return group.anchor.module.split(".")


def _block(group: Group, depth: int) -> str:
    """Return the module path up to its number ``depth``, from 0: ``h.3`` of ``h.3.mlp`` for 0; "" if none."""
    path = _path(group)
    numbers = [i for i, part in enumerate(path) if part.isdigit()]
    return ".".join(path[: numbers[depth] + 1]) if len(numbers) > depth else ""


def _blocks(graph: GroupGraph, depth: int, wanted: Callable[[Sequence[Group]], bool]) -> tuple[Region, ...]:
    regions: list[Region] = []
    times: dict[str, int] = {}
    # Neighbours only: a block that runs a second time later is a separate region, because otherwise
    # everything between the two runs would have to be inside.
    for name, run in groupby(graph.groups, key=lambda g: _block(g, depth)):
        groups = tuple(run)
        if not name or len(groups) < _MIN_GROUPS:
            continue
        # The executor makes one call of a region, so the region must not wait for itself in the middle.
        if not wanted(groups) or not _runs_at_once(graph, groups):
            continue
        times[name] = times.get(name, 0) + 1
        label = name if times[name] == 1 else f"{name}#{times[name]}"
        regions.append(_region(graph, label, tuple(g.name for g in groups)))
    return tuple(regions)


def _has_backward(graph: GroupGraph, groups: Sequence[Group]) -> bool:
    return any(graph.atoms.graph.tensors[name].requires_grad for g in groups for name in g.writes)


def _runs_at_once(graph: GroupGraph, groups: Sequence[Group]) -> bool:
    atoms = graph.atoms.graph
    inside = {op.name for g in groups for op in g.operators}
    # Nothing before the first of them reads their results, and nothing after the last feeds them: in a model
    # with many blocks, only the operators of one are examined.
    places = [atoms.places[name] for name in inside]
    later: set[str] = set()
    made: set[str] = set()
    for op in atoms.operators[min(places) : max(places) + 1]:
        reads = op.inputs()
        if op.name in inside:
            if not later.isdisjoint(reads):
                return False
            made.update(op.outputs)
        elif not (made.isdisjoint(reads) and later.isdisjoint(reads)):
            later.update(op.outputs)
    return True


def _bytes_when_recomputed(graph: GroupGraph, regions: Sequence[Region]) -> float:
    tensors = graph.atoms.graph.tensors
    written = {g.name: sum(tensors[n].bytes for n in g.writes) for g in graph.groups}
    inside = {name: region.name for region in regions for name in region.groups}
    # A group's reads are activations only, because inputs and parameters are alive in any case.
    makers = {n: g.name for g in graph.groups for n in g.writes}
    leaving = {
        n
        for g in graph.groups
        for n in g.reads
        if makers[n] in inside and inside[makers[n]] != inside.get(g.name)
    }
    outside = sum(size for name, size in written.items() if name not in inside)
    largest = max(sum(written[name] for name in region.groups) for region in regions)
    return outside + sum(tensors[n].bytes for n in leaving) + largest


class Neighbours(NamedTuple):
    """Whether other blocks compute while a block's parameters are gathered, which hides the gathering.

    Attributes:
        before: whether a block precedes it in forward; otherwise its parameters are gathered as it begins.
        behind: whether a block precedes it in backward; otherwise they are gathered as its backward begins.
    """

    before: bool
    behind: bool


@dataclass(frozen=True)
class Blocks:
    """The blocks (repeated layers, and groups between them) of a graph, numbered in execution order.

    Attributes:
        of: group -> the number of its block.
        first: for each block the group that begins its forward.
        last: for each block the group that begins its backward, or None if it has no backward.
    """

    of: Mapping[str, int]
    first: tuple[str, ...]
    last: tuple[str | None, ...]

    def neighbours(self, group: str) -> Neighbours | None:
        """Return whether other blocks precede a group's block; None if the block has no backward."""
        block = self.of[group]
        if self.last[block] is None:
            return None
        return Neighbours(before=block > 0, behind=block in self.behind.values())

    @cached_property
    def behind(self) -> Mapping[int, int]:
        """Block -> the block whose backward comes next, if any."""
        begun = [block for block, last in enumerate(self.last) if last is not None]
        return dict(pairwise(reversed(begun)))


def find_blocks(graph: GroupGraph) -> Blocks:
    """Return the repeated blocks of a graph, and between them one block per group with parameters."""
    regions, of, runs = region_of(find_regions(graph)), dict[str, int](), list[list[Group]]()
    region = None
    for group in graph.groups:
        begins = regions.get(group.name) is not region if group.name in regions else bool(group.parameters)
        if begins or not runs:
            runs.append([])
            region = regions.get(group.name)
        of[group.name] = len(runs) - 1
        runs[-1].append(group)
    last = (next((g.name for g in reversed(run) if needs_kept(graph, g)), None) for run in runs)
    training = graph.atoms.graph.training
    return Blocks(of, tuple(run[0].name for run in runs), tuple(name if training else None for name in last))


def needs_kept(graph: GroupGraph, group: Group) -> bool:
    """Return whether a group's backward reads saved tensors; sums and moves of data read only gradients."""
    made = (graph.atoms.graph.tensors[name] for op in group.operators for name in op.outputs)
    if not any(tensor.requires_grad for tensor in made):
        return False
    linear = all(graph.atoms.spaces[op.name].linear for op in group.operators)
    return not linear or bool(group.parameters or group.shared)


_Run = Callable[..., Any]


def recomputed(run: _Run, *inputs: Any) -> Any:
    """Return ``run(*inputs)``, but let autograd save ``inputs`` only; backward calls ``run`` again.

    Args:
        run: a deterministic function; the second call has the first's autocast precision.

    Raises:
        RuntimeError: in backward, if an input has been changed in place.
    """
    inside = _Inside(run, inputs)
    with saved_tensors_hooks(inside.leave, inside.take):
        return run(*inputs)


class _Given(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        # Not plain references, because autograd then notices when an input is changed in place before
        # backward, frees the tensors with the graph, and shows them to the user's hooks.
        ctx.save_for_backward(*tensors)
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise AssertionError("its result is not used, so it has no backward")


class _Inside:
    """The tensors that autograd would save in one run of a function; backward makes them by a second run."""

    def __init__(self, run: _Run, inputs: tuple[Any, ...]):
        self._run = run
        self._others = [None if isinstance(x, torch.Tensor) else x for x in inputs]
        self._places = [i for i, x in enumerate(inputs) if isinstance(x, torch.Tensor)]
        # Without an input that requires a gradient, the function would get no node, and nowhere to save
        # tensors.
        device = inputs[self._places[0]].device if self._places else None
        anchor = torch.empty((), requires_grad=True, device=device)
        self._given: Any = _Given.apply(anchor, *(inputs[i] for i in self._places)).grad_fn
        self._autocast = autocast_now(inputs)
        self._count = 0
        self._made: dict[int, torch.Tensor] = {}

    def leave(self, tensor: torch.Tensor) -> int:
        """Return a number that autograd saves in place of the tensor."""
        self._count += 1
        return self._count - 1

    def take(self, number: int) -> torch.Tensor:
        if number not in self._made:  # all of them are missing; or, with a kept graph, freed once more
            self._make()
        # Each is needed once: when it is taken out, it is freed as soon as backward is past it.
        return self._made.pop(number)

    def _make(self) -> None:
        made = self._made
        made.clear()

        def keep(tensor: torch.Tensor) -> int:
            made[len(made)] = tensor.detach()  # the tensor itself would keep its own graph alive
            return len(made)

        own = list(self._others)
        for place, value in zip(self._places, self._given.saved_tensors, strict=True):
            # Detached from the first run's graph, but requiring gradients where the original did; otherwise
            # autograd would save different tensors this time and the numbers would not match.
            own[place] = value.detach().requires_grad_(value.requires_grad)
        with saved_tensors_hooks(keep, no_backward), torch.enable_grad(), self._autocast():
            self._run(*own)
        # The numbers that forward gave out are positions in the order of saving: they refer to the same
        # tensors only if the region saves the same number of tensors this time.
        if len(made) != self._count:
            raise RuntimeError(
                f"a recomputed block saved {self._count} tensors in forward and {len(made)} when it ran"
                " again; it must do the same each time"
            )


def no_backward(_: object) -> torch.Tensor:
    """Raise the error for a backward that runs during a recomputed block's second forward."""
    raise RuntimeError("a recomputed block ran a backward during its second forward; do not recompute it")


def autocast_now(inputs: Sequence[Any]) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Return a function that makes a context with the current autocast settings of the inputs' device (CPU
    without tensors), for the second forward."""
    kind = next((x.device.type for x in inputs if isinstance(x, torch.Tensor)), "cpu")
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return contextlib.nullcontext
    dtype, cached = torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()
    return lambda: torch.autocast(kind, dtype=dtype, cache_enabled=cached)

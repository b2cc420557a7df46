"""Notes on what every searched mesh leaves whole: sizes that none divides."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from math import prod

from tensoropt.costs.tables import CostTables
from tensoropt.ops.families.attention import ATTENTION
from tensoropt.ops.index_space import LoopDim
from tensoropt.ops.layouts import chunk
from tensoropt.sharding.configurations import batch_strategies
from tensoropt.sharding.groups import Group, GroupGraph, batch_inputs


def undivided(tables: Iterable[CostTables], but: Container[str] = ()) -> tuple[str, ...]:
    """Return notes on what every searched mesh leaves whole, with the sizes that would be divided.

    Groups with a rule, the batch and heads of attention; one sentence per kind of operator and sizes, the
    longest loop nests first.

    Args:
        but: groups that constraints decide about.
    """
    split: dict[str, set[str]] = {}
    axes: set[int] = set()
    graph: GroupGraph | None = None
    for one in tables:
        if prod(one.mesh[1:]) == 1:
            continue
        graph = one.graph
        axes.update(size for size in one.mesh[1:] if size > 1)
        for group in graph.groups:
            labels = (
                group.strategies[i].label for choice in one.templates[group.name].choices for i in choice
            )
            split.setdefault(group.name, set()).update(label.dim for label in labels if label.splits)
    if graph is None:
        return ()
    left: dict[tuple[str, tuple[tuple[str, int], ...]], list[str]] = {}
    for group in graph.groups:
        sizes = tuple(_sizes(graph, group))
        # Of moves without work nobody needs to know.
        if sizes and group.name not in but and not split[group.name] and not _moves(graph, group):
            left.setdefault((group.anchor.target, sizes), []).append(group.name)
    ordered = sorted(left.items(), key=lambda item: -prod(size for _, size in item[0][1]))
    return (
        *_counts_left_whole(graph, split, min(axes), but),
        *(_sentence(target, sizes, names, min(axes)) for (target, sizes), names in ordered),
    )


def _counts_left_whole(
    graph: GroupGraph, split: Mapping[str, set[str]], axis: int, but: Container[str]
) -> Iterator[str]:
    """Yield sentences on the batch and the heads of attention, if they could be split and are not.

    Args:
        split: the loops that searched meshes split, by group.
        axis: the smallest axis of these meshes.
    """
    following = batch_strategies(graph, everywhere=False)
    samples = {graph.atoms.graph.tensors[name].shape[0] for name in batch_inputs(graph.atoms.graph)}
    batch, heads = dict[str, list[LoopDim]](), dict[str, list[LoopDim]]()
    for group in graph.groups:
        dims = {dim.name: dim for dim in graph.atoms.spaces[group.name].dims}
        follows = following.get(group.name)
        if follows is not None and follows.label.splits and dims[follows.label.dim].size in samples:
            batch[group.name] = [dims[follows.label.dim]]
        if group.anchor.target == ATTENTION:
            heads[group.name] = [dim for dim in dims.values() if _of_heads(dim)]
    for what, loops in (("batch", batch), ("attention heads", heads)):
        whole = [
            [dim.size for dim in own]
            for name, own in loops.items()
            if own and name not in but and not split[name].intersection(dim.name for dim in own)
        ]
        if whole and len(whole) == len(loops):
            size, *shared = whole[0]
            # Where several query heads share a key head, either may be split.
            sizes = f"{size} of keys, each of which {prod(shared)} of queries share" if shared else f"{size}"
            better = f"{_near_in_parts(size, axis)}{' of keys' if shared else ''}"
            yield f"{what} left whole: no searched mesh splits {sizes}; an axis of {axis} cuts {better}"


def _of_heads(dim: LoopDim) -> bool:
    return dim.name.partition(".")[0] in ("heads", "group")


def _near(size: int, parts: int) -> str:
    below = size // parts * parts
    return f"{below} or {below + parts}" if below else str(parts)


def _near_in_parts(size: int, parts: int) -> str:
    def cuts(whole: int) -> bool:
        return chunk(whole, parts, parts - 1)[1] > 0

    below = next((whole for whole in range(size - 1, 0, -1) if cuts(whole)), None)
    above = next(whole for whole in range(size + 1, size + 2 * parts) if cuts(whole))
    return f"{above}" if below is None else f"{below} or {above}"


def _sizes(graph: GroupGraph, group: Group) -> Iterator[tuple[str, int]]:
    loops = {s.label.dim for s in group.strategies if s.label.splits}
    for dim in graph.atoms.spaces[group.name].dims:
        if dim.name in loops and dim.size > 1:
            yield dim.name, dim.size


def _moves(graph: GroupGraph, group: Group) -> bool:
    return all(graph.atoms.spaces[op.name].cheap for op in group.operators)


def _sentence(target: str, sizes: tuple[tuple[str, int], ...], names: list[str], axis: int) -> str:
    kind = target.removeprefix("aten.").partition(".")[0]
    shown = ", ".join(f"{name} {size}" for name, size in sizes)
    others = f" and {len(names) - 1} more like it" if len(names) > 1 else ""
    better = ", ".join(f"{name} {_near(size, axis)}" for name, size in sizes)
    return (
        f"kept whole, since no searched mesh divides its sizes: {kind} {names[0]} ({shown}){others}; "
        f"an axis of {axis} divides {better}"
    )

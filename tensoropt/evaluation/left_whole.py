"""Notes on operators that no searched mesh splits, because none divides their sizes."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from math import prod

from tensoropt.costs.tables import CostTables
from tensoropt.sharding.groups import Group, GroupGraph


def undivided(tables: Iterable[CostTables], but: Container[str] = ()) -> tuple[str, ...]:
    """Return sentences on operators that no searched mesh splits, and on sizes that a mesh axis would divide.

    One sentence covers the operators of one kind with equal loop sizes. The largest operators, by the product
    of loop sizes, come first. Operators that no mesh could split or that only move data are left out.

    Args:
        but: the groups to leave out, because constraints decide their splits.
    """
    split: dict[str, set[str]] = {}
    searched = [one for one in tables if prod(one.mesh[1:]) > 1]
    if not searched:
        return ()
    axes = {size for one in searched for size in one.mesh[1:] if size > 1}
    for one in searched:
        for group in one.graph.groups:
            choices = one.templates[group.name].choices
            labels = (group.strategies[i].label for choice in choices for i in choice)
            split.setdefault(group.name, set()).update(label.dim for label in labels if label.splits)
    graph = searched[-1].graph
    left: dict[tuple[str, tuple[tuple[str, int], ...]], list[str]] = {}
    for group in graph.groups:
        sizes = tuple(_sizes(graph, group))
        # Moves without work are not worth a note.
        if sizes and group.name not in but and not split[group.name] and not _moves(graph, group):
            left.setdefault((group.anchor.target, sizes), []).append(group.name)
    ordered = sorted(left.items(), key=lambda item: -prod(size for _, size in item[0][1]))
    return tuple(_sentence(target, sizes, names, min(axes)) for (target, sizes), names in ordered)


def _near(size: int, parts: int) -> str:
    below = size // parts * parts
    return f"{below} or {below + parts}" if below else str(parts)


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

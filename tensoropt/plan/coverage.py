"""How much of a model's work can be split, and what cannot and why."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from math import prod

from tensoropt.costs.tables import CostTables, Template, make_templates
from tensoropt.plan.problem import Problem
from tensoropt.profiling.facts import Facts
from tensoropt.profiling.workload import Workload
from tensoropt.sharding.groups import Group, GroupGraph


def unsplit(graph: GroupGraph, facts_of: Callable[[Workload], Facts]) -> Mapping[str, Template]:
    """Per group its one configuration on one device, with workload and facts."""
    return make_templates(graph, (1,), {g.name: g.unsplit for g in graph.groups}, facts_of)


def shares_of_flops(problem: Problem, facts_of: Callable[[Workload], Facts]) -> tuple[float, float]:
    """Shares of the forward FLOPs in groups (all of whose operators have a rule, that can be split at least
    two ways, the unsplit one not counted)."""
    graph = problem.graph
    templates = unsplit(graph, facts_of)
    total = ruled = split = 0.0
    for group in graph.groups:
        flops = templates[group.name].facts[0].forward_flops
        loops = {s.label.dim for s in group.strategies if s.label.splits}
        total += flops
        ruled += flops if all(graph.atoms.spaces[op.name].known for op in group.operators) else 0.0
        split += flops if len(loops) >= 2 else 0.0
    # A model without FLOP has nothing that could not be split.
    return (ruled / total, split / total) if total else (1.0, 1.0)


def undivided(tables: Iterable[CostTables], but: Container[str] = ()) -> tuple[str, ...]:
    """Groups with a rule that every searched mesh leaves whole because it divides none of their sizes.

    One sentence per kind of operator and sizes, the longest loop nests first; meshes of one device say
    nothing and are passed over.

    Args:
        but: groups to pass over, since constraints decide about them.
    """
    split_somewhere: dict[str, bool] = {}
    graph: GroupGraph | None = None
    for one in tables:
        if prod(one.mesh[1:]) == 1:
            continue
        graph = one.graph
        for group in graph.groups:
            used = any(_splits(group, choice) for choice in one.templates[group.name].choices)
            split_somewhere[group.name] = split_somewhere.get(group.name, False) or used
    if graph is None:
        return ()
    left: dict[tuple[str, tuple[tuple[str, int], ...]], list[str]] = {}
    for group in graph.groups:
        sizes = tuple(_sizes(graph, group))
        if sizes and group.name not in but and not split_somewhere[group.name]:
            left.setdefault((group.anchor.target, sizes), []).append(group.name)
    ordered = sorted(left.items(), key=lambda item: -prod(size for _, size in item[0][1]))
    return tuple(_sentence(target, sizes, names) for (target, sizes), names in ordered)


def _splits(group: Group, choice: tuple[int, ...]) -> bool:
    return any(group.strategies[i].label.splits for i in choice)


def _sizes(graph: GroupGraph, group: Group) -> Iterator[tuple[str, int]]:
    """The loop dims that a group could split, with their sizes; a dim of size 1 is none."""
    loops = {s.label.dim for s in group.strategies if s.label.splits}
    for dim in graph.atoms.spaces[group.name].dims:
        if dim.name in loops and dim.size > 1:
            yield dim.name, dim.size


def _sentence(target: str, sizes: tuple[tuple[str, int], ...], names: list[str]) -> str:
    kind = target.removeprefix("aten.").partition(".")[0]
    shown = ", ".join(f"{name} {size}" for name, size in sizes)
    others = f" and {len(names) - 1} more like it" if len(names) > 1 else ""
    return f"kept whole, since no searched mesh divides its sizes: {kind} {names[0]} ({shown}){others}"

"""Points of a saved exploration at current costs."""

from __future__ import annotations

from tensoropt.costs.source import real_shape
from tensoropt.plan.evaluate import evaluate_strategy
from tensoropt.plan.exploration import Exploration
from tensoropt.profiling.workload import workload
from tensoropt.report.explain import Recosted
from tensoropt.session.one_space import SearchedSpace
from tensoropt.session.searched import Searched
from tensoropt.session.session import Session
from tensoropt.sharding.serialise import strategy_from_dict
from tensoropt.simulate.overlap import overlap_of


def recost_point(session: Session, searched: Searched, old: Exploration, index: int) -> Recosted:
    """Return the memory and time of a point of another exploration of the same operators, at this one's
    prices."""
    if old.points[index].placed is not None:
        return Recosted(index, None, None, "placed plans are made anew, by their planners")
    if old.points[index].pipeline is not None:
        return Recosted(index, None, None, "pipelines are made anew, by `tensoropt explore`")
    plan = old.plan(index)
    found = _same_space(searched, plan.mesh.shape, plan.micro_batches)
    if found is None:
        reason = f"mesh {plan.mesh.label} is not one of {session.cluster.name}'s"
        return Recosted(index, None, None, reason)
    graph = searched.problem.graph
    strategy = strategy_from_dict(plan.strategy_data(), graph)
    works = {n: workload(graph, c, strategy.mesh) for n, c in strategy.configurations.items()}
    # From the source and not from the tables: an old strategy need not be among today's configurations.
    facts = {n: searched.costs.facts_of(work) for n, work in works.items()}
    overlap = overlap_of(session.cluster, found.mesh, beside=found.tables.prices.beside)
    metrics = evaluate_strategy(strategy, works, facts, found.tables.prices, overlap).metrics
    return Recosted(index, float(metrics.memory_bytes[0]), float(metrics.time_s[0]))


def _same_space(searched: Searched, shape: tuple[int, ...], micro_batches: int) -> SearchedSpace | None:
    for space in searched.spaces:
        if real_shape(space.mesh) == shape and space.tables.mesh[0] == micro_batches:
            return space
    return None

"""The search of a model's strategies on all meshes of a cluster, from cost tables to frontiers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from tensoropt.cluster import Cluster
from tensoropt.costs.restrictions import Restrictions, check_devices, restrict
from tensoropt.costs.source import CostSource
from tensoropt.errors import InfeasibleError
from tensoropt.evaluation.left_whole import undivided
from tensoropt.evaluation.problem import (
    Problem,
    micro_batch_counts,
    model_flops,
    offered_regions,
    parallelism,
    shares_of_flops,
    unsplit,
)
from tensoropt.ops.device_kernels import has_kernel
from tensoropt.placement.limits import placed_limits
from tensoropt.processes import not_searched_for_garbage
from tensoropt.session.kept import code
from tensoropt.session.one_space import Built, SearchedSpace
from tensoropt.session.refining import MAX_AXES, Offered, apart, refine, tables_of
from tensoropt.session.session import Session
from tensoropt.session.simulations import Simulations, SpaceSimulations
from tensoropt.session.spaces import SpaceSearch
from tensoropt.session.usual import USUAL_NOTE, usual_spaces
from tensoropt.sharding.constraints import ConstraintError, Constraints, LackingDevicesError, match


@dataclass(frozen=True)
class Searched:
    """The frontiers on all meshes at all micro-batch counts, and the costs behind them.

    Attributes:
        problem: the operator graph, prepared for costs.
        costs: the source of the costs, which caches those that the search used.
        spaces: the meshes and micro-batch counts that have a strategy; empty if no sharded plan is possible.
        simulations: the simulated strategies of each space.
        split_share: the share of the forward FLOPs in groups of operators that can be split in two or more
            ways.
        model_flops: the FLOP of a step by number format (:func:`~tensoropt.evaluation.problem.model_flops`).
        notes: remarks: on what constraints or a partial search leave out, on sizes that no mesh axis divides,
            and on operators without a GPU kernel.
        refusal: why no sharded plan is possible; "" if one is.
        parallelism: the model's FLOPs over those of its longest chain of dependent groups.
    """

    problem: Problem
    costs: CostSource
    spaces: tuple[SearchedSpace, ...]
    simulations: tuple[SpaceSimulations, ...]
    split_share: float
    model_flops: Mapping[str, float]
    notes: tuple[str, ...]
    refusal: str = ""
    parallelism: float = 1.0


def search(session: Session, problem: Problem) -> Searched:
    """Search the strategies of a model on every mesh of the session's cluster, at every micro-batch count.

    Raises:
        TensorOptError: a setting is impossible for this model.
        InfeasibleError, ConstraintError: no mesh has a strategy at any micro-batch count.
    """
    settings, clock = session.settings, session.clock
    counts, regions = micro_batch_counts(problem, settings), offered_regions(problem, settings)
    meshes = session.cluster.meshes(MAX_AXES)
    given, left = settings.constraints, Restrictions()
    supported: tuple[str, ...] = ()
    refusal, kernels = _two_types(session.cluster), _without_kernels(problem, session.cluster)
    if given is not None:
        if given.recompute and settings.recompute == "never":
            raise ConstraintError(
                f"{given.recompute[0]} says what is recomputed, and recompute is 'never'; leave out one of "
                "them"
            )
        if settings.first and given.pipeline is not None and given.pipeline.stages > 1:
            raise ConstraintError(
                "usual strategies have no stages, and the constraints pin a pipeline; leave out --first or "
                "the pin"
            )
        supported, of_devices = check_devices(given, session.cluster)
        refusal = "; ".join(filter(None, [refusal, of_devices]))
        if refusal:
            _check_placed(given, problem, session.cluster, refusal)
        else:
            left = restrict(match(given, problem.graph), problem.graph, problem.micro, meshes, counts)
    with session.open_store() as store, session.open_ranks() as pool:
        costs = CostSource(
            session.cluster,
            store,
            settings,
            pool,
            session.progress,
            keep=code() if session.keep else None,
            note=session.note,
        )
        spaces = SpaceSearch([], settings, Simulations(session.cluster, []), session.progress)
        refined: tuple[str, ...] = ()
        if not refusal:
            narrow, wide = apart(problem.graph, meshes, counts, left)
            if settings.first:
                narrow, wide = usual_spaces(narrow, problem.graph), {}
            spaces, refined = _searched(session, partial(tables_of, problem, costs, regions), narrow, wide)
        with clock.stage("costs"):
            # Inside the block: facts of unsplit groups may still have to be read from the store or found.
            whole = unsplit(problem.graph, costs.facts.of)
            left_out = undivided((tables for _, tables in spaces.built), left.groups)
            _, split_share = shares_of_flops(problem.graph, whole)
            beside = parallelism(problem.graph, whole)
            flops = model_flops(whole.values(), costs.facts.of, session.cluster.device_type, costs.kernels)
            if refusal:
                # Placed plans run these; the report says what they rest on.
                costs.timings.measure({work.key: work for made in whole.values() for work in made.works})
                costs.compute()
    found = dict(sorted(spaces.found.items()))
    return Searched(
        problem,
        costs,
        tuple(found.values()),
        tuple(spaces.simulations.spaces[number] for number in found),
        split_share,
        flops,
        (*((USUAL_NOTE,) if settings.first else ()), *left.notes, *supported, *kernels, *refined, *left_out),
        refusal,
        beside,
    )


def _two_types(cluster: Cluster) -> str:
    if len(cluster.device_types) == 1:
        return ""
    return f"collectives join devices of one type, and {cluster.name} has {cluster.counts}"


def _without_kernels(problem: Problem, cluster: Cluster) -> tuple[str, ...]:
    if cluster.device_types != ("cuda",):
        return ()
    targets = dict.fromkeys(op.target for op in problem.graph.atoms.graph.operators)
    lacking = [target for target in targets if has_kernel(target, "cuda") is False]
    if not lacking:
        return ()
    return (
        f"no GPU kernels exist for {', '.join(lacking)}, so no plan runs on these GPUs, and the predictions "
        "assume such kernels; describe CPU ranks beside the GPUs in the cluster file, or write that part "
        "with other PyTorch calls",
    )


def _check_placed(given: Constraints, problem: Problem, cluster: Cluster, refusal: str) -> None:
    # Patterns that match nothing are refused by themselves.
    match(given, problem.graph)
    try:
        placed_limits(given, problem.graph, cluster)
    except ConstraintError as error:
        raise LackingDevicesError(f"no sharded plan: {refusal}; no placed plan: {error}") from None


def _searched(
    session: Session, build: Callable[[Offered], list[Built]], narrow: Offered, wide: Offered
) -> tuple[SpaceSearch, tuple[str, ...]]:
    if session.settings.first:
        return _search(session, build, narrow), ()
    refused: tuple[str, ...] = ()
    try:
        spaces = _search(session, build, narrow)
    except (InfeasibleError, ConstraintError) as error:
        if not wide:
            raise
        # If only wide meshes have strategies, nothing says which of these are good.
        refused = (str(error),)
        spaces, wide = _search(session, build, wide), {}
    # The name under which saved explorations keep these seconds.
    with session.clock.stage("judge"), not_searched_for_garbage():
        spaces.simulate()
    refined: tuple[str, ...] = ()
    if spaces.interrupted:
        session.left.append(f"{spaces.interrupted} of {len(spaces.built)} meshes and micro-batch counts")
    else:
        try:
            refined = refine(session, build, spaces, wide)
        except KeyboardInterrupt:
            session.left.append("meshes with more axes")
    return spaces, (*refused, *spaces.notes, *refined)


def _search(session: Session, build: Callable[[Offered], list[Built]], offered: Offered) -> SpaceSearch:
    with session.clock.stage("costs"):
        built = build(offered)
    simulations = Simulations(session.cluster, [])
    for one in built:
        simulations.add(*one)
    spaces = SpaceSearch(built, session.settings, simulations, session.progress)
    if session.settings.first:
        spaces.leave()
        return spaces
    with session.clock.stage("search"), not_searched_for_garbage():
        spaces.search()
    return spaces

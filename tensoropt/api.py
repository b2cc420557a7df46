"""The whole pipeline on one page: model + cluster -> frontier.

capture -> atoms and groups -> cost tables -> search -> simulation -> pipelines and quick planners
-> points that no other beats

What a stage does is in :mod:`tensoropt.session`; here is the order in which they run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from tensoropt.capture import Capture, capture
from tensoropt.cluster import Cluster, load_cluster
from tensoropt.graph import OperatorGraph
from tensoropt.plan.call import describe_call
from tensoropt.plan.exploration import Exploration
from tensoropt.plan.plan import ModelInfo
from tensoropt.plan.point import check_budget
from tensoropt.plan.problem import Problem, prepare, prepare_graph
from tensoropt.plan.settings import Settings, settings_of
from tensoropt.planners.compare import asked
from tensoropt.profiling.store import ProfileStore
from tensoropt.report.changes import question_of_change
from tensoropt.report.detail import recorded_of
from tensoropt.report.explain import Recosted
from tensoropt.session.comparing import with_planners
from tensoropt.session.evaluation import evaluate_searched
from tensoropt.session.failures import failures_named
from tensoropt.session.kept import KeptExplorations, question_of
from tensoropt.session.pipelines import wants_pipelines, with_pipelines
from tensoropt.session.quick_plans import with_quick_plans
from tensoropt.session.recosting import recost_point
from tensoropt.session.run_report import implausible
from tensoropt.session.searched import Searched, search
from tensoropt.session.session import Session
from tensoropt.types import Progress, silent


def explore(
    model: torch.nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    cluster: str | Cluster = "local",
    loss: Callable[[Any], torch.Tensor] | None = None,
    settings: Settings | None = None,
    store: ProfileStore | None = None,
    progress: Progress | None = None,
    source: str = "",
    seed: int = 0,
    planners: str | Sequence[str] = (),
    limits: Sequence[float | None] = (None,),
    keep: bool = False,
    **chosen: Any,
) -> Exploration:
    """The cost frontier of one step of ``model(*args, **kwargs)`` on a cluster.

    Args:
        model: any module ``torch.export`` accepts; on the meta device for big models.
        args, kwargs: example inputs at the global batch size.
        cluster: ``local``, ``local:N``, ``cpu:N``, a preset, a file, or a :class:`Cluster`. CPU ranks and the
            GPUs of this machine are measured; anything else is priced from data sheets.
        loss: maps the output to a scalar, where the model returns none.
        settings: everything else that can be chosen, see :class:`Settings`.
        store: profile store; the user's own by default.
        progress: called with (stage, done, total, what).
        source, seed: where the model comes from, for plans that are run without a script.
        planners: published methods to run on the same tables, by name, or ``all``; their points and a row
            each are in ``others`` and ``comparison``.
        limits: memory per device they are given, bytes; None for all trade-offs they know.
        keep: keep the exploration beside the profile store, and return one that was kept, with a note, where
            nothing has changed that decides its points: the operators, the cluster, the settings, what the
            store knows, this package. Explorations with planners are not kept, their tables and frontiers of
            single spaces are.
        chosen: fields of :class:`Settings` one by one, instead of ``settings``, such as ``mode`` or ``epsilon``.

    Raises:
        CaptureError, ClusterError, TensorOptError: with the rule, the values and the remedy.
        InfeasibleError: no plan fits ``memory_bytes``.
    """
    settings = settings_of(settings, chosen)
    session = Session(load_cluster(cluster), settings, store, progress or silent, keep=keep)
    entries = asked(planners)  # an unknown name is refused before anything is computed
    with failures_named(type(model).__name__):
        captured, problem = _prepared(session, model, args, kwargs, loss)
    info = _model_info(session, captured, args, kwargs, source, seed)
    with failures_named(type(model).__name__, captured.graph):
        if keep and not entries:
            return replace(_kept(session, problem, info), captured=captured)
        searched = search(session, problem)
        found = _evaluated(session, searched, info)
        if entries:
            found = with_planners(session, searched, found, entries, limits)
    check_budget(found.points, settings.memory_bytes)
    return replace(found, captured=captured)


def explore_graph(
    graph: OperatorGraph,
    model: ModelInfo,
    *,
    cluster: str | Cluster,
    settings: Settings | None = None,
    store: ProfileStore | None = None,
    progress: Progress | None = None,
    keep: bool = False,
    **chosen: Any,
) -> Exploration:
    """The cost frontier of an operator graph that was captured before, without the model.

    Args:
        graph: captured in the mode and the dtype that the settings ask for.
        model: what plans say of the model.
        cluster, settings, store, progress, chosen: as in :func:`explore`.
        keep: keep tables and frontiers of single spaces beside the profile store, and use those that were
            kept; the exploration is made again.

    Raises:
        ClusterError, TensorOptError: with the rule, the values and the remedy.
        InfeasibleError: no plan fits ``memory_bytes``.
    """
    settings = settings_of(settings, chosen)
    session = Session(load_cluster(cluster), settings, store, progress or silent, keep=keep)
    with failures_named("the model", graph):
        with session.clock.stage("capture"), session.open_store() as kept:
            problem = prepare_graph(graph, kept=kept)
        found = _evaluated(session, search(session, problem), model)
    check_budget(found.points, settings.memory_bytes)
    return found


def compare(
    model: torch.nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    planners: str | Sequence[str] = "all",
    limits: Sequence[float | None] = (None,),
    **more: Any,
) -> Exploration:
    """The exploration of a model, with what published planners find in the same tables beside its frontier.

    Args:
        model, args, kwargs: as in :func:`explore`.
        planners: names, or ``all``.
        limits: memory per device they are given, bytes; None for all trade-offs they know.
        more: whatever else :func:`explore` takes.

    Raises:
        TensorOptError: there is no such planner; and whatever :func:`explore` raises.
        MissingExtraError: a planner named needs a solver that is not installed.
    """
    return explore(model, args, kwargs, planners=planners, limits=limits, **more)


def recost(
    exploration: Exploration,
    *,
    cluster: str | Cluster | None = None,
    store: ProfileStore | None = None,
    progress: Progress | None = None,
    planners: str | Sequence[str] = (),
    keep: bool = False,
    old_points: bool = True,
) -> tuple[Exploration, tuple[Recosted, ...]]:
    """The operator graph saved with an exploration explored again, and its old points, at the costs of now.

    Nothing is captured: the model is not needed. The search is made anew, with the same settings and
    what the store, the cluster file and the links say today; the old strategies are simulated at the same new
    costs beside it.

    Args:
        cluster: another one; by default the one that was saved.
        store, progress, planners: as in :func:`explore`.
        keep: keep tables and frontiers of single spaces beside the profile store, and use those that were
            kept: where nothing has changed since, nothing is searched.
        old_points: simulate the old strategies too, which takes about as long as they are many.

    Returns:
        (the new exploration, per old point its memory and time at the new costs).

    Raises:
        TensorOptError: the exploration was saved without its operator graph.
        InfeasibleError: no plan fits the budget that the exploration was made with.
    """
    recorded = recorded_of(exploration)
    where = Cluster.from_dict(exploration.cluster) if cluster is None else load_cluster(cluster)
    settings = Settings.from_dict(exploration.settings)
    session = Session(where, settings, store, progress or silent, keep=keep)
    entries = asked(planners)
    searched = search(session, prepare_graph(recorded.graph, kept=recorded))
    found = with_quick_plans(session, searched, evaluate_searched(session, searched, exploration.model))
    if entries:
        found = with_planners(session, searched, found, entries, (None,))
    check_budget(found.points, settings.memory_bytes)
    old = range(len(exploration.points)) if old_points else ()
    return found, tuple(recost_point(session, searched, exploration, i) for i in old)


def explore_changed(
    exploration: Exploration,
    change: str,
    *,
    store: ProfileStore | None = None,
    progress: Progress | None = None,
    keep: bool = False,
) -> Exploration:
    """An exploration made again from its saved operator graph with one thing changed, all else as it was.

    A memory budget is left out, as it only says which points fit. No model is needed.

    Args:
        change: ``bandwidth:LEVEL``, ``bandwidth:all``, ``bfloat16``, ``micro-batches:N`` or ``devices:N``, as
            :func:`tensoropt.report.changes.changes` offers them.
        store, progress, keep: as in :func:`explore_graph`.

    Raises:
        TensorOptError: there is no such change, it is refused, or the operator graph was not saved.
        InfeasibleError, ClusterError: nothing can be searched with it.
    """
    asked = question_of_change(exploration, change)
    return explore_graph(
        asked.graph,
        asked.model,
        cluster=asked.cluster,
        settings=asked.settings,
        store=store,
        progress=progress,
        keep=keep,
    )


def _evaluated(session: Session, searched: Searched, info: ModelInfo) -> Exploration:
    """The points of all that was searched, of pipelines where these are asked for, and of quick planners."""
    found = evaluate_searched(session, searched, info)
    if wants_pipelines(session):
        found = with_pipelines(session, searched, found)
    found = with_quick_plans(session, searched, found)
    notes = [*implausible(session.cluster, found.points), *found.report["notes"]]
    return replace(found, report={**found.report, "notes": notes})


def _kept(session: Session, problem: Problem, info: ModelInfo) -> Exploration:
    """The exploration that was kept, or one made and kept now."""
    question, settings = question_of(info), session.settings
    with session.open_store() as store:
        found = KeptExplorations(store).find(question, session.cluster, settings)
    if found is None:
        found = _evaluated(session, search(session, problem), info)
        check_budget(found.points, settings.memory_bytes)
        with session.open_store() as store:
            refusal = KeptExplorations(store).keep(question, session.cluster, settings, found)
        if refusal:
            found = replace(found, report={**found.report, "notes": [*found.report["notes"], refusal]})
    return found


def _prepared(
    session: Session,
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    loss: Callable[[Any], torch.Tensor] | None,
) -> tuple[Capture, Problem]:
    """The capture of the model, and its operators made ready for costs."""
    settings = session.settings
    session.progress("capture", 0, 1, type(model).__name__)
    with session.clock.stage("capture"), session.open_store() as store:
        captured = capture(model, args, kwargs, loss=loss, mode=settings.mode, dtype=settings.dtype)
        with failures_named(type(model).__name__, captured.graph):
            problem = prepare(captured, store)
    counts = f"{len(captured.graph.operators)} operators, {len(problem.graph.groups)} groups"
    session.progress("capture", 1, 1, counts)
    return captured, problem


def _model_info(
    session: Session,
    captured: Capture,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    source: str,
    seed: int,
) -> ModelInfo:
    """What a plan says of its model."""
    graph = captured.graph
    return ModelInfo(
        source=source,
        fingerprint=graph.fingerprint,
        mode=session.settings.mode,
        seed=seed,
        parameters=sum(t.elements for t in graph.parameters),
        call=describe_call(args, kwargs or {}),
    )

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
from tensoropt.errors import TensorOptError
from tensoropt.evaluation.problem import Problem, prepare, prepare_graph
from tensoropt.exploration.exploration import Exploration
from tensoropt.plan.plan import ModelInfo, OnnxInfo, describe_call
from tensoropt.plan.point import check_budget
from tensoropt.planners.compare import asked
from tensoropt.planners.registry import Entry
from tensoropt.profiling.store import ProfileStore
from tensoropt.question.model_source import LoadedModel
from tensoropt.question.question import Question
from tensoropt.question.settings import Settings
from tensoropt.ranks.local_hardware import has_local_cores
from tensoropt.report.changes import question_of_change
from tensoropt.report.detail import recorded_of
from tensoropt.report.explain import Recosted
from tensoropt.session.comparing import recost_point, with_planners
from tensoropt.session.evaluation import evaluate_searched
from tensoropt.session.kept import KeptCapture, KeptExplorations, question_of, source_key
from tensoropt.session.pipelines import wants_pipelines, with_pipelines
from tensoropt.session.quick_plans import with_quick_plans
from tensoropt.session.run_report import failures_named, implausible
from tensoropt.session.searched import Searched, search
from tensoropt.session.session import Session
from tensoropt.types import Progress, silent


def explore(
    model: torch.nn.Module | LoadedModel,
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
        model: any module ``torch.export`` accepts, on the meta device for big models; or what
            :func:`tensoropt.load_model` gave, which brings its example inputs, source and seed.
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
        keep: keep the exploration in the profile store, and return one that was kept, with a note, where
            nothing has changed that decides its points: the operators, the cluster, the settings, what the
            store knows, this package. Explorations with planners are not kept, their tables and frontiers of
            single spaces are.
        chosen: fields of :class:`Settings` one by one, instead of ``settings``, such as ``mode`` or
            ``epsilon``.

    Raises:
        CaptureError, ClusterError, TensorOptError: with the rule, the values and the remedy.
        InfeasibleError: no plan fits ``memory_bytes``.
    """
    session = Session(
        load_cluster(cluster), _settings_of(settings, chosen), store, progress or silent, keep=keep
    )
    entries = asked(planners)  # an unknown name is refused before anything is computed
    loaded = (
        model if isinstance(model, LoadedModel) else LoadedModel(model, args, kwargs or {}, source, seed=seed)
    )
    name = type(loaded.model).__name__
    with failures_named(name):
        captured, problem = _prepared(session, loaded, loss)
    described = KeptCapture(_model_info(session, captured, loaded), captured.graph, loaded.notes)
    with failures_named(name, captured.graph):
        found = _explored(session, described, lambda: problem, entries, limits)
    return replace(found, captured=captured)


def explore_captured(
    captured: KeptCapture,
    *,
    cluster: str | Cluster,
    settings: Settings | None = None,
    store: ProfileStore | None = None,
    progress: Progress | None = None,
    keep: bool = False,
    **chosen: Any,
) -> Exploration:
    """The cost frontier of a model that was captured before, in the mode and the dtype that the settings ask
    for.

    Args:
        cluster, settings, store, progress, keep, chosen: as in :func:`explore`.

    Raises:
        ClusterError, TensorOptError: with the rule, the values and the remedy.
        InfeasibleError: no plan fits ``memory_bytes``.
    """
    session = Session(
        load_cluster(cluster), _settings_of(settings, chosen), store, progress or silent, keep=keep
    )

    def prepared() -> Problem:
        with session.clock.stage("capture"), session.open_store() as kept:
            return prepare_graph(captured.graph, kept=kept)

    with failures_named("the model", captured.graph):
        return _explored(session, captured, prepared)


def answer(
    question: Question,
    cluster: Cluster,
    settings: Settings,
    known: Exploration | None = None,
    *,
    progress: Progress,
    note: Callable[[str], None],
) -> Exploration:
    """The exploration that answers a question: one that was kept, or one that is made and kept now.

    Args:
        cluster, settings: the question's, or those in their place.
        known: an exploration of the same model elsewhere, whose operators are taken.
        note: is told where the answer, or the model's operators, were kept before.

    Raises:
        CaptureError, TensorOptError: as :func:`explore` and :func:`load_model` do.
    """
    keep, captured, source = not question.anew, None, None
    if known is not None and known.recorded is not None:
        imported = tuple(known.report.get("imported", ()))
        captured = KeptCapture(known.model, known.recorded.graph, imported)
    elif keep and not question.planners:
        source = source_key(question.model, question.capture_facts)
    if source is not None:
        # Before the model is built, which takes longer than to read what was kept.
        with ProfileStore() as store:
            kept = KeptExplorations(store)
            captured = kept.capture_of(source)
            if captured is not None:
                found = kept.find(question_of(captured.model), cluster, settings)
                if found is not None:
                    note(found.report["notes"][-1])
                    return found
        if captured is not None:
            note("the operator graph is one that was kept; --anew captures the model again")
    how: dict[str, Any] = {"cluster": cluster, "settings": settings, "progress": progress, "keep": keep}
    if captured is not None:
        return explore_captured(captured, **how)
    loaded = question.loaded_model(on_meta=not has_local_cores(cluster))
    found = explore(loaded, planners=question.planners, limits=question.limits, **how)
    if source is not None and found.recorded is not None:
        captured = KeptCapture(found.model, found.recorded.graph, loaded.notes)
        with ProfileStore() as store:
            KeptExplorations(store).keep_capture(source, captured)
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
        keep: keep tables and frontiers of single spaces in the profile store, and use those that were
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
        store, progress, keep: as in :func:`explore`.

    Raises:
        TensorOptError: there is no such change, it is refused, or the operator graph was not saved.
        InfeasibleError, ClusterError: nothing can be searched with it.
    """
    asked = question_of_change(exploration, change)
    return explore_captured(
        KeptCapture(asked.model, asked.graph), cluster=asked.cluster, settings=asked.settings,
        store=store, progress=progress, keep=keep,
    )  # fmt: skip


def _explored(
    session: Session,
    captured: KeptCapture,
    prepared: Callable[[], Problem],
    entries: Sequence[Entry] = (),
    limits: Sequence[float | None] = (),
) -> Exploration:
    """The exploration that was kept, where the session keeps any; else one that is made, and kept.

    Args:
        prepared: gives the model's operators, made ready for costs.
        entries, limits: planners to run beside it, and what memory they are given; nothing is kept with them.

    Raises:
        InfeasibleError: none of its points fits the budget.
    """
    question, cluster, settings = question_of(captured.model), session.cluster, session.settings
    keep = session.keep and not entries
    if keep:
        with session.open_store() as store:
            kept = KeptExplorations(store).find(question, cluster, settings)
        if kept is not None:
            return kept
    searched = search(session, prepared())
    found = _evaluated(session, searched, captured.model, captured.notes)
    if entries:
        found = with_planners(session, searched, found, entries, limits)
    check_budget(found.points, settings.memory_bytes)
    if keep:
        with session.open_store() as store:
            refusal = KeptExplorations(store).keep(question, cluster, settings, found)
        if refusal:
            found = found.noted([refusal])
    return found


def _evaluated(
    session: Session, searched: Searched, info: ModelInfo, notes: Sequence[str] = ()
) -> Exploration:
    """The points of all that was searched, of pipelines where these are asked for, and of quick planners."""
    found = evaluate_searched(session, searched, info)
    if wants_pipelines(session):
        found = with_pipelines(session, searched, found)
    found = with_quick_plans(session, searched, found)
    imported = {"imported": list(notes)} if notes else {}  # for explorations of the same operators elsewhere
    notes = [*notes, *implausible(session.cluster, found.points), *found.report["notes"]]
    return replace(found, report={**found.report, **imported, "notes": notes})


def _settings_of(settings: Settings | None, chosen: Mapping[str, Any]) -> Settings:
    """The settings that a caller gave, whole or one by one.

    Raises:
        TensorOptError: something is chosen twice, which it names; or a value means nothing.
        TypeError: something is chosen that is no setting.
    """
    if settings is None:
        return Settings(**chosen)
    if chosen:
        name = next(iter(chosen))
        raise TensorOptError(
            f"{name} is given twice, as {name}= and in settings=; give one of them, or "
            f"settings=dataclasses.replace(settings, {name}=...)"
        )
    return settings


def _prepared(
    session: Session, loaded: LoadedModel, loss: Callable[[Any], torch.Tensor] | None
) -> tuple[Capture, Problem]:
    """The capture of the model, and its operators made ready for costs."""
    settings, name = session.settings, type(loaded.model).__name__
    session.progress("capture", 0, 1, name)
    with session.clock.stage("capture"), session.open_store() as store:
        captured = capture(
            loaded.model, loaded.args, loaded.kwargs, loss=loss, mode=settings.mode, dtype=settings.dtype
        )
        with failures_named(name, captured.graph):
            problem = prepare(captured, store)
    counts = f"{len(captured.graph.operators)} operators, {len(problem.graph.groups)} groups"
    session.progress("capture", 1, 1, counts)
    return captured, problem


def _model_info(session: Session, captured: Capture, loaded: LoadedModel) -> ModelInfo:
    """What a plan says of its model."""
    graph, onnx = captured.graph, loaded.onnx
    return ModelInfo(
        source=loaded.source,
        fingerprint=graph.fingerprint,
        mode=session.settings.mode,
        seed=loaded.seed,
        parameters=sum(t.elements for t in graph.parameters),
        batch=loaded.batch,
        call=describe_call(loaded.args, loaded.kwargs),
        onnx=None if onnx is None else OnnxInfo(dims=dict(onnx.dims), outputs=onnx.outputs, loss=onnx.loss),
    )

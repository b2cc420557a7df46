"""The functions that explore a model on a cluster, by running all stages in order.

The stages are: capture, grouping of operators, cost tables, search, simulation, pipelines and quick planners,
and the reduction to points that no other point beats. :mod:`tensoropt.session` implements them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tensoropt.capture import Capture, capture
from tensoropt.capture.quantised import weights_in_bytes
from tensoropt.cluster import Cluster, load_cluster
from tensoropt.console import shows_progress
from tensoropt.errors import TensorOptError
from tensoropt.evaluation.problem import Problem, prepare, prepare_graph
from tensoropt.exploration.answer import answer as answer_within
from tensoropt.exploration.exploration import Exploration, InterruptedExplorationError
from tensoropt.plan.plan import ModelInfo, OnnxInfo, describe_call
from tensoropt.planners.compare import requested_planners
from tensoropt.planners.registry import Entry
from tensoropt.processes import finished_when_interrupted, garbage_sought_seldom
from tensoropt.profiling.store import ProfileStore
from tensoropt.question.compute_dtype import AUTO, with_dtype
from tensoropt.question.model_source import LoadedModel
from tensoropt.question.question import Question
from tensoropt.question.settings import Settings
from tensoropt.ranks.local_hardware import has_local_cores
from tensoropt.report.detail import recorded_of
from tensoropt.session.comparing import Recosted, recosted, with_planners
from tensoropt.session.evaluation import evaluate_searched, record_used
from tensoropt.session.kept import KeptCapture, KeptExplorations, Known, question_of
from tensoropt.session.pipelines import pinned_pipeline, wants_pipelines, with_pipelines
from tensoropt.session.quick_plans import First, check_found, with_quick_plans
from tensoropt.session.run_report import failures_named, implausible
from tensoropt.session.searched import Searched, search
from tensoropt.session.session import Session
from tensoropt.types import Progress, ProgressChoice, heard
from tensoropt.units import limit_bytes
from tensoropt.zoo.lora import adapters_words

_FEW_GROUPS = 64
"""The number of operator groups up to which a search takes little longer than the first answer."""


@shows_progress
def explore(
    model: torch.nn.Module | LoadedModel,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    cluster: str | Cluster = "local",
    loss: Callable[[Any], torch.Tensor] | None = None,
    settings: Settings | None = None,
    store: ProfileStore | None = None,
    progress: ProgressChoice = None,
    source: str = "",
    seed: int = 0,
    planners: str | Sequence[str] = (),
    planner_options: Sequence[str] = (),
    limits: Sequence[float | None] = (None,),
    keep: bool = False,
    **chosen: Any,
) -> Exploration:
    """Return the frontier of memory and time of one step of ``model(*args, **kwargs)`` on a cluster.

    Args:
        model: any module that ``torch.export`` accepts, on the meta device for big models; or the result of
            :func:`tensoropt.load_model`, which includes its example inputs, source and seed.
        args, kwargs: example inputs at the global batch size.
        cluster: ``local``, ``local:N``, ``cpu:N``, a preset, a file, or a :class:`Cluster`. CPU ranks and the
            GPUs of this machine are measured; the costs of other devices are taken from data sheets.
        loss: maps the output to a scalar, if the model does not return one.
        settings: all other choices, see :class:`Settings`.
        store: the profile store, which keeps measurements; by default the user's own.
        progress: True for a bar, False for none, or a function called with (stage, done, total, what); by
            default a bar in a terminal or a notebook.
        source, seed: the origin of the model and of its weights, by which a plan can be run without a script.
        planners: published methods to run on the same cost tables, by name, or ``all``; their points are in
            ``others``, and ``comparison`` has a row for each.
        planner_options: settings of the planners, such as ``netsplit.seconds=600``.
        limits: memory limits of the planners, in bytes per device; None for all trade-offs that they find.
        keep: whether to cache the exploration in the profile store, and to return a cached one, with a note,
            if nothing that determines its points has changed: the operators, the cluster, the settings, the
            contents of the store, this package. Of explorations with planners, only cost tables are cached.
        chosen: single fields of :class:`Settings`, such as ``mode`` or ``epsilon``, instead of ``settings``;
            ``memory="24GiB"`` (or bytes) for ``memory_bytes``.

    Raises:
        CaptureError, ClusterError, TensorOptError: the input cannot be used; the message has the rule, the
            values and the remedy.
        InfeasibleError: no plan fits ``memory_bytes``.
    """
    _check_words(args, loss)
    loaded = (
        model if isinstance(model, LoadedModel) else LoadedModel(model, args, kwargs or {}, source, seed=seed)
    )
    settings, where = _settings_of(settings, chosen), load_cluster(cluster)
    settings = with_dtype(settings, loaded.source, [where])
    session = Session(where, settings, store, heard(progress), keep=keep)
    # Impossible requests are refused before anything is computed.
    entries = requested_planners(planners, planner_options)
    name = type(loaded.model).__name__
    with failures_named(name):
        captured, problem = _prepared(session, loaded, loss)
    described = KeptCapture(_model_info(session, captured, loaded), captured.graph, loaded.notes)
    with failures_named(name, captured.graph):
        return _explored(session, described, lambda: problem, entries, limits)


def _check_words(args: Any, loss: Any) -> None:
    if not isinstance(args, (tuple, list)):
        raise TensorOptError(
            f"args must be a tuple of example inputs, and a {type(args).__name__} was given; pass (x,)"
        )
    try:
        if loss is not None:
            inspect.signature(getattr(loss, "forward", loss)).bind(None)
        takes = True
    except (TypeError, ValueError) as error:
        takes = isinstance(error, ValueError)  # some that are written in C have no signature
    if not takes:
        raise TensorOptError(
            f"loss must map the model's output to a scalar, and {loss!r} was given, which cannot be called "
            "with one argument; let the model take targets and compute its own loss"
        )


def explore_captured(
    captured: KeptCapture,
    *,
    cluster: str | Cluster,
    settings: Settings | None = None,
    store: ProfileStore | None = None,
    progress: ProgressChoice = None,
    keep: bool = False,
    **chosen: Any,
) -> Exploration:
    """Return the frontier of memory and time of a captured model, without the module itself.

    Args:
        captured: the model, captured in the mode and the dtype of the settings; the dtype ``auto`` stands for
            that of the capture.
        cluster, settings, store, progress, keep, chosen: as in :func:`explore`.

    Raises:
        ClusterError, TensorOptError: the input cannot be used; the message has the rule, the values and the
            remedy.
        InfeasibleError: no plan fits ``memory_bytes``.
    """
    settings = _settings_of(settings, chosen)
    if settings.dtype == AUTO:
        settings = replace(settings, dtype=captured.graph.compute_dtype)
    session = Session(load_cluster(cluster), settings, store, heard(progress), keep=keep)

    def prepared() -> Problem:
        with session.clock.stage("capture"), session.open_store() as kept:
            graph = replace(captured.graph, expert_imbalance=settings.expert_imbalance)
            return prepare_graph(graph, kept=kept)

    with failures_named("the model", captured.graph):
        return _explored(session, captured, prepared)


def answer(
    question: Question,
    cluster: Cluster,
    settings: Settings,
    known: Known,
    *,
    progress: Progress,
    note: Callable[[str], None],
) -> Exploration:
    """Return the exploration that a question asks for; cache it and the model's operator graph where that is
    possible, unless the question asks to ignore the cache.

    Args:
        cluster, settings: the cluster and the settings to use, which may differ from the question's.
        known: the cached results for the question, such as the model's operator graph.
        note: called with a message if the cached operator graph is used.

    Raises:
        CaptureError, TensorOptError: as in :func:`explore` and
            :func:`~tensoropt.question.model_source.load_model`.
    """
    keep = not question.anew
    how: dict[str, Any] = {"cluster": cluster, "settings": settings, "progress": progress, "keep": keep}
    if known.captured is not None:
        if known.source is not None:
            note("using an operator graph kept from an earlier run; --anew captures the model again")
        return explore_captured(known.captured, **how)
    loaded = question.loaded_model(on_meta=not has_local_cores(cluster))
    how |= {"planners": question.planners, "planner_options": question.planner_options}
    exploration = explore(loaded, limits=question.limits, **how)
    if known.source is not None and exploration.costs is not None:
        captured = KeptCapture(exploration.model, exploration.recorded.graph, loaded.notes)
        with ProfileStore() as store:
            KeptExplorations(store).keep_capture(known.source, captured)
    return exploration


def compare(
    model: torch.nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    planners: str | Sequence[str] = "all",
    limits: Sequence[float | None] = (None,),
    **more: Any,
) -> Exploration:
    """Return the exploration of a model, with the plans that published planners make from the same cost
    tables.

    Args:
        model, args, kwargs: as in :func:`explore`.
        planners: names, or ``all``.
        limits: memory limits of the planners, in bytes per device; None for all trade-offs that they find.
        more: any other arguments of :func:`explore`.

    Raises:
        TensorOptError: there is no such planner, or :func:`explore` raises it.
        MissingExtraError: a planner needs a solver that is not installed.
    """
    return explore(model, args, kwargs, planners=planners, limits=limits, **more)


@shows_progress
def recost(
    exploration: Exploration,
    *,
    cluster: str | Cluster | None = None,
    store: ProfileStore | None = None,
    progress: ProgressChoice = None,
    planners: str | Sequence[str] = (),
    keep: bool = False,
    old_points: bool = True,
) -> tuple[Exploration, tuple[Recosted, ...]]:
    """Search a saved exploration's operator graph again at today's costs, and find what its old points cost
    now.

    The model is not needed, because nothing is captured. The search uses the same settings and the current
    contents of the store, the cluster file and the links; the old strategies are simulated at the same costs.

    Args:
        cluster: another cluster; by default the saved one.
        store, progress, planners: as in :func:`explore`.
        keep: whether to cache cost tables in the profile store, and to reuse cached ones.
        old_points: whether to simulate the old strategies, which takes time in proportion to their number.

    Returns:
        (the new exploration, the memory and time of each old point at the new costs).

    Raises:
        TensorOptError: the exploration was saved without its operator graph.
        InfeasibleError: no plan fits the memory budget of the exploration.
    """
    recorded = recorded_of(exploration)
    where = Cluster.from_dict(exploration.cluster) if cluster is None else load_cluster(cluster)
    settings = Settings.from_dict(exploration.settings)
    session = Session(where, settings, store, heard(progress), keep=keep)
    entries = requested_planners(planners)
    searched = search(session, prepare_graph(recorded.graph, kept=recorded))
    imported = exploration.report.get("imported", ())
    updated = _evaluated(session, searched, exploration.model, imported)
    if entries:
        updated = with_planners(session, searched, updated, entries, (None,))
    check_found(searched, updated)
    updated.check_budget()
    old = range(len(exploration.points))
    return updated, recosted(session, searched, exploration, old) if old_points else ()


def _explored(
    session: Session,
    captured: KeptCapture,
    prepared: Callable[[], Problem],
    entries: Sequence[Entry] = (),
    limits: Sequence[float | None] = (),
) -> Exploration:
    """Return the cached exploration of a model if there is one; otherwise search, and cache the result.

    Args:
        prepared: returns the model's operators, ready for costs.
        entries, limits: planners to run, and their memory limits; with planners the cache is not used.

    Raises:
        InfeasibleError: no point fits the budget.
        InterruptedExplorationError: Ctrl-C was pressed after points were found; the error has these points.
    """
    question, cluster, settings = question_of(captured.model), session.cluster, session.settings
    keep = session.keep and not entries
    if keep:
        with session.open_store() as store:
            kept = KeptExplorations(store).find(question, cluster, settings)
        if kept is not None:
            return kept
    with garbage_sought_seldom():
        problem = prepared()
        first = _first_answer(session, captured, problem)
        try:
            searched = search(session, problem)
        except KeyboardInterrupt:
            if first is None:
                raise
            raise InterruptedExplorationError(["all but usual strategies"], first.exploration) from None
        exploration = _evaluated(session, searched, captured.model, captured.notes, first)
        if entries and not session.left:
            exploration = with_planners(session, searched, exploration, entries, limits)
    if session.left:
        raise InterruptedExplorationError(session.left, exploration)
    check_found(searched, exploration)
    if keep:
        with session.open_store() as store:
            refusal = KeptExplorations(store).keep(question, cluster, settings, exploration)
        if refusal:
            exploration = exploration.noted([refusal])
    exploration.check_budget()
    return exploration


def _first_answer(session: Session, captured: KeptCapture, problem: Problem) -> First | None:
    """Return the plans of usual strategies (DDP, FSDP, ...), and show the best to a person who waits for the
    search. None for a small model, whose search takes little longer, if only usual strategies are wanted, or
    if none are found.

    Raises:
        InterruptedExplorationError: Ctrl-C was pressed after points were found.
    """
    if session.settings.first or len(problem.graph.groups) <= _FEW_GROUPS:
        return None
    usual = replace(session, settings=replace(session.settings, first=True))
    try:
        searched = search(usual, problem)
        first = _evaluated(usual, searched, captured.model, captured.notes)
    except TensorOptError:  # the full search reports the error
        return None
    if session.left:  # by Ctrl-C, which is meant for the search, too
        if not first.points:
            raise KeyboardInterrupt
        raise InterruptedExplorationError([*session.left, "all but usual strategies"], first)
    if not first.points:
        return None
    if show := getattr(session.progress, "first", None):
        show(answer_within(first, session.settings.memory_bytes).sentence())
    return First(searched, first)


def _evaluated(
    session: Session,
    searched: Searched,
    info: ModelInfo,
    notes: Sequence[str] = (),
    first: First | None = None,
) -> Exploration:
    with finished_when_interrupted() as interrupted:
        exploration = evaluate_searched(session, searched, info)
    stages = {"pipelines": with_pipelines} if wants_pipelines(session) else {}
    quick = partial(with_quick_plans, first=first)
    for what, add in (stages | {"plans of planners": quick}).items():
        if not session.left and not interrupted:
            try:
                exploration = add(session, searched, exploration)
                continue
            except KeyboardInterrupt:
                pass
        if not exploration.points or (what in stages and pinned_pipeline(session.settings)):
            raise KeyboardInterrupt  # there is no result to return
        session.left.append(what)
        if add is quick and first is not None:
            with finished_when_interrupted():
                exploration = quick(session, searched, exploration)
    if session.left:
        exploration = exploration.noted([f"interrupted: not searched: {', '.join(session.left)}"])
    with finished_when_interrupted():
        exploration = replace(exploration, costs=record_used(session, searched, exploration))
    imported = {"imported": list(notes)} if notes else {}  # for explorations of the same operators elsewhere
    notes = [*notes, *implausible(exploration), *exploration.report["notes"]]
    return replace(exploration, report={**exploration.report, **imported, "notes": notes})


def _settings_of(settings: Settings | None, chosen: Mapping[str, Any]) -> Settings:
    if settings is None:
        fields = {name: value for name, value in chosen.items() if name != "memory"}
        if "memory" in chosen:
            fields["memory_bytes"] = limit_bytes(fields.get("memory_bytes"), chosen["memory"])
        return Settings(**fields)
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
    settings, name = session.settings, type(loaded.model).__name__
    session.progress("capture", 0, 1, name)
    with session.clock.stage("capture"), session.open_store() as store:
        captured = capture(
            loaded.model, loaded.args, loaded.kwargs, loss=loss, mode=settings.mode, dtype=settings.dtype
        )
        with failures_named(name, captured.graph):
            problem = prepare(captured, store, settings.expert_imbalance)
    counts = f"{len(captured.graph.operators)} operators, {len(problem.graph.groups)} groups"
    session.progress("capture", 1, 1, counts)
    return captured, problem


def _model_info(session: Session, captured: Capture, loaded: LoadedModel) -> ModelInfo:
    graph, onnx = captured.graph, loaded.onnx
    trained = [tensor for tensor in graph.parameters if tensor.requires_grad]
    schemes, more = weights_in_bytes(graph)
    adapters = adapters_words(((t.key or "", t.shape) for t in trained), schemes)
    return ModelInfo(
        source=loaded.source,
        fingerprint=graph.fingerprint,
        mode=session.settings.mode,
        seed=loaded.seed,
        parameters=sum(t.elements for t in graph.parameters) + more,
        trained=sum(t.elements for t in trained) if graph.training else None,
        adapters=adapters if graph.training else "",
        batch=loaded.batch,
        call=describe_call(loaded.args, loaded.kwargs),
        onnx=None if onnx is None else OnnxInfo(dims=dict(onnx.dims), outputs=onnx.outputs, loss=onnx.loss),
    )

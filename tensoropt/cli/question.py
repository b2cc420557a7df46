"""The question of ``explore`` and ``compare``: which model, on which cluster, and what may be chosen."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tensoropt.cli.arguments import CLUSTER_HELP, MODEL_HELP, add_onnx, onnx_options, writable_folder
from tensoropt.console import ProgressDisplay
from tensoropt.errors import TensorOptError
from tensoropt.profiling.optimizers import OPTIMIZERS
from tensoropt.units import format_bytes


def add_question(verb: argparse.ArgumentParser) -> None:
    """Which model on which cluster, and what may be chosen."""
    verb.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    verb.add_argument("--cluster", required=True, help=CLUSTER_HELP)
    verb.add_argument("--mode", choices=("train", "inference"), default="train", help="default: %(default)s")
    verb.add_argument(
        "--optimizer",
        choices=OPTIMIZERS,
        default="adam",
        help="adam_fused: one kernel, nothing made for a while; default: %(default)s",
    )
    verb.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="what operators compute in; bfloat16 keeps float32 master weights; default: %(default)s",
    )
    verb.add_argument(
        "--micro-batches",
        default="auto",
        metavar="auto|1,2,4",
        help="counts to search; auto: 1,2,4,8 that divide; pipelines of P stages run P times as many",
    )
    verb.add_argument(
        "--recompute",
        choices=("auto", "never"),
        default="auto",
        help="whether repeated blocks may be computed again in backward; default: %(default)s",
    )
    verb.add_argument(
        "--pipelines",
        choices=("auto", "always", "never"),
        default="auto",
        help="plans that cut the model into stages, by a heuristic: auto: a first look on clusters of "
        "several nodes or device kinds; always: a closer one, on any; default: %(default)s",
    )
    verb.add_argument(
        "--placements",
        choices=("auto", "always", "never"),
        default="auto",
        help="plans that put each operator on one device, by published planners: auto: where these are "
        "quick; always: on any number of devices; default: %(default)s",
    )
    verb.add_argument(
        "--overlap",
        choices=("default", "none"),
        default="default",
        help="none: all communication is waited for, to compare with; CPU ranks hide nothing in either case; "
        "default: %(default)s",
    )
    verb.add_argument(
        "--epsilon",
        type=float,
        default=1e-3,
        metavar="E",
        help="allowed gap, 0 for exact; default: %(default)s",
    )
    verb.add_argument(
        "--max-points", type=int, metavar="N", help="keep at most N points per table while searching"
    )
    verb.add_argument(
        "--batch", type=int, metavar="N", help="global batch of a zoo model; default: the model's"
    )
    verb.add_argument(
        "--constraints",
        metavar="FILE",
        help="YAML or JSON: pins of operators and parameters, what belongs together, device kinds",
    )
    verb.add_argument(
        "--measure",
        choices=("all", "never"),
        default="all",
        help="never: price from the profile store and a fit to it instead of timing; default: %(default)s",
    )
    verb.add_argument(
        "--process-memory",
        action="store_true",
        help="count what a process takes of a GPU beside tensors, too, and replay PyTorch's allocator: "
        "estimates, never compared with a card",
    )
    verb.add_argument(
        "--anew",
        action="store_true",
        help="explore although the same exploration was kept and nothing has changed since",
    )
    verb.add_argument("--seed", type=int, default=0, help="of weights and random walks; default: %(default)s")
    add_onnx(verb)


def explored(
    options: argparse.Namespace, progress: ProgressDisplay, memory_bytes: float | None, **more: Any
) -> tuple[Path | None, Any]:
    """The folder of ``--out`` if there is one, and the exploration saved there; no folder is left empty."""
    # Settings before cluster and folder: a wrong option is refused before anything is made.
    settings = settings_option(options, memory_bytes)
    cluster = asked_cluster(options)
    with writable_folder(options.out) if options.out else contextlib.nullcontext() as folder:
        found = _explored(options, progress, cluster, settings, more)
        if folder is not None:
            found.save(folder)
        return folder, found


def asked_cluster(options: argparse.Namespace) -> Any:
    """The cluster of ``--cluster``, or the one that was loaded of several."""
    from tensoropt.cluster import load_cluster

    loaded = getattr(options, "cluster_itself", None)
    return load_cluster(options.cluster) if loaded is None else loaded


def explored_again(
    options: argparse.Namespace, progress: ProgressDisplay, first: Any, memory_bytes: float | None
) -> Any:
    """The operators of an exploration explored on another cluster: kept before, or made and kept now."""
    settings, cluster = settings_option(options, memory_bytes), asked_cluster(options)
    from tensoropt.api import explore_graph
    from tensoropt.profiling.store import ProfileStore
    from tensoropt.session.kept import KeptExplorations, question_of

    progress.note(defaults_line(options, cluster, settings))
    keep, question = not options.anew, question_of(first.model)
    if keep:
        with ProfileStore() as store:
            found = KeptExplorations(store).find(question, cluster, settings)
        if found is not None:
            return found
    found = explore_graph(
        first.recorded.graph, first.model, cluster=cluster, settings=settings, progress=progress, keep=keep
    )
    if keep:
        with ProfileStore() as store:
            if refusal := KeptExplorations(store).keep(question, cluster, settings, found):
                progress.note(refusal)
    return found


def _explored(
    options: argparse.Namespace,
    progress: ProgressDisplay,
    cluster: Any,
    settings: Any,
    more: Mapping[str, Any],
) -> Any:
    """The exploration asked for: one that was kept, if nothing that decides it has changed, or a new one."""
    from tensoropt.profiling.store import ProfileStore
    from tensoropt.session.kept import KeptExplorations, question_of

    progress.note(defaults_line(options, cluster, settings))
    source = _source(options) if not options.anew and not more.get("planners") else None
    if source is None:
        more = {"keep": not options.anew, **more}
        return _explored_anew(options, progress, cluster, settings, more)[0]
    # Asked before the model is built and PyTorch is imported, which takes longer than to read what was kept.
    with ProfileStore() as store:
        kept = KeptExplorations(store)
        question = kept.question_from(source)
        found = kept.find(question, cluster, settings) if question else None
        if found is not None:
            progress.note(found.report["notes"][-1])
            return found
        captured = kept.capture_of(source)
    if captured is None:
        found, captured = _explored_anew(options, progress, cluster, settings, {"keep": True, **more})
    else:
        found = _explored_graph(captured, progress, cluster, settings)
    with ProfileStore() as store:
        kept = KeptExplorations(store)
        # Another source may have led to the same operators before.
        made = "kept" not in found.report
        if made and (refusal := kept.keep(question_of(found.model), cluster, settings, found)):
            progress.note(refusal)
        if captured is not None:
            kept.note_source(source, captured)
    return found


def _explored_graph(captured: Any, progress: ProgressDisplay, cluster: Any, settings: Any) -> Any:
    """The exploration of an operator graph that was kept."""
    from tensoropt.api import explore_graph

    found = explore_graph(
        captured.graph, captured.model, cluster=cluster, settings=settings, progress=progress, keep=True
    )
    progress.note("the operator graph is one that was kept; --anew captures the model again")
    return with_notes(found, captured.notes)


def _source(options: argparse.Namespace) -> str | None:
    """What decides the operator graph, where that can be said without building the model."""
    from tensoropt.session.kept import source_key

    onnx = onnx_options(options, training=options.mode == "train")
    facts = {name: getattr(options, name) for name in ("batch", "seed", "mode", "dtype")}
    return source_key(options.model, {**facts, "onnx": repr(onnx)})


def _explored_anew(
    options: argparse.Namespace,
    progress: ProgressDisplay,
    cluster: Any,
    settings: Any,
    more: Mapping[str, Any],
) -> tuple[Any, Any]:
    """(the exploration, what is kept of the capture; None where the graph cannot be saved)"""
    from tensoropt.api import explore
    from tensoropt.ranks.local_hardware import has_local_cores
    from tensoropt.session.kept import KeptCapture

    loaded = build_model(options, on_meta=not has_local_cores(cluster))
    found = explore(
        loaded.model,
        loaded.args,
        loaded.kwargs,
        cluster=cluster,
        settings=settings,
        source=options.model,
        seed=options.seed,
        progress=progress,
        **more,
    )
    found = with_origin(found, options, loaded.notes)
    graph = found.recorded.graph if found.recorded is not None else None
    return found, None if graph is None else KeptCapture(found.model, graph, loaded.notes)


def settings_option(options: argparse.Namespace, memory_bytes: float | None) -> Any:
    """What the command line chooses, as :class:`~tensoropt.plan.settings.Settings`."""
    counts = micro_batch_option(options.micro_batches)
    from tensoropt.plan.settings import settings_of

    return settings_of(
        None,
        {
            "mode": options.mode,
            "optimizer": options.optimizer,
            "micro_batches": counts,
            "memory_bytes": memory_bytes,
            "epsilon": options.epsilon,
            "max_points": options.max_points,
            "dtype": options.dtype,
            "recompute": options.recompute,
            "overlap": options.overlap,
            "constraints": options.constraints,
            "measure": options.measure,
            "process_memory": options.process_memory,
            "pipelines": options.pipelines,
            "placements": options.placements,
        },
    )


def build_model(options: argparse.Namespace, *, on_meta: bool) -> Any:
    """The model, without memory for its weights where they are not needed and its code allows it."""
    from tensoropt.plan import load_model
    from tensoropt.plan.model_source import ModelSourceError

    if options.batch is not None and not options.model.startswith("zoo:"):
        raise TensorOptError("--batch is for models of the zoo; other models bring their own example inputs")
    onnx = onnx_options(options, training=getattr(options, "mode", "train") == "train")
    if on_meta:
        try:
            return load_model(options.model, device="meta", seed=options.seed, batch=options.batch, onnx=onnx)
        except ModelSourceError:
            pass  # some code needs values; it either builds on the CPU or says there what is wrong
    return load_model(options.model, device="cpu", seed=options.seed, batch=options.batch, onnx=onnx)


def micro_batch_option(text: str) -> str | tuple[int, ...]:
    """``auto``, or the counts of ``1,2,4``."""
    if text == "auto":
        return text
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise TensorOptError(f"--micro-batches '{text}' is neither auto nor a list such as 1,2,4") from None


def with_origin(exploration: Any, options: argparse.Namespace, notes: tuple[str, ...]) -> Any:
    """The exploration with what its plans need to build the same model, and what its import has to say."""
    from dataclasses import replace

    from tensoropt.plan.plan import OnnxInfo

    onnx = onnx_options(options, training=getattr(options, "mode", "train") == "train")
    if onnx is not None:
        onnx = OnnxInfo(dims=dict(onnx.dims), outputs=onnx.outputs, loss=onnx.loss)
    model = exploration.model.model_copy(update={"batch": options.batch, "onnx": onnx})
    return with_notes(replace(exploration, model=model), notes)


def with_notes(exploration: Any, notes: Sequence[str]) -> Any:
    """The exploration with what the import of its model has to say before its other notes."""
    from dataclasses import replace

    report = {**exploration.report, "notes": [*notes, *exploration.report["notes"]]}
    return replace(exploration, report=report)


def defaults_line(options: argparse.Namespace, cluster: Any, settings: Any) -> str:
    """Everything in effect, defaults included, in one line."""
    micro = (
        settings.micro_batches if isinstance(settings.micro_batches, str) else list(settings.micro_batches)
    )
    parts = {
        "model": options.model,
        "batch": options.batch or "the model's own",
        "seed": options.seed,
        "cluster": f"{cluster.name} ({cluster.counts})",
        "mode": settings.mode,
        "optimizer": settings.optimizer,
        "dtype": settings.dtype,
        "recompute": settings.recompute,
        "overlap": settings.overlap,
        "pipelines": settings.pipelines,
        "placements": settings.placements,
        "micro-batches": micro,
        "memory": format_bytes(settings.memory_bytes) if settings.memory_bytes else "no limit",
        "epsilon": settings.epsilon,
        "max-points": settings.max_points or "no limit",
        "constraints": options.constraints or "none",
        "out": options.out or "nothing saved",
    }
    return "exploring with " + ", ".join(f"{k} {v}" for k, v in parts.items())

"""From a command line to an exploration: the model, the cluster, what may be chosen."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tensoropt.console import Progress
from tensoropt.errors import TensorOptError
from tensoropt.units import format_bytes


def explored(
    options: argparse.Namespace, progress: Progress, memory_bytes: float | None, **more: Any
) -> tuple[Path | None, Any]:
    """(the folder of ``--out`` if there is one, the exploration, saved there); none is left empty."""
    counts = micro_batch_option(options.micro_batches)
    from tensoropt.plan.constraints import constraints_of

    constraints = constraints_of(options.constraints)
    from tensoropt.cluster import load_cluster

    cluster = load_cluster(options.cluster)
    with writable_folder(options.out) if options.out else contextlib.nullcontext() as folder:
        return folder, _explored(options, progress, cluster, constraints, counts, memory_bytes, folder, more)


def _explored(
    options: argparse.Namespace,
    progress: Progress,
    cluster: Any,
    constraints: Any,
    counts: str | tuple[int, ...],
    memory_bytes: float | None,
    folder: Path | None,
    more: Mapping[str, Any],
) -> Any:
    from tensoropt import api
    from tensoropt.plan.problem import Settings
    from tensoropt.ranks.local_hardware import has_local_cores

    settings = Settings(
        options.mode,
        options.optimizer,
        counts,
        memory_bytes,
        options.epsilon,
        options.max_points,
        options.dtype,
        options.recompute,
        constraints,
        options.measure,
    )
    progress.note(defaults_line(options, cluster, settings))
    loaded = build_model(options, on_meta=not has_local_cores(cluster))
    found = api.explore(
        loaded.model,
        loaded.args,
        loaded.kwargs,
        cluster=cluster,
        mode=settings.mode,
        optimizer=settings.optimizer,
        micro_batches=counts,
        memory_bytes=memory_bytes,
        epsilon=settings.epsilon,
        max_points=settings.max_points,
        dtype=settings.dtype,
        recompute=settings.recompute,
        constraints=constraints,
        measure=options.measure,
        source=options.model,
        seed=options.seed,
        progress=progress,
        **more,
    )
    found = with_origin(found, options, loaded.notes)
    if folder is not None:
        found.save(folder)
    return found


def build_model(options: argparse.Namespace, *, on_meta: bool) -> Any:
    """The model; without memory for its weights where they are not needed and its code allows it."""
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


def onnx_options(options: argparse.Namespace, *, training: bool) -> Any:
    """What ``--dim``, ``--output`` and ``--loss`` say of an ONNX file; None where nothing is said."""
    from tensoropt.plan.model_source import OnnxOptions, is_onnx

    source = getattr(options, "model", None) or options.target
    if not is_onnx(source) and not (options.dim or options.output or options.loss):
        return None
    if options.loss is not None and not training:
        raise TensorOptError("--loss is for training; leave it out with --mode inference")
    dims: dict[str, int] = {}
    for text in options.dim:
        name, _, size = text.rpartition("=")
        if not name or not size.isdecimal():
            raise TensorOptError(f"--dim '{text}' is not NAME=SIZE, for example --dim batch=8")
        dims[name] = int(size)
    return OnnxOptions.of(dims, options.output, (options.loss or "auto") if training else None)


def micro_batch_option(text: str) -> str | tuple[int, ...]:
    """``auto`` or ``1,2,4``."""
    if text == "auto":
        return text
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise TensorOptError(f"--micro-batches '{text}' is neither auto nor a list such as 1,2,4") from None


@contextlib.contextmanager
def writable_folder(path: str) -> Iterator[Path]:
    """The folder, made if need be: refused before hours are spent, not after; made in vain, it is removed."""
    folder = Path(path)
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".probe"):
            pass
    except OSError as error:
        raise TensorOptError(
            f"cannot write into {folder} ({error.strerror or error}); choose another --out"
        ) from error
    try:
        yield folder
    except BaseException:
        with contextlib.suppress(OSError):  # not empty: something was saved
            for place in made:
                place.rmdir()
        raise


def with_origin(exploration: Any, options: argparse.Namespace, notes: tuple[str, ...]) -> Any:
    """The exploration with what its plans need to build the same model, and what its import has to say."""
    from dataclasses import replace

    from tensoropt.plan.plan import OnnxInfo

    onnx = onnx_options(options, training=getattr(options, "mode", "train") == "train")
    if onnx is not None:
        onnx = OnnxInfo(dims=dict(onnx.dims), outputs=onnx.outputs, loss=onnx.loss)
    report = {**exploration.report, "notes": [*notes, *exploration.report["notes"]]}
    model = exploration.model.model_copy(update={"batch": options.batch, "onnx": onnx})
    return replace(exploration, model=model, report=report)


def defaults_line(options: argparse.Namespace, cluster: Any, settings: Any) -> str:
    """Everything in effect, defaults included."""
    micro = (
        settings.micro_batches if isinstance(settings.micro_batches, str) else list(settings.micro_batches)
    )
    parts = {
        "model": options.model,
        "batch": options.batch or "the model's own",
        "seed": options.seed,
        "cluster": f"{cluster.name} ({cluster.device_count} x {cluster.device.name})",
        "mode": settings.mode,
        "optimizer": settings.optimizer,
        "dtype": settings.dtype,
        "recompute": settings.recompute,
        "micro-batches": micro,
        "memory": format_bytes(settings.memory_bytes) if settings.memory_bytes else "no limit",
        "epsilon": settings.epsilon,
        "max-points": settings.max_points or "no limit",
        "constraints": options.constraints or "none",
        "out": options.out or "nothing saved",
    }
    return "exploring with " + ", ".join(f"{k} {v}" for k, v in parts.items())

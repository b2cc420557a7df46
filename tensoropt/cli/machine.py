"""Verbs on this machine: ``profiles``, ``measure-links``, ``dashboard``, ``demo``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tensoropt.cli.answer import Answer
from tensoropt.cli.question import writable_folder
from tensoropt.console import Progress
from tensoropt.errors import TensorOptError, import_extra


def profiles(options: argparse.Namespace, progress: Progress) -> Answer:
    from tensoropt.costs.roofline import MOST_SAMPLES, fit_errors
    from tensoropt.profiling.store import KINDS, ProfileStore
    from tensoropt.report.table import fit_lines

    with ProfileStore() as store:
        lines: list[str] = []
        data: dict[str, Any] = {"path": str(store.path)}
        if options.export:
            lines.append(f"{store.export_file(options.export)} records written to {options.export}")
        if options.import_:
            lines.append(f"{store.import_file(options.import_)} records added from {options.import_}")
        if options.forget_failed:
            data["forgotten"] = store.forget_failed()
            lines.append(
                f"{data['forgotten']} records of what failed forgotten; it is tried again when needed"
            )
        counts = {kind: store.count(kind) for kind in KINDS}
        drawn = store.sample(MOST_SAMPLES)
        fits = fit_errors(drawn.records)
    lines.append(f"{store.path}: " + ", ".join(f"{n} {kind}" for kind, n in counts.items()))
    lines += [f"fitted to {drawn.words}"] if drawn.words else []
    for (device, mode), errors in fits.items():
        lines += [f"{device}, {mode}:", *fit_lines(errors)]
    fit = [{"device_type": d, "mode": m, "errors": errors} for (d, m), errors in fits.items()]
    sampled = {"records": len(drawn.records), "of": drawn.total}
    return data | {"records": counts, "fit": fit, "fitted_to": sampled}, "\n".join(lines), 0


def measure_links(options: argparse.Namespace, progress: Progress) -> Answer:
    from tensoropt.cluster import load_cluster

    cluster = load_cluster(options.cluster)
    from tensoropt import api
    from tensoropt.profiling.links import measure_links as measure
    from tensoropt.profiling.store import ProfileStore
    from tensoropt.ranks.local_hardware import local_pool

    if (ranks := local_pool(cluster)) is None:
        raise TensorOptError(
            f"{cluster.name} is neither CPU ranks nor the GPUs of this machine, so its links cannot be timed "
            "here; use local or local:N"
        )
    meshes = cluster.meshes(api.MAX_AXES)
    if cluster.device_count < 2:
        raise TensorOptError("a single device has no links; give at least local:2")
    data, texts = [], []
    with ProfileStore() as store, ranks as pool:
        for mesh in meshes:
            fits = measure(
                cluster,
                mesh,
                pool,
                store,
                refresh=options.refresh,
                progress=progress,
                stage=f"links {mesh.label}",
            )
            data.append(links_data(mesh.label, fits))
            texts.append(f"mesh {mesh.label}\n{fits.table()}")
    return {"cluster": cluster.name, "meshes": data}, "\n\n".join(texts), 0


def links_data(mesh: str, fits: Any) -> dict[str, Any]:
    """The fits of one mesh as plain data."""
    return {
        "mesh": mesh,
        "collectives": [
            {"kind": kind, "axes": list(axes), "groups": [fit.to_dict() for fit in group]}
            for (kind, axes), group in fits.collectives.items()
        ],
        "pairs": [{"between": list(pair), **fit.to_dict()} for pair, fit in fits.pairs.items()],
        "failed": dict(fits.failed),
    }


def dashboard(options: argparse.Namespace, progress: Progress) -> Answer:
    """Serve until interrupted. The dashboard lies above this package, so it is found by its name."""
    address = import_extra("tensoropt_app.server", "app", "the dashboard").serve(
        Path(options.dir) if options.dir else None, host=options.host, port=options.port, say=progress.note
    )
    return {"address": address}, "", 0


def demo(options: argparse.Namespace, progress: Progress) -> Answer:
    from tensoropt.demo import run_demo

    if options.steps < 1:
        raise TensorOptError(f"--steps {options.steps} runs nothing; give at least 1")

    def say(text: str) -> None:
        if not options.json:
            progress.say(text)

    with writable_folder(options.out) as folder:
        return run_demo(
            options.model, options.cluster, folder, steps=options.steps, progress=progress, say=say
        )

"""``measure-links``: the speed of communication between this machine's ranks."""

from __future__ import annotations

import argparse
from typing import Any

from tensoropt.cli.arguments import Answer, Verb
from tensoropt.console import ProgressDisplay


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    verb.add_argument(
        "--cluster",
        required=True,
        help="local or local:N; under torchrun, with one process per host, the file that detect wrote",
    )
    verb.add_argument("--refresh", action="store_true", help="measure again what is known already")


def answer(options: argparse.Namespace, progress: ProgressDisplay) -> Answer:
    """Return the fits for every mesh of this machine."""
    from tensoropt.cluster import load_cluster

    cluster = load_cluster(options.cluster)
    from tensoropt.machine import measure_links

    fits_of = measure_links(cluster, refresh=options.refresh, progress=progress)
    data = {"cluster": cluster.name, "meshes": [_links_data(mesh, fits) for mesh, fits in fits_of.items()]}
    return Answer(data, "\n\n".join(f"mesh {mesh}\n{fits.table()}" for mesh, fits in fits_of.items()))


def _links_data(mesh: str, fits: Any) -> dict[str, Any]:
    """Return the fits of one mesh as plain data."""
    return {
        "mesh": mesh,
        "collectives": [
            {"kind": kind, "axes": list(axes), "groups": [fit.to_dict() for fit in group]}
            for (kind, axes), group in fits.collectives.items()
        ],
        "pairs": [{"between": list(pair), **fit.to_dict()} for pair, fit in fits.pairs.items()],
        "failed": dict(fits.failed),
    }


VERB = Verb(
    "measure-links",
    "time point-to-point messages and collectives of this machine's ranks, or of a job's hosts",
    add_arguments,
    answer,
    measures=True,
)

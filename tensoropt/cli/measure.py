"""The verb ``measure``, which times this machine's links, describes its devices, or shows saved timings."""

from __future__ import annotations

import argparse
import os
from typing import Any

from tensoropt.cli.arguments import Answer, Verb
from tensoropt.console import WHOLE, ProgressDisplay
from tensoropt.errors import TensorOptError


def _add_arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "what",
        choices=("links", "host", "profiles"),
        help="links: time messages and collectives between ranks; host: describe this host, or all hosts "
        "of a job, as a cluster file; profiles: the profile store's contents and the errors of its fits",
    )
    links = verb.add_argument_group("links")
    links.add_argument(
        "--cluster",
        help="local or local:N; under torchrun, with one process per host, the file of `measure host`",
    )
    links.add_argument("--refresh", action="store_true", help="repeat measurements that are in the store")
    host = verb.add_argument_group("host")
    host.add_argument(
        "--hosts",
        type=WHOLE,
        metavar="N",
        help="number of hosts like this one; under torchrun, with one process per host, each is detected",
    )
    host.add_argument(
        "--network", default="", metavar="8xIB-400G", help="network cards per host, for several hosts"
    )
    host.add_argument("--out", metavar="FILE", help="cluster file to write, .yaml or .json")
    files = verb.add_argument_group("profiles").add_mutually_exclusive_group()
    files.add_argument("--export", metavar="FILE", help="write all records, for another machine")
    files.add_argument("--import", dest="import_", metavar="FILE", help="add the records of such a file")
    files.add_argument(
        "--forget-failed",
        action="store_true",
        help="forget measurements that failed, hung or ran out of memory, so that they are repeated",
    )


def _answer(options: argparse.Namespace, progress: ProgressDisplay) -> Answer:
    return {"links": _links, "host": _host, "profiles": _profiles}[options.what](options, progress)


def _links(options: argparse.Namespace, progress: ProgressDisplay) -> Answer:
    if options.cluster is None:
        raise TensorOptError("measure links needs --cluster local, local:N or cpu:N")
    from tensoropt.cluster import load_cluster

    cluster = load_cluster(options.cluster)
    from tensoropt.machine import measure_links

    fits_of = measure_links(cluster, refresh=options.refresh, progress=progress)
    data = {"cluster": cluster.name, "meshes": [_links_data(mesh, fits) for mesh, fits in fits_of.items()]}
    return Answer(data, "\n\n".join(f"mesh {mesh}\n{fits.table()}" for mesh, fits in fits_of.items()))


def _links_data(mesh: str, fits: Any) -> dict[str, Any]:
    return {
        "mesh": mesh,
        "collectives": [
            {"kind": kind, "axes": list(axes), "groups": [fit.to_dict() for fit in group]}
            for (kind, axes), group in fits.collectives.items()
        ],
        "pairs": [{"between": list(pair), **fit.to_dict()} for pair, fit in fits.pairs.items()],
        "failed": dict(fits.failed),
    }


def _host(options: argparse.Namespace, _: ProgressDisplay) -> Answer:
    """Return the description of the hosts found; the first process of a torchrun job also writes it."""
    from tensoropt.cluster.files import save_cluster
    from tensoropt.machine import detect

    found = detect(options.hosts, options.network)
    if os.environ.get("RANK", "0") != "0":
        return Answer(found.to_dict(), "")
    lines = [found.describe(), f"source: {found.source}"]
    if options.out:
        save_cluster(found, options.out)
        lines.append(f"saved: {options.out}; explore with --cluster {options.out}")
    return Answer(found.to_dict(), "\n".join(lines))


def _profiles(options: argparse.Namespace, _: ProgressDisplay) -> Answer:
    from tensoropt.costs.compute import MOST_SAMPLES, fit_errors
    from tensoropt.profiling.store import KINDS, ProfileStore
    from tensoropt.report.table import fit_lines

    lines: list[str] = []
    with ProfileStore() as store:
        data: dict[str, Any] = {"path": str(store.path)}
        if options.export:
            lines.append(f"{store.export_file(options.export)} records written to {options.export}")
        if options.import_:
            lines.append(f"{store.import_file(options.import_)} records added from {options.import_}")
        if options.forget_failed:
            data["forgotten"] = gone = store.forget_failed()
            lines.append(f"{gone} records of failed measurements forgotten; they are repeated when needed")
        data["records"] = {kind: store.count(kind) for kind in KINDS}
        drawn = store.sample(MOST_SAMPLES)
    fits = fit_errors(drawn.records)
    lines.append(f"{data['path']}: " + ", ".join(f"{n} {kind}" for kind, n in data["records"].items()))
    lines += [f"fitted to {drawn.words}"] if drawn.words else []
    for (device, mode), errors in fits.items():
        lines += [f"{device}, {mode}:", *fit_lines(errors)]
    data["fit"] = [{"device_type": d, "mode": m, "errors": errors} for (d, m), errors in fits.items()]
    data["fitted_to"] = {"records": len(drawn.records), "of": drawn.total}
    return Answer(data, "\n".join(lines))


VERB = Verb(
    "measure",
    "time this machine's links, describe it as a cluster, show its profiles",
    _add_arguments,
    _answer,
    measures=True,
)

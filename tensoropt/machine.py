"""This machine: its links, what its profile store knows, and the dashboard that it serves."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensoropt.cluster import Cluster, load_cluster
from tensoropt.costs.compute import MOST_SAMPLES, fit_errors
from tensoropt.errors import TensorOptError, import_extra
from tensoropt.profiling.links import LinkFits
from tensoropt.profiling.links import measure_links as measure_links_of_mesh
from tensoropt.profiling.store import KINDS, ProfileStore
from tensoropt.ranks.local_hardware import local_pool
from tensoropt.session.refining import MAX_AXES
from tensoropt.types import Progress, silent


def measure_links(
    cluster: str | Cluster = "local",
    *,
    refresh: bool = False,
    store: ProfileStore | None = None,
    progress: Progress | None = None,
) -> dict[str, LinkFits]:
    """The fits of this machine's collectives and point-to-point messages, by the label of the mesh.

    Args:
        cluster: ``local``, ``local:N`` or ``cpu:N``.
        refresh: measure again what the store knows already.
        store: where fits are kept; the user's own by default.
        progress: called with (stage, done, total, what).

    Raises:
        TensorOptError: the cluster is not this machine, or a single device.
    """
    where = load_cluster(cluster)
    if (ranks := local_pool(where)) is None:
        raise TensorOptError(
            f"{where.name} is neither CPU ranks nor the GPUs of this machine, so its links cannot be timed "
            "here; use local, local:N or cpu:N"
        )
    if where.device_count < 2:
        raise TensorOptError("a single device has no links; give at least local:2")
    found = {}
    with _open(store) as profile, ranks as pool:
        # All meshes of up to MAX_AXES axes, also those that an exploration leaves out.
        for mesh in where.meshes(MAX_AXES):
            found[mesh.label] = measure_links_of_mesh(
                where,
                mesh,
                pool,
                profile,
                refresh=refresh,
                progress=progress or silent,
                stage=f"links {mesh.label}",
            )
    return found


@dataclass(frozen=True)
class _KnownProfiles:
    """What a profile store knows.

    Attributes:
        path: of the store.
        records: how many of each kind.
        fits: per (type of device, mode) the errors of the fit to its records, by class of operator.
        sampled, of: how many records the fits were made to, of how many there are.
        sample_words: the same in words.
        exported, imported, forgotten: how many records were written, read, forgotten; None where not asked.
    """

    path: Path
    records: Mapping[str, int]
    fits: Mapping[tuple[str, str], list[dict[str, Any]]]
    sampled: int
    of: int
    sample_words: str
    exported: int | None = None
    imported: int | None = None
    forgotten: int | None = None


def profiles(
    *,
    export: str | os.PathLike[str] | None = None,
    import_: str | os.PathLike[str] | None = None,
    forget_failed: bool = False,
    store: ProfileStore | None = None,
) -> _KnownProfiles:
    """What the profile store knows, and how well it can be fitted.

    Args:
        export: write all records into this file, for another machine.
        import_: add the records of such a file.
        forget_failed: forget what failed, hung or ran out of memory, so that it is tried again.
        store: the user's own by default.

    Raises:
        TensorOptError: a file cannot be written or read.
    """
    with _open(store) as profile:
        exported = profile.export_file(export) if export else None
        imported = profile.import_file(import_) if import_ else None
        forgotten = profile.forget_failed() if forget_failed else None
        counts = {kind: profile.count(kind) for kind in KINDS}
        drawn = profile.sample(MOST_SAMPLES)
        fits = fit_errors(drawn.records)
        path = Path(profile.path)
    return _KnownProfiles(
        path, counts, fits, len(drawn.records), drawn.total, drawn.words, exported, imported, forgotten
    )


def dashboard(
    folder: str | os.PathLike[str] | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8050,
    say: Callable[[str], Any] = print,
) -> str:
    """The address at which the dashboard was served, until it was interrupted.

    The dashboard lies above this package, so it is found by its name.

    Args:
        folder: of an exploration, or one that holds several; None for the ready-made ones alone.
        port: 0 for any free one.
        say: gets the address once it is known.

    Raises:
        MissingExtraError: the extra ``app`` is not installed.
        TensorOptError: the folder holds no exploration, or the address cannot be bound.
    """
    server = import_extra("tensoropt_app.server", "app", "the dashboard")
    address: str = server.serve(Path(folder) if folder else None, host=host, port=port, say=say)
    return address


def _open(store: ProfileStore | None) -> Any:
    return nullcontext(store) if store is not None else ProfileStore()

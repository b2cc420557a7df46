"""One model on several clusters, on several device counts of one cluster, or at several global batches:
explored on each, and compared."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tensoropt.api import explore, explore_captured
from tensoropt.cluster import Cluster, list_clusters, load_cluster
from tensoropt.console import shows_progress
from tensoropt.errors import CaptureError, InfeasibleError, TensorOptError
from tensoropt.exploration.batch import REFUSED, refused_in
from tensoropt.exploration.batch_sweep import folder_of_batch, next_batch, throughput_frontier
from tensoropt.exploration.cluster_offers import (
    ClusterCurve,
    ClusterQuestion,
    Offers,
    Profile,
    batch_per_device,
    check_headroom,
    check_prices,
    load_sweep,
    offers,
    profile,
)
from tensoropt.exploration.exploration import Exploration
from tensoropt.exploration.exploration_files import LISTED
from tensoropt.exploration.export import write_points_csv
from tensoropt.exploration.rates import CLUSTERS_OWN, THOUSAND_STEPS, Amount, StepWork, Tariff, made_for
from tensoropt.files import write_text
from tensoropt.question.compute_dtype import AUTO, with_dtype
from tensoropt.question.model_source import (
    LoadedModel,
    ModelSourceError,
    batch_on,
    check_batch_is_choice,
    default_batch,
)
from tensoropt.question.settings import Settings
from tensoropt.session.kept import KeptCapture
from tensoropt.sharding.constraints import ConstraintError, LackingDevicesError
from tensoropt.types import Progress, ProgressChoice, heard

_logger = logging.getLogger(__name__)

_PRESETS = "presets"
"""The name that stands for all presets except those with a number of nodes."""


@dataclass(frozen=True)
class OnClusters:
    """Explorations of one step on several clusters, or of one model's steps at several batches, and the
    reasons why there is none on others, by name."""

    explorations: tuple[Exploration, ...]
    refused: Mapping[str, str]

    @classmethod
    def of(cls, saved: SavedOnClusters) -> OnClusters:
        """Return explorations given in any form; one in a folder that cannot be read counts as refused.

        Raises:
            TensorOptError: the folder holds none, or they are not of one model's step.
        """
        if isinstance(saved, OnClusters):
            return saved
        if isinstance(saved, (str, os.PathLike)):
            refused = refused_in(Path(saved))
            return cls(load_sweep(saved, refused), refused)
        return cls(tuple(saved), {})

    @property
    def profile(self) -> Profile:
        """The table devices x memory -> time, without explorations that were saved without their cluster."""
        return profile([ClusterCurve.of(e) for e in self.explorations if made_for(e.cluster)])

    @property
    def batch_per_device(self) -> int | None:
        """The batch of each device, if the global batch grows with the devices; otherwise None."""
        return batch_per_device(self.explorations)


SavedOnClusters = OnClusters | str | os.PathLike[str] | Sequence[Exploration]
"""Explorations on several clusters or numbers of devices, or the folder that they were saved in."""


@shows_progress
def explore_clusters(
    model: Any,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    clusters: str | Sequence[str | Cluster],
    batch_per_device: int | None = None,
    out: str | os.PathLike[str] | None = None,
    progress: ProgressChoice = None,
    **more: Any,
) -> OnClusters:
    """Return the cost frontiers of one model on several clusters; the model is captured once for all, or for
    each if its batch grows with the devices.

    A failure on one cluster is recorded for that cluster, and the others are explored; an unknown name is
    refused before anything is explored.

    Args:
        model, args, kwargs: as in :func:`tensoropt.explore`.
        clusters: names, files or clusters; ``presets`` for all presets.
        batch_per_device: the batch of each device, for weak scaling; ``model`` is then the result of
            :func:`tensoropt.load_model` for a model of the zoo, without a batch.
        out: a folder, in which each exploration gets a folder like that of ``explore --out``.
        progress: as in :func:`tensoropt.explore`.
        more: any other arguments of :func:`tensoropt.explore` except planners.

    Raises:
        ClusterError: a name is not a cluster.
        CaptureError: the model cannot be captured, whatever the cluster.
        TensorOptError: it could not be explored on any cluster; the message has the reasons. Or a batch per
            device is given for a model that brings its own inputs.
    """
    loaded = model if isinstance(model, LoadedModel) else LoadedModel(model, args, kwargs or {})
    if batch_per_device is not None:
        batch_on(loaded.source, loaded.batch, batch_per_device, 1)  # refused before anything is explored
    named = named_clusters(clusters)
    settings = more.get("settings") or Settings(dtype=more.get("dtype", AUTO))
    computing = with_dtype(settings, loaded.source or more.get("source", ""), map(load_cluster, named))
    if "settings" in more:
        more["settings"] = computing
    else:
        more["dtype"] = computing.dtype
    graph_settings = {k: v for k, v in more.items() if k not in ("loss", "source", "seed")}

    def on(cluster: Cluster, first: Exploration | None) -> Exploration:
        if batch_per_device is not None:
            sized = loaded.on(cluster.device_count, batch_per_device)
            return explore(sized, cluster=cluster, progress=progress, **more)
        if first is None:
            return explore(model, args, kwargs, cluster=cluster, progress=progress, **more)
        captured = KeptCapture(first.model, first.recorded.graph)
        return explore_captured(captured, cluster=cluster, progress=progress, **graph_settings)

    return over_clusters(named, on, out=out, progress=heard(progress))


def named_clusters(clusters: str | Sequence[str | Cluster]) -> list[str | Cluster]:
    """Return the clusters without duplicates: ``presets`` and comma-separated lists are expanded."""
    words = clusters.split(",") if isinstance(clusters, str) else list(clusters)
    expanded: list[str | Cluster] = []
    for word in words:
        name = word.strip() if isinstance(word, str) else word
        expanded += [n for n in list_clusters() if not n.endswith("xN")] if name == _PRESETS else [name]
    unique = list(dict.fromkeys(cluster for cluster in expanded if cluster != ""))
    if not unique:
        raise TensorOptError("there is no cluster to explore on; name some, or presets for all of them")
    return unique


def over_clusters(
    clusters: Sequence[str | Cluster] | Mapping[str, Cluster],
    explore_on: Callable[[Cluster, Exploration | None], Exploration],
    *,
    out: str | os.PathLike[str] | None,
    progress: Progress,
) -> OnClusters:
    """Explore on each cluster in turn; return the explorations and the failures.

    Args:
        clusters: clusters; with a mapping, its keys name them in results and folders.
        explore_on: explores on a cluster, given an earlier exploration whose operators it can reuse, if any.

    Raises:
        ClusterError: a name is not a cluster; raised before anything is explored.
    """
    sweep = _Sweep(out)
    named = clusters if isinstance(clusters, Mapping) else {}
    loaded = [*named.values()] or [load_cluster(cluster) for cluster in clusters]
    for number, (given, cluster) in enumerate(zip(clusters, loaded, strict=True)):
        name = given if isinstance(given, str) else given.name
        progress("clusters", number, len(clusters), name)
        first = next((e for e in sweep.explorations if e.recorded is not None), None)
        folder = name if named else _folder(cluster.name, sweep.explorations)
        sweep.add(name, folder, partial(explore_on, cluster, first))
    progress("clusters", len(clusters), len(clusters), "")
    return sweep.result()


@shows_progress
def explore_batches(
    model: LoadedModel,
    batches: str | Sequence[int] = "auto",
    *,
    cluster: str | Cluster = "local",
    out: str | os.PathLike[str] | None = None,
    progress: ProgressChoice = None,
    **more: Any,
) -> OnClusters:
    """Return the cost frontiers of one model at several global batches on one cluster; :func:`shop` compares
    them by sample.

    A failure at one batch is recorded for that batch, and the others are explored.

    Args:
        model: the result of :func:`tensoropt.load_model`, without a batch, for a model whose batch is a
            choice.
        batches: global batches in samples, or ``auto``: the model's own, doubled until the leanest plan does
            not fit the devices with 5 % free (or ``memory_bytes``), and one between the last that fits and
            the first that does not. If not even its own fits, it is halved instead.
        cluster, progress: as in :func:`tensoropt.explore`.
        out: a folder, in which each exploration gets a folder like that of ``explore --out``; beside them
            ``frontier.csv`` has the points that none at any batch beats in memory and time per sample.
        more: any other arguments of :func:`tensoropt.explore` except planners.

    Raises:
        TensorOptError: the model's batch is not a choice, a batch is below 1, or it could not be explored at
            any batch; the message has the reasons.
    """
    if model.batch is not None:
        raise TensorOptError(
            f"the model was loaded with a batch of {model.batch}, and batches to choose among are given; "
            "load it without a batch"
        )
    check_batch_is_choice(model.source)
    where = load_cluster(cluster)
    settings = more.get("settings") or Settings()
    limit = more.get("memory_bytes", settings.memory_bytes)

    def at(batch: int) -> Exploration:
        return explore(model.with_batch(batch), cluster=where, progress=progress, **more)

    return over_batches(batches, model.source, at, memory_bytes=limit, out=out, progress=heard(progress))


MOST_BATCHES = 12
"""The most explorations in search of the largest batch that fits; 11 times doubled is 2,048 times the
first."""


def over_batches(
    batches: str | Sequence[int],
    source: str,
    explore_at: Callable[[int], Exploration],
    *,
    memory_bytes: float | None,
    out: str | os.PathLike[str] | None,
    progress: Progress,
) -> OnClusters:
    """Explore at each batch in turn, or at larger and larger ones until none fits; return the explorations
    and the failures.

    Args:
        batches: as in :func:`explore_batches`.
        source: the model's, which says with which batch ``auto`` begins.
        explore_at: explores at a batch.
        memory_bytes: what plans may use of a device, if that is less than it has.

    Raises:
        TensorOptError: as in :func:`explore_batches`.
    """
    sweep, room = _Sweep(out), ClusterQuestion(memory_bytes=memory_bytes)
    tried: dict[int, bool] = {}
    if isinstance(batches, str):
        if batches != "auto":
            raise TensorOptError(
                f"batches '{batches}' are neither auto nor a list of numbers such as [8, 16]"
            )
        first = default_batch(source)
        chosen = iter(lambda: next_batch(tried, first) if len(tried) < MOST_BATCHES else None, None)
        total = MOST_BATCHES
    else:
        if not batches or min(batches) < 1:
            raise TensorOptError(f"batches {list(batches)} must be some numbers of at least 1")
        chosen, total = iter(dict.fromkeys(batches)), len(set(batches))
    for batch in chosen:
        name = folder_of_batch(batch)
        progress("batches", len(tried), total, f"batch {batch}")
        found = sweep.add(name, name, partial(explore_at, batch))
        tried[batch] = found is not None and ClusterCurve.of(found).offered(room) is not None
    progress("batches", len(tried), len(tried), "")
    sweep.explorations.sort(key=lambda found: StepWork.of(found).samples or 0)
    result = sweep.result()
    if out is not None:
        names = [folder_of_batch(StepWork.of(found).samples or 0) for found in result.explorations]
        points = [(names[place], index) for place, index in throughput_frontier(result.explorations)]
        of_name = dict(zip(names, result.explorations, strict=True))
        write_points_csv(of_name, points, Path(out) / LISTED)
    return result


class _Sweep:
    """Explorations one after the other; a failure of one is recorded, and does not cost the others."""

    def __init__(self, out: str | os.PathLike[str] | None) -> None:
        self.out = None if out is None else Path(out)
        self.explorations: list[Exploration] = []
        self.refused: dict[str, str] = {}

    def add(self, name: str, folder: str, explore_one: Callable[[], Exploration]) -> Exploration | None:
        """Return an exploration, saved in a folder of the sweep's; None if it failed.

        Raises:
            CaptureError, ModelSourceError, ConstraintError: nothing else of the sweep would succeed, either.
        """
        try:
            exploration = explore_one()
            if self.out is not None:
                exploration.save(self.out / folder)
        except LackingDevicesError as error:
            self.refused[name] = " ".join(str(error).split())
        except (CaptureError, ModelSourceError, ConstraintError):
            raise
        except TensorOptError as error:
            self.refused[name] = " ".join(str(error).split())
        except Exception as error:  # TensorOpt's own fault must not cost the others' results
            _logger.debug("exploring %s failed", name, exc_info=True)
            self.refused[name] = (
                f"TensorOpt itself failed with {type(error).__name__}: {' '.join(str(error).split())}"
            )
        else:
            self.explorations.append(exploration)
            return exploration
        return None

    def result(self) -> OnClusters:
        """Return all of it, and save the failures.

        Raises:
            InfeasibleError: nothing was explored; the message has the reasons.
        """
        if not self.explorations:
            raise InfeasibleError("; ".join(f"{name}: {why}" for name, why in self.refused.items()))
        if self.out is not None:
            write_text(self.out / REFUSED, json.dumps(self.refused, indent=1) + "\n")
        return OnClusters(tuple(self.explorations), self.refused)


def _folder(name: str, explorations: Sequence[Exploration]) -> str:
    """Return the name of a separate folder for a cluster, whatever characters its name contains."""
    plain = re.sub(r"[^\w.\[\]-]+", "-", name).lstrip(".") or "cluster"
    same = sum(str(exploration.cluster["name"]) == name for exploration in explorations)
    return f"{plain}-{same + 1}" if same else plain


def shop(
    saved: SavedOnClusters,
    *,
    time_s: float | None = None,
    cost: float | None = None,
    memory_bytes: float | None = None,
    headroom: float | None = None,
    amount: Amount = THOUSAND_STEPS,
    tariff: Tariff = CLUSTERS_OWN,
) -> Offers:
    """Return the clusters' offers for one model: the cheapest within a time, the fastest within a cost, and
    why.

    Args:
        saved: the result of :func:`explore_clusters`, its folder, or explorations.
        time_s: the longest step.
        cost: the most money for ``amount``.
        memory_bytes: the budget per device.
        headroom: the share of a device's memory that must stay free; by default 5 %, or none of a budget.
        amount: the training to which hours and money refer.
        tariff: prices that replace those of the clusters, and the currency.

    Raises:
        TensorOptError: the folder holds none, they are of different steps, or the amount's unit is unknown.
    """
    check_headroom(headroom)
    saved = OnClusters.of(saved)
    check_prices(saved.explorations, tariff)
    question = ClusterQuestion(time_s, cost, memory_bytes, headroom, amount, tariff)
    return offers(saved.explorations, question, saved.refused)

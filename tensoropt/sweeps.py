"""Functions that explore one model on several clusters or device counts, or at several batch sizes."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tensoropt.cluster import Cluster
from tensoropt.errors import CaptureError, InfeasibleError, TensorOptError
from tensoropt.exploration.batch_sweep import folder_of_batch, next_batch
from tensoropt.exploration.cluster_offers import fits_within
from tensoropt.exploration.exploration import Exploration
from tensoropt.exploration.rates import StepWork
from tensoropt.question.model_source import ModelSourceError, default_batch
from tensoropt.sharding.constraints import ConstraintError, LackingDevicesError
from tensoropt.types import Progress

_logger = logging.getLogger(__name__)

_MOST_BATCHES = 12
"""The most explorations in the search for the largest batch that fits; 11 doublings are a factor of 2,048."""


@dataclass(frozen=True)
class Sweep:
    """The explorations of one model, and the reasons for those that failed, by name."""

    explorations: list[Exploration] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, folder: Path, explore_one: Callable[[], Exploration]) -> Exploration | None:
        """Explore once and save the exploration in a folder. If that fails, note the reason and return None.

        Raises:
            CaptureError, ModelSourceError, ConstraintError: the rest of the sweep would fail, too.
        """
        try:
            exploration = explore_one()
            exploration.save(folder)
        except Exception as error:
            of_all = isinstance(error, (CaptureError, ModelSourceError, ConstraintError))
            if of_all and not isinstance(error, LackingDevicesError):
                raise
            self.refused[name] = " ".join(str(error).split())
            if not isinstance(error, TensorOptError):  # a bug must not lose the other results
                _logger.debug("exploring %s failed", name, exc_info=True)
                kind = type(error).__name__
                self.refused[name] = f"TensorOpt itself failed with {kind}: {self.refused[name]}"
            return None
        self.explorations.append(exploration)
        return exploration

    def ended(self) -> Sweep:
        """Return the sweep itself, or raise :class:`InfeasibleError` if it has no exploration."""
        if not self.explorations:
            raise InfeasibleError("; ".join(f"{name}: {why}" for name, why in self.refused.items()))
        return self


def over_clusters(
    clusters: Mapping[str, Cluster],
    explore_on: Callable[[Cluster, Exploration | None], Exploration],
    *,
    out: Path,
    progress: Progress,
) -> Sweep:
    """Explore a model on each cluster in turn.

    Args:
        clusters: the clusters by name; results and the folders in ``out`` have these names.
        explore_on: explores on a cluster; gets an earlier exploration, if there is one, to reuse its operator
            graph.

    Raises:
        InfeasibleError: no exploration succeeded; the message has the reasons.
    """
    sweep = Sweep()
    for number, (name, cluster) in enumerate(clusters.items()):
        progress("clusters", number, len(clusters), name)
        first = next((e for e in sweep.explorations if e.costs is not None), None)
        folder = re.sub(r"[^\w.\[\]-]+", "-", name).lstrip(".") or "cluster"
        sweep.add(name, out / folder, partial(explore_on, cluster, first))
    progress("clusters", len(clusters), len(clusters), "")
    return sweep.ended()


def over_batches(
    batches: str | Sequence[int],
    source: str,
    explore_at: Callable[[int], Exploration],
    *,
    memory_bytes: float | None,
    out: Path,
    progress: Progress,
) -> Sweep:
    """Explore a model at each batch size in turn. ``auto`` doubles the size until it does not fit, or
    halves it until it fits, then tries one halfway between the largest that fits and the next larger one.

    Args:
        source: the model's source; ``auto`` begins with its default batch size.
        memory_bytes: memory limit per device in bytes; None for that of the explorations.

    Raises:
        TensorOptError: the model's batch size cannot be chosen, or no exploration succeeded.
    """
    sweep, tried = Sweep(), dict[int, bool]()
    if isinstance(batches, str):
        first, total = default_batch(source), _MOST_BATCHES
        chosen = iter(lambda: next_batch(tried, first) if len(tried) < _MOST_BATCHES else None, None)
    else:
        chosen, total = iter(batches), len(batches)
    for batch in chosen:
        name = folder_of_batch(batch)
        progress("batches", len(tried), total, f"batch {batch}")
        found = sweep.add(name, out / name, partial(explore_at, batch))
        tried[batch] = found is not None and fits_within(found, memory_bytes)
    progress("batches", len(tried), len(tried), "")
    sweep.explorations.sort(key=lambda found: StepWork.of(found).samples or 0)
    return sweep.ended()

"""One model on several clusters, on several numbers of devices of one, or at several global batches."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tensoropt.cluster import Cluster
from tensoropt.errors import CaptureError, InfeasibleError, TensorOptError
from tensoropt.exploration.batch import REFUSED
from tensoropt.exploration.batch_sweep import folder_of_batch, next_batch, throughput_frontier
from tensoropt.exploration.cluster_offers import fits_within
from tensoropt.exploration.exploration import Exploration
from tensoropt.exploration.exploration_files import LISTED
from tensoropt.exploration.export import write_points_csv
from tensoropt.exploration.rates import StepWork
from tensoropt.files import write_text
from tensoropt.question.model_source import ModelSourceError, default_batch
from tensoropt.sharding.constraints import ConstraintError, LackingDevicesError
from tensoropt.types import Progress

_logger = logging.getLogger(__name__)

_MOST_BATCHES = 12
"""The most explorations in search of the largest batch that fits; 11 times doubled is 2,048 times the
first."""


@dataclass(frozen=True)
class Sweep:
    """Explorations of one model, and the reasons why there is none on other clusters or at other batches, by
    name."""

    explorations: tuple[Exploration, ...]
    refused: Mapping[str, str]


def over_clusters(
    clusters: Mapping[str, Cluster],
    explore_on: Callable[[Cluster, Exploration | None], Exploration],
    *,
    out: Path,
    progress: Progress,
) -> Sweep:
    """Explore on each cluster in turn.

    Args:
        clusters: by the name that the result and the folder in ``out`` have.
        explore_on: explores on a cluster, given an earlier exploration whose operators it can reuse, if any.

    Raises:
        InfeasibleError: no exploration succeeded; the message has the reasons.
    """
    sweep = _Running(out)
    for number, (name, cluster) in enumerate(clusters.items()):
        progress("clusters", number, len(clusters), name)
        first = next((e for e in sweep.explorations if e.recorded is not None), None)
        folder = re.sub(r"[^\w.\[\]-]+", "-", name).lstrip(".") or "cluster"
        sweep.add(name, folder, partial(explore_on, cluster, first))
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
    """Explore at each batch in turn, or with ``auto`` at larger and larger ones until none fits, then between
    the last that fits and the first that does not.

    Args:
        source: the model's, which says with which batch ``auto`` begins.
        memory_bytes: what plans may use of a device, if that is less than it has.

    Raises:
        TensorOptError: the model's batch is not a choice, or no exploration succeeded.
    """
    sweep, tried = _Running(out), dict[int, bool]()
    if isinstance(batches, str):
        first, total = default_batch(source), _MOST_BATCHES
        chosen = iter(lambda: next_batch(tried, first) if len(tried) < _MOST_BATCHES else None, None)
    else:
        chosen, total = iter(batches), len(batches)
    for batch in chosen:
        name = folder_of_batch(batch)
        progress("batches", len(tried), total, f"batch {batch}")
        found = sweep.add(name, name, partial(explore_at, batch))
        tried[batch] = found is not None and fits_within(found, memory_bytes)
    progress("batches", len(tried), len(tried), "")
    sweep.explorations.sort(key=lambda found: StepWork.of(found).samples or 0)
    result = sweep.ended()
    names = [folder_of_batch(StepWork.of(found).samples or 0) for found in result.explorations]
    points = [(names[place], index) for place, index in throughput_frontier(result.explorations)]
    write_points_csv(dict(zip(names, result.explorations, strict=True)), points, out / LISTED)
    return result


class _Running:
    def __init__(self, out: Path) -> None:
        self.out = out
        self.explorations: list[Exploration] = []
        self.refused: dict[str, str] = {}

    def add(self, name: str, folder: str, explore_one: Callable[[], Exploration]) -> Exploration | None:
        """Return an exploration, saved in a folder of the sweep's; None if it failed.

        Raises:
            CaptureError, ModelSourceError, ConstraintError: nothing else of the sweep would succeed, either.
        """
        try:
            exploration = explore_one()
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

    def ended(self) -> Sweep:
        """Return all of it, and save the failures."""
        if not self.explorations:
            raise InfeasibleError("; ".join(f"{name}: {why}" for name, why in self.refused.items()))
        write_text(self.out / REFUSED, json.dumps(self.refused, indent=1) + "\n")
        return Sweep(tuple(self.explorations), self.refused)

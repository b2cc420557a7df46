"""The facts about a run, kept with the exploration: what its model is, what was timed, what was left out."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from tensoropt.cluster import Cluster
from tensoropt.cluster.quantities import BANDWIDTH, FLOPS, LATENCY, MEMORY
from tensoropt.costs.process_memory import process_notes
from tensoropt.ops.atom_graph import AtomGraph
from tensoropt.plan.point import Point
from tensoropt.ranks.local_hardware import local_notes
from tensoropt.session.searched import Searched
from tensoropt.units import format_bytes
from tensoropt.version import __version__

HOUR_S = 3600.0
"""Seconds of a step above which a note is made."""


def versions() -> dict[str, str]:
    """Return the versions of everything that a plan's figures depend on."""
    return {
        "tensoropt": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def run_report(
    searched: Searched, seconds: Mapping[str, float], simulated: int, unbeaten: int
) -> dict[str, Any]:
    """Return the facts, under the names that they have in saved explorations.

    Args:
        seconds: the seconds of each stage.
        simulated: how many of the strategies that the search found were simulated.
        unbeaten: how many of these no other beats.
    """
    problem, costs = searched.problem, searched.costs
    graph, spaces = problem.graph.atoms.graph, problem.graph.atoms.spaces
    spreads = [e["spread"] for e in costs.measured.values() if "spread" in e]
    return {
        "operators": len(graph.operators),
        "groups": len(problem.graph.groups),
        "hubs": len(problem.graph.hubs),
        "shared_parameters": len(problem.graph.shared),
        "operators_without_rule": sorted({op.target for op in graph.operators if not spaces[op.name].known}),
        "operators_discovered": {
            target: found
            for target, found in problem.graph.atoms.discoveries().items()
            if any(spaces[op.name].discovered for op in graph.operators if op.target == target)
        },
        "split_share_of_flops": searched.split_share,
        "model_flops": dict(searched.model_flops),
        "micro_batches_refused": problem.refusal,
        "notes": [
            *local_notes(costs.cluster),
            *unusual_figures(costs.cluster),
            *graph.notes,
            *_lost(problem.graph.atoms),
            *costs.notes(),
            *process_notes(costs.cluster, graph, counted=costs.settings.process_memory),
            *searched.notes,
        ],
        "seconds": {k: round(v, 3) for k, v in seconds.items()},
        "points_found": sum(len(frontier) for space in searched.spaces for frontier in space.frontiers),
        "points_before_judging": simulated,
        "points_unbeaten": unbeaten,
        "workloads_measured": len(costs.measured),
        "median_spread": float(np.median(spreads)) if spreads else None,
        "failed_measurements": sum("error" in e for e in costs.measured.values()),
        "device": costs.cluster.device.name,
        "timed_now": costs.pool is not None,
        # With ranks, the figures were timed, and none rests on the fit.
        "fit": [asdict(error) for error in costs.efficiencies.errors] if costs.pool is None else [],
    }


def unusual_figures(cluster: Cluster) -> Iterator[str]:
    """Yield figures of a cluster that no device or link has, in words: units are easily mistaken."""
    for kind in cluster.device_kinds:
        yield from MEMORY.unusual(kind.memory_bytes, f"memory of {kind.name}")
        yield from BANDWIDTH.unusual(kind.memory_bandwidth, f"memory bandwidth of {kind.name}")
        for dtype, rate in kind.flops.items():
            yield from FLOPS.unusual(rate, f"{dtype} FLOP/s of {kind.name}")
    links = {link.name: link for link in (*(level.link for level in cluster.levels), *cluster.pairs.values())}
    for name, link in links.items():
        yield from LATENCY.unusual(link.latency_s, f"latency of {name}")
        yield from BANDWIDTH.unusual(link.bandwidth_bytes_per_s, f"bandwidth of {name}")


def implausible(cluster: Cluster, points: Sequence[Point]) -> Iterator[str]:
    """Yield remarks that no plan fits a device, or that every step takes hours."""
    largest = max(device.memory_bytes for device in cluster.devices)
    if points[0].memory_bytes > largest:
        yield (
            f"no plan fits a device: the leanest needs {format_bytes(points[0].memory_bytes)}, and a device "
            f"has {format_bytes(largest)}; take more devices or a smaller batch, or mend the cluster's units"
        )
    if points[-1].time_s > HOUR_S:
        yield (
            f"the fastest step takes {points[-1].time_s / HOUR_S:,.1f} hours: are the units of the cluster's "
            "figures right?"
        )


def _lost(atoms: AtomGraph) -> Iterator[str]:
    """Yield the operators that could not be tried without their rules, in words."""
    for target, reason in atoms.lost().items():
        yield (
            f"{target} has no rule and is kept whole on every device: {reason}; once it is mended, "
            "`tensoropt profiles --forget-failed` has it tried again"
        )

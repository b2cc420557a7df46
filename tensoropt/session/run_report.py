"""Facts about a run, kept with the exploration: what its model is, what was timed, what was left out."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from tensoropt.costs.process_memory import process_notes
from tensoropt.ops.atom_graph import AtomGraph
from tensoropt.ranks.local_hardware import local_notes
from tensoropt.session.searched import Searched
from tensoropt.version import __version__


def versions() -> dict[str, str]:
    """The versions of everything that a plan's figures depend on."""
    return {
        "tensoropt": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def run_report(
    searched: Searched, seconds: Mapping[str, float], simulated: int, unbeaten: int
) -> dict[str, Any]:
    """The facts, under the names that saved explorations have them by.

    Args:
        seconds: by stage.
        simulated: how many of the strategies that the search found were simulated.
        unbeaten: how many of these no other one beats.
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
        # With ranks the figures were timed, and none rests on the fit.
        "fit": [asdict(error) for error in costs.efficiencies.errors] if costs.pool is None else [],
    }


def _lost(atoms: AtomGraph) -> Iterator[str]:
    """Operators that could not be tried without their rules, in words."""
    for target, reason in atoms.lost().items():
        yield (
            f"{target} has no rule and is kept whole on every device: {reason}; once it is mended, "
            "`tensoropt profiles --forget-failed` has it tried again"
        )

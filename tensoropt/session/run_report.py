"""The report saved with an exploration: the size of its model, what was timed, what was left out.

If PyTorch cannot run an operator in some way (on fake tensors, in pieces, without storage), its error is
replaced by one that names the operator and its line in the model.
"""

from __future__ import annotations

import contextlib
import dis
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tensoropt.capture.lines import frames_of
from tensoropt.capture.unsupported import of_error
from tensoropt.costs.process_memory import process_notes
from tensoropt.errors import TensorOptError, UnsupportedError
from tensoropt.exploration.rates import HOUR_S
from tensoropt.graph import Operator, OperatorGraph
from tensoropt.ops.calls import LocalCall
from tensoropt.ops.families.routed_experts import EXPERTS
from tensoropt.ops.index_space import AtomGraph
from tensoropt.plan.findings import Findings
from tensoropt.profiling.workload import Workload
from tensoropt.ranks.local_hardware import local_notes
from tensoropt.session.searched import Searched
from tensoropt.units import format_bytes
from tensoropt.version import __version__

_TORCH = Path(torch.__file__).parent
_REASON = 200
"""The most characters shown of an error's first line."""


@contextlib.contextmanager
def failures_named(model: str, graph: OperatorGraph | None = None) -> Iterator[None]:
    """Replace PyTorch's errors inside the block by errors that a person can act on.

    Args:
        model: the model's name.
        graph: the model's operators with their source lines, if they are known.

    Raises:
        UnsupportedError: names the operator and its line in the model's own code.
    """
    try:
        yield
    except (TensorOptError, OSError, MemoryError):
        raise
    except Exception as error:
        if not _is_pytorchs(error):
            raise
        raise UnsupportedError(_described(model, graph, error)) from error


def _is_pytorchs(error: Exception) -> bool:
    innermost = next(frames_of(error), None)
    if innermost is None:
        return False
    filename = Path(innermost.f_code.co_filename)
    # Kernels raise from the line that calls them, whatever that line is; no `raise` stands there.
    return filename.is_relative_to(_TORCH) or (isinstance(error, RuntimeError) and not _raised(error))


def _raised(error: BaseException) -> bool:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def _described(model: str, graph: OperatorGraph | None, error: BaseException) -> str:
    operator = _operator(error, graph)
    at = f" at {operator.target}" if operator is not None else ""
    if operator is not None and operator.module:
        at += f" of `{operator.module}`"
    if operator is not None and operator.source:
        at += f" ({operator.source})"
    kind = of_error(error)
    known = f"the model {kind.what}; {kind.remedy}" if kind is not None else ""
    unknown = "write that part with other PyTorch calls, or report it with what --debug prints"
    return f"{model} is not supported: exploring it failed{at}: {_reason(error)}; {known or unknown}"


def _operator(error: BaseException, graph: OperatorGraph | None) -> Operator | None:
    operators = graph.operators if graph is not None else ()
    makers = {name: op for op in operators for name in op.outputs}
    by_name = {op.name: op for op in operators}
    for frame in frames_of(error):
        names = frame.f_locals
        for value in (names[one] for one in ("op", "operator", "call", "probe", "work") if one in names):
            if isinstance(value, Operator):
                return by_name.get(value.name, value)
            if isinstance(value, LocalCall) and value.name in by_name:
                return by_name[value.name]
            if isinstance(value, Workload):
                made = [value.names.get(name, name) for _, names in value.calls for name in names]
                found = [makers[name] for name in made if name in makers]
                # In backward no function handles an operator; the error may name one.
                named = [op for op in found if op.target.split(".")[1] in str(error)]
                if found:
                    return (named or found)[0]
    return None


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split("\n\n")[0].split()) or type(error).__name__
    first = text.split(". ")[0]
    return first if len(first) <= _REASON else first[:_REASON].rsplit(" ", 1)[0] + " ..."


def versions() -> dict[str, str]:
    """Return the versions of this package and of the libraries on which its predictions depend."""
    return {
        "tensoropt": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def run_report(searched: Searched, seconds: Mapping[str, float]) -> dict[str, Any]:
    """Return the report of an exploration, as the dictionary that is saved with it.

    Args:
        seconds: the duration of each stage in seconds.
    """
    problem, costs = searched.problem, searched.costs
    graph, spaces = problem.graph.atoms.graph, problem.graph.atoms.spaces
    spreads = [e["spread"] for e in costs.timings.records.values() if "spread" in e]
    return {
        "operators": len(graph.operators),
        "operators_without_rule": sorted({op.target for op in graph.operators if not spaces[op.name].known}),
        "split_share_of_flops": searched.split_share,
        "model_flops": dict(searched.model_flops),
        "peak_flops": dict(costs.timings.peaks),
        "micro_batches_refused": problem.refusal,
        "notes": [
            *local_notes(costs.cluster),
            *graph.notes,
            *_expected_rows(graph, costs.cluster.device_count),
            *_lost(problem.graph.atoms),
            *costs.notes(),
            *process_notes(costs.cluster, graph, counted=costs.settings.process_memory),
            *searched.notes,
        ],
        "seconds": {k: round(v, 3) for k, v in seconds.items()},
        "workloads_measured": len(costs.timings.records),
        "median_spread": float(np.median(spreads)) if spreads else None,
        "failed_measurements": sum("error" in e for e in costs.timings.records.values()),
        "device": costs.cluster.device.name,
        "timed_now": costs.pool is not None,
        # With ranks, the figures were timed, and none rests on the fit.
        "fit": [asdict(error) for error in costs.timings.efficiencies.errors] if costs.pool is None else [],
    }


def _expected_rows(graph: OperatorGraph, devices: int) -> Iterator[str]:
    """Yield a note on how unevenly experts are assumed to be loaded; none for a model without experts."""
    if not any(op.target == EXPERTS for op in graph.operators):
        return
    asked = graph.expert_imbalance
    if asked == 1:
        share = "as many rows as the mean"
    elif asked < devices:
        fewer = f", or all of them on fewer than {asked:g} ranks" if asked > 2 else ""
        share = f"{asked:g} times as many rows as the mean{fewer}"
    else:
        # The busiest of n ranks computes at most all rows, n times the mean.
        share = "all rows"
    yield (
        "which experts a router chooses is not known: where experts are split, the busiest rank is expected "
        f"to compute {share} (--expert-imbalance {asked:g})"
    )


def implausible(found: Findings) -> Iterator[str]:
    """Yield a remark if no plan fits a device, and one if even the fastest step takes more than an hour."""
    points = found.points
    if not points:
        return
    if (least := float(found.needs.min())) > found.device_bytes:
        yield (
            f"no plan fits a device: the leanest needs {format_bytes(least)}, and a device "
            f"has {format_bytes(found.device_bytes)}; take more devices or a smaller batch, or correct the "
            "cluster's units"
        )
    if points[-1].time_s > HOUR_S:
        yield (
            f"the fastest step takes {points[-1].time_s / HOUR_S:,.1f} hours: are the units of the "
            "cluster's figures right?"
        )


def _lost(atoms: AtomGraph) -> Iterator[str]:
    for target, reason in atoms.lost().items():
        yield (
            f"{target} has no rule and is kept whole on every device: {reason}; once that is fixed, "
            "`tensoropt measure profiles --forget-failed` lets the next exploration try it again"
        )

"""The command lines that repeat an exploration, choose its points, run its plans and check them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tensoropt.cluster import Cluster, load_cluster
from tensoropt.errors import ClusterError
from tensoropt.exploration.exploration import Exploration
from tensoropt.exploration.exploration_files import DESCRIBED
from tensoropt.exploration.export import limits_asked
from tensoropt.exploration.rates import for_gpus, made_for
from tensoropt.plan.point import FRONTIER
from tensoropt.question.model_source import is_onnx
from tensoropt.question.question import Question
from tensoropt.question.settings import Settings
from tensoropt.report.table import run_line
from tensoropt.units import counted, format_bytes


@dataclass(frozen=True)
class Command:
    """A command line to copy, and its purpose."""

    title: str
    line: str


def cluster_is_named(exploration: Exploration) -> bool:
    """Return whether a command line can give the cluster by its name: the name still means the same cluster,
    or it is ``local``, which means the machine that runs the command."""
    if str(exploration.cluster["name"]).partition(":")[0] == "local":
        return True
    try:
        saved = Cluster.from_dict(exploration.cluster)
        return load_cluster(saved.name).fingerprint == saved.fingerprint
    except ClusterError:
        return False


def question_of(exploration: Exploration) -> Question:
    """Return the model, cluster and settings of an exploration, as far as they were saved."""
    model, settings = exploration.model, Settings.from_dict(exploration.settings)
    named = dict.fromkeys(str(row["planner"]) for row in exploration.comparison)
    planners = tuple(name for name in named if name != FRONTIER)
    fields: dict[str, Any] = {}
    if planners:
        settings = replace(settings, memory_bytes=None)  # planners have separate limits
        fields["limits"] = limits_asked(exploration)
    if model.onnx is not None:
        loss = None if model.onnx.loss == "auto" else model.onnx.loss
        fields |= {"dims": model.onnx.dims, "outputs": model.onnx.outputs, "loss": loss}
    return Question(
        model=_whole_source(model.source) or "MODEL",
        cluster=dict(exploration.cluster),
        batch=model.batch,
        seed=model.seed,
        settings=settings,
        planners=planners,
        **fields,
    )


def explore_line(exploration: Exploration, out: str, folder: str = "DIR") -> str:
    """Return the command line that repeats this exploration; options at their default are left out.

    Args:
        out: the folder to write to.
        folder: the exploration's folder, whose file states the cluster and constraints if they have no name.
    """
    file = f"{folder}/{DESCRIBED}"
    constraints = exploration.settings.get("constraints")
    # Named, not read, because reading it needs PyTorch, which pages that show explorations do not import.
    bare = replace(exploration, settings={**exploration.settings, "constraints": None})
    named = {"cluster": str(exploration.cluster["name"])} if cluster_is_named(exploration) else {}
    question = question_of(bare).model_copy(update={**named, "constraints_file": file if constraints else ""})
    return question.line(out, cluster_file=file)


def _whole_source(source: str) -> str:
    place = source if is_onnx(source) else source.rpartition(":")[0]
    if not place.endswith((".onnx", ".py")) or not Path(place).is_file():
        return source
    return f"{Path(place).resolve()}{source.removeprefix(place)}"


def run_ways(cluster: Mapping[str, Any], devices: int, path: str) -> tuple[Command, ...]:
    """Return commands and calls that run the plan file ``path`` on ``devices`` devices of a cluster; for GPUs
    also a command that runs it on CPU ranks."""
    known = made_for(cluster)
    if known is None or not for_gpus(cluster):
        return (Command("Run it", run_line(devices, path)),)
    inside = known.levels[-1].size if known.levels else devices
    nodes, each = -(-devices // inside), min(inside, devices)
    several = f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29500 " if nodes > 1 else ""
    return (
        Command(
            f"Run it on {counted(devices, 'GPU')}{' (on each node)' if nodes > 1 else ''}",
            f"torchrun {several}--nproc-per-node {each} -m tensoropt.execute {path}",
        ),
        Command("Or in your own loop, under torchrun", f'tensoropt.parallelize(model, "{path}")'),
        Command(
            "Or by Hugging Face's Trainer (tensoropt.integrations.transformers)",
            f'PlanTrainer(model, arguments, plan="{path}")',
        ),
        Command("Run it on CPU ranks", run_line(devices, path, gpus=True)),
    )


def commands_for(exploration: Exploration, folder: str, rerun: str, index: int) -> tuple[Command, ...]:
    """Return the commands that repeat the exploration, choose a point, run it, verify it and save the result.

    Args:
        folder: the exploration's folder.
        rerun: the folder into which a repeated exploration is written.
        index: the point's index in ``exploration.all_points``.
    """
    needs = format_bytes(float(exploration.needs[index]))
    devices = exploration.spaces[exploration.all_points[index].space].devices
    return (
        Command("Explore again", explore_line(exploration, rerun, folder)),
        Command(
            f"Make this plan (needs {needs})",
            f"tensoropt choose {shlex.quote(folder)} --point {index + 1} --out plan.json",
        ),
        *run_ways(exploration.cluster, devices, "plan.json"),
        Command(
            "Check it beside the unsplit model, and save the result",
            f"tensoropt verify plan.json --save {shlex.quote(folder)}",
        ),
    )

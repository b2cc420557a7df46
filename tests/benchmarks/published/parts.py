"""A published run's step in named parts, so that shares of peaks are fitted without simulating it again.

A run is simulated once, at the depths of predictions. Operators are kept as their kernels, with what each
would take at the peaks; everything beside them as it is simulated.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tensoropt.cluster import reached_by
from tensoropt.cluster.catalog import Reached, host_seconds
from tensoropt.costs.compute import RooflineCompute, moved_bytes, peak_flops
from tensoropt.evaluation.evaluate import Evaluation
from tensoropt.ops.calls import CostClass
from tensoropt.planners.pinned import PinnedPipelinePoint, PinnedPoint, mesh_of
from tensoropt.profiling.store import ProfileStore
from tensoropt.report.step_parts import _waited_lanes
from tensoropt.simulate.recording import COMPUTE, TimelineEvent
from tensoropt.simulate.timed import TimedStep
from tests.benchmarks.published.predict import DEPTHS, simulate_run
from tests.benchmarks.published.runs import Run, architecture_of, cluster_of, pinned_of

LAUNCHES, OPTIMIZER, COPIES, SLOWER = "launches", "optimizer", "copies and additions", "slow-down"
TENSOR, CONTEXT, DATA, SENDS = "tensor parallel", "context parallel", "data parallel", "pipeline sends"
WAITS = (TENSOR, CONTEXT, SENDS, DATA)
BUBBLE, HOST = "bubble", "host"
_GPU = "cuda"

Kernel = tuple[str, float, float]
"""The class of an operator's kernel, and its seconds at the peak FLOP/s and at the peak bandwidth."""


@dataclass(frozen=True)
class StepParts:
    """A simulated step in parts; of a pipeline that of its busiest place.

    Attributes:
        weight: how often it counts in the run's step; below 0 where depths are extended.
        kernels: kernels of operators with how often each runs.
        seconds: all else that the device computes or waits for, by name.
        bubble: what the place waits for others, as a share of what it computes and waits otherwise.
        host_s: the host's seconds to issue the step; 0 of a pipeline, whose places have it in their own.
    """

    weight: float
    kernels: Sequence[tuple[str, float, float, float]]
    seconds: Mapping[str, float]
    bubble: float = 0.0
    host_s: float = 0.0


@dataclass(frozen=True)
class RunParts:
    """A run's step in parts, what it took, and what a fit tells runs apart by.

    Attributes:
        simulated_s: the step as simulated, at ``simulated_at``: the shares of peaks that products, attention
            and the memory bandwidth reached there.
    """

    id: str
    source: str
    date: str
    gpu: str
    capability: str
    cluster: str
    model: str
    published_s: float
    simulated_s: float
    simulated_at: tuple[float, float, float]
    steps: Sequence[StepParts]


def kernels_of(run: Run, evaluation: Evaluation) -> tuple[Counter[Kernel], float]:
    """The kernels of a step's operators with how often each runs, and the seconds of launching them all."""
    device = cluster_of(run).device
    roofline = RooflineCompute(device, "adam_fused", fused=run.fused, dated=run.date)
    candidates, found, launched = evaluation.batch.candidates, Counter[Kernel](), 0
    micro_batches = candidates.mesh[0]
    for group in candidates.graph.groups:
        index = int(evaluation.choices[group.name][0])
        work, facts = candidates.works(group)[index], candidates.facts(group)[index]
        again = candidates.again(group)
        forwards = micro_batches * (2 if again and again[index] else 1)
        for cls, of in roofline.kernels_of(work, facts):
            peak = peak_flops(device, roofline.kernels, work.dtype, cls)
            share = of.forward_flops / facts.forward_flops if facts.forward_flops else 0.0
            memory_s = moved_bytes(cls, of) / device.memory_bandwidth
            found[str(cls), of.forward_flops / peak, memory_s] += forwards
            found[str(cls), share * facts.backward_flops / peak, 2 * memory_s] += micro_batches
            launched += forwards + 2 * micro_batches
    host = host_seconds(device.type)
    return found, launched * host.kernel_s if host else 0.0


def seconds_of(kernels: Iterable[tuple[str, float, float, float]], reached: Reached) -> float:
    """The seconds of kernels at these shares of the peaks."""
    return sum(times * max(a / reached.of(cls), m / reached.memory) for cls, a, m, times in kernels)


def _waited(timed: TimedStep, names: Sequence[str]) -> Counter[str]:
    """The seconds that are waited for in a step, by what is waited for."""

    def lane(axes: Sequence[int] | None) -> str:
        if axes is None:
            return COMPUTE
        # Where tensor parallelism has two axes, the second has no name here.
        of = {names[axis] if axis < len(names) else "tensor" for axis in axes}
        return TENSOR if "tensor" in of else CONTEXT if of == {"context"} else DATA

    events = [
        TimelineEvent(e.name, lane(e.axes), e.start_s, e.duration_s, e.phase, e.group) for e in timed.events
    ]
    return Counter(_waited_lanes(events))


def step_parts(run: Run, found: PinnedPoint | PinnedPipelinePoint, weight: float) -> StepParts:
    """The parts of a simulated step; they add up to it."""
    point, mesh, device = found.point, mesh_of(pinned_of(run)), cluster_of(run).device
    names = [name for name, size in zip(mesh.names, mesh.shape, strict=True) if size > 1]
    stages, sends_s = [], 0.0
    if isinstance(found, PinnedPoint):
        stages.append(found.evaluation)
    else:
        pipeline, place = found.evaluation, found.evaluation.busiest_place
        stages += [pipeline.stages[stage] for stage in pipeline.strategy.stages_at(place)]
        sends_s = float(pipeline.times.sending_s[place])
    kernels, computed, waited, launches_s = Counter[Kernel](), Counter[str](), Counter[str](), 0.0
    for stage in stages:
        own, own_s = kernels_of(run, stage)
        kernels.update(own)
        launches_s += own_s
        timed = stage.timed()
        waited.update(_waited(timed, names))
        for event in timed.events:
            if event.axes is None:
                computed[event.kind] += event.duration_s
    rows = [(*kernel, float(times)) for kernel, times in kernels.items()]
    copies_s = sum(s for kind, s in computed.items() if kind not in ("compute", "step", "begin"))
    seconds = {LAUNCHES: launches_s, OPTIMIZER: computed["step"], COPIES: copies_s}
    seconds[SLOWER] = (
        point.compute_s
        - seconds_of(rows, reached_by(device, run.date, compiled=run.fused))
        - sum(seconds.values())
    )
    # What stages wait for by themselves may be less in a pipeline: what is left is of the end of a step.
    waited[SENDS], waited[DATA], left_s = sends_s, point.exposed_s, point.exposed_s
    for name in WAITS:
        seconds[name] = min(waited[name], left_s)
        left_s -= seconds[name]
    busy_s = point.compute_s + point.exposed_s
    if isinstance(found, PinnedPoint):
        return StepParts(weight, rows, seconds, host_s=point.host_s)
    return StepParts(weight, rows, seconds, bubble=max(point.idle_s, 0.0) / busy_s)


def parts_of(run: Run, models: Mapping[str, Any], store: ProfileStore) -> RunParts:
    """A run's step in parts, extended from two depths as predictions are.

    Raises:
        RefusedRunError: something of it cannot be expressed.
        TensorOptError: the package refuses it.
    """
    of, cluster = architecture_of(run, models), cluster_of(run)
    times = (of.layers - DEPTHS[0]) / (DEPTHS[1] - DEPTHS[0])
    depths = list(zip(DEPTHS, (1 - times, times), strict=True))
    # Stages of a pipeline that are equal are searched once.
    if run.number("pp") > 1 or of.layers <= DEPTHS[-1]:
        depths = [(of.layers, 1.0)]
    steps, simulated_s = [], 0.0
    # Of a run that recomputes some of its blocks a mean of all and none, as in predictions.
    for (layers, of_depth), (recipe, share) in itertools.product(depths, run.recomputed.items()):
        found = simulate_run(run, replace(of, layers=layers), store, recipe=recipe)
        simulated_s += of_depth * share * found.point.time_s
        steps.append(step_parts(run, found, of_depth * share))
    assert run.published_step_s is not None
    shares = reached_by(cluster.device, run.date, compiled=run.fused)
    simulated_at = shares.of(CostClass.MATRIX), shares.of(CostClass.ATTENTION), shares.memory
    return RunParts(
        id=run.id, source=run.family, date=run.date, gpu=run.gpu, capability=cluster.device.capability,
        cluster=cluster.name, model=run.model, published_s=run.published_step_s, simulated_s=simulated_s,
        simulated_at=simulated_at, steps=steps,
    )  # fmt: skip


def load_parts(path: Path) -> dict[str, RunParts]:
    """The runs of a file of parts, by id; none if there is no file."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        data = json.loads(line)
        steps = [
            StepParts(**step | {"kernels": [*map(tuple, step["kernels"])]}) for step in data.pop("steps")
        ]
        simulated_at = tuple(data.pop("simulated_at"))
        found[data["id"]] = RunParts(steps=steps, simulated_at=simulated_at, **data)
    return found


def keep_parts(parts: RunParts, path: Path) -> None:
    """Append a run to a file of parts."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(parts)) + "\n")

"""The functions that :mod:`tensoropt.verify.real_ranks` runs on every rank, to check its part of a plan."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tensoropt.capture.steps import GRADIENT_FLOOR, LEAST_SCALE, Worst, difference, precision, worst
from tensoropt.engine.engine import Engine
from tensoropt.engine.models import CapturedModel, ModelSpec, load_model
from tensoropt.execute.executable import engine_of, strategy_from_data
from tensoropt.verify import reference
from tensoropt.verify.agreement import JointCall
from tensoropt.verify.fake_ranks import RunStep, recorded, step_times, tracked_memory
from tensoropt.verify.findings import Differences, NarrowDistance
from tensoropt.verify.recorder import summarise
from tensoropt.verify.reference import Results, first_step


@dataclass(frozen=True)
class CheckOptions:
    """The checks that every rank makes of a plan; picklable.

    Attributes:
        optimizer: the name of the plan's optimizer.
        seed: the seed of dropout.
        numerics: whether to compare with the unsplit model.
        memory: whether to track the memory of one step.
        timed_steps: the number of steps to time, 0 for none.
    """

    optimizer: str = "adam"
    seed: int = 0
    numerics: bool = True
    memory: bool = True
    timed_steps: int = 5


@dataclass(frozen=True)
class _RankNumerics:
    """The differences of one rank's results from the unsplit model's; picklable.

    Attributes:
        loss: the difference of the loss, or of outputs in inference.
        gradient, parameter, buffer: the largest difference of each kind, and the tensor's name.
        not_finite: the number of NaN and infinite values of the unsplit model's results, by name.
        rounding: the unsplit model's rounding under mixed precision, otherwise None.
        replicas: (shard index, digest of results) by parameter.
        spread: the largest relative difference between replicas; None if their bits must agree.
        unsplit_on: the unsplit model's device.
    """

    loss: float
    gradient: Worst
    parameter: Worst
    buffer: Worst
    not_finite: Mapping[str, int]
    rounding: Differences | None
    replicas: Mapping[str, tuple[tuple[int, ...], str]]
    spread: float | None
    unsplit_on: str


@dataclass(frozen=True)
class RankFindings:
    """The results of one rank's checks of a plan; picklable.

    Attributes:
        collectives: the step's collectives, one row per distinct one.
        calls: the collectives and messages with other ranks, in order.
        precision: the lowest precision in the model.
        times_s: the durations of the timed steps in seconds.
        memory: sizes from :func:`~.fake_ranks.tracked_memory`, if requested.
        numerics: the comparison with the unsplit model, if requested.
    """

    collectives: list[dict[str, Any]]
    calls: list[JointCall]
    precision: str
    times_s: list[float]
    memory: dict[str, int] | None
    numerics: _RankNumerics | None


def hold_model(rank: int, world_size: int, spec: ModelSpec) -> None:
    """Build and capture the model, which the next calls on this rank reuse."""
    load_model(spec)


def check_plan(
    rank: int, world_size: int, spec: ModelSpec, strategy_data: Mapping[str, Any], options: CheckOptions
) -> RankFindings:
    loaded = load_model(spec)
    ref = reference.reference(loaded, options.seed) if options.numerics else None
    strategy = strategy_from_data(strategy_data, loaded.graph)
    engine = engine_of(strategy, loaded.values, seed=options.seed, device=loaded.device)
    results: list[Any] = []
    # The compared step is the recorded one: both come from the same calls.
    sent = recorded(engine, lambda: results.extend(first_step(engine, loaded)))
    numerics = None if ref is None else _numerics(engine, loaded, ref, results)
    results.clear()  # otherwise the allocator's peak of the next step would include them
    step = RunStep(engine, loaded.inputs, options.optimizer)
    memory = None
    if options.memory:
        step()  # the optimizer makes its state in the first one
        memory = tracked_memory(step)
    times_s = step_times(step, options.timed_steps)
    lowest = precision(loaded.captured.graph)
    return RankFindings(summarise(sent.issued), sent.calls, lowest, times_s, memory, numerics)


def narrow_distance(
    rank: int, world_size: int, spec: ModelSpec, strategy_data: Mapping[str, Any], options: CheckOptions
) -> NarrowDistance:
    """Measure how far this rank's gradients (in inference: outputs) are from those in double precision."""
    loaded, wide = load_model(spec), load_model(replace(spec, dtype="float64", compute_dtype="float32"))
    exact, unsplit = reference.reference(wide, options.seed), reference.reference(loaded, options.seed)
    strategy = strategy_from_data(strategy_data, loaded.graph)
    engine = engine_of(strategy, loaded.values, seed=options.seed, device=loaded.device)
    outputs, gradients = first_step(engine, loaded)
    shard = engine.shards.shard
    if engine.training:
        split = [(value, shard(name, exact.gradients[name])) for name, value in gradients.items()]
        whole = [(value, exact.gradients[name]) for name, value in unsplit.gradients.items()]
    else:
        split = list(zip(outputs, exact.outputs, strict=True))
        whole = list(zip(unsplit.outputs, exact.outputs, strict=True))
    return NarrowDistance(_distance(split), _distance(whole), reference.has_kinks(loaded))


def _distance(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> float:
    apart = size = 0.0
    for got, want in pairs:
        want = want.to(got.device)
        apart += float((got.double() - want.double()).square().sum())
        size += float(want.double().square().sum())
    return math.sqrt(apart / size) if size else math.sqrt(apart)


def _numerics(engine: Engine, loaded: CapturedModel, ref: Results, first: Sequence[Any]) -> _RankNumerics:
    outputs, gradients = first
    shard = engine.shards.shard
    per_gradient = {
        # Shard against shard, but relative to the whole: a shard of small values needs no higher accuracy.
        name: difference(got, shard(name, ref.gradients[name]), ref.gradients[name], ref.floor)
        for name, got in gradients.items()
    }
    after, buffers = reference.after_steps(engine, loaded, ref.floor)
    per_parameter = {
        f"{optimizer}:{name}": difference(got, shard(name, want), want, GRADIENT_FLOOR)
        for optimizer, values in after.items()
        for name, got in values.items()
        for want in [ref.after[optimizer][name]]
    }
    per_buffer = {
        name: difference(got, ref.buffers[name], floor=GRADIENT_FLOOR) for name, got in buffers.items()
    }
    return _RankNumerics(
        loss=reference.outputs_difference(outputs, ref.outputs),
        gradient=worst(per_gradient),
        parameter=worst(per_parameter),
        buffer=worst(per_buffer),
        not_finite=ref.not_finite,
        rounding=ref.rounding,
        replicas=dict(_checksums(engine, after)),
        spread=_spread(engine, [gradients, *after.values()]),
        unsplit_on=ref.ran_on,
    )


def _spread(engine: Engine, results: Sequence[Mapping[str, torch.Tensor]]) -> float | None:
    """Return the largest difference between replicas; None on CPUs and with deterministic algorithms."""
    if engine.runtime.device.type != "cuda" or torch.are_deterministic_algorithms_enabled():
        return None
    return max((_replica_spread(engine, values) for values in results), default=0.0)


def _replica_spread(engine: Engine, values: Mapping[str, torch.Tensor]) -> float:
    """Return the largest relative difference between replicas of shards. All ranks call this together."""
    spread = 0.0
    for name, value in values.items():
        axes = engine.shards.replica_axes(name)
        if engine.runtime.group(axes) is None:
            continue
        # NaN has no order; the comparison with the unsplit model checks that NaNs are in the same places.
        wide = value.detach().double().nan_to_num()
        highest = engine.runtime.all_reduce(wide, axes, "max")
        lowest = -engine.runtime.all_reduce(-wide, axes, "max")
        if wide.numel():
            size = max(float(highest.abs().max()), float(lowest.abs().max()), LEAST_SCALE)
            spread = max(spread, float((highest - lowest).max()) / size)
    return spread


def _checksums(
    engine: Engine, after: Mapping[str, Mapping[str, torch.Tensor]]
) -> Iterator[tuple[str, tuple[tuple[int, ...], str]]]:
    for name, leaf in engine.shards.leaves.items():
        gradient = [engine.shards.gradients[name]] if name in engine.shards.gradients else []
        # Bits, not tolerances: replicas are never sent to each other, and what drifts once drifts on.
        values = [leaf, *gradient, *(values[name] for values in after.values())]
        digest = hashlib.sha256()
        for value in values:
            digest.update(value.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())
        yield name, (engine.shards.shard_index(name), digest.hexdigest())

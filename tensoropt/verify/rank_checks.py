"""The part of :mod:`tensoropt.verify.check` that runs on every rank."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from tensoropt.engine.engine import Engine
from tensoropt.engine.models import LoadedModel, ModelSpec, load_model
from tensoropt.ops.layouts import REPLICATE
from tensoropt.placement.execute.engine import AnyEngine, PlacedEngine
from tensoropt.placement.plans import placed_from_dict
from tensoropt.sharding.serialise import strategy_from_dict
from tensoropt.verify.differences import difference, outputs_difference, worst
from tensoropt.verify.recorder import outgoing, summarise
from tensoropt.verify.reference import (
    GRADIENT_FLOOR,
    Results,
    after_steps,
    first_step,
    has_kinks,
    precision,
    reference,
)
from tensoropt.verify.steps import Step, issued, step_times, tracked_memory


@dataclass(frozen=True)
class CheckOptions:
    """What to check; picklable.

    Attributes:
        optimizer: the plan's, for memory and time.
        seed: of dropout.
        numerics: compare with the unsplit model.
        memory: track memory of one step.
        timed_steps: steps to time, 0 for none.
    """

    optimizer: str = "adam"
    seed: int = 0
    numerics: bool = True
    memory: bool = True
    timed_steps: int = 5


def check_plan(
    rank: int, world_size: int, spec: ModelSpec, strategy_data: Mapping[str, Any], options: CheckOptions
) -> dict[str, Any]:
    """Everything one rank finds out about one plan; put together by :mod:`tensoropt.verify.check`."""
    loaded = load_model(spec)
    ref = reference(loaded, options.seed) if options.numerics else None
    engine = engine_of(loaded, strategy_data, options.seed)
    found: dict[str, Any] = {}
    results: list[Any] = []
    sent = outgoing(issued(engine, lambda: results.extend(first_step(engine, loaded))))
    found["collectives"] = summarise(sent)
    found["sequence"] = digest([repr(c[:2]).encode() for c in sent])
    found["precision"] = precision(loaded)
    if ref is not None:
        found["rounding"] = dict(ref.rounding)
        outputs, gradients = results
        found |= _numerics(engine, loaded, ref, Results(outputs, gradients, {}, {}))
    step = Step(engine, loaded.inputs, options.optimizer)
    if options.memory:
        step()
        found["memory"] = tracked_memory(step)
    found["times_s"] = step_times(step, options.timed_steps)
    return found


def narrow_distance(
    rank: int, world_size: int, spec: ModelSpec, strategy_data: Mapping[str, Any], options: CheckOptions
) -> dict[str, float]:
    """How far this rank's gradients are from the unsplit model's in double precision, in the model's own one.

    In inference the same of the outputs.

    Returns:
        ``split``: norm of the difference over all parameters here, relative to that of the gradients;
        ``unsplit``: the same of the unsplit model in its own precision, what rounding alone does;
        ``kinked``: 1 where rounding may change whole elements (:func:`has_kinks`), else 0.
    """
    loaded, wide = load_model(spec), load_model(replace(spec, dtype="float64", compute_dtype="float32"))
    exact, unsplit = reference(wide, options.seed), reference(loaded, options.seed)
    engine = engine_of(loaded, strategy_data, options.seed)
    outputs, gradients = first_step(engine, loaded)
    shard = engine.shards.shard
    if engine.training:
        split = [(value, shard(name, exact.gradients[name])) for name, value in gradients.items()]
        whole = [(value, exact.gradients[name]) for name, value in unsplit.gradients.items()]
    else:
        split = list(zip(outputs, exact.outputs, strict=True))
        whole = list(zip(unsplit.outputs, exact.outputs, strict=True))
    return {
        "split": _distance(split),
        "unsplit": _distance(whole),
        "kinked": float(has_kinks(loaded)),
    }


def _distance(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Norm of the differences of (got, wanted) pairs relative to that of what is wanted."""
    apart = size = 0.0
    for got, want in pairs:
        apart += float((got.double() - want.double()).square().sum())
        size += float(want.double().square().sum())
    return math.sqrt(apart / size) if size else math.sqrt(apart)


def engine_of(loaded: LoadedModel, data: Mapping[str, Any], seed: int) -> AnyEngine:
    """The engine of a strategy on this rank, whichever kind of strategy it is."""
    if "placed" in data:
        return PlacedEngine(placed_from_dict(data["placed"], loaded.graph), loaded.values, seed=seed)
    return Engine(strategy_from_dict(data, loaded.graph), loaded.values, seed=seed)


def _numerics(engine: AnyEngine, loaded: LoadedModel, ref: Results, first: Results) -> dict[str, Any]:
    shard = engine.shards.shard
    per_gradient = {
        name: difference(got, shard(name, ref.gradients[name]), ref.gradients[name], ref.floor)
        for name, got in first.gradients.items()
    }
    after, buffers = after_steps(engine, loaded, ref.floor)
    per_parameter = {
        f"{optimizer}:{name}": difference(got, shard(name, want), want, GRADIENT_FLOOR)
        for optimizer, values in after.items()
        for name, got in values.items()
        for want in [ref.after[optimizer][name]]
    }
    per_buffer = {
        name: difference(got, ref.buffers[name], floor=GRADIENT_FLOOR) for name, got in buffers.items()
    }
    return {
        "loss_difference": outputs_difference(first.outputs, ref.outputs),
        "gradient_difference": worst(per_gradient),
        "parameter_difference": worst(per_parameter),
        "buffer_difference": worst(per_buffer),
        "not_finite": ref.not_finite,
        "replicas": dict(_checksums(engine, after)),
    }


def digest(pieces: list[bytes]) -> str:
    found = hashlib.sha256()
    for piece in pieces:
        found.update(piece)
    return found.hexdigest()


def _bytes_of(value: torch.Tensor) -> bytes:
    return value.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes()


def _checksums(
    engine: AnyEngine, after: Mapping[str, Mapping[str, torch.Tensor]]
) -> Iterator[tuple[str, tuple[tuple[int, ...], str]]]:
    """Per parameter which shard this rank holds, and a digest of its last gradient and of what it became."""
    place = engine.runtime.place
    for name, leaf in engine.shards.leaves.items():
        stored = engine.strategy.stored[name] if isinstance(engine, Engine) else ()
        shard = tuple(place[a] for a, code in enumerate(stored) if a > 0 and code > REPLICATE)
        gradient = [engine.shards.gradients[name]] if name in engine.shards.gradients else []
        values = [leaf, *gradient, *(values[name] for values in after.values())]
        yield name, (shard, digest([_bytes_of(v) for v in values]))

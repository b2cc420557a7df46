"""The part of :mod:`tensoropt.execute.verify` that runs on every rank."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from tensoropt.capture import find_loss
from tensoropt.costs.measure import make_optimizer
from tensoropt.execute.counts import unsplit_strategy
from tensoropt.execute.engine import Engine
from tensoropt.execute.models import LoadedModel, ModelSpec, load_model, open_model
from tensoropt.execute.parameters import shard_of
from tensoropt.execute.recorder import CollectiveRecorder, MemoryTracker, summarise
from tensoropt.sharding.placement import REPLICATE
from tensoropt.sharding.serialise import strategy_from_dict

OPTIMIZER_STEPS = 2
"""Steps after which parameters are compared: the second one starts from moved weights and used state."""
GRADIENT_FLOOR = 1e-3
"""A parameter's gradients are compared relative to its own largest one, but to no less than this share of the
model's largest: BERT's key biases have gradients that are zero but for rounding."""
NARROW_FLOOR = 5e-2
"""The same under mixed precision, where rounding is 4e-3 and sums of it more."""


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


def test_optimizers(floor: float) -> dict[str, Any]:
    """Optimizers whose result depends smoothly on gradients: Adam's first step is the gradient's *sign*, also
    where the gradient is rounding noise, so its ``eps`` is set at the scale of the gradients that count."""
    eps = max(floor, 1e-8)
    return {
        "momentum": lambda leaves: torch.optim.SGD(leaves, lr=1e-2, momentum=0.9),
        "adam": lambda leaves: torch.optim.Adam(leaves, lr=1e-3, eps=eps),
    }


test_optimizers.__test__ = False  # type: ignore[attr-defined]  # pytest, this is no test


# -- reference ------------------------------------------------------------------------------------


@dataclass
class Reference:
    """What the unsplit model gives: loss, gradients, parameters and buffers after the steps.

    ``floor`` is the size below which gradients are not looked at, ``rounding`` what mixed precision alone
    changes.
    """

    loss: float
    gradients: dict[str, torch.Tensor]
    after: dict[str, dict[str, torch.Tensor]]
    buffers: dict[str, torch.Tensor]
    floor: float
    rounding: dict[str, float]


def reference(loaded: LoadedModel, seed: int, floor: float | None = None) -> Reference:
    """Run the unsplit model once; kept with the loaded model."""
    key = ("reference", seed)
    narrow = loaded.spec.compute_dtype != "float32"
    if key not in loaded.memory:
        engine = Engine(unsplit_strategy(loaded.graph), loaded.values, seed=seed)
        loss, gradients = _loss_and_gradients(engine, loaded)
        largest = max((float(g.abs().max()) for g in gradients.values() if g.numel()), default=0.0)
        floor = (NARROW_FLOOR if narrow else GRADIENT_FLOOR) * largest if floor is None else floor
        after, buffers = _train(engine, loaded, floor)
        found = Reference(loss, gradients, after, buffers, floor, {})
        if narrow:
            found.rounding.update(_rounding(loaded.spec, seed, found))
        loaded.memory[key] = found
    return loaded.memory[key]


def _rounding(spec: ModelSpec, seed: int, narrow: Reference) -> dict[str, float]:
    """How far the narrower type alone takes the unsplit model from what it gives in float32."""
    wide = reference(open_model(replace(spec, compute_dtype="float32")), seed, narrow.floor)
    parameters = [
        _difference(narrow.after[optimizer][n], want, want, GRADIENT_FLOOR)
        for optimizer, values in wide.after.items()
        for n, want in values.items()
    ]
    gradients = [
        _difference(narrow.gradients[n], want, want, narrow.floor) for n, want in wide.gradients.items()
    ]
    buffers = [
        _difference(narrow.buffers[n].double(), v.double(), v.double(), GRADIENT_FLOOR)
        for n, v in wide.buffers.items()
    ]
    return {
        "loss": abs(narrow.loss - wide.loss) / max(abs(wide.loss), 1e-12),
        "gradient": max(gradients, default=0.0),
        "parameter": max(parameters, default=0.0),
        "buffer": max(buffers, default=0.0),
    }


def _loss_and_gradients(engine: Engine, loaded: LoadedModel) -> tuple[float, dict[str, torch.Tensor]]:
    engine.runtime.step = 0
    loss = engine(*loaded.inputs)[0]
    loss.backward()
    return float(loss.detach()), {n: g.clone() for n, g in engine.shards.gradients.items()}


def _train(
    engine: Engine, loaded: LoadedModel, floor: float
) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """Parameters after the steps by optimizer, and buffers after them; the engine ends as it began."""
    after = {}
    buffers: dict[str, torch.Tensor] = {}
    for name, make in test_optimizers(floor).items():
        engine.load(loaded.values)
        engine.runtime.step = 0
        optimizer = make(list(engine.shards.leaves.values()))
        for _ in range(OPTIMIZER_STEPS):
            engine.shards.clear()
            engine(*loaded.inputs)[0].backward()
            optimizer.step()
        after[name] = {n: leaf.detach().clone() for n, leaf in engine.shards.leaves.items()}
        buffers = {n: value.clone() for n, value in engine.buffers.items()}
    engine.load(loaded.values)
    engine.shards.clear()
    return after, buffers


def module_difference(rank: int, world_size: int, spec: ModelSpec, seed: int) -> dict[str, float] | None:
    """The unsplit graph against the module it was captured from; None where dropout makes them differ."""
    loaded = load_model(spec)
    if has_dropout(loaded):
        return None
    ref = reference(loaded, seed)
    model, args, kwargs = spec.build()
    model.train()
    _, loss = find_loss(model(*args, **kwargs))
    loss.backward()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    worst = 0.0
    for tensor in loaded.captured.graph.parameters:
        if tensor.requires_grad:
            want = parameters[str(tensor.key)].grad
            assert want is not None
            worst = max(worst, _difference(ref.gradients[tensor.name], want, want, ref.floor))
    return {
        "loss_difference": abs(ref.loss - float(loss.detach())) / max(abs(float(loss.detach())), 1e-12),
        "gradient_difference": worst,
    }


def precision(loaded: LoadedModel) -> str:
    """The lowest floating precision anything is computed in (some models cast to float32 inside)."""
    used = {t.dtype for t in loaded.captured.graph.tensors.values()}
    order = ("bfloat16", "float16", "float32", "float64")
    return next((dtype for dtype in order if dtype in used), "float32")


def has_dropout(loaded: LoadedModel) -> bool:
    for op in loaded.captured.graph.operators:
        if "dropout" in op.target:
            return True
        if "scaled_dot_product_attention" in op.target:
            p = op.args[4] if len(op.args) > 4 else op.kwargs.get("dropout_p", 0.0)
            if p:
                return True
    return False


# -- one plan -------------------------------------------------------------------------------------


def check_plan(
    rank: int, world_size: int, spec: ModelSpec, strategy_data: Mapping[str, Any], options: CheckOptions
) -> dict[str, Any]:
    """Everything one rank finds out about one plan; put together by :mod:`tensoropt.execute.verify`."""
    loaded = load_model(spec)
    strategy = strategy_from_dict(strategy_data, loaded.graph)
    ref = reference(loaded, options.seed) if options.numerics else None
    engine = Engine(strategy, loaded.values, seed=options.seed)
    found: dict[str, Any] = {}
    with CollectiveRecorder(strategy.mesh) as recorder:
        loss, gradients = _loss_and_gradients(engine, loaded)
    found["collectives"] = summarise(recorder.issued)
    found["precision"] = precision(loaded)
    if ref is not None:
        found["rounding"] = ref.rounding
        found |= _numerics(engine, loaded, ref, loss, gradients)
        found["replicas"] = dict(_checksums(engine))
    optimizer = make_optimizer(
        options.optimizer, [v for v in engine.shards.leaves.values() if v.requires_grad]
    )
    if options.memory:
        found["memory"] = _memory(engine, loaded, optimizer)
    found["times_s"] = _times(engine, loaded, optimizer, options.timed_steps, world_size)
    return found


def _difference(got: torch.Tensor, want: torch.Tensor, whole: torch.Tensor, floor: float) -> float:
    """Largest difference of a shard, relative to the largest value of the whole tensor, or to ``floor``."""
    if not want.numel():
        return 0.0
    scale = max(float(whole.abs().max()), floor, 1e-30)
    return float((got - want).abs().max()) / scale


def _numerics(
    engine: Engine, loaded: LoadedModel, ref: Reference, loss: float, gradients: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    strategy = engine.strategy

    def shard(name: str, whole: torch.Tensor) -> torch.Tensor:
        return shard_of(engine.runtime, name, strategy.atoms(name), strategy.stored[name], whole)

    per_gradient = {
        name: _difference(got, shard(name, ref.gradients[name]), ref.gradients[name], ref.floor)
        for name, got in gradients.items()
    }
    after, buffers = _train(engine, loaded, ref.floor)
    per_parameter = {
        f"{optimizer}:{name}": _difference(got, shard(name, want), want, GRADIENT_FLOOR)
        for optimizer, values in after.items()
        for name, got in values.items()
        for want in [ref.after[optimizer][name]]
    }
    per_buffer = {
        name: _difference(got.double(), want.double(), want.double(), GRADIENT_FLOOR)
        for name, got in buffers.items()
        for want in [ref.buffers[name]]
    }
    return {
        "loss_difference": abs(loss - ref.loss) / max(abs(ref.loss), 1e-12),
        "gradient_difference": _worst(per_gradient),
        "parameter_difference": _worst(per_parameter),
        "buffer_difference": _worst(per_buffer),
    }


def _worst(differences: Mapping[str, float]) -> tuple[float, str]:
    name = max(differences, key=lambda n: (differences[n] != differences[n], differences[n]), default="")
    return (differences[name], name) if name else (0.0, "")


def _checksums(engine: Engine) -> Iterator[tuple[str, tuple[tuple[int, ...], str]]]:
    """Per parameter which shard this rank holds, and a digest of it after one more step."""
    strategy = engine.strategy
    for name, leaf in engine.shards.leaves.items():
        place = engine.runtime.place
        shard = tuple(place[a] for a, code in enumerate(strategy.stored[name]) if a > 0 and code > REPLICATE)
        values = [leaf.detach(), *([engine.shards.gradients[name]] if leaf.requires_grad else [])]
        digest = hashlib.sha256()
        for value in values:
            digest.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        yield name, (shard, digest.hexdigest())


# -- memory and time ------------------------------------------------------------------------------


def _step(engine: Engine, loaded: LoadedModel, optimizer: torch.optim.Optimizer) -> None:
    engine.shards.clear()
    engine(*loaded.inputs)[0].backward()
    optimizer.step()


def _optimizer_state(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [value for value in states if isinstance(value, torch.Tensor)]


def _memory(engine: Engine, loaded: LoadedModel, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes of one step: parameters, gradients, optimizer state, and the peak with all that a step makes."""
    _step(engine, loaded, optimizer)  # makes the optimizer's state
    leaves = list(engine.shards.leaves.values())
    buckets = [flat for _, flat in engine.shards.buckets]
    state = _optimizer_state(optimizer)
    tracker = MemoryTracker()
    tracker.exclude(loaded.inputs)
    tracker.exclude(engine.lowered.module.buffers())
    tracker.exclude(engine.buffers.values())
    sizes = {}
    for name, values in (("parameters", leaves), ("gradients", buckets), ("optimizer", state)):
        before = tracker.now_bytes
        tracker.add(v.detach() for v in values)
        sizes[name] = tracker.now_bytes - before
    with tracker:
        _step(engine, loaded, optimizer)
    return {
        **sizes,
        "peak": tracker.peak_bytes,
        "inputs_and_constants": tracker.excluded_bytes,
    }


def _times(
    engine: Engine, loaded: LoadedModel, optimizer: torch.optim.Optimizer, steps: int, world_size: int
) -> Sequence[float]:
    seconds = []
    for index in range(steps + 1 if steps else 0):
        if world_size > 1:
            dist.barrier()
        start = time.perf_counter()
        _step(engine, loaded, optimizer)
        if index:  # the first one warms up
            seconds.append(time.perf_counter() - start)
    return seconds

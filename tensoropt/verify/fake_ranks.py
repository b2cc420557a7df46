"""A rank of any job, without the job: fake tensors and PyTorch's fake process group.

Nothing is computed and nothing is sent, so a 64-device plan can be checked on a laptop: what each rank would
send and keep alive is what it does send and keep alive, only the numbers are missing. Tensors are the CPU's
(fake CUDA tensors with autograd abort a CPU-only build of PyTorch).
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from tensoropt.engine.engine import Engine
from tensoropt.engine.models import LoadedModel
from tensoropt.errors import PlanError
from tensoropt.placement.execute.engine import AnyEngine, PlacedEngine
from tensoropt.placement.plans import PlacedStrategy
from tensoropt.sharding.strategy import Strategy
from tensoropt.verify.recorder import Collective, all_sent, outgoing, summarise
from tensoropt.verify.steps import Step, issued, tracked_memory

MOST_RANKS = 3
"""Ranks of a bigger job that are looked at: the first, the last, and others between them."""


@contextlib.contextmanager
def fake_job(rank: int, world_size: int) -> Iterator[None]:
    """Be ``rank`` of a job of ``world_size`` whose other ranks do not exist.

    Raises:
        PlanError: this process belongs to a real job.
    """
    if dist.is_initialized():
        raise PlanError(
            "this process is a rank of a real job already; check plans on fake ranks in a process of its own"
        )
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        dist.destroy_process_group()


def looked_at(world_size: int) -> tuple[int, ...]:
    """The ranks that are checked of a job; all of them where they are few."""
    if world_size <= MOST_RANKS:
        return tuple(range(world_size))
    last = world_size - 1
    return tuple(sorted({round(i * last / (MOST_RANKS - 1)) for i in range(MOST_RANKS)}))


def check_on_fake_ranks(
    loaded: LoadedModel, strategy: Strategy, optimizer: str, ranks: Sequence[int] | None = None
) -> dict[str, Any]:
    """What ranks of a plan send and keep alive in a step.

    Returns:
        ``ranks`` looked at; ``collectives`` of the first of them, as
        :func:`tensoropt.verify.recorder.summarise` writes them; ``unlike``: where another one's differ in
        more than being smaller (uneven shards); ``memory`` of the first, whose shards are the largest.
    """
    world_size = math.prod(strategy.mesh[1:])
    ranks = tuple(looked_at(world_size) if ranks is None else ranks)
    first, *others = ranks
    memory: dict[str, int] = {}
    with step_on(first, loaded, strategy, optimizer) as step:
        sent = issued(step.engine, step)
        memory = tracked_memory(step)
    unlike = []
    for rank in others:
        with step_on(rank, loaded, strategy, optimizer) as step:
            unlike += compare_ranks(first, sent, rank, issued(step.engine, step.model))
    return {"ranks": list(ranks), "collectives": summarise(sent), "unlike": unlike, "memory": memory}


def check_placed_on_fake_ranks(
    loaded: LoadedModel, strategy: PlacedStrategy, optimizer: str
) -> dict[str, Any]:
    """:func:`check_on_fake_ranks` for a placed plan, whose ranks all do something else and are all looked at:
    ``collectives`` are those of all, ``memory`` is that of the fullest."""
    sent, memory = [], []
    for rank in range(strategy.devices):
        with step_on(rank, loaded, strategy, optimizer) as step:
            sent.append(summarise(outgoing(issued(step.engine, step))))
            memory.append(tracked_memory(step))
    return {
        "ranks": list(range(strategy.devices)),
        "collectives": all_sent(sent),
        "unlike": [],
        "memory": max(memory, key=lambda m: m["peak"]),
        "memory_of_ranks": [m["peak"] for m in memory],
    }


@contextlib.contextmanager
def step_on(
    rank: int, loaded: LoadedModel, strategy: Strategy | PlacedStrategy, optimizer: str
) -> Iterator[Step]:
    """A step of a fake rank."""
    world_size = strategy.devices if isinstance(strategy, PlacedStrategy) else math.prod(strategy.mesh[1:])
    with contextlib.ExitStack() as stack:
        if world_size > 1:
            stack.enter_context(fake_job(rank, world_size))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        values = {n: _like(v) for n, v in loaded.values.items()}
        engine: AnyEngine
        if isinstance(strategy, PlacedStrategy):
            engine = PlacedEngine(strategy, values)
        else:
            engine = Engine(strategy, values)
        for module in engine.module.modules():
            for name, constant in module.named_buffers(recurse=False):
                setattr(module, name, _like(constant))
        yield Step(engine, [_like(v) for v in loaded.inputs], optimizer)


def _like(value: torch.Tensor) -> torch.Tensor:
    return torch.empty(value.shape, dtype=value.dtype)


def compare_ranks(
    first: int, expected: Sequence[Collective], rank: int, sent: Sequence[Collective]
) -> list[str]:
    """What would let two ranks of a job wait for each other for ever, or send more than the first: one line
    for the first difference in order, kind or axes, and one for each that is bigger."""
    for position, (one, other) in enumerate(zip(expected, sent, strict=False)):
        if one[:2] != other[:2]:
            return [
                f"collective {position}: rank {first} issues {one[0]} over axes {_shown(one[1])}, "
                f"rank {rank} {other[0]} over axes {_shown(other[1])}"
            ]
    if len(expected) != len(sent):
        return [f"rank {first} issues {len(expected)} collectives, rank {rank} {len(sent)}"]
    bigger = Counter((one, other) for one, other in zip(expected, sent, strict=True) if other[2] > one[2])
    return [
        f"{one[0]} over axes {_shown(one[1])}: rank {rank} sends {other[2]} bytes, rank {first} {one[2]} "
        f"({count} times)"
        for (one, other), count in bigger.items()
    ]


def _shown(axes: Sequence[int]) -> list[int]:
    return [axis - 1 for axis in axes]


def fake_result(found: Mapping[str, Any]) -> dict[str, Any]:
    """As :func:`tensoropt.verify.check.verify_strategies` reports a strategy, without numbers and time."""
    nothing = dict.fromkeys(
        (
            "loss_difference", "gradient_difference", "parameter_difference", "buffer_difference",
            "worst_gradient", "worst_parameter", "replicas_agree", "numerics_ok", "compared_in", "narrow",
            "time_measured_s",
        )
    )  # fmt: skip
    return nothing | {
        "collectives_issued": found["collectives"],
        "ranks_unlike": found["unlike"],
        "ranks_checked": found["ranks"],
        "memory_tracked": found["memory"],
        "memory_tracked_bytes": found["memory"]["peak"],
        "memory_tracked_of_ranks": found.get("memory_of_ranks", []),
        "not_finite": {},
        "error": None,
    }

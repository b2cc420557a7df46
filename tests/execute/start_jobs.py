"""What ranks of a test pool do to watch how a model starts: which bytes are alive, and which values there
are."""

import ctypes
import gc
import random
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from tensoropt.capture import Mode, capture
from tensoropt.engine.parallel_model import parallel_of
from tensoropt.execute import parallelize, save_checkpoint
from tensoropt.pipeline.stages import Cutter
from tensoropt.pipeline.strategy import SCHEDULES
from tensoropt.sharding.atoms import refine_graph
from tensoropt.sharding.groups import GroupGraph, group_operators
from tensoropt.verify.random_strategies import micro_strategies, random_pipeline, random_strategy
from tensoropt.verify.recorder import MemoryTracker
from tests.execute.jobs import captured_once, whole
from tests.pipeline.models import split_along_the_batch
from tests.placement.execute.random_placed import random_placed

WIDTH, DEPTH, VOCABULARY = 64, 6, 96


class Block(nn.Module):
    """A norm, a buffer that the state dict leaves out, and two layers of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("scale", torch.empty(WIDTH), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.scale = torch.linspace(0.5, 1.5, WIDTH)
        nn.init.normal_(self.down.weight, std=0.01)  # a child's, after the child's own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x) * self.scale)))


class Tied(nn.Module):
    """Blocks between an embedding and an output layer that shares its weight, and a layer nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.unused = nn.Linear(3, 5)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.embedding(x)
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


def draw(module: nn.Module) -> None:
    """As models of PyTorch draw their weights."""
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


def drawn(seed: int) -> Tied:
    """The model with the weights that ``draw`` gives, drawn as a whole."""
    model = Tied()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model.apply(draw)


def on_meta() -> Tied:
    with torch.device("meta"):
        return Tied()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randint(0, VOCABULARY, (2, 8, 4), generator=generator)
    return x, y


@cache
def graph(mode: Mode = "train") -> GroupGraph:
    return group_operators(refine_graph(capture(on_meta(), batch(), mode=mode).graph))


class Alive(MemoryTracker):
    """Bytes of the storages alive that operators made, and their peak; shapes alone take none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))  # collectives on no copies, which the process would grow by
        self.add(value for value in tree_leaves(result) if isinstance(value, torch.Tensor))
        return result

    def _see(self, value: torch.Tensor, *, counted: bool) -> int:
        # A DTensor's own storage is a shape as well; what it shows is a tensor beside it.
        shape_only = isinstance(value, (FakeTensor, DTensor)) or value.is_meta
        return 0 if shape_only else super()._see(value, counted=counted)


def save(rank, world, path):
    """Write the weights of ``drawn(3)`` as a checkpoint of a plan."""
    found = graph()
    strategy = random_strategy(found, (1, world), micro_strategies(found, 1), random.Random(5))
    save_checkpoint(path, parallelize(drawn(3), strategy, batch()))


LAYER = 4 * (2 * WIDTH * WIDTH + 2 * WIDTH)
"""Bytes of the largest layer: the weight and bias of ``up``."""
TIED = 4 * VOCABULARY * WIDTH
"""Bytes of the weight that embedding and output share."""
SMALL = 4 * (2 * WIDTH * DEPTH + 8 * WIDTH + 256)
"""Bytes of buffers, which the model and the engine both have for a while, of single norms and of the
batch."""


def start(rank, world, source, path, plan, mode, seed):
    """Start a model that is on the meta device, and compare what this rank has with a model that was made as
    a whole.

    Args:
        plan: "sharded", "placed", or the schedule of a pipeline.
    """
    found, rng = graph(mode), random.Random(seed)
    if plan == "placed":
        strategy: Any = random_placed(found, world, rng)
    elif plan == "sharded":
        strategy = random_strategy(found, (1, world), micro_strategies(found, 1), rng)
    else:
        stages = world * (2 if SCHEDULES[plan].several else 1)
        strategy = random_pipeline(found, (stages, world), plan, rng)
    model = on_meta()
    sources: dict[str, Any] = {} if source == "drawn" else {"checkpoint": path}
    with captured_once(("Tied", mode)), Alive() as alive:
        parallelize(model, strategy, batch(), device="cpu", seed=3, init_weights=draw, **sources)
    plain = drawn(3)
    engine = parallel_of(model).engine
    tensors = [*engine.parameter_tensors(), *engine.gradient_tensors(), *engine.buffers.values()]
    kept = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    state, wanted = model.state_dict(), plain.state_dict()
    loss = model(*batch())
    if mode == "train":
        loss.backward()
    return {
        "peak": alive.peak_bytes,
        "kept": sum(kept.values()),
        "whole": sum(p.numel() * p.element_size() for p in plain.parameters()),
        "differ": [n for n, v in state.items() if not torch.equal(whole(v).view(wanted[n].shape), wanted[n])],
        "names": list(state),
        "all": list(wanted),
        "loss": float((loss - plain(*batch())).detach().abs()),
    }


class Deep(nn.Module):
    """Wide layers, all of a size, and little else."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def resident_bytes(what: str) -> int:
    """``VmRSS``: what of this process lies in memory; ``VmHWM``: the most that did."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{what}:"))


def resident(rank, world, width, depth, places, path, steps):
    """By how much this process grows while it starts its stages of a large model, and while it trains.

    Args:
        path: of a checkpoint, to which a plan of all ranks is written first; "" to draw weights.
    """
    with torch.device("meta"):
        model = Deep(width, depth)
    x = torch.randn(2, width, generator=torch.Generator().manual_seed(1))  # the same on every rank
    found = group_operators(refine_graph(capture(model, (x,)).graph))
    sizes = (1, places, *((world // places,) if world > places else ()))
    cuts = [group.name for group in found.groups if group.parameters]
    cutter = Cutter(found)
    starts = [cutter.beginning(cuts[depth * place // places]) for place in range(1, places)]
    strategy = split_along_the_batch(found, starts, sizes, "gpipe")
    if path:
        save_checkpoint(path, parallelize(model, strategy, (x,), device="cpu", init_weights=draw))
        with torch.device("meta"):
            model = Deep(width, depth)
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what was freed is not to be taken for what is needed
    Path("/proc/self/clear_refs").write_text("5")  # the most from now on
    before = resident_bytes("VmRSS")
    weights: dict[str, Any] = {"checkpoint": path} if path else {"init_weights": draw}
    parallelize(model, strategy, (x,), device="cpu", **weights)
    started = resident_bytes("VmHWM") - before
    engine = parallel_of(model).engine
    parameters = sum(t.untyped_storage().nbytes() for t in engine.parameter_tensors())
    for _ in range(steps):
        model(x).backward()
        model.zero_grad()
    return {
        "started": started,
        "trained": resident_bytes("VmHWM") - before,
        "parameters": parameters,
        "whole": sum(4 * (width * width + width) for _ in range(depth)),
        "layer": 4 * (width * width + width),
    }

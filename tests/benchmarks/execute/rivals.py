"""One training step of a model, done by each method, as somebody who uses PyTorch alone would write it.

Every maker returns ``step()``: forward, backward and optimizer on this rank's part of one global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from tensoropt import parallelize
from tensoropt.engine.models import ModelSpec, load_model
from tensoropt.sharding.storage import Gather
from tensoropt.sharding.strategy import Strategy
from tests.benchmarks.execute.data_parallel import IndivisibleError, data_parallel

Step = Callable[[], Any]
LEARNING_RATE = 1e-4


class UnsplittableError(Exception):
    """A method has nothing for this model; says why."""


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Multi-tensor Adam; it does not mix DTensors with others, so they are groups of their own."""
    parameters = list(model.parameters())
    groups = [[p for p in parameters if isinstance(p, DTensor) is kind] for kind in (True, False)]
    return torch.optim.Adam([{"params": group} for group in groups if group], lr=LEARNING_RATE, foreach=True)


def stepper(model: nn.Module, args: tuple, kwargs: dict) -> Step:
    optimizer = adam(model)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(*args, **kwargs)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def part(inputs: Any) -> Any:
    """This rank's share of the global batch."""
    rank, world = dist.get_rank(), dist.get_world_size()
    return pytree.tree_map_only(torch.Tensor, lambda t: t.chunk(world)[rank].contiguous(), inputs)


def plain(spec: ModelSpec, _: Any) -> Step:
    """The model as it is, whole batch, one rank."""
    model, args, kwargs = spec.build()
    return stepper(model.train(), args, kwargs)


def plan(spec: ModelSpec, strategy: Any) -> Step:
    model, args, kwargs = spec.build()
    chosen = Strategy.from_data(strategy, load_model(spec).graph)
    return stepper(parallelize(model.train(), chosen, args, kwargs), args, kwargs)


def zero3_ahead(spec: ModelSpec, _: Any) -> Step:
    """ZeRO stage 3 by our executor, parameters gathered one block ahead."""
    return _data_parallel(spec, Gather.AHEAD)


def zero3_at_the_use(spec: ModelSpec, _: Any) -> Step:
    """The same with every parameter gathered at its use, in a collective of its own."""
    return _data_parallel(spec, Gather.EACH_USE)


def zero3_as_fsdp2(spec: ModelSpec, _: Any) -> Step:
    """Ahead in the blocks that FSDP2 is told of; its root keeps what else there is from forward to backward,
    which here is gathered once per step."""
    model, _args, _kwargs = spec.build()
    inside = {id(p) for block in blocks(model) for p in block.parameters()}
    return _data_parallel(spec, Gather.AHEAD, {k for k, p in model.named_parameters() if id(p) not in inside})


def whole_parameters(spec: ModelSpec, _: Any) -> Step:
    """Data parallelism by our executor, as DDP does it."""
    return _data_parallel(spec, None)


def _data_parallel(spec: ModelSpec, gather: Gather | None, once: Collection[str] = ()) -> Step:
    try:
        return plan(spec, data_parallel(load_model(spec).graph, dist.get_world_size(), gather, once))
    except IndivisibleError as error:
        raise UnsplittableError(str(error)) from None


def ddp(spec: ModelSpec, _: Any) -> Step:
    model, args, kwargs = spec.build()
    wrapped = DistributedDataParallel(model.train(), gradient_as_bucket_view=True)
    return stepper(wrapped, *part((args, kwargs)))


def fsdp2(spec: ModelSpec, _: Any) -> Step:
    model, args, kwargs = spec.build()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return stepper(model.train(), *part((args, kwargs)))


def blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated parts: children of every module list, and of a chain's features and classifier."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 1]
    outer = [m for m in lists if not any(m is not o and m in list(o.modules()) for o in lists)]
    found = [child for m in outer for child in m]
    if not found:
        chains = [m for m in model.children() if isinstance(m, nn.Sequential)]
        found = [c for m in chains for c in m if any(True for _ in c.parameters())]
    return found


def tensor_parallel(spec: ModelSpec, _: Any) -> Step:
    """Megatron's split, as far as ``parallelize_module`` goes: Linear and Embedding."""
    model, args, kwargs = spec.build()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    name = spec.source.removeprefix("zoo:").split("-")[0]
    if name not in SPLITS:
        raise UnsplittableError("it splits Linear and Embedding only")
    SPLITS[name](model, mesh)
    return stepper(model.train(), args, kwargs)


def _gpt2(model: nn.Module, mesh: Any) -> None:
    world, rank = mesh.size(), dist.get_rank()
    for block in model.network.transformer.h:
        attention, mlp = block.attn, block.mlp
        attention.c_attn = _linear(attention.c_attn, parts=3, world=world)
        attention.c_proj, mlp.c_fc, mlp.c_proj = map(_linear, (attention.c_proj, mlp.c_fc, mlp.c_proj))
        attention.split_size //= world
        parallelize_module(
            block,
            mesh,
            {
                "attn.c_attn": ColwiseParallel(),
                "attn.c_proj": RowwiseParallel(),
                "mlp.c_fc": ColwiseParallel(),
                "mlp.c_proj": RowwiseParallel(),
            },
        )
    assert rank < world


def _linear(convolution: Any, parts: int = 1, world: int = 1) -> nn.Linear:
    """GPT-2's transposed linear as an ordinary one; a fused projection's rows are ordered by rank, so that a
    contiguous split gives each rank its heads of all ``parts``."""
    inputs, outputs = convolution.weight.shape
    order = torch.arange(outputs).view(parts, world, -1).transpose(0, 1).flatten()
    made = nn.Linear(inputs, outputs)
    with torch.no_grad():
        made.weight.copy_(convolution.weight.t()[order])
        made.bias.copy_(convolution.bias[order])
    return made


def _bert(model: nn.Module, mesh: Any) -> None:
    for layer in model.network.bert.encoder.layer:
        split: dict[str, Any] = {
            f"attention.self.{name}": ColwiseParallel() for name in ("query", "key", "value")
        }
        split |= {
            "attention.output.dense": RowwiseParallel(),
            "intermediate.dense": ColwiseParallel(),
            "output.dense": RowwiseParallel(),
        }
        parallelize_module(layer, mesh, split)


def _vgg16(model: nn.Module, mesh: Any) -> None:
    parallelize_module(model, mesh, {"classifier.0": ColwiseParallel(), "classifier.3": RowwiseParallel()})


def _rnn(model: nn.Module, mesh: Any) -> None:
    """Hidden units split; a cell's inputs are gathered once."""
    sharded, whole = (Shard(-1), Shard(-1), None), (Replicate(), Replicate(), None)
    parallelize_module(
        model,
        mesh,
        {
            "embedding": ColwiseParallel(output_layouts=Shard(-1)),
            "head": ColwiseParallel(input_layouts=Shard(-1), output_layouts=Replicate()),
        },
    )
    for cell in model.recurrent.cells:
        gates = {f"{kind}.{i}": ColwiseParallel() for kind in ("from_input", "from_hidden") for i in range(4)}
        parallelize_module(cell, mesh, gates)
        gather = PrepareModuleInput(input_layouts=sharded, desired_input_layouts=whole, use_local_output=True)
        parallelize_module(cell, mesh, gather)


SPLITS: dict[str, Callable[[nn.Module, Any], None]] = {
    "gpt2": _gpt2,
    "bert": _bert,
    "vgg16": _vgg16,
    "rnn": _rnn,
}
METHODS: dict[str, Callable[[ModelSpec, Any], Step]] = {
    "plan": plan,
    "data parallel": whole_parameters,
    "ddp": ddp,
    "fsdp2": fsdp2,
    "tensor parallel": tensor_parallel,
    "zero3": zero3_ahead,
    "zero3 at the use": zero3_at_the_use,
    "zero3 as fsdp2": zero3_as_fsdp2,
}

"""A script for PyTorch's own parts: ``fully_shard`` (FSDP2) and ``parallelize_module`` (tensor parallelism).

The script is for ``torchrun``. Its function ``parallelize(model, mesh)`` needs PyTorch alone, and can be
taken into other scripts; the rest trains the model that the plan is of, on its example inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tensoropt.launchers.job import FULL, NOTHING, LaunchedJob, recipes_near

NAME = "fsdp2"
ABOUT = "a script"
_PRODUCTS = "products"
_RECIPES = (NOTHING, FULL, _PRODUCTS)


@dataclass(frozen=True, kw_only=True)
class ModelParts:
    """What a script has to know of a model: names of modules, as ``named_modules`` has them.

    Attributes:
        source: the model as on the command line. seed: of its weights.
        blocks: repeated blocks, each sharded (and recomputed) by itself.
        columns, rows: linear layers that tensor parallelism splits by outputs, and by inputs. gathered: those
            by outputs whose output is gathered again. lookups: embeddings that it splits by rows.
        refusal: why ``parallelize_module`` cannot split the model; "" if it can.
    """

    source: str
    seed: int = 0
    blocks: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    gathered: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    lookups: tuple[str, ...] = ()
    refusal: str = ""

    @property
    def reductions_more(self) -> int:
        """How many layers read what another layer of the same module has read."""
        return len(self.columns) - len({name.rpartition(".")[0] for name in self.columns})


def refusal(job: LaunchedJob) -> str:
    """Return what of a job the script cannot do; "" if it can do everything."""
    degrees = {
        "context parallelism": job.context,
        "a pipeline": job.places,
        "experts over ranks": job.experts,
    }
    for words, degree in degrees.items():
        if degree > 1:
            return words
    if job.sequence_parallel or job.gathered_inputs:
        return "activations that tensor parallelism splits along the sequence"
    if job.first is not None or job.recompute not in _RECIPES:
        return f"recomputation of '{job.recompute}'"
    return ""


def variants(job: LaunchedJob) -> list[LaunchedJob]:
    """Return jobs on as many devices that the script can do, the likest first."""
    outside = job.context * job.places
    like = replace(
        job, launcher=NAME, data=(job.data or 1) * outside, context=1, places=1, stages_per_place=1,
        experts=1, ring=False, sequence_parallel=False, gathered_inputs=False, first=None, schedule="1f1b",
    )  # fmt: skip
    # What other ranks' stages and sequences saved of a device's memory, shards save too.
    stage = job.stage if outside == 1 else 3
    found = [
        replace(like, stage=stage, root_once=stage == 3, recompute=recipe)
        for recipe in recipes_near(job, _RECIPES)
    ]
    # Not every model can be split by parallelize_module.
    wide = [
        replace(one, data=(one.data or 1) * one.tensor, tensor=1, stage=3, root_once=True) for one in found
    ]
    return [*found, *(wide if job.tensor > 1 else [])]


def write(job: LaunchedJob, parts: ModelParts) -> str:
    """Return the script."""
    data = job.data or 1
    shards = data // job.replicas if job.stage else 1
    half = job.dtype == "bfloat16"
    policy = "MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)"
    return _SCRIPT.format(
        title=_title(job, data, shards),
        source=parts.source,
        ranks=data * job.tensor,
        replicas=data // shards,
        shards=shards,
        tensor=job.tensor,
        blocks=_listed(parts.blocks),
        columns=_listed(parts.columns if job.tensor > 1 else ()),
        gathered=_listed(parts.gathered if job.tensor > 1 else ()),
        rows=_listed(parts.rows if job.tensor > 1 else ()),
        lookups=_listed(parts.lookups if job.tensor > 1 else ()),
        policy=policy if half else "MixedPrecisionPolicy()",
        stage=job.stage,
        recompute=job.recompute,
        every=job.every,
        micro_batches=job.micro_batches or 1,
        seed=parts.seed,
        batch=job.batch,
        optimizer=_OPTIMIZERS.get(job.optimizer, _OPTIMIZERS["adam"]),
    )


_OPTIMIZERS = {
    "sgd": "torch.optim.SGD(model.parameters(), lr=lr)",
    "momentum": "torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)",
    "adam": "torch.optim.AdamW(model.parameters(), lr=lr)",
    "adam_fused": "torch.optim.AdamW(model.parameters(), lr=lr, fused=True)",
}


def _title(job: LaunchedJob, data: int, shards: int) -> str:
    parts = [f"{data} data-parallel ranks"] if data > 1 else []
    parts += [f"ZeRO-{job.stage} over {shards}"] if job.stage else []
    parts += [f"tensor parallelism over {job.tensor}"] if job.tensor > 1 else []
    parts += [f"{job.micro_batches} micro-batches"] if (job.micro_batches or 1) > 1 else []
    parts += [f"blocks recomputed ({job.recompute})"] if job.recompute != NOTHING else []
    return ", ".join(parts) or "one device"


def _listed(names: Sequence[str]) -> str:
    if not names:
        return "()"
    return "(\n" + "".join(f'    "{name}",\n' for name in names) + ")"


_SCRIPT = '''"""{title}: FSDP2 and tensor parallelism, by PyTorch alone.

torchrun --nproc-per-node {ranks} THIS_FILE --steps 10
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

MODEL, SEED = "{source}", {seed}
REPLICAS, SHARDS, TENSOR = {replicas}, {shards}, {tensor}
STAGE = {stage}  # of ZeRO: 0 keeps everything whole, 1 shards the state, 2 gradients too, 3 parameters too
MICRO_BATCHES = {micro_batches}
RECOMPUTE, EVERY = "{recompute}", {every}
BLOCKS = {blocks}
COLUMNS = {columns}
GATHERED_COLUMNS = {gathered}
ROWS = {rows}
LOOKUPS = {lookups}


def parallelize(model, mesh):
    """Split a model, in place, on a mesh with the axes replica, shard and tensor."""
    styles = {{name: ColwiseParallel() for name in COLUMNS}}
    styles |= {{name: ColwiseParallel(output_layouts=Replicate()) for name in GATHERED_COLUMNS}}
    styles |= {{name: RowwiseParallel() for name in ROWS}}
    styles |= {{name: RowwiseParallel(input_layouts=Replicate()) for name in LOOKUPS}}
    if TENSOR > 1:
        parallelize_module(model, mesh["tensor"], styles)
    how = {{"mesh": mesh["replica", "shard"], "mp_policy": {policy}}}
    for number, name in enumerate(BLOCKS, 1):
        if RECOMPUTE != "none" and number % EVERY == 0:
            parent, _, own = name.rpartition(".")
            whole = {{}} if RECOMPUTE == "full" else {{"context_fn": keep_products}}
            block = checkpoint_wrapper(model.get_submodule(name), **whole)
            setattr(model.get_submodule(parent), own, block)
        fully_shard(model.get_submodule(name), reshard_after_forward=STAGE == 3, **how)
    fully_shard(model, **({{}} if STAGE == 3 else {{"reshard_after_forward": False}}), **how)
    return model


def keep_products():
    """Recompute all but products and attention."""
    aten = torch.ops.aten
    kept = {{aten.mm.default, aten.addmm.default, aten.bmm.default}}

    def policy(context, op, *args, **kwargs):
        keep = op in kept or "scaled_dot_product" in str(op)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def rows_of(value, part, parts):
    """Return the rows of one of ``parts`` equal parts of a batch."""
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    size = value.shape[0] // parts
    return value[part * size : (part + 1) * size]


def step(model, args, kwargs, rank, ranks):
    """Compute the gradients of one step from a global batch, of which each data-parallel rank takes its rows;
    return the loss of these."""
    losses = []
    for number in range(MICRO_BATCHES):
        last = number == MICRO_BATCHES - 1
        # Gradients are reduced once per step (stages 0 and 1) or in every micro-batch; parameters stay
        # gathered between micro-batches, of stage 3 only those outside of blocks.
        model.set_requires_gradient_sync(last or STAGE >= 2)
        model.set_reshard_after_backward(last or STAGE == 3)
        model.set_reshard_after_backward(last, recurse=False)
        # A micro-batch is a part of the whole batch, and each rank takes its rows of that.
        part, parts = number * ranks + rank, MICRO_BATCHES * ranks
        own = [rows_of(value, part, parts) for value in args]
        named = {{name: rows_of(value, part, parts) for name, value in kwargs.items()}}
        loss = model(*own, **named) / MICRO_BATCHES
        loss.backward()
        losses.append(loss.detach())
    return sum(losses)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--cpu", action="store_true", help="run on CPU ranks over gloo")
    options = parser.parse_args()
    lr, device = options.lr, "cpu" if options.cpu or not torch.cuda.is_available() else "cuda"
    dist.init_process_group("gloo" if device == "cpu" else "nccl")
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh(device, (REPLICAS, SHARDS, TENSOR), mesh_dim_names=("replica", "shard", "tensor"))

    # Your own model, with weights that are the same on every rank, and its global batch.
    from tensoropt import load_model

    loaded = load_model(MODEL, device="cpu", seed=SEED, batch={batch})
    model = parallelize(loaded.model.to(device), mesh)
    args = [value.to(device) if isinstance(value, torch.Tensor) else value for value in loaded.args]
    kwargs = {{name: value.to(device) for name, value in loaded.kwargs.items()}}

    optimizer = {optimizer}
    rank = mesh["replica"].get_local_rank() * SHARDS + mesh["shard"].get_local_rank()
    for number in range(options.steps):
        loss = step(model, args, kwargs, rank, REPLICAS * SHARDS)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss)
        if dist.get_rank() == 0:
            print(f"step {{number + 1}}: loss {{loss.item() / dist.get_world_size():.6f}}", flush=True)
    dist.barrier()  # no rank leaves while others still send
    del model, optimizer
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
'''

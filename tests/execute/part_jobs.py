"""What ranks run to try the parts of the executor alone: kernels, resharding, recorders."""

import itertools
from math import prod
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tensoropt.engine.parameters import _as_dtensor, shard_of
from tensoropt.engine.runtime import Runtime
from tensoropt.ops.families.losses import cross_entropy_kernel
from tensoropt.ops.families.norms import sync_batch_norm
from tensoropt.ops.layouts import REPLICATE
from tensoropt.sharding.reshard.redistribute import EdgeSpec, redistribute, run_steps, take_shard
from tensoropt.sharding.reshard.steps import edge_steps, forward_placements, gradient_placements
from tensoropt.verify.recorder import CollectiveRecorder, MemoryTracker, summarise


def kernels_on_ranks(rank, world):
    """Split cross entropy and synchronised batch norm against PyTorch's own."""
    torch.manual_seed(0)
    runtime = Runtime((1, world))
    logits = torch.randn(12, 11, requires_grad=True)
    target = torch.randint(0, 11, (12,))
    target[[1, 4, 5]] = -100
    want = F.cross_entropy(logits, target)
    (gradient,) = torch.autograd.grad(want, logits)
    step = -(-11 // world)
    local = logits.detach()[:, rank * step : (rank + 1) * step].requires_grad_()
    got = cross_entropy_kernel(runtime, "x", (), (1,), (step,), 11, local, target)
    (shard,) = torch.autograd.grad(got, local)
    found = {
        "classes": float((got - want).abs()),
        "classes gradient": float((shard - gradient[:, rank * step : (rank + 1) * step]).abs().max()),
    }
    rows = 12 // world
    local = logits.detach()[rank * rows : (rank + 1) * rows].requires_grad_()
    own = target[rank * rows : (rank + 1) * rows]
    part = cross_entropy_kernel(runtime, "x", (1,), (), (), 11, local, own)
    (shard,) = torch.autograd.grad(part, local)
    found["rows"] = float((runtime.all_reduce(part.detach(), (1,)) - want).abs())
    found["rows gradient"] = float((shard - gradient[rank * rows : (rank + 1) * rows]).abs().max())

    x = torch.randn(8, 5, 3, requires_grad=True)
    weight, bias = torch.randn(5, requires_grad=True), torch.randn(5, requires_grad=True)
    mean, var = torch.randn(5), torch.rand(5)
    new_mean, new_var = mean.clone(), var.clone()
    want = F.batch_norm(x, new_mean, new_var, weight, bias, training=True, momentum=0.3, eps=1e-3)
    upstream = torch.randn_like(want)
    gradients = torch.autograd.grad(want, (x, weight, bias), upstream)
    part_of = slice(rank * 8 // world, (rank + 1) * 8 // world)
    local = x.detach()[part_of].requires_grad_()
    y, _, _, got_mean, got_var = sync_batch_norm(
        runtime, "x", (1,), 24, local, weight, bias, mean, var, True, 0.3, 1e-3
    )
    shards = torch.autograd.grad(y, (local, weight, bias), upstream[part_of])
    found["norm"] = float((y - want[part_of]).abs().max())
    found["norm x"] = float((shards[0] - gradients[0][part_of]).abs().max())
    for index, name in ((1, "norm weight"), (2, "norm bias")):
        found[name] = float((runtime.all_reduce(shards[index], (1,)) - gradients[index]).abs().max())
    found["running mean"] = float((got_mean - new_mean).abs().max())
    found["running var"] = float((got_var - new_var).abs().max())
    return found


def reshard_uneven(rank, world):
    """A tensor of which the last rank has less, put together and cut again: differences."""
    mesh, atoms = (1, world), ((3,), (2 * world - 1,))
    runtime, sizes = Runtime(mesh), (3, 2 * world - 1)
    shard, whole, summed = (-1, 1), (-1, -1), (-1, -3)
    value = torch.arange(float(sizes[0] * sizes[1])).view(sizes)
    piece = take_shard(runtime, EdgeSpec("x", atoms, mesh, shard, shard, (), ()), value).clone()
    found = {}
    for name, start, target, given, wanted in (
        ("gathered", shard, whole, piece, value),
        ("scattered", summed, shard, value / world, piece),
    ):
        steps = edge_steps(sizes, mesh, start, target)[0]
        got = run_steps(runtime, given, EdgeSpec("x", atoms, mesh, start, target, steps, ()))
        found[name] = float((got - wanted).abs().max())
    return found


def reshard_all(rank, world, sizes, each=True):
    """Every pair of layouts on a mesh: value and gradient against what the whole tensor says. Every other
    tensor lies transposed in memory, and what arrives has to lie so too. There are as many atoms as dims, but
    none in the first. Without ``each``, only the first pair of every sequence of collectives."""
    mesh = (1, *sizes)
    runtime = Runtime(mesh)
    atoms = ((), (4, 2), (8,))
    flat = tuple(n for dim in atoms for n in dim)
    axes = len(sizes)
    codes = (0, 1, 2, -1, -2, -3)
    layouts = [(-1, *c) for c in itertools.product(codes, repeat=axes) if _fits(c, sizes, flat)]
    generator = torch.Generator().manual_seed(0)
    value, upstream = (torch.randn(1, 8, 8, generator=generator) for _ in range(2))

    def part(x: torch.Tensor, placements: tuple[int, ...]) -> torch.Tensor:
        """This rank's part: a shard, or the summand of a partial (coordinate c holds (c+1)/sum of it)."""
        for axis, code in enumerate(placements):
            if code == -3:
                weights = [i + 1 for i in range(mesh[axis])]
                x = x * (weights[runtime.place[axis]] / sum(weights))
        cut = tuple(-1 if code == -3 else code for code in placements)
        return take_shard(runtime, EdgeSpec("x", atoms, mesh, cut, cut, (), ()), x)

    def total(x: torch.Tensor, placements: tuple[int, ...]) -> torch.Tensor:
        partial = tuple(a for a, code in enumerate(placements) if code == -3)
        return runtime.all_reduce(x, partial) if partial else x

    def shard(x: torch.Tensor, placements: tuple[int, ...]) -> torch.Tensor:
        return part(x, tuple(-1 if code == -3 else code for code in placements))

    wrong, seen = [], set()
    for (i, source), (j, target) in itertools.product(enumerate(layouts), enumerate(layouts)):
        forward, backward = edge_steps(flat, mesh, source, target)
        order = (0, 2, 1) if (i + j) % 2 else None
        sequence = *((s.kind, s.axes) for s in forward), None, *((s.kind, s.axes) for s in backward)
        if sequence in seen and not each:
            continue
        seen.add(sequence)
        spec = EdgeSpec("x", atoms, mesh, source, target, forward, backward, order=order)
        x = part(value, forward_placements(source)).clone()
        x = (x.mT.contiguous().mT if order else x).requires_grad_()
        y = redistribute(runtime, spec, x)
        if order and not y.mT.is_contiguous():
            wrong.append(f"{source} -> {target}: lies otherwise")
        after = forward_placements(target)
        if not torch.allclose(total(y.detach(), after), shard(value, after), atol=1e-5):
            wrong.append(f"{source} -> {target}")
        arriving, leaving = gradient_placements(target), gradient_placements(source)
        y.backward(part(upstream, arriving))
        if not torch.allclose(total(x.grad, leaving), shard(upstream, leaving), atol=1e-5):
            wrong.append(f"{source} -> {target}: gradient")
    return [f"{len(layouts)} layouts", *wrong]


def _fits(codes: tuple[int, ...], mesh: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    for atom, size in enumerate(sizes):
        parts = 1
        for code, count in zip(codes, mesh, strict=True):
            parts *= count if code == atom else 1
        if size % parts:
            return False
    return True


def recorded(rank, world):
    """Collectives of forward and backward as the recorder sees them, on a 1 x 2 x 1 mesh."""

    class InBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            grad = grad.clone()
            dist.all_reduce(grad)
            return grad

    x = torch.ones(6, requires_grad=True)
    with CollectiveRecorder((3, world, 1)) as recorder:
        dist.all_gather_into_tensor(torch.empty(6 * world), x.detach())
        dist.reduce_scatter_tensor(torch.empty(6), torch.ones(6 * world))
        dist.all_to_all_single(torch.empty(4 * world), torch.ones(4 * world))
        dist.barrier()
        InBackward.apply(x).sum().backward()
    rows = summarise(recorder.issued)
    with MemoryTracker() as tracker:
        kept = torch.empty(1000)
        torch.empty(5000)
        view = kept[10:]
        del view
    return [rows, tracker.now_bytes, tracker.peak_bytes]


def put_together(rank, world, mesh, cases):
    """The (atoms, axes' codes) of which PyTorch does not give the whole tensor back."""
    runtime, wrong = Runtime(mesh), []
    for atoms in cases:
        shape = tuple(map(prod, atoms))
        whole = torch.arange(prod(shape), dtype=torch.float32).view(shape)
        count = sum(map(len, atoms))
        for codes in itertools.product(range(-1, count), repeat=len(mesh) - 1):
            layout = (REPLICATE, *codes)
            local = shard_of(runtime, "w", atoms, layout, whole)
            shown = _as_dtensor(local, atoms, layout, runtime.device_mesh, runtime)
            if not torch.equal(shown.full_tensor().reshape(shape), whole):
                wrong.append((atoms, codes))
    return wrong

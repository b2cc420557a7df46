"""A rank's mesh coordinate, process groups, micro-batch and step, and hashes to compare ranks."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import warnings
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tensoropt.engine import script_values
from tensoropt.errors import PlanError
from tensoropt.ops.layouts import flat_index
from tensoropt.sharding.reshard.redistribute import AT_THE_USE, Ahead, Route

_CHUNK = 1 << 18
"""The number of 8-byte words hashed at once: 2 MiB, so that intermediate results stay in a core's cache."""
_FIRST, _EVERY = 3, 1000
"""Numbers of calls: inputs are compared in the first ``_FIRST``, then in one of every ``_EVERY``."""
RING_TAG = 1 << 20
"""The tag of messages in ring attention, apart from the tags of pipeline and placed plans."""
_STEP = 6364136223846793005  # Knuth's multiplier of a linear congruence modulo 2^64 (MMIX)


@functools.lru_cache(maxsize=8)
def _weights(device: torch.device, count: int) -> torch.Tensor:
    """Return cached multipliers of 8-byte words; they are odd, so that changing one word changes the hash."""
    generator = torch.Generator().manual_seed(44)
    drawn = torch.randint(-(1 << 63), (1 << 63) - 1, (count,), generator=generator)
    return (drawn | 1).to(device)


@torch.no_grad()
def content_hash(value: torch.Tensor) -> torch.Tensor:
    """Return a hash of a tensor's bits, dtype and shape: an int64 scalar on its device, without a sync.

    The hash is a sum of 8-byte words times odd numbers, modulo 2^64. It is the same on every device.
    """
    data = value.detach()
    if data.is_quantized or data.layout is not torch.strided:
        data = data.dequantize() if data.is_quantized else data.to_dense()
    data = data.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    whole = data.numel() // 8 * 8
    words = data[:whole]
    # A view needs its start at a multiple of eight bytes, which a slice of a larger tensor may not have.
    words = (words if words.storage_offset() % 8 == 0 else words.clone()).view(torch.int64)
    about = zlib.crc32(f"{value.dtype} {tuple(value.shape)}".encode())
    total = torch.full((), about, dtype=torch.int64, device=data.device)
    # A power of two, and enough for what remains after the last whole word.
    multipliers = _weights(data.device, min(_CHUNK, 1 << max(words.numel() - 1, 7).bit_length()))
    for chunk in words.split(_CHUNK):
        total = total * _STEP + (chunk * multipliers[: chunk.numel()]).sum()
    if whole < data.numel():
        rest = data[whole:].to(torch.int64)
        total = total * _STEP + (rest * multipliers[: rest.numel()]).sum()
    return total


def text_hash(text: str) -> int:
    """Return a 62-bit hash of a text, equal on every rank."""
    data = text.encode()
    return zlib.crc32(data) << 30 ^ zlib.adler32(data)


def gathered(row: torch.Tensor) -> torch.Tensor:
    """Gather one row of numbers from each rank; return them on the host, by rank."""
    rows = torch.empty(dist.get_world_size() * row.numel(), dtype=row.dtype, device=row.device)
    dist.all_gather_single(rows, row)
    return rows.view(-1, row.numel()).cpu()


def is_first() -> bool:
    """Return whether this process is rank 0, or outside of a job."""
    return not dist.is_initialized() or dist.get_rank() == 0


def wait_for_all() -> None:
    """Wait for all ranks of the job; do nothing outside of a job."""
    if dist.is_initialized():
        dist.barrier()


def through_host(device: torch.device) -> bool:
    """Return whether coalesced collectives and messages of this job must pass through host memory.

    Gloo reads GPU addresses in ``allgather_into_tensor_coalesced``, ``send`` and ``recv``, and crashes.
    """
    return device.type != "cpu" and dist.get_backend() == "gloo"


class EqualShares:
    """Warns once if ranks with different shares of the batch pass the same rows."""

    def __init__(self, device: torch.device):
        self.device, self.calls = device, 0

    def look(self, share: int, values: Sequence[torch.Tensor], contents: Sequence[object]) -> None:
        """Compare the rows of a call between ranks; a collective.

        Args:
            share: the number of this rank's share of the batch.
            values: this rank's inputs with a batch dim.
            contents: a key for each rank, equal for ranks with equal inputs.
        """
        self.calls += 1
        if self.calls > _FIRST or not values:
            return
        # Where every input has one value only, as masks of ones have, rows are equal by nature.
        varies = any(value.numel() and bool((value != value.flatten()[0]).any()) for value in values)
        rows = gathered(torch.tensor([share, varies], device=self.device)).tolist()
        first: dict[object, tuple[int, int]] = {}
        for rank, ((of, tells), content) in enumerate(zip(rows, contents, strict=True)):
            other, its = first.setdefault(content, (rank, of))
            if tells and of != its:
                self.calls = _FIRST
                if is_first():
                    warnings.warn(
                        f"ranks {other} and {rank} passed the same rows, but have data_rank {its} and {of}: "
                        "the batch is divided among ranks with different data_rank, and each passes rows of "
                        "its own; use tensoropt.sampler(model, dataset), or a DistributedSampler with "
                        "rank=model.data_rank and num_replicas=model.data_world",
                        stacklevel=2,
                    )
                return


class SameCalls:
    """Checks that ranks pass equal inputs, in the first calls and regularly later.

    Args:
        names: the names of the inputs.
        shares: by input, the number of this rank's share of the batch; -1 if all ranks pass the same tensor.
        reads: by input, whether this rank reads it.
    """

    def __init__(
        self, names: Sequence[str], reads: Sequence[bool], device: torch.device, shares: Sequence[int]
    ):
        self.names, self.reads, self.device, self.shares = list(names), list(reads), device, list(shares)
        self.calls = 0
        self.equal_shares = EqualShares(device)

    def due(self) -> bool:
        """Count a call and return whether to compare it; equal on all ranks."""
        self.calls += 1
        return self.calls <= _FIRST or self.calls % _EVERY == 0

    def compare(self, inputs: Sequence[torch.Tensor] | None, mode: int) -> None:
        """Compare a call with those of the other ranks; a collective.

        Args:
            inputs: the graph's inputs; None if this rank refuses its call.
            mode: the call's mode (:func:`mode_of`).

        Raises:
            PlanError: the calls differ, or a rank refuses its own.
        """
        # This rank's refusal and mode; then of each input its share, whether its content counts, and that.
        own = torch.zeros(1 + len(self.names), 3, dtype=torch.int64, device=self.device)
        own[0, :2] = torch.tensor([inputs is None, mode])
        own[1:, 0] = torch.tensor(self.shares)
        for row, value, read in zip(own[1:], inputs or (), self.reads, strict=False):
            row[1] = 1 if read else value.detach().any()
            row[2] = content_hash(value)
        ranks = gathered(own.flatten()).view(-1, *own.shape).tolist()
        if inputs is None:
            return  # this rank's own refusal says more
        refused = [rank for rank, (head, *_) in enumerate(ranks) if head[0]]
        if refused:
            raise PlanError(f"rank {refused[0]} refused this call of the model; see its own error")
        modes = [_MODES[head[1]] for head, *_ in ranks]
        for rank, words in enumerate(modes):
            if words != modes[0]:
                raise PlanError(
                    f"rank {rank} calls the model {words}, but rank 0 {modes[0]}; every rank must make the "
                    "same calls"
                )
        for index, name in enumerate(self.names, start=1):
            first: dict[int, int] = {}
            for rank, rows in enumerate(ranks):
                share, counts, content = rows[index]
                other = first.setdefault(share, rank) if counts else rank
                if content != ranks[other][index][2]:
                    rule = (
                        "every rank must pass the same global batch: use one sampler with one seed on all "
                        "ranks, and no DistributedSampler, or pass batch='share' to parallelize"
                        if len({each[index][0] for each in ranks}) == 1
                        else f"both have data_rank {share}, and ranks with the same data_rank must pass the "
                        "same rows: use tensoropt.sampler"
                    )
                    raise PlanError(f"rank {rank} passed another batch than rank {other} in {name}; {rule}")
        divided = [index for index, share in enumerate(self.shares) if share >= 0]
        if inputs and divided:
            self.equal_shares.look(
                self.shares[divided[0]],
                [inputs[index] for index in divided],
                [tuple(rows[1 + index][2] for index in divided) for rows in ranks],
            )


_MODES = ("in evaluation under no_grad", "in evaluation", "in training under no_grad", "in training")


def mode_of(training: bool, gradients: bool) -> int:
    """Return a number for a call's mode: training or eval, with or without gradients (:data:`_MODES`)."""
    return 2 * training + gradients


def first_differing(tensors: Mapping[str, torch.Tensor], device: torch.device) -> tuple[str, int] | None:
    """Return the name of the first tensor that differs between ranks, and a rank that differs from rank 0.

    Args:
        tensors: tensors by name; the same names in the same order on every rank.
        device: the device of the job's collectives.
    """
    if not tensors:
        return None
    rows = gathered(torch.stack([content_hash(value).to(device) for value in tensors.values()]))
    different = (rows != rows[0]).nonzero()
    if not len(different):
        return None
    # By tensor first: the one that comes first in the model is the most informative.
    column = int(different[:, 1].min())
    rank = int(different[different[:, 1] == column][0, 0])
    return list(tensors)[column], rank


# Groups are made once per job and mesh; a new job (as tests begin) is recognised by its world group.
_made_for: list[object] = []
_made_groups: dict[tuple[int, ...], dict[tuple[int, ...], dist.ProcessGroup]] = {}
# The runtimes that may still refer to groups when the job is left (leave_job).
_runtimes: weakref.WeakSet[Runtime] = weakref.WeakSet()


def leave_job() -> None:
    """Destroy all process groups and leave the job.

    A group that is still referenced would be destroyed as the interpreter exits, where gloo's threads abort.
    """
    script_values.forget()
    for runtime in list(_runtimes):
        runtime._groups = {}
        runtime.routes.clear()  # they refer to groups
        runtime.ahead = AT_THE_USE
    _made_for.clear()
    _made_groups.clear()
    # Cycles (autograd graphs, lowered modules) may still refer to groups: they are freed before the groups
    # are.
    gc.collect()
    if dist.is_initialized():
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


def _same(value: Any) -> Any:
    return value


class Runtime:
    """A rank's position on the mesh, its process groups, and the state of the current step for kernels.

    Axis 0 is the micro-batch axis, whose coordinate changes over time. The other axes number the ranks in
    row-major order.

    Args:
        mesh: the number of micro-batches, then the axis sizes.
        rank: the number of the rank; by default that of this process.
        job: the runtime of the whole pipeline job, whose mesh has the pipeline as axis 1, if this runtime is
            for one stage; otherwise None.

    Attributes:
        step, micro_batch: the number of the current step, and of the current micro-batch.
        counts: mean loss operator -> number of targets in the whole batch, over all micro-batches.
        gathered: a function that records how a tensor was gathered, so that backward can gather it again.
        kept: a function that lets autograd save a gathered tensor after all.
        saving: the saved-tensor hooks (pack, unpack).
        unsharded: the parameters that are gathered once per step, by name.
        ahead: the prefetching of parameters in the current call.

    Raises:
        PlanError: the job has a different number of ranks than the mesh needs.
    """

    def __init__(
        self,
        mesh: Sequence[int],
        *,
        rank: int | None = None,
        seed: int = 0,
        device: torch.device | None = None,
        job: Runtime | None = None,
    ):
        self.mesh = tuple(mesh)
        self.device = device or torch.device("cpu")
        self.seed = seed
        self.step = 0
        self.micro_batch = 0
        self.counts: dict[str, torch.Tensor] = {}
        self.gathered: Callable[..., None] = lambda *_: None
        self.kept: Callable[[torch.Tensor], None] = lambda _: None
        self.saving: tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] = (_same, _same)
        self.unsharded: dict[str, torch.Tensor] = {}
        self.routes: dict[object, Route] = {}
        self.ahead: Ahead = AT_THE_USE
        self._job = job
        _runtimes.add(self)
        # Without axis 0: micro-batches take time, not devices.
        devices = prod(self.mesh[1:])
        self.distributed = devices > 1
        self.alone = False
        self.rank: int
        self.position: tuple[int, ...]
        self._groups: dict[tuple[int, ...], dist.ProcessGroup]
        if job is not None:
            assert self.mesh[1:] == job.mesh[2:], "a place of a pipeline has the other axes of the job's mesh"
            self.rank, self.position = job.rank, job.position[1:]
            self._groups = {
                tuple(axis - 1 for axis in axes): group
                for axes, group in job._groups.items()
                if 1 not in axes
            }
            return
        if self.distributed:
            if not dist.is_initialized():
                raise PlanError(
                    f"the plan's mesh has {devices} devices but torch.distributed is not initialised; "
                    f"start the script with torchrun --nproc-per-node {devices}"
                )
            if dist.get_world_size() != devices:
                shape = "x".join(map(str, self.mesh[1:]))
                raise PlanError(
                    f"the plan's mesh {shape} needs {devices} ranks, but this job has "
                    f"{dist.get_world_size()}; start it with torchrun --nproc-per-node {devices}"
                )
        self.rank = rank if rank is not None else (dist.get_rank() if self.distributed else 0)
        # Row-major, the last axis fastest, as `init_device_mesh` numbers ranks: DTensors and groups agree.
        place = np.unravel_index(self.rank % devices, self.mesh[1:])
        self.position = tuple(map(int, place))
        self._groups = self._make_groups() if self.distributed else {}

    def _make_groups(self) -> dict[tuple[int, ...], dist.ProcessGroup]:
        """Return process groups over every subset of axes, made once per job as PyTorch never frees them."""
        world = dist.group.WORLD
        # Groups of a job that has ended are dead; a new job has another world group.
        if _made_for[:1] != [world]:
            _made_for[:] = [world]
            _made_groups.clear()
        if self.mesh[1:] not in _made_groups:
            _made_groups[self.mesh[1:]] = self._new_groups()
        return _made_groups[self.mesh[1:]]

    def _new_groups(self) -> dict[tuple[int, ...], dist.ProcessGroup]:
        axes = [a for a in range(1, len(self.mesh)) if self.mesh[a] > 1]
        own: dict[tuple[int, ...], dist.ProcessGroup] = {}
        # All subsets, whether the plan uses them or not: 2^axes - 1, few for the axes that meshes have.
        for count in range(1, len(axes) + 1):
            for subset in itertools.combinations(axes, count):
                # All ranks already form a group, with its connections open.
                if prod(self.mesh[a] for a in subset) == prod(self.mesh[1:]):
                    assert dist.group.WORLD is not None
                    own[subset] = dist.group.WORLD
                    continue
                # new_group is a collective: every rank takes part in making groups it is not in, in one
                # order.
                for ranks in self._partitions(subset):
                    group = dist.new_group(ranks)
                    if self.rank in ranks:
                        own[subset] = group
        return own

    def _partitions(self, subset: tuple[int, ...]) -> list[list[int]]:
        """Return the groups of ranks that differ only along ``subset``."""
        ranks = np.arange(prod(self.mesh[1:])).reshape(self.mesh[1:])
        ranks = np.moveaxis(ranks, [axis - 1 for axis in subset], range(-len(subset), 0))
        return ranks.reshape(-1, self.parts(subset)).tolist()

    @functools.cached_property
    def device_mesh(self) -> DeviceMesh | None:
        """The ranks as a DeviceMesh; None for one device. The first access is a collective."""
        axes = range(1, len(self.mesh))
        if self._job is not None:
            whole = self._job.device_mesh
            assert whole is not None
            return whole[tuple(f"axis{axis + 1}" for axis in axes)] if axes else None
        if not self.distributed:
            return None
        names = tuple(f"axis{axis}" for axis in axes)
        return init_device_mesh(self.device.type, self.mesh[1:], mesh_dim_names=names)

    # -- coordinates ------------------------------------------------------------------------------

    @property
    def place(self) -> tuple[int, ...]:
        """This rank's coordinates on all mesh axes; the first is the number of the current micro-batch."""
        return (self.micro_batch, *self.position)

    def coordinate(self, axes: tuple[int, ...]) -> int:
        return flat_index(self.mesh, self.place, axes)

    def parts(self, axes: tuple[int, ...]) -> int:
        return prod(self.mesh[axis] for axis in axes)

    def group(self, axes: tuple[int, ...]) -> dist.ProcessGroup | None:
        """Return the process group over ``axes``; None if it has one member."""
        # Kernels and steps name axes as the strategy does, those of one part and the micro-batches included.
        real = tuple(a for a in axes if a > 0 and self.mesh[a] > 1)
        return self._groups[real] if real else None

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # -- what kernels need ------------------------------------------------------------------------

    def all_reduce(self, value: torch.Tensor, axes: tuple[int, ...], op: str = "sum") -> torch.Tensor:
        """Return ``value`` reduced over ``axes``."""
        group = self.group(axes)
        if group is None:
            return value
        value = value.contiguous().clone()  # all_reduce writes in place, and the caller keeps its own
        dist.all_reduce(value, op=dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM, group=group)
        return value

    def all_to_all(
        self,
        value: torch.Tensor,
        axes: tuple[int, ...],
        sent: Sequence[int] | None = None,
        received: Sequence[int] | None = None,
    ) -> torch.Tensor:
        group = self.group(axes)
        if group is None:
            return value.clone()
        rows = value.shape[0] if received is None else sum(received)
        result = value.new_empty((rows, *value.shape[1:]))
        sizes = [None if part is None else list(part) for part in (received, sent)]
        dist.all_to_all_single(result, value.contiguous(), sizes[0], sizes[1], group=group)
        return result

    def send_around(self, value: torch.Tensor, axes: tuple[int, ...]) -> Callable[[], torch.Tensor]:
        group = self.group(axes)
        if group is None:
            copy = value.clone()
            return lambda: copy
        sent = value.cpu() if through_host(self.device) else value
        received, place, size = torch.empty_like(sent), self.coordinate(axes), self.parts(axes)
        # Together, as NCCL would carry out one after the other: every rank would send, and none receive.
        messages = [
            dist.P2POp(dist.isend, sent, group=group, tag=RING_TAG, group_peer=(place + 1) % size),
            dist.P2POp(dist.irecv, received, group=group, tag=RING_TAG, group_peer=(place - 1) % size),
        ]
        under_way = dist.batch_isend_irecv(messages)

        def arrive() -> torch.Tensor:
            for message in under_way:
                message.wait()
            return received.to(value.device)

        return arrive

    def total(self, name: str, value: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
        """Return a loss's number of targets summed over ``axes``; ``counts`` has sums over micro-batches."""
        if self.mesh[0] == 1 or 0 not in axes:
            return self.all_reduce(value, axes)
        return self.counts[name]

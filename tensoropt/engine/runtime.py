"""A rank's place in the job: mesh coordinate, process groups, micro-batch, step."""

from __future__ import annotations

import contextlib
import gc
import itertools
import weakref
from collections.abc import Callable, Sequence
from math import prod

import torch
import torch.distributed as dist

from tensoropt.errors import PlanError
from tensoropt.sharding.reshard.redistribute import AT_THE_USE, Ahead, Route

# Groups are made once per job and mesh; a new job (as tests begin) is recognised by its world group.
_made_for: list[object] = []
_made_groups: dict[tuple[int, ...], dict[tuple[int, ...], dist.ProcessGroup]] = {}
# Those that may still refer to groups when the job is left (leave_job).
_runtimes: weakref.WeakSet[Runtime] = weakref.WeakSet()


def leave_job() -> None:
    """Release every process group, then end this rank's part in the job.

    A group to which something still refers outlives ``destroy_process_group``, and is destroyed together with
    the interpreter: gloo's threads then abort a process that has done its work ("terminate called without an
    active exception").
    """
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


class Runtime:
    """A rank's view of the mesh; the :class:`~tensoropt.ops.context.ShardContext` of its kernels.

    Axis 0 is the micro-batch axis: its coordinate changes over time. The other axes are row-major over ranks.
    Process groups exist for every subset of axes, so that several axes can act as one group.

    Args:
        mesh: micro-batches, then the axis sizes.
        rank: this process's rank; by default the job's, 0 without a job.
        seed: the seed of dropout.
        device: the device that this rank computes on; the CPU by default.
        job: for a mesh that is one place of a pipeline, the whole job's mesh, whose first axis after the
            micro-batches is the pipeline.

    Attributes:
        step, micro_batch: the current position of the run; dropout and shards of the batch depend on them.
        counts: the counts of mean losses over the whole batch, by operator.
        gathered, kept: called with each gathered parameter that backward can regather, and with those of
            which autograd is to keep what it saves from then on.
        unsharded: the parameters that are gathered once per step, by name.
        routes: the routes of edges determined so far.
        ahead: what is gathered ahead in the running call.

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
        self.unsharded: dict[str, torch.Tensor] = {}
        self.routes: dict[object, Route] = {}
        self.ahead: Ahead = AT_THE_USE
        # Without axis 0: micro-batches take time, not devices.
        devices = prod(self.mesh[1:])
        self.distributed = devices > 1
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
            _runtimes.add(self)
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
        position: list[int] = []
        rest = self.rank
        # Row-major, the last axis fastest, as `init_device_mesh` numbers ranks: DTensors and groups agree.
        for size in reversed(self.mesh[1:]):
            position.insert(0, rest % size)
            rest //= size
        self.position = tuple(position)
        self._groups = self._make_groups() if self.distributed else {}
        _runtimes.add(self)

    def _make_groups(self) -> dict[tuple[int, ...], dist.ProcessGroup]:
        """Make a process group for every subset of real axes with more than one member; every rank makes all.

        Groups are costly to make and are never freed by PyTorch, so those of a mesh are made once per job.
        """
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
        """Return the ranks that differ only along the axes of ``subset``, group by group."""
        members: dict[tuple[int, ...], list[int]] = {}
        sizes = self.mesh[1:]
        for rank, place in enumerate(itertools.product(*(range(n) for n in sizes))):
            key = tuple(c for axis, c in enumerate(place, start=1) if axis not in subset)
            members.setdefault(key, []).append(rank)
        return list(members.values())

    # -- coordinates ------------------------------------------------------------------------------

    @property
    def place(self) -> tuple[int, ...]:
        """The coordinates on all axes, the micro-batch first."""
        return (self.micro_batch, *self.position)

    def coordinate(self, axes: tuple[int, ...]) -> int:
        """Return this rank's index within the flattened group of ``axes``, the first axis outermost."""
        index = 0
        for axis in axes:
            index = index * self.mesh[axis] + self.place[axis]
        return index

    def parts(self, axes: tuple[int, ...]) -> int:
        """Return the number of shards into which ``axes`` cut an atom."""
        return prod(self.mesh[axis] for axis in axes)

    def group(self, axes: tuple[int, ...]) -> dist.ProcessGroup | None:
        """Return the process group over ``axes``; None if it has one member."""
        # Kernels and steps name axes as the strategy does, those of one part and the micro-batches included.
        real = tuple(a for a in axes if a > 0 and self.mesh[a] > 1)
        return self._groups[real] if real else None

    def synchronize(self) -> None:
        """Wait until the device has done what was issued."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # -- what kernels need ------------------------------------------------------------------------

    def all_reduce(self, value: torch.Tensor, axes: tuple[int, ...], op: str = "sum") -> torch.Tensor:
        """Return ``value`` reduced over ``axes``; itself if no other rank takes part."""
        group = self.group(axes)
        if group is None:
            return value
        value = value.contiguous().clone()  # all_reduce writes in place, and the caller keeps its own
        dist.all_reduce(value, op=dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM, group=group)
        return value

    def total(self, name: str, value: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
        """Return a count over the whole batch; with micro-batches it was taken beforehand (``counts``)."""
        if self.mesh[0] == 1 or 0 not in axes:
            return self.all_reduce(value, axes)
        return self.counts[name]

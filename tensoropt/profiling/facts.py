"""What a workload keeps for backward, how much it computes, how high it peaks: found by running it with
``torch.autograd.graph.saved_tensors_hooks``.

Kernels of one device keep other things than those of another (attention its random state, a GPU's batch norm
a reserve, dropout a mask of bytes or of floats). On fake tensors it is CPU kernels that are asked: PyTorch
ends the process at a fake CUDA tensor with autograd where it was built without CUDA. A GPU of this machine is
asked itself, with real tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tensoropt.graph import iter_refs
from tensoropt.profiling.memory import Activity, LiveTensors, PeakTracker
from tensoropt.profiling.timers import end_if_lost, local_timer
from tensoropt.profiling.workload import TensorSpec, Workload, order_of, random_tensor, run_workload
from tensoropt.sharding.kernels import SingleDevice


class CallMemory(NamedTuple):
    """Bytes of one call of the forward.

    Attributes:
        kept_bytes: what it and those before it made of the workload's ``kept_bytes``.
        peak_bytes: the most alive while it runs, all that was made inside included.
        reads_parameter: whether it reads one, which is gathered then.
    """

    kept_bytes: int
    peak_bytes: int
    reads_parameter: bool


class BackwardRun(NamedTuple):
    """Nodes of autograd's that run while the same gathered parameters may be there.

    Attributes:
        reads: the parameters that they read.
        made: those whose gradients were made before.
        peak_bytes: the most alive meanwhile, above ``kept_bytes``.
        own_peak_bytes: the same where the incoming gradients are somebody else's, who counts them.
    """

    reads: tuple[str, ...]
    made: tuple[str, ...]
    peak_bytes: int
    own_peak_bytes: int


@dataclass(frozen=True)
class Facts:
    """Facts of one workload, bytes and FLOP of one rank and one micro-batch.

    Attributes:
        kept_bytes: made inside and kept for backward.
        reads_kept: reads that backward needs.
        writes_kept: results whose storage is among ``kept_bytes`` already.
        parameters_kept: parameter -> how many saved tensors lie in it (each is a gather under ZeRO).
        forward_flops, backward_flops: multiply-adds counted as two.
        traffic_bytes: operands read and results written, forward, views left out.
        forward_peak_bytes, backward_peak_bytes: the most that is alive of what was made inside, above
            ``kept_bytes``. Backward counts the incoming gradients, which go as they are used up, and not
            the gradients of parameters once they are added to their buckets.
        forward_parameters_peak_bytes, backward_parameters_peak_bytes: the same while a call, or a node of
            autograd's, that reads a parameter runs; gathered parameters are there only then.
        handed_peak_bytes, handed_parameters_peak_bytes: of backward where the incoming gradients are
            somebody else's too, who counts them.
        backward_runs: the parts of backward in which gathered parameters may be there.
        calls: memory per call of the forward.
        lies_in: result that is a view -> the read, or the earlier result, in whose storage it lies.
        extents: result -> bytes of its storage where these are not its own: the larger one of which it is
            a view, 0 for a view of a parameter, an input or a constant.
        hands_on: read -> the result in whose gradient its own gradient lies (a sum hands it to every
            operand, a concatenation slices of it), or the earlier read with whose gradient it shares a
            storage.
        gradient_extents: read -> bytes of its gradient's storage where these are not its own.
    """

    kept_bytes: int
    reads_kept: tuple[str, ...]
    writes_kept: tuple[str, ...]
    parameters_kept: Mapping[str, int]
    forward_flops: float
    backward_flops: float
    traffic_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    forward_parameters_peak_bytes: int
    backward_parameters_peak_bytes: int
    handed_peak_bytes: int = 0
    handed_parameters_peak_bytes: int = 0
    backward_runs: tuple[BackwardRun, ...] = ()
    calls: tuple[CallMemory, ...] = ()
    lies_in: Mapping[str, str] = field(default_factory=dict)
    extents: Mapping[str, int] = field(default_factory=dict)
    hands_on: Mapping[str, str] = field(default_factory=dict)
    gradient_extents: Mapping[str, int] = field(default_factory=dict)

    def to_record(self) -> dict[str, Any]:
        """Plain data, read back by :meth:`from_record`."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Facts:
        """The facts of a record, also of one that was JSON meanwhile, where tuples became lists."""
        data = dict(record)
        data["reads_kept"], data["writes_kept"] = tuple(data["reads_kept"]), tuple(data["writes_kept"])
        data["calls"] = tuple(CallMemory(kept, peak, bool(reads)) for kept, peak, reads in data["calls"])
        data["backward_runs"] = tuple(
            BackwardRun(tuple(reads), tuple(made), most, own)
            for reads, made, most, own in data["backward_runs"]
        )
        return cls(**data)


def find_facts(work: Workload, training: bool = True) -> Facts:
    """Run a workload on fake tensors and note what it keeps with CPU kernels."""
    with FakeTensorMode():
        tensors = {name: random_tensor(spec) for name, spec, _ in work.inputs}
        return _Probe(work, tensors, training).observe()


def find_facts_on_rank(rank: int, world_size: int, work: Workload, training: bool) -> dict[str, Any]:
    """Run a workload on this rank's device and note what it keeps with that device's kernels (runs in the
    pool); the record of its :class:`Facts`, or an ``error`` where it cannot run."""
    timer = local_timer()
    try:
        with timer.device:
            tensors = {name: random_tensor(spec) for name, spec, _ in work.inputs}
            return _Probe(work, tensors, training).observe().to_record()
    except Exception as error:
        found = {"error": str(error).splitlines()[0] if str(error) else type(error).__name__}
    timer.release()
    end_if_lost(timer, f"{work.describe()}: {found['error']}")
    return found


class _Given(torch.autograd.Function):
    """Joins results under one root, whose backward makes their gradients and keeps no hold of them.

    Gradients that a caller passed to autograd would be alive until it returns; in a step each is let go of
    once its node has used it.
    """

    @staticmethod
    def forward(ctx: Any, incoming: _Incoming, *results: torch.Tensor) -> torch.Tensor:
        ctx.incoming = incoming
        ctx.like = [
            TensorSpec(tuple(r.shape), str(r.dtype).removeprefix("torch."), False, order=order_of(r))
            for r in results
        ]
        ctx.device = results[0].device
        return torch.zeros((), device=results[0].device)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return None, *ctx.incoming.make(ctx.like, ctx.device)


class _Incoming:
    """The gradients that come into a workload's backward, by the names of its results."""

    def __init__(self, live: LiveTensors, names: Sequence[str]):
        self.live, self.names = live, names
        self._storages: dict[str, weakref.ref] = {}

    def make(self, like: Sequence[TensorSpec], device: torch.device) -> list[torch.Tensor]:
        self.live.lent = True
        made = [random_tensor(spec, device) for spec in like]
        self.live.lent = False
        for name, value in zip(self.names, made, strict=True):
            self._storages[name] = weakref.ref(value.untyped_storage())
        return made

    @property
    def left(self) -> dict[int, str]:
        """Those that are still there after backward: storage -> name of the result."""
        there = {name: storage() for name, storage in self._storages.items()}
        return {storage._cdata: name for name, storage in there.items() if storage is not None}


class _Taken(torch.autograd.Function):
    """A read as a group finds it: the gradient that comes to it is taken as it is.

    A leaf's would be copied where it is a view of another one, and in a step it is not.
    """

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, name: str, taken: dict[str, torch.Tensor]) -> torch.Tensor:
        ctx.name, ctx.taken = name, taken
        ctx.set_materialize_grads(False)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:  # type: ignore[override]
        if grad is not None:
            ctx.taken[ctx.name] = grad
        return None, None, None


class _Gradients(NamedTuple):
    """Where the gradients of reads lie: see :class:`Facts`."""

    hands_on: Mapping[str, str]
    extents: Mapping[str, int]


class _Probe:
    """Runs one workload and notes what autograd saves and how much memory is alive meanwhile.

    Attributes:
        given: storages that the workload was given, with name and role of the tensor in each.
        saved: storages made inside that autograd saves.
        touched: per given tensor how many saved ones lie in its storage.
        made_by: per storage the position of the call that made it.
        calls: per call the peak while it ran, and whether it reads a parameter.
    """

    def __init__(self, work: Workload, tensors: dict[str, torch.Tensor], training: bool):
        self.work = work
        self.tensors = tensors
        self.training = training
        self.given = {tensors[n].untyped_storage()._cdata: (n, role) for n, _, role in work.inputs}
        self.parameters = {n for n, _, role in work.inputs if role == "parameter"}
        self.saved: dict[int, torch.UntypedStorage] = {}
        self.touched: dict[str, int] = {}
        self.made_by: dict[int, int] = {}
        self.calls: list[tuple[int, bool]] = []
        self.live = LiveTensors()
        self.peaks = PeakTracker(self.live)

    def _pack(self, value: torch.Tensor) -> Any:
        """Note a tensor that autograd saves; parameters go with their names, so that their reads are seen."""
        storage = value.untyped_storage()
        if storage._cdata not in self.given:
            self.saved[storage._cdata] = storage
            return value
        name, role = self.given[storage._cdata]
        self.touched[name] = self.touched.get(name, 0) + 1
        return (value, name) if role == "parameter" else value

    def _unpack(self, packed: Any) -> torch.Tensor:
        """What was saved; a gathered parameter is there for as long as the node runs that asks for it."""
        if isinstance(packed, torch.Tensor):
            return packed
        value, name = packed
        self.peaks.read(name)
        return value

    def observe(self) -> Facts:
        """Run forward, and backward if training, and sum up what was noted."""
        work, live = self.work, self.live
        for tensor in self.tensors.values():
            live.ignore(tensor)
        leaves = {n: self.tensors[n] for n, spec, _ in work.inputs if spec.requires_grad}
        taken: dict[str, torch.Tensor] = {}
        if self.training:
            for name, spec, role in work.inputs:
                if role == "read" and spec.requires_grad:
                    self.tensors[name] = _Taken.apply(self.tensors[name], name, taken)
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        with torch.set_grad_enabled(self.training), live, hooks:
            run_workload(work, self.tensors, SingleDevice(), buffers=True, after=self._after_call)
        kept = sum(storage.nbytes() for storage in self.saved.values())
        by_call = [
            sum(
                storage.nbytes()
                for key, storage in self.saved.items()
                if self.made_by.get(key, 0) <= position
            )
            for position in range(len(self.calls))
        ]
        calls = tuple(CallMemory(size, *call) for size, call in zip(by_call, self.calls, strict=True))
        storages = {n: self.tensors[n].untyped_storage()._cdata for n in work.writes}
        writes_kept = tuple(n for n in work.writes if storages[n] in self.saved)
        roles = {n: role for n, _, role in work.inputs}
        lies_in, extents = self._lying()
        forward, forward_flops, traffic = self.peaks.take(), live.flops, live.traffic
        self.saved.clear()
        gradients = self._backward(leaves, taken) if self.training else _Gradients({}, {})
        backward = self.peaks.take()
        return Facts(
            kept_bytes=kept,
            reads_kept=tuple(n for n in self.touched if roles[n] == "read"),
            writes_kept=writes_kept,
            parameters_kept={n: c for n, c in self.touched.items() if roles[n] == "parameter"},
            forward_flops=float(forward_flops),
            backward_flops=float(live.flops - forward_flops),
            traffic_bytes=traffic,
            forward_peak_bytes=forward.above(kept),
            backward_peak_bytes=backward.above(kept),
            forward_parameters_peak_bytes=forward.above(kept, reading=True),
            backward_parameters_peak_bytes=backward.above(kept, reading=True),
            handed_peak_bytes=backward.above(kept, own=True),
            handed_parameters_peak_bytes=backward.above(kept, reading=True, own=True),
            backward_runs=tuple(
                BackwardRun(
                    reads=tuple(sorted(activity.reads)),
                    made=tuple(sorted(activity.made)),
                    peak_bytes=max(0, peak.most - kept),
                    own_peak_bytes=max(0, peak.own - kept),
                )
                for activity, peak in backward.of.items()
                if activity.reads or activity.made
            ),
            calls=calls,
            lies_in=lies_in,
            extents=extents,
            hands_on=gradients.hands_on,
            gradient_extents=gradients.extents,
        )

    def _lying(self) -> tuple[dict[str, str], dict[str, int]]:
        """Results that are views of something else, and bytes of storages that are not a result's own."""
        lies_in, extents = {}, {}
        first: dict[int, str] = {}
        for name in self.work.writes:
            value = self.tensors[name]
            storage = value.untyped_storage()
            given, role = self.given.get(storage._cdata, ("", ""))
            if role == "read":
                lies_in[name] = given
            elif role:
                extents[name] = 0
            elif storage._cdata in first:
                lies_in[name] = first[storage._cdata]
            else:
                first[storage._cdata] = name
                if storage.nbytes() != value.numel() * value.element_size():
                    extents[name] = storage.nbytes()
        return lies_in, extents

    def _after_call(self, position: int) -> None:
        """Book the call's peak."""
        call, _ = self.work.calls[position]
        reads = self.parameters.intersection(iter_refs((call.args, tuple(call.kwargs.values()))))
        self.calls.append((self.live.peak, bool(reads)))
        for key in self.live.storages:
            self.made_by.setdefault(key, position)
        self.peaks.book(Activity(frozenset(reads)))

    def _backward(self, leaves: Mapping[str, torch.Tensor], taken: dict[str, torch.Tensor]) -> _Gradients:
        """Run a backward in which gradients of parameters go to their buckets and others are ``taken``."""
        names = [n for n in self.work.writes if self.tensors[n].requires_grad]
        if not names or not leaves:
            return _Gradients({}, {})
        for name in self.parameters & leaves.keys():
            bucket = torch.zeros_like(leaves[name])
            self.live.ignore(bucket)
            leaves[name].grad = bucket
            leaves[name].register_post_accumulate_grad_hook(partial(self._arrived, name))
        incoming = _Incoming(self.live, names)
        root = _Given.apply(incoming, *(self.tensors[n] for n in names))
        for name in self.work.writes:
            self.tensors.pop(name, None)
        self.live.restart()
        start = torch.ones((), device=root.device)
        self.live.before = self.peaks.close
        with self.live:
            root.backward(start, inputs=list(leaves.values()))
        self.peaks.close(ended=True)
        return self._shared(taken, incoming.left)

    def _arrived(self, name: str, _: torch.Tensor) -> None:
        self.peaks.arrived(name)

    def _shared(self, taken: Mapping[str, torch.Tensor], incoming: Mapping[int, str]) -> _Gradients:
        """Which gradients of reads lie in one storage, or in that of a result's gradient."""
        hands_on, extents = {}, {}
        first: dict[int, str] = {}
        for name, spec, role in self.work.inputs:
            if role != "read" or not spec.requires_grad:
                continue
            storage = taken[name].untyped_storage() if name in taken else None
            size = storage.nbytes() if storage is not None else 0
            if size != spec.bytes:
                extents[name] = size
            if storage is None:
                continue
            key = storage._cdata
            if key in incoming or key in first:
                hands_on[name] = incoming.get(key) or first[key]
            else:
                first[key] = name
        return _Gradients(hands_on, extents)

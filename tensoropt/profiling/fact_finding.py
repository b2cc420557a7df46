"""Functions that find a workload's facts, such as saved tensors, FLOP and memory peaks, on fake tensors.

Saved-tensor hooks and a dispatch mode that tracks storages observe the run. Tensors on the meta device show
what most kernels save for backward, fake tensors what attention and recurrent layers save on CPUs and GPUs
(:mod:`tensoropt.profiling.cuda_kernels`). Neither shows that some kernels leave results in larger storages,
which :class:`KernelStorages` adds; a test compares every operator with real tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial, reduce
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tensoropt.graph import iter_refs
from tensoropt.ops.kernels import SingleDevice
from tensoropt.ops.registry import reads_of
from tensoropt.profiling import cuda_kernels, workload
from tensoropt.profiling.facts import BackwardRun, CallMemory, CallWork, Facts, SplitFacts, flops_of


def _most(a: Any, b: Any) -> Any:
    return np.maximum(a, b) if isinstance(a, np.ndarray) or isinstance(b, np.ndarray) else max(a, b)


class UnlikeError(Exception):
    """Workloads cannot be run as one: a comparison of their sizes is true for some, false for others."""


def _differ(a: Any, b: Any) -> bool:
    answers = np.unique(np.asarray(a != b))
    if len(answers) > 1:
        raise UnlikeError
    return bool(answers[0])


class LiveTensors(TorchDispatchMode):
    """A dispatch mode that tracks the storages that operators create.

    Args:
        of_kind: the sizes of many workloads that differ only in sizes, to track all of them in one run: for
            each call of :meth:`size`, an array with an element per workload. All numbers below are then such
            arrays.

    Attributes:
        sizes: the recorded sizes in bytes and FLOP counts, in order.
        now, peak: the size of live storages in bytes, and its peak since :meth:`restart`.
        before: a function called before each operator.
        traffic: the bytes that operators read and wrote, without views.
        flops: the FLOP, a multiply-add counted as two.
        storages: the live storages, by address.
    """

    def __init__(self, of_kind: Sequence[Any] | None = None) -> None:
        super().__init__()
        self.now: Any = 0
        self.peak = self.now
        self.before: Callable[[], None] = lambda: None
        self.traffic: Any = 0
        self.flops: Any = 0
        self.sizes: list[int] = []
        self._of_kind = of_kind
        self.storages: dict[int, weakref.ref] = {}

    def size(self, number: int) -> Any:
        """Record a size or FLOP count; return it, or with ``of_kind`` an array with it for all workloads."""
        self.sizes.append(number)
        return number if self._of_kind is None else self._of_kind[len(self.sizes) - 1]

    def bytes(self, tensor: torch.Tensor) -> Any:
        return self.size(tensor.numel() * tensor.element_size())

    def ignore(self, tensor: torch.Tensor) -> None:
        """Do not count a tensor's storage as live, because it was made outside of the workload."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        # When it dies, a new storage, which then has to count, may reuse its address.
        self.storages[key] = weakref.ref(storage, lambda _: self.storages.pop(key, None))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.before()
        result = func(*args, **kwargs)
        if (count := flops_of(func)) is not None:
            # Not in place, here and below: numbers of kinds are arrays, which others hold too.
            self.flops = self.flops + self.size(count(*args, **kwargs, out_val=result))
        written = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and self._track(t)]
        if written:
            # Views read and write nothing; only operators that make a storage count as traffic.
            reads = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            # If a storage is larger than its tensor, the rest is not written.
            fresh = (min(t.untyped_storage().nbytes(), t.numel() * t.element_size()) for t in written)
            self.traffic = self.traffic + sum(map(self.size, fresh)) + sum(map(self.bytes, reads))
        return result

    def _track(self, tensor: torch.Tensor) -> bool:
        """Count a tensor's storage; return whether the storage is new and has elements."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        reference = self.storages.get(key)
        if reference is not None and reference() is not None:
            return False

        size = self.size(storage.nbytes())

        # The storage itself reports when it dies: its tensors may come and go.
        def gone(_: Any) -> None:
            self.storages.pop(key, None)
            self._count(-size)

        self.storages[key] = weakref.ref(storage, gone)
        self._count(size)
        return storage.nbytes() > 0

    def _count(self, size: Any) -> None:
        self.now = self.now + size
        self.peak = _most(self.peak, self.now)

    def reshard(self, x: torch.Tensor, shape: Sequence[int], elements: int) -> torch.Tensor:
        """Return a tensor of ``shape`` as if ``x`` was resharded, and count the buffers that this takes.
        ``elements``: the most elements alive meanwhile, besides ``x``."""
        result = x.new_empty(shape)
        others = _most(0, self.size(elements * x.element_size()) - self.bytes(result))
        self._count(others)
        self._count(-others)
        self.traffic = self.traffic + others + (others > 0) * self.bytes(x)
        return result

    def restart(self) -> None:
        self.peak = self.now


class _Peak(NamedTuple):
    """The peak of live memory during a part of the run, and the live memory at its beginning, in bytes."""

    most: Any
    begin: Any


class _Activity(NamedTuple):
    """A part of forward or backward, identified by the parameters that may be in memory during it.

    Attributes:
        reads: the parameters that the part reads.
        made: the parameters whose gradients were made earlier.
    """

    reads: frozenset[str] = frozenset()
    made: frozenset[str] = frozenset()


class _PeakBytes(NamedTuple):
    of: Mapping[_Activity, _Peak]

    def above(self, kept: Any, *, reading: bool = False) -> Any:
        """Return by how many bytes the highest peak exceeds ``kept``. With ``reading``, only parts of the run
        that read parameters count."""
        peaks = [peak.most for at, peak in self.of.items() if at.reads or not reading]
        return _most(0, reduce(_most, peaks, 0) - kept)


class _PeakTracker:
    """A recorder of memory peaks, one for each part of backward in which the same parameters are read."""

    def __init__(self, live: LiveTensors):
        self.live = live
        self._of: dict[_Activity, _Peak] = {}
        self._node: Any = None
        self._activity = _Activity()
        self._began: Any = 0
        self._arrived: set[str] = set()

    def read(self, name: str) -> None:
        """Record that the running autograd node unpacks a parameter."""
        # What was alive until now belongs to the previous activity: the parameter is gathered from here on.
        self.close()
        self.book(self._activity)
        self._node = torch._C._current_autograd_node()
        self._activity = self._activity._replace(reads=self._activity.reads | {name})
        self._began = self.live.now

    def arrived(self, name: str) -> None:
        """Record that a parameter's gradient was added to its bucket, so that the gradient will be freed."""
        self._arrived.add(name)

    def close(self, *, ended: bool = False) -> None:
        """End the current part of backward if its autograd node has ended or made a gradient. With ``ended``
        (at the end of backward), end the part unconditionally."""
        # Autograd does not report when a node ends: the next operator that runs in another node shows it.
        other = self._node is not None and torch._C._current_autograd_node() is not self._node
        if ended or other or self._arrived:
            self.book(self._activity)
            reads = frozenset() if other or ended else self._activity.reads
            self._activity = _Activity(reads, self._activity.made | self._arrived)
            self._node, self._arrived = None if other else self._node, set()
        if ended:
            self.book(self._activity)

    def book(self, activity: _Activity) -> None:
        """Attribute the memory peak since the last call to a part of forward or backward."""
        now = _Peak(self.live.peak, self._began)
        before = self._of.get(activity, now)
        self._of[activity] = _Peak(*map(_most, before, now))
        self.live.restart()

    def take(self) -> _PeakBytes:
        peaks, self._of = _PeakBytes(self._of), {}
        return peaks


_aten: Any = torch.ops.aten


def _as_read(read: torch.Tensor, *_: Any, **__: Any) -> Sequence[int]:
    # The result is first as large as the input (columns of an image, or the image), and then resized.
    return [read.numel()]


def _reduced(
    input: torch.Tensor, target: torch.Tensor, reduction: int = 1, *_: Any, **__: Any
) -> Sequence[int]:
    # With a reduction, the storage holds all terms of the sum.
    return [torch.broadcast_shapes(input.shape, target.shape).numel() if reduction else 0]


def _weighed(
    input: torch.Tensor, target: torch.Tensor, weight: Any = None, reduction: int = 1
) -> Sequence[int]:
    return _reduced(input, target, reduction)


def _bags(weight: torch.Tensor, indices: torch.Tensor, *_: Any, **__: Any) -> Sequence[int]:
    # The bag of each index, with one extra element for counting.
    return [0, indices.numel() + 1, 0, 0]


_ELEMENTS: dict[Any, Callable[..., Sequence[int]]] = {
    _aten.col2im.default: _as_read,
    _aten.im2col.default: _as_read,
    _aten.mse_loss.default: _reduced,
    _aten.smooth_l1_loss.default: _reduced,
    _aten.soft_margin_loss.default: _reduced,
    _aten.binary_cross_entropy.default: _weighed,
    _aten._embedding_bag.default: _bags,
    _aten._embedding_bag_forward_only.default: _bags,
}
"""Operator -> function of its arguments that returns the fewest elements in the storage of each result."""


_RNN_BATCH, _RNN_STEPS = 8, (32, 64)
"""Sizes from which a recurrent layer's workspace is extrapolated; memory pages do not matter there."""


@cache
def _rnn_kept(
    steps: int,
    batch: int,
    inputs: int,
    weights: tuple[tuple[int, ...], ...],
    dtype: torch.dtype,
    settings: tuple[Any, ...],
) -> int:
    """Return the bytes of workspace that oneDNN's recurrent layer saves, from a run on real tensors, as a
    fake layer's workspace is empty.

    Args:
        weights: the shapes of the weights.
        settings: the call's arguments after the states.
    """
    with unset_fake_temporarily():
        x, state = (
            torch.zeros(*sizes, dtype=dtype) for sizes in ((steps, batch, inputs), (1, batch, weights[1][-1]))
        )
        made = [torch.zeros(shape, dtype=dtype) for shape in weights]
        return int(_aten.mkldnn_rnn_layer(x, *made, state, state, *settings)[3].untyped_storage().nbytes())


def _rnn_workspace(steps: int, batch: int, *layer: Any) -> int:
    """Return the bytes of workspace that oneDNN's recurrent layer saves, extrapolated for large inputs."""
    few, more = _RNN_STEPS
    if steps * batch <= more * _RNN_BATCH:
        return _rnn_kept(steps, batch, *layer)
    least = _rnn_kept(few, _RNN_BATCH, *layer)
    per_step = (_rnn_kept(more, _RNN_BATCH, *layer) - least) / (more - few)
    return round(batch / _RNN_BATCH * (least + (steps - few) * per_step))


def _with_workspace(result: Any, args: Sequence[Any]) -> Any:
    if not torch.is_grad_enabled():
        return result
    x, weights = args[0], tuple(tuple(weight.shape) for weight in args[1:5])
    settings = tuple(tuple(a) if isinstance(a, list) else a for a in args[7:])
    kept = _rnn_workspace(x.shape[0], x.shape[1], x.shape[-1], weights, x.dtype, settings)
    return (*result[:3], result[3].new_empty(kept))


class KernelStorages(TorchDispatchMode):
    """A dispatch mode that gives results on fake tensors the storage sizes of real kernels.

    It has to be entered before the modes that observe storages.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is _aten.mkldnn_rnn_layer.default:
            return _with_workspace(result, args)
        elements = _ELEMENTS.get(func)
        if elements is None:
            return result
        results = [result] if isinstance(result, torch.Tensor) else list(result)
        left = [
            _in_storage(part, count)
            for part, count in zip(results, elements(*args, **(kwargs or {})), strict=True)
        ]
        return left[0] if isinstance(result, torch.Tensor) else tuple(left)


def _in_storage(value: torch.Tensor, elements: int) -> torch.Tensor:
    # A result with no elements at all was not made (the bags of a sum).
    if not 0 < value.numel() < elements:
        return value
    return value.new_empty(elements).as_strided(value.shape, value.stride())


def find_facts(
    work: workload.Workload, training: bool = True, capability: cuda_kernels.Capability | None = None
) -> Facts:
    """Find a workload's facts on fake tensors, with CPU kernels or those of a GPU's compute capability."""
    if capability is None:
        return probe(work, training)[0]
    with cuda_kernels.CudaAttention(capability):
        if not cuda_kernels.has_recurrent(work):
            return probe(work, training, meta=True)[0]
        computed = probe(work, training)[0]
        with cuda_kernels.CudaRecurrent():
            kept = probe(work, training)[0]
    # The stand-in for cuDNN's layers creates storages, and computes nothing.
    return replace(
        kept,
        forward_flops=computed.forward_flops,
        backward_flops=computed.backward_flops,
        traffic_bytes=computed.traffic_bytes,
    )


def probe(
    work: workload.Workload, training: bool, of_kind: Sequence[Any] | None = None, *, meta: bool = False
) -> tuple[Facts, tuple[int, ...]]:
    """Run a workload on fake tensors with CPU kernels; return its facts, and all recorded sizes and FLOP.

    Args:
        of_kind: the recorded sizes of many workloads (:class:`LiveTensors`); the facts then have arrays.
        meta: try the meta device first (faster, lacks some kernels) also with attention or recurrent layers.

    Raises:
        UnlikeError: the workloads of ``of_kind`` have facts of different forms.
    """

    def observe(tensors: dict[str, torch.Tensor]) -> tuple[Facts, tuple[int, ...]]:
        run = _Probe(work, tensors, training, of_kind)
        return run.observe(), tuple(run.live.sizes)

    meta = meta or not (cuda_kernels.has_attention(work) or cuda_kernels.has_recurrent(work))
    return workload.on_fake_tensors(work, observe, KernelStorages(), meta=meta)


_SPLIT: dict[tuple[str, cuda_kernels.Capability | None], SplitFacts] = {}
"""A cache of the results of :func:`find_split_facts`, because layers repeat."""


def find_split_facts(
    work: workload.Workload, capability: cuda_kernels.Capability | None = None
) -> SplitFacts:
    """Find the memory of a workload that makes gradients of inputs first and of parameters later.

    Fake tensors are used, with CPU kernels or those of a GPU's compute capability.
    """
    key = work.key, capability
    if key not in _SPLIT:
        kernels = nullcontext() if capability is None else cuda_kernels.CudaAttention(capability)
        with kernels:
            last, facts = (
                workload.on_fake_tensors(work, partial(_split_facts, work, last=last), KernelStorages())
                for last in (True, False)
            )
            _SPLIT[key] = facts._replace(released_bytes=last.released_bytes)
    return _SPLIT[key]


def _split_facts(work: workload.Workload, tensors: dict[str, torch.Tensor], *, last: bool) -> SplitFacts:
    return _Probe(work, tensors, training=True).observe_split(last=last)


class _Given(torch.autograd.Function):
    """The root of a backward pass over several results. It creates their gradients when backward begins, so
    that these do not count as live memory in forward."""

    @staticmethod
    def forward(ctx: Any, *results: torch.Tensor) -> torch.Tensor:
        # Shapes, not tensors: a tensor that is kept for backward would be alive all the time.
        ctx.like = [
            workload.TensorSpec(
                tuple(r.shape), str(r.dtype).removeprefix("torch."), False, order=workload.order_of(r)
            )
            for r in results
        ]
        ctx.device = results[0].device
        return torch.zeros((), device=results[0].device)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        # Created when backward begins, not before: they count as alive from then on.
        return tuple(workload.random_tensor(spec, ctx.device) for spec in ctx.like)


class _Taken(torch.autograd.Function):
    """An identity whose backward stores the gradient tensor that it receives. Autograd would store a copy in
    ``grad`` if the gradient is a view."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, name: str, taken: dict[str, torch.Tensor]) -> torch.Tensor:
        ctx.name, ctx.taken = name, taken
        ctx.set_materialize_grads(False)  # a read without a gradient has none, not zeros
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:  # type: ignore[override]
        if grad is not None:
            ctx.taken[ctx.name] = grad
        return None, None, None


class _Probe:
    """A run of one workload that records what autograd saves, and the live memory.

    Attributes:
        given: storage of an input -> the input's name and role.
        saved: the storages made inside the workload that autograd saves.
        touched: input -> number of saved tensors in its storage.
        made_by: storage -> the index of the call that made it, and a weak reference.
        calls: for each call, the memory peak in bytes, and whether the call reads a parameter.
    """

    def __init__(
        self,
        work: workload.Workload,
        tensors: dict[str, torch.Tensor],
        training: bool,
        of_kind: Sequence[Any] | None = None,
    ):
        self.live = LiveTensors(of_kind)
        self.work = work
        self.tensors = tensors
        self.training = training
        # Storages are identified by the address of their C++ object, because Python creates new wrappers each
        # time.
        self.given = {tensors[n].untyped_storage()._cdata: (n, role) for n, _, role in work.inputs}
        self.parameters = {n for n, _, role in work.inputs if role == "parameter"}
        self.saved: dict[int, torch.UntypedStorage] = {}
        self.touched: dict[str, int] = {}
        self.made_by: dict[int, tuple[int, weakref.ref]] = {}
        self.calls: list[tuple[Any, bool]] = []
        self.work_of_calls: list[CallWork] = []
        self.sizes = {name: self.live.size(spec.bytes) for name, spec, _ in work.inputs}
        self.peaks = _PeakTracker(self.live)

    def _pack(self, value: torch.Tensor) -> Any:
        """Record a tensor that autograd saves; a parameter is saved together with its name."""
        storage = value.untyped_storage()
        if storage._cdata not in self.given:
            self.saved[storage._cdata] = storage
            return value
        name, role = self.given[storage._cdata]
        self.touched[name] = self.touched.get(name, 0) + 1
        return (value, name) if role == "parameter" else value

    def _unpack(self, packed: Any) -> torch.Tensor:
        """Return a saved tensor, and record the read if it is a parameter's."""
        if isinstance(packed, torch.Tensor):
            return packed
        value, name = packed
        self.peaks.read(name)
        return value

    def observe(self) -> Facts:
        work, live = self.work, self.live
        leaves = {n: self.tensors[n] for n, spec, _ in work.inputs if spec.requires_grad}
        taken: dict[str, torch.Tensor] = {}
        self._forward(taken)
        kept = sum(live.size(storage.nbytes()) for storage in self.saved.values())
        calls = self._memory_of_calls()
        storages = {n: self.tensors[n].untyped_storage()._cdata for n in work.writes}
        writes_kept = tuple(n for n in work.writes if storages[n] in self.saved)
        roles = {n: role for n, _, role in work.inputs}
        lies_in, extents, lies_in_free = self._lying()
        forward, forward_flops, traffic = self.peaks.take(), live.flops, live.traffic
        # From here on only autograd holds the saved tensors, so backward can release them.
        self.saved.clear()
        gradient_extents, same_gradients = self._backward(leaves, taken) if self.training else ({}, ())
        backward = self.peaks.take()
        return Facts(
            kept_bytes=kept,
            reads_kept=tuple(n for n in self.touched if roles[n] == "read"),
            writes_kept=writes_kept,
            parameters_kept={n: c for n, c in self.touched.items() if roles[n] == "parameter"},
            forward_flops=1.0 * forward_flops,
            backward_flops=1.0 * (live.flops - forward_flops),
            traffic_bytes=traffic,
            forward_peak_bytes=forward.above(kept),
            backward_peak_bytes=backward.above(kept),
            forward_parameters_peak_bytes=forward.above(kept, reading=True),
            backward_runs=_runs(backward, kept),
            calls=calls,
            work_of_calls=tuple(self.work_of_calls),
            lies_in=lies_in,
            extents=extents,
            gradient_extents=gradient_extents,
            same_gradients=same_gradients,
            free_kept=tuple(n for n in self.touched if roles[n] == "free"),
            lies_in_free=lies_in_free,
        )

    def observe_split(self, *, last: bool) -> SplitFacts:
        """Run forward and a split backward; with ``last``, no later workload keeps autograd's graph alive."""
        # Imported only here, as importing PyTorch's distributed part takes a while.
        from torch.distributed.pipelining._backward import stage_backward_input

        learning = [(self.tensors[n], role) for n, spec, role in self.work.inputs if spec.requires_grad]
        reads, parameters = ([t for t, role in learning if role == of] for of in ("read", "parameter"))
        taken: dict[str, torch.Tensor] = {}
        # Without a saved tensor's node, which would keep itself alive.
        self._forward(taken, lambda value: self._pack(value.detach()))
        kept, live = sum(storage.nbytes() for storage in self.saved.values()), self.live
        self.saved.clear()
        names = [n for n in self.work.writes if self.tensors[n].requires_grad]
        if not names or not reads:
            return SplitFacts()
        later = [] if last else [self.tensors[n].grad_fn for n in names]
        root = _Given.apply(*(self.tensors[n] for n in names))
        for name in self.work.writes:
            self.tensors.pop(name, None)
        self.peaks.take()
        live.restart()
        start = [torch.ones((), device=root.device)]
        with live:
            _, groups = stage_backward_input([root], start, reads, iter(cast("list[Any]", parameters)))
        self.peaks.close(ended=True)
        peaks = self.peaks.take()
        taken.clear()
        del root, start
        waiting = sum(_gradients_of(groups).values())
        facts = SplitFacts(
            peaks.above(kept),
            waiting,
            released_bytes=max(kept + waiting - live.now, 0) if last else 0,
        )
        if not groups or last:
            return facts
        live.restart()
        with live:
            add_weight_gradients(groups)
        self.peaks.close(ended=True)
        facts = facts._replace(weights_bytes=self.peaks.take().above(kept + waiting))
        for parameter in parameters:
            parameter.grad = None
        del later  # held until here
        return facts

    def _forward(
        self, taken: dict[str, torch.Tensor], pack: Callable[[torch.Tensor], Any] | None = None
    ) -> None:
        """Run forward; backward will put inputs' gradients in ``taken``. ``pack`` records saved tensors."""
        for tensor in self.tensors.values():
            self.live.ignore(tensor)  # tensors passed to a group are counted where they were made
        if self.training:
            for name, spec, role in self.work.inputs:
                if role == "read" and spec.requires_grad:
                    self.tensors[name] = _Taken.apply(self.tensors[name], name, taken)
        hooks = torch.autograd.graph.saved_tensors_hooks(pack or self._pack, self._unpack)
        with torch.set_grad_enabled(self.training), self.live, hooks:
            workload.run_workload(
                self.work, self.tensors, SingleDevice(), buffers=self.live.reshard, after=self._after_call
            )

    def _memory_of_calls(self) -> tuple[CallMemory, ...]:
        memory = []
        for position, (peak, reads) in enumerate(self.calls):
            kept = (
                self.live.size(s.nbytes()) for key, s in self.saved.items() if self._made_at(key) <= position
            )
            memory.append(CallMemory(sum(kept), peak, reads))
        return tuple(memory)

    def _made_at(self, storage: int) -> int:
        return self.made_by[storage][0] if storage in self.made_by else 0

    def _lying(self) -> tuple[dict[str, str], dict[str, Any], dict[str, str]]:
        """Return the fields ``lies_in``, ``extents`` and ``lies_in_free`` of :class:`Facts`."""
        lies_in, extents, in_free = {}, {}, {}
        first: dict[int, str] = {}
        for name in self.work.writes:
            value = self.tensors[name]
            storage = value.untyped_storage()
            given, role = self.given.get(storage._cdata, ("", ""))
            if role == "read":
                lies_in[name] = given
            elif role:
                extents[name] = 0  # a parameter's or a constant's storage exists anyway
                if role == "free":
                    in_free[name] = given
            elif storage._cdata in first:
                lies_in[name] = first[storage._cdata]
            else:
                first[storage._cdata] = name
                size = self.live.size(storage.nbytes())
                if _differ(size, self.live.bytes(value)):
                    extents[name] = size
        return lies_in, extents, in_free

    def _after_call(self, position: int) -> None:
        call, _ = self.work.calls[position]
        reads = self.parameters.intersection(iter_refs((call.args, tuple(call.kwargs.values()))))
        self.calls.append((self.live.peak, bool(reads)))
        self._note_work(position)
        for key, alive in self.live.storages.items():
            # A storage may reuse the address of one that is gone; it is a different one if its reference
            # differs.
            if key not in self.made_by or self.made_by[key][1] is not alive:
                self.made_by[key] = position, alive
        self.peaks.book(_Activity(frozenset(reads)))

    def _note_work(self, position: int) -> None:
        call, outputs = self.work.calls[position]
        # Tensors released after their last use are gone by now, but their sizes are known.
        self.sizes |= {n: self.live.bytes(t) for n, t in self.tensors.items()}
        operands = iter_refs((call.args, tuple(call.kwargs.values())))
        read, written = (sum(self.sizes.get(name, 0) for name in names) for names in (operands, outputs))
        outer = reads_of(call.function) * read + written
        flops = self.live.flops - sum(done.forward_flops for done in self.work_of_calls)
        traffic = self.live.traffic - sum(done.traffic_bytes for done in self.work_of_calls)
        self.work_of_calls.append(CallWork(flops, traffic, outer if np.any(traffic) else 0))

    def _backward(
        self, leaves: Mapping[str, torch.Tensor], taken: dict[str, torch.Tensor]
    ) -> tuple[dict[str, Any], tuple[tuple[str, ...], ...]]:
        """Run backward, with parameters' gradients added to buckets as in a step.

        Returns:
            (:attr:`Facts.gradient_extents`, :attr:`Facts.same_gradients`).
        """
        names = [n for n in self.work.writes if self.tensors[n].requires_grad]
        if not names or not leaves:
            return {}, ()
        for name in self.parameters & leaves.keys():
            # As in the executor: a gradient is added to its bucket, which is counted with the parameter.
            bucket = torch.zeros_like(leaves[name])
            self.live.ignore(bucket)
            leaves[name].grad = bucket
            leaves[name].register_post_accumulate_grad_hook(lambda _, name=name: self.peaks.arrived(name))
        root = _Given.apply(*(self.tensors[n] for n in names))
        # In a step only the readers hold results until backward, and they count them.
        for name in self.work.writes:
            self.tensors.pop(name, None)
        self.live.restart()
        start = torch.ones((), device=root.device)
        self.live.before = self.peaks.close
        with self.live:
            root.backward(start, inputs=list(leaves.values()))
        self.peaks.close(ended=True)
        extents: dict[str, Any] = {}
        lies: dict[int, list[str]] = {}
        for name, spec, role in self.work.inputs:
            if role == "read" and spec.requires_grad:
                size = self.live.size(taken[name].untyped_storage().nbytes() if name in taken else 0)
                if _differ(size, self.live.size(spec.bytes)):
                    extents[name] = size
                elif name in taken:
                    lies.setdefault(taken[name].untyped_storage()._cdata, []).append(name)
        return extents, tuple(tuple(names) for names in lies.values() if len(names) > 1)


def add_weight_gradients(groups: list[dict[str, Any]]) -> None:
    """Make the parameters' gradients that a split backward has left for later, and add them to ``grad``."""
    # Imported only here, as importing PyTorch's distributed part takes a while.
    from torch.distributed.pipelining._backward import stage_backward_weight

    while groups:
        group = groups.pop(0)
        stage_backward_weight(iter([node.variable for node in group["params"]]), [group])


def _gradients_of(groups: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """Return storage -> size in bytes of the gradients that wait for the second part of a split backward."""
    return {
        gradient.untyped_storage()._cdata: gradient.untyped_storage().nbytes()
        for group in groups
        for of_node in group.get("grads", ())
        for gradient in of_node or ()
        if gradient is not None
    }


def _runs(backward: _PeakBytes, kept: int) -> tuple[BackwardRun, ...]:
    if not any(activity.reads or activity.made for activity in backward.of):
        return ()
    return tuple(
        BackwardRun(
            reads=tuple(sorted(activity.reads)),
            made=tuple(sorted(activity.made)),
            peak_bytes=peak.most - kept,
            begin_bytes=peak.begin - kept,
        )
        for activity, peak in backward.of.items()
    )

"""What a workload keeps for backward, how much it computes, how high it peaks: found by running it with
``torch.autograd.graph.saved_tensors_hooks``.

Kernels of one device keep other things than those of another (attention its random state, a GPU's batch norm
a reserve, dropout a mask of bytes or of floats). On fake tensors it is CPU kernels that are asked: PyTorch
ends the process at a fake CUDA tensor with autograd where it was built without CUDA. A GPU that is here is
asked itself, with real tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count, shape_wrapper

from tensoropt.costs.stopwatch import end_if_lost, stopwatch_here
from tensoropt.costs.workload import TensorSpec, Workload, differentiable, order_of, random_tensor, run
from tensoropt.graph import iter_refs
from tensoropt.sharding.kernels import SingleDevice


def _attention_flops(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(q, k, v)


def _attention_backward_flops(grad: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return sdpa_backward_flop_count(grad, q, k, v)


def _recurrent_flops(x: Any, w: Any, h: Any, *_: Any, **__: Any) -> int:
    """One layer and direction: every step multiplies its input and its state with all gates' weights."""
    return 2 * int(x[0]) * int(x[1]) * (int(w[0]) * int(w[1]) + int(h[0]) * int(h[1]))


def _recurrent_backward_flops(x: Any, w: Any, h: Any, *_: Any, **__: Any) -> int:
    return 2 * _recurrent_flops(x, w, h)


_FLOPS = {
    **flop_registry,
    torch.ops.aten.mkldnn_rnn_layer: shape_wrapper(_recurrent_flops),
    torch.ops.aten.mkldnn_rnn_layer_backward: shape_wrapper(_recurrent_backward_flops),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: shape_wrapper(_attention_flops),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: shape_wrapper(
        _attention_backward_flops
    ),
}
"""PyTorch's counts, and those it lacks: it knows GPUs' kernels of attention and LSTM layers only."""


def _grouped_flops(x: Any, w: Any, *_: Any, **__: Any) -> int:
    return 2 * int(x[0]) * int(x[1]) * int(w[-1])


def _grouped_backward_flops(x: Any, w: Any, *_: Any, **__: Any) -> int:
    return 2 * _grouped_flops(x, w)


_EXPERTS = {
    "aten::_grouped_mm": shape_wrapper(_grouped_flops),
    "transformers::grouped_mm_fallback": shape_wrapper(_grouped_flops),
    "transformers::grouped_mm_fallback_backward": shape_wrapper(_grouped_backward_flops),
}
"""Products of mixtures of experts, by name: those of ``transformers`` exist where that is imported."""


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
        forward_parameters_peak_bytes, backward_parameters_peak_bytes: the same while a call that reads a
            parameter runs; gathered parameters are there only then.
        handed_peak_bytes, handed_parameters_peak_bytes: of backward where the incoming gradients are
            somebody else's too, who counts them.
        calls: per call of the forward (what it and those before it made of ``kept_bytes``; the most alive
            while it runs, all that was made inside included; whether it reads a parameter).
        lies_in: result that is a view -> the read, or the earlier result, in whose storage it lies.
        extents: result -> bytes of its storage where these are not its own: the larger one of which it is
            a view, 0 for a view of a parameter, an input or a constant.
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
    calls: tuple[tuple[int, int, bool], ...] = ()
    lies_in: Mapping[str, str] = field(default_factory=dict)
    extents: Mapping[str, int] = field(default_factory=dict)

    def to_record(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Facts:
        data = dict(record)
        data["reads_kept"], data["writes_kept"] = tuple(data["reads_kept"]), tuple(data["writes_kept"])
        data["calls"] = tuple((kept, peak, bool(reads)) for kept, peak, reads in data.get("calls", ()))
        return cls(**data)


class _Alive(TorchDispatchMode):
    """Bytes of the storages made while it is active that are alive, and their peak; FLOP and traffic.

    ``lent``: what is made now is somebody else's too: alive, but not in ``own``, nor in its peak.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.own = self.own_peak = 0
        self.lent = False
        self.traffic = self.flops = 0
        self._seen: dict[int, weakref.ref] = {}

    @property
    def alive(self) -> Iterable[int]:
        """The storages it knows of."""
        return self._seen

    def ignore(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._seen[key] = weakref.ref(storage, lambda _: self._seen.pop(key, None))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if (count := _FLOPS.get(func._overloadpacket) or _EXPERTS.get(func._schema.name)) is not None:
            self.flops += count(*args, **kwargs, out_val=result)
        fresh = 0
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                fresh += self._track(tensor)
        if fresh:
            reads = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            self.traffic += fresh + sum(t.numel() * t.element_size() for t in reads)
        return result

    def _track(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        known = self._seen.get(key)
        if known is not None and known() is not None:
            return 0

        own = 0 if self.lent else size

        def gone(_: Any) -> None:
            self._seen.pop(key, None)
            self._count(-size, -own)

        self._seen[key] = weakref.ref(storage, gone)
        self._count(size, own)
        return size

    def _count(self, size: int, own: int) -> None:
        self.now, self.own = self.now + size, self.own + own
        self.peak, self.own_peak = max(self.peak, self.now), max(self.own_peak, self.own)

    def restart(self) -> None:
        """Look for the peaks from now on."""
        self.peak, self.own_peak = self.now, self.own


def find_facts(work: Workload, training: bool = True) -> Facts:
    """Run a workload on fake tensors and note what it keeps with CPU kernels."""
    with FakeTensorMode():
        tensors = {name: random_tensor(spec) for name, spec, _ in work.inputs}
        return _Probe(work, tensors, training).run()


def find_facts_here(rank: int, world_size: int, work: Workload, training: bool) -> dict[str, Any]:
    """Run a workload on this rank's device and note what it keeps with that device's kernels (runs in the
    pool); the record of its :class:`Facts`, or an ``error`` where it cannot run."""
    watch = stopwatch_here()
    try:
        with watch.device:
            tensors = {name: random_tensor(spec) for name, spec, _ in work.inputs}
            return _Probe(work, tensors, training).run().to_record()
    except Exception as error:
        found = {"error": str(error).splitlines()[0] if str(error) else type(error).__name__}
    watch.release()
    end_if_lost(watch, f"{work.describe()}: {found['error']}")
    return found


class _Given(torch.autograd.Function):
    """Joins results under one root whose backward makes their gradients, and lets go of them."""

    @staticmethod
    def forward(ctx: Any, alive: _Alive, *results: torch.Tensor) -> torch.Tensor:
        ctx.alive = alive
        ctx.like = [
            TensorSpec(tuple(r.shape), str(r.dtype).removeprefix("torch."), False, order=order_of(r))
            for r in results
        ]
        ctx.device = results[0].device
        return torch.zeros((), device=results[0].device)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        ctx.alive.lent = True
        made = [random_tensor(spec, ctx.device) for spec in ctx.like]
        ctx.alive.lent = False
        return None, *made


class _Probe:
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
        self.alive = _Alive()
        self.peaks = _Peaks(self.alive)

    def _pack(self, value: torch.Tensor) -> torch.Tensor:
        storage = value.untyped_storage()
        if storage._cdata in self.given:
            name, _ = self.given[storage._cdata]
            self.touched[name] = self.touched.get(name, 0) + 1
        else:
            self.saved[storage._cdata] = storage
        return value

    def run(self) -> Facts:
        work, alive = self.work, self.alive
        for tensor in self.tensors.values():
            alive.ignore(tensor)
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda v: v)
        with torch.set_grad_enabled(self.training), alive, hooks:
            run(work, self.tensors, SingleDevice(), buffers=True, after=self._after_call)
        kept = sum(storage.nbytes() for storage in self.saved.values())
        by_call = [
            sum(
                storage.nbytes()
                for key, storage in self.saved.items()
                if self.made_by.get(key, 0) <= position
            )
            for position in range(len(self.calls))
        ]
        calls = tuple((size, *call) for size, call in zip(by_call, self.calls, strict=True))
        storages = {n: self.tensors[n].untyped_storage()._cdata for n in work.writes}
        writes_kept = tuple(n for n in work.writes if storages[n] in self.saved)
        roles = {n: role for n, _, role in work.inputs}
        lies_in, extents = self._lying()
        (forward, _), forward_flops, traffic = self.peaks.take(), alive.flops, alive.traffic
        self.saved.clear()
        if self.training:
            self._backward()
        backward, handed = self.peaks.take()
        return Facts(
            kept_bytes=kept,
            reads_kept=tuple(n for n in self.touched if roles[n] == "read"),
            writes_kept=writes_kept,
            parameters_kept={n: c for n, c in self.touched.items() if roles[n] == "parameter"},
            forward_flops=float(forward_flops),
            backward_flops=float(alive.flops - forward_flops),
            traffic_bytes=traffic,
            forward_peak_bytes=max(0, max(forward) - kept),
            backward_peak_bytes=max(0, max(backward) - kept),
            forward_parameters_peak_bytes=max(0, forward[True] - kept),
            backward_parameters_peak_bytes=max(0, backward[True] - kept),
            handed_peak_bytes=max(0, max(handed) - kept),
            handed_parameters_peak_bytes=max(0, handed[True] - kept),
            calls=calls,
            lies_in=lies_in,
            extents=extents,
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
        """Book the call's peak, and have its backward book its own where it reads a parameter."""
        call, outputs = self.work.calls[position]
        reads = not self.parameters.isdisjoint(iter_refs((call.args, tuple(call.kwargs.values()))))
        self.calls.append((self.alive.peak, reads))
        for key in self.alive.alive:
            self.made_by.setdefault(key, position)
        self.peaks.book(reads)
        results = [self.tensors[n] for n in outputs if n in self.tensors]
        if reads and results and results[0].grad_fn is not None:
            for node in _nodes_of_call(results[0].grad_fn, len(self.work.calls[position][0].args) + 4):
                node.register_prehook(lambda *_: self.peaks.book(False))
                node.register_hook(lambda *_: self.peaks.book(True))

    def _backward(self) -> None:
        """Run a backward in which gradients of parameters go to their buckets."""
        results, leaves = differentiable(self.work, self.tensors)
        if not results or not leaves:
            return
        for name, spec, role in self.work.inputs:
            if role == "parameter" and spec.requires_grad:
                bucket = torch.zeros_like(self.tensors[name])
                self.alive.ignore(bucket)
                self.tensors[name].grad = bucket
        root = _Given.apply(self.alive, *results)
        del results
        for name in self.work.writes:
            self.tensors.pop(name, None)
        self.alive.restart()
        start = torch.ones((), device=root.device)
        with self.alive:
            root.backward(start, inputs=leaves)
        self.peaks.book(False)


class _Peaks:
    """The peaks of what was alive, and of what was nobody else's, apart for calls that read parameters."""

    def __init__(self, alive: _Alive):
        self.alive = alive
        self._most, self._own = [0, 0], [0, 0]

    def book(self, with_parameters: bool) -> None:
        """What has peaked since the last booking."""
        self._most[with_parameters] = max(self._most[with_parameters], self.alive.peak)
        self._own[with_parameters] = max(self._own[with_parameters], self.alive.own_peak)
        self.alive.restart()

    def take(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """((without, with parameters) of all, of its own), and begin anew."""
        found = (self._most[0], self._most[1]), (self._own[0], self._own[1])
        self._most, self._own = [0, 0], [0, 0]
        return found


def _nodes_of_call(root: Any, most: int) -> list[Any]:
    """Autograd nodes of one call, found backwards from its result down to what it was given.

    A call of the model becomes few nodes (a linear layer: view, product, transposition); those of its
    operands that are no leaves are not told apart from them, so the walk ends at the first that works.
    """
    found: list[Any] = []
    node = root
    while node is not None and len(found) < most:
        found.append(node)
        if not node.name().startswith(("View", "UnsafeView", "Unsqueeze", "Squeeze", "Transpose", "Alias")):
            break
        node = next((n for n, _ in node.next_functions if n is not None), None)
    return found

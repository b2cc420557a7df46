"""Recorders of a real step: the collectives that it issues, and the memory that its tensors need.

Both recorders are PyTorch dispatch modes that know neither strategies nor costs. Collectives on host tensors
run on copies, as gloo's threads release their tensors some time after completion.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tensoropt.engine.runtime import RING_TAG
from tensoropt.ops.calls import BY_VALUES, RING_SEND
from tensoropt.simulate.collectives import Collective
from tensoropt.verify.agreement import JointCall

_NOT_COPIED = frozenset({"send", "recv_", "wait_tensor"})
"""Operators that do not run on copies: no thread sends messages, and waiting for one here would deadlock."""


def _is_collective(func: Any, args: Any) -> bool:
    """Return whether an operator call is a collective on host tensors."""
    if func.namespace not in ("c10d", "_c10d_functional") or func._schema.name.split("::")[1] in _NOT_COPIED:
        return False
    tensors = _tensors(args)
    # Plans issue no functional collective that writes in place.
    return (
        bool(tensors)
        and not func._schema.is_mutable
        and all(t.device.type == "cpu" and not isinstance(t, FakeTensor) for t in tensors)
    )


def _run_on_copies(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a collective on copies of its tensors, wait for it, and copy the results back."""
    copies, named = tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
    result = func(*copies, **named)
    if func.namespace == "_c10d_functional":
        return tree_map_only(torch.Tensor, _arrived, result)
    written, work = result if isinstance(result, tuple) else (None, result)
    dist.Work.unbox(work).wait()
    # The first argument is what collectives write, whatever their kind.
    for own, copy in zip(_tensors(args[0]), _tensors(copies[0]), strict=True):
        own.copy_(copy)
    # Not gloo's own work: waiting for it again would copy its result into the copies again.
    done = _finished_work()
    return done if written is None else (args[0], done)


def _finished_work() -> torch.ScriptObject:
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    future.set_result([])
    return _create_work_from_future(future).boxed()


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _arrived(value: torch.Tensor) -> torch.Tensor:
    arrived: torch.Tensor = torch.ops._c10d_functional.wait_tensor(value)
    return arrived.clone()


# operator -> (kind, position of the argument that is counted)
_COUNTED = {
    "allreduce_": ("all_reduce", 0),
    "_allgather_base_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "alltoall_base_": ("all_to_all", 1),
    "broadcast_": ("broadcast", 0),
    "send": ("send", 0),
    "recv_": ("recv", 0),
}
_FUNCTIONAL = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}
_SILENT = frozenset({"barrier", "monitored_barrier_", "wait_tensor"})


def _nbytes(value: Any) -> int:
    return sum(t.numel() * t.element_size() for t in _tensors(value))


class CollectiveRecorder(TorchDispatchMode):
    """Records every collective issued while active, in forward and backward.

    Args:
        mesh: the number of micro-batches, then the sizes of the mesh axes, row-major over ranks.

    Attributes:
        issued: collectives and sent messages, in order.
        calls: collectives and all messages, sent or received, with the ranks that take part.
    """

    def __init__(self, mesh: Sequence[int]):
        super().__init__()
        self.mesh = tuple(mesh)
        self.issued: list[Collective] = []
        self.calls: list[JointCall] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # Both of PyTorch's forms: in-place collectives, and the functional ones that DTensor issues.
        if func.namespace in ("c10d", "_c10d_functional"):
            self._note(func, args, result)
        return result

    def _note(self, func: Any, args: Sequence[Any], result: Any) -> None:
        name = func._schema.name.split("::")[1]
        if name in _SILENT:
            return
        if func.namespace == "c10d":
            kind, position = _COUNTED.get(name, (name, 0))
            groups = [_ranks(a) for a in args if isinstance(a, torch.ScriptObject)]
            # The group is the script object among the arguments that is one; its place differs by operator.
            ranks = next((g for g in groups if g is not None), ())
            if kind in ("send", "recv"):
                self._message(kind, ranks, int(args[2]), int(args[3]), _nbytes(args[0]))
                return
            if name == "alltoall_base_" and any(args[3:5]):
                kind = BY_VALUES
            self._collective(kind, ranks, _nbytes(args[position]))
            return
        kind = _FUNCTIONAL.get(name, name)
        # The size of the gathered output or of the scattered input, as `Step.payload` counts it.
        counted = result if kind == "all_gather" else args[0]
        group = dist.distributed_c10d._resolve_process_group(args[-1])  # type: ignore[attr-defined]
        self._collective(kind, tuple(dist.get_process_group_ranks(group)), _nbytes(counted))

    def _collective(self, kind: str, ranks: Sequence[int], size: int) -> None:
        self.issued.append(Collective(kind, self.axes(ranks), size))
        self.calls.append(JointCall.of(kind, ranks, size))

    def _message(self, kind: str, ranks: Sequence[int], peer: int, tag: int, size: int) -> None:
        # `peer` is a position in the group, not a rank.
        own, other = dist.get_rank(), ranks[peer]
        ends = (own, other) if kind == "send" else (other, own)
        around = tag == RING_TAG
        self.calls.append(JointCall.of(RING_SEND if around else "send", ends, size))
        if kind == "send":
            sent = Collective(RING_SEND, self.axes(ranks), size) if around else Collective("send", ends, size)
            self.issued.append(sent)

    def axes(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return the mesh axes, numbered from 1, along which ``ranks`` differ."""
        sizes = self.mesh[1:]
        places = [np.unravel_index(rank % prod(sizes), sizes) for rank in ranks]
        return tuple(a for a, own in enumerate(zip(*places, strict=True), start=1) if len(set(own)) > 1)


def _ranks(argument: torch.ScriptObject) -> tuple[int, ...] | None:
    try:
        return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(argument)))
    except RuntimeError:  # a ReduceOp is a script object too
        return None


def summarise(collectives: Iterable[Collective]) -> list[dict[str, Any]]:
    """Return one row per distinct collective, sorted: kind, mesh axes, size in bytes, and count."""
    return rows_of(Counter(collectives))


def rows_of(counts: Mapping[Collective, int]) -> list[dict[str, Any]]:
    """Return one row per distinct collective, sorted, given the count of each."""
    return [{**c._asdict(), "axes": list(c.axes), "count": n} for c, n in sorted(counts.items())]


def all_sent(ranks: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return the whole job's rows: the messages that each rank sends, and the collectives of rank 0."""
    # A collective is issued by all that take part: counting it on rank 0 counts it once.
    sent = (row for rank, rows in enumerate(ranks) for row in rows if row["kind"] == "send" or rank == 0)
    return rows_of(counted(sent))


def counted(rows: Iterable[Mapping[str, Any]]) -> Counter[Collective]:
    """Return the number of each distinct collective in rows; the inverse of :func:`rows_of`."""
    counts: Counter[Collective] = Counter()
    for row in rows:
        counts[Collective(row["kind"], tuple(row["axes"]), row["bytes"])] += row["count"]
    return counts


def shown_axes(row: Mapping[str, Any]) -> list[int]:
    """Return a row's mesh axes numbered from 0; for a message its sender and receiver."""
    return list(row["axes"]) if row["kind"] == "send" else [axis - 1 for axis in row["axes"]]


def without_values(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return rows with size 0 for collectives whose size depends on values of tensors (expert routing)."""
    return [{**row, "bytes": 0 if row["kind"] == BY_VALUES else row["bytes"]} for row in rows]


def compare_collectives(
    predicted: Iterable[Mapping[str, Any]], issued: Iterable[Mapping[str, Any]]
) -> list[str]:
    """Return a line for each collective whose predicted and issued counts differ."""
    left, right = counted(predicted), counted(issued)
    return [
        f"{c.kind} of {c.bytes} bytes {_between(c)}: predicted {left[c]}, issued {right[c]}"
        for c in sorted(left.keys() | right.keys())
        if left[c] != right[c]
    ]


_Kind = tuple[str, tuple[int, ...]]
"""The kind of a collective, and its mesh axes."""


def compare_smaller(predicted: Iterable[Mapping[str, Any]], issued: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a line for each (kind, mesh axes) with another count, or more bytes in total, than predicted."""

    def totals(rows: Iterable[Mapping[str, Any]]) -> tuple[Counter[_Kind], Counter[_Kind]]:
        counts, sizes = Counter[_Kind](), Counter[_Kind]()
        for row in rows:
            key = row["kind"], tuple(row["axes"])
            counts[key] += row["count"]
            sizes[key] += row["count"] * row["bytes"]
        return counts, sizes

    (wanted, most), (found, sent) = totals(predicted), totals(issued)
    return [
        f"{kind} {_between(Collective(kind, axes, 0))}: predicted {wanted[kind, axes]} of "
        f"{most[kind, axes]} bytes, issued {found[kind, axes]} of {sent[kind, axes]}"
        for kind, axes in sorted(wanted.keys() | found.keys())
        if wanted[kind, axes] != found[kind, axes] or sent[kind, axes] > most[kind, axes]
    ]


def _between(collective: Collective) -> str:
    if collective.kind == "send":
        return f"from device {collective.axes[0]} to {collective.axes[1]}"
    return f"over axes {list(collective.axes)}"


class MemoryTracker(TorchDispatchMode):
    """Counts the size in bytes of all live tensors, by storage, and its peak.

    Storages made while active are counted, and those given to :meth:`add`. Storages given to :meth:`exclude`
    (inputs, constants, buffers) are not. A storage that replaces an excluded one counts with the difference
    of their sizes. Memory inside kernels and process groups is invisible.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now_bytes = 0
        self.peak_bytes = 0
        self.excluded_bytes = 0
        self._known: dict[int, weakref.ref] = {}

    def add(self, values: Iterable[torch.Tensor]) -> None:
        for value in values:
            self._see(value, counted=True)

    def exclude(self, values: Iterable[torch.Tensor]) -> None:
        for value in values:
            self.excluded_bytes += self._see(value, counted=False)

    def _see(self, value: torch.Tensor, *, counted: bool) -> int:
        storage = value.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        # An address is reused once its storage is gone, so that the key alone proves nothing.
        if (reference := self._known.get(key)) is not None and reference() is not None:
            return 0

        def gone(_: Any) -> None:
            self._known.pop(key, None)
            self.now_bytes -= size

        # The storage, not the tensor: views come and go while the memory stays.
        self._known[key] = weakref.ref(storage, gone)
        if counted:
            self.now_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.now_bytes)
        return size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        on_copies = _is_collective(func, args)
        result = _run_on_copies(func, args, kwargs) if on_copies else func(*args, **kwargs)
        if func is torch.ops._c10d_functional.wait_tensor.default:
            # Its result shares the operand's storage; PyTorch's kernel for fake tensors makes a new one.
            return args[0]
        for value in _tensors(result):
            if not self._is_foreign(func, value):
                self._see(value, counted=True)
        return result

    def _is_foreign(self, func: Any, value: torch.Tensor) -> bool:
        """Return whether ``value`` is a view of gloo's own buffer, as results of reduce_scatter are."""
        reference = self._known.get(value.untyped_storage()._cdata)
        # Gloo's buffers are left out: predictions count what plans keep, not what a process group has of its
        # own.
        return getattr(func, "is_view", False) and (reference is None or reference() is None)

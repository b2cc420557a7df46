"""Placement problems small enough to follow by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tensoropt.placement import DeviceSet, PlacedTensor, PlacementProblem


def problem_of(
    seconds: Sequence[float] | Sequence[Sequence[float]],
    edges: Sequence[tuple[int, int]],
    *,
    devices: int = 2,
    message_s: float | Mapping[tuple[int, int], float] = 0.0,
    stored: Sequence[float] | float = 0.0,
    capacity: float | Sequence[float] = float("inf"),
    training: bool = False,
    together: tuple[tuple[int, ...], ...] = (),
    pinned: tuple[tuple[int, tuple[int, ...]], ...] = (),
    queues: bool = True,
) -> PlacementProblem:
    """Operators by their seconds, one tensor per edge, a byte per second of its message; nothing is kept.

    Args:
        seconds: per operator, or per operator and device.
        message_s: seconds on any link.
        stored: bytes of parameters per operator.
        queues: False lets messages pass each other.
    """
    count = len(seconds)
    forward = np.array(seconds, dtype=float)
    if forward.ndim == 1:
        forward = np.repeat(forward[:, None], devices, axis=1)
    sizes = message_s if isinstance(message_s, Mapping) else dict.fromkeys(edges, message_s)
    # a byte per microsecond keeps fractions of seconds whole
    tensors = tuple(
        PlacedTensor(name=f"{i}-{j}", bytes=round(1e6 * sizes.get((i, j), 0.0)), producer=i, readers=(j,))
        for i, j in edges
    )
    pairs = [(i, j) for i in range(devices) for j in range(devices) if i != j]
    zeros = np.zeros(count)
    return PlacementProblem(
        names=tuple(f"op{i}" for i in range(count)),
        forward_s=forward,
        backward_s=2 * forward if training else np.zeros((count, devices)),
        update_s=np.zeros((count, devices)),
        parameter_bytes=np.broadcast_to(np.asarray(stored, dtype=float), (count,)).copy(),
        gradient_bytes=zeros,
        optimizer_bytes=zeros,
        kept_bytes=zeros,
        forward_peak_bytes=zeros,
        backward_peak_bytes=zeros,
        update_peak_bytes=zeros,
        host_s=np.zeros((count, devices)),
        tensors=tensors,
        devices=DeviceSet(
            capacity_bytes=np.broadcast_to(np.asarray(capacity, dtype=float), (devices,)).copy(),
            latency_s=np.zeros((devices, devices)),
            seconds_per_byte=1e-6 * (1 - np.eye(devices)),
            lanes={} if queues else dict.fromkeys(pairs, ()),
        ),
        training=training,
        together=together,
        pinned=pinned,
    )


@dataclass(frozen=True)
class Chain:
    """A chain of operators of which each can be cut: its time divides, and cutting and joining take a while.

    The other side of :class:`tensoropt.planners.placed.os_dpos.Splittable` and of
    :class:`tensoropt.planners.placed.cut_search.Cuttable`, with nothing but numbers.
    """

    seconds: tuple[float, ...]
    devices: int
    copy_s: float = 0.1
    message_s: float = 0.1
    splits: tuple[tuple[str, tuple[str, int]], ...] = ()
    parallel: bool = False
    stored: float = 1.0
    capacity: float = float("inf")

    @property
    def _layout(self) -> tuple[list[float], list[tuple[int, int]], list[int], list[str]]:
        """(seconds, edges, what each is a piece of or -1, names)."""
        cut = dict(self.splits)
        seconds: list[float] = []
        edges: list[tuple[int, int]] = []
        owner: list[int] = []
        names: list[str] = []

        def add(name: str, took: float, whole: int, reads: Sequence[int]) -> int:
            names.append(name)
            seconds.append(took)
            owner.append(whole)
            edges.extend((i, len(seconds) - 1) for i in reads)
            return len(seconds) - 1

        last: list[int] = []
        for number, took in enumerate(self.seconds):
            count = cut.get(f"op{number}", ("whole", 1))[1]
            if count == 1:
                last = [add(f"op{number}", took, number, last)]
                continue
            spread = [add(f"split for op{number}", self.copy_s, -1, last)] if last else []
            pieces = [add(f"op{number}[{i}/{count}]", took / count, number, spread) for i in range(count)]
            last = [add(f"join op{number}", self.copy_s, -1, pieces)]
        return seconds, edges, owner, names

    @property
    def problem(self) -> PlacementProblem:
        seconds, edges, owner, names = self._layout
        stored = [self.stored if whole >= 0 else 0.0 for whole in owner]
        problem = problem_of(
            seconds, edges, devices=self.devices, message_s=self.message_s, stored=stored,
            capacity=self.capacity, queues=False,
        )  # fmt: skip
        return replace(problem, names=tuple(names))

    def whole_of(self, operator: int) -> str | None:
        whole = self._layout[2][operator]
        return f"op{whole}" if whole >= 0 else None

    def split_choices(self, operator: int) -> tuple[tuple[str, int], ...]:
        name = self.whole_of(operator)
        found = tuple((dim, n) for dim in ("rows", "columns") for n in range(2, self.devices + 1))
        return tuple(c for c in found if c != dict(self.splits).get(str(name))) if name else ()

    def batch_cuts(self, pieces: int) -> dict[str, tuple[str, int]]:
        return {f"op{i}": ("rows", pieces) for i in range(len(self.seconds))} if self.parallel else {}

    def data_parallel(self) -> dict[str, tuple[str, int]]:
        return self.batch_cuts(self.devices)

    def split(self, splits: Mapping[str, tuple[str, int]]) -> Chain:
        return replace(self, splits=tuple({**dict(self.splits), **splits}.items()))

"""Meshes: a cluster's ranks arranged as a grid whose axes follow the link levels."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

from tensoropt.errors import ClusterError


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Ranks ``0 … size-1`` as a row-major grid; the last axis is the innermost and uses the fastest links.

    Attributes:
        shape: size of each axis, outermost first.
        names: one readable name per axis, e.g. ``("node", "gpu")``.
    """

    shape: tuple[int, ...]
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # Accept lists and numpy integers too, so that equal meshes compare and hash equal.
        object.__setattr__(self, "shape", tuple(int(size) for size in self.shape))
        if not self.shape or any(size < 1 for size in self.shape):
            raise ClusterError(
                f"mesh shape {self.shape} has no axis or an axis below 1; give sizes of at least 1"
            )
        names = tuple(self.names) or tuple(f"axis{i}" for i in range(len(self.shape)))
        if len(names) != len(self.shape) or len(set(names)) != len(names):
            raise ClusterError(f"mesh axis names {names} must be {len(self.shape)} different names")
        object.__setattr__(self, "names", names)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(self.shape)

    @property
    def axis_count(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def label(self) -> str:
        """The shape as text, such as ``2x4``: what people read, and what the frontier CSV's ``mesh`` column
        holds."""
        return "x".join(str(size) for size in self.shape)

    @property
    def strides(self) -> tuple[int, ...]:
        """The rank distance between neighbours along each axis."""
        return tuple(math.prod(self.shape[i + 1 :]) for i in range(len(self.shape)))

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """The coordinates of a rank on the grid."""
        if not 0 <= rank < self.size:
            raise ClusterError(f"rank {rank} is not on mesh {self.label}; ranks go from 0 to {self.size - 1}")
        return tuple(rank // stride % size for stride, size in zip(self.strides, self.shape, strict=True))

    def normalise_axes(self, axes: Iterable[int]) -> tuple[int, ...]:
        """The sorted axis numbers without repeats; raises ClusterError for an axis that the mesh lacks."""
        chosen = tuple(sorted(set(axes)))
        if any(not 0 <= axis < self.axis_count for axis in chosen):
            raise ClusterError(f"mesh {self.label} has axes 0 to {self.axis_count - 1}, not {chosen}")
        return chosen

    def groups(self, axes: Iterable[int]) -> tuple[tuple[int, ...], ...]:
        """The groups of ranks that differ only along ``axes``; each is ascending, and they are ordered by
        first rank."""
        return _groups(self.shape, self.normalise_axes(axes))

    def axis_subsets(self) -> tuple[tuple[int, ...], ...]:
        """Every non-empty set of axes, smallest first; each is one kind of communication group."""
        numbers = range(self.axis_count)
        return tuple(
            subset
            for length in range(1, self.axis_count + 1)
            for subset in itertools.combinations(numbers, length)
        )

    def to_dict(self) -> dict[str, list]:
        """Return plain data, which :meth:`from_dict` reads back."""
        return {"shape": list(self.shape), "names": list(self.names)}

    @classmethod
    def from_dict(cls, data: dict) -> Mesh:
        """Return the mesh that :meth:`to_dict` wrote."""
        return cls(shape=tuple(data["shape"]), names=tuple(data.get("names", ())))

    def __str__(self) -> str:
        return self.label


@cache
def _groups(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))

    def offsets(chosen: Iterable[int]) -> list[int]:
        ranges = [range(0, shape[axis] * strides[axis], strides[axis]) for axis in chosen]
        return [sum(parts) for parts in itertools.product(*ranges)]

    # Axes ascend, so product() varies the innermost axis fastest and groups come out ascending.
    inside = offsets(axes)
    others = offsets(axis for axis in range(len(shape)) if axis not in axes)
    return tuple(tuple(base + offset for offset in inside) for base in others)


def _factorisations(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Every ordered way to write a number as a product of ``parts`` factors of at least 2, ascending."""
    if parts == 1:
        if number > 1:
            yield (number,)
        return
    # Neither 1 nor the number itself: an axis of size 1 splits nothing.
    for first in _divisors(number)[1:-1]:
        for rest in _factorisations(number // first, parts - 1):
            yield (first, *rest)


@cache
def _divisors(number: int) -> tuple[int, ...]:
    """All divisors of a number, ascending: each divisor up to the square root has a partner above it."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return tuple(dict.fromkeys((*small, *(number // n for n in reversed(small)))))


def aligned_meshes(levels: tuple[tuple[str, int], ...], max_axes: int, *, ordered: bool) -> tuple[Mesh, ...]:
    """Every mesh whose axes each cover whole levels or lie inside one.

    Args:
        levels: (name, size), outermost first, each size at least 2.
        max_axes: the most axes a mesh may have.
        ordered: keep both ``2x4`` and ``4x2`` of one level. If every pair of a level has the same link, the
            two cost the same after renaming the axes, so only the ascending one is kept.
    """
    if not levels:
        return (Mesh(shape=(1,), names=("device",)),)
    found: dict[tuple[int, ...], Mesh] = {}
    for pieces in _segmentations(len(levels)):
        # A piece that spans several levels is one axis; a piece of one level may be split into several axes.
        choices: list[list[tuple[tuple[int, ...], tuple[str, ...]]]] = []
        for start, stop in pieces:
            name = "_".join(level for level, _ in levels[start:stop])
            size = math.prod(size for _, size in levels[start:stop])
            options: list[tuple[tuple[int, ...], tuple[str, ...]]] = [((size,), (name,))]
            if stop - start == 1:
                for parts in range(2, max_axes + 1):
                    for shape in _factorisations(size, parts):
                        if ordered or tuple(sorted(shape)) == shape:
                            options.append((shape, tuple(f"{name}{i}" for i in range(parts))))
            choices.append(options)
        for combination in itertools.product(*choices):
            shape = tuple(size for sizes, _ in combination for size in sizes)
            names = tuple(name for _, part in combination for name in part)
            if len(shape) <= max_axes:
                # A shape that can be reached in several ways is one mesh; the first way names its axes.
                found.setdefault(shape, Mesh(shape=shape, names=names))
    return tuple(sorted(found.values(), key=lambda mesh: (mesh.axis_count, mesh.shape)))


def _segmentations(length: int) -> Iterator[tuple[tuple[int, int], ...]]:
    for cuts in itertools.product((False, True), repeat=length - 1):
        bounds = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), length]
        yield tuple(itertools.pairwise(bounds))

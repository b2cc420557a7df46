"""Devices, links, clusters of them, and meshes. All figures are in bytes, seconds, FLOP/s, bytes/second.

A cluster consists of devices, each of a kind, and of links between pairs of devices. A mesh is a cluster's
ranks as a grid whose axes follow the levels of links.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any

from tensoropt.cluster.quantities import BANDWIDTH, FLOPS, LATENCY, MEMORY, count, positive
from tensoropt.errors import ClusterError, suggest

_DEVICE_TYPES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """A kind of device with its peak figures.

    Attributes:
        type: PyTorch's device type, ``cpu`` or ``cuda``.
        memory_bytes: the memory that one rank may use.
        flops: peak dense FLOP/s per dtype name (``float32``, ``bfloat16``, … and ``tf32``).
        memory_bandwidth: peak memory bandwidth in bytes/second.
        price_per_hour: price of one device, in any currency; None if unknown.
        source: where the figures come from.
        capability: CUDA's compute capability, such as ``9.0`` for an H100; "" if none is known.
    """

    name: str
    type: str
    memory_bytes: int
    flops: Mapping[str, float] = field(hash=False)
    memory_bandwidth: float
    price_per_hour: float | None = None
    source: str = ""
    capability: str = ""

    def __post_init__(self) -> None:
        if self.capability and not all(part.isdecimal() for part in self.capability.split(".", 1)):
            raise ClusterError(
                f"device kind '{self.name}' has the compute capability '{self.capability}'; write it as '9.0'"
            )
        if self.type not in _DEVICE_TYPES:
            # The names that people type for a GPU are spelled more like cpu.
            meant = "cuda" if str(self.type).lower() in ("gpu", "nvidia", "rocm", "hip") else self.type
            raise ClusterError(
                f"device kind '{self.name}' has type '{self.type}'; {suggest(meant, _DEVICE_TYPES)}"
            )
        MEMORY.read(self.memory_bytes, f"memory of device kind '{self.name}'")
        BANDWIDTH.read(self.memory_bandwidth, f"memory bandwidth of device kind '{self.name}'")
        if not isinstance(self.flops, Mapping) or "float32" not in self.flops:
            raise ClusterError(
                f"device kind '{self.name}' must give flops for float32 at least,"
                " for example {float32: 15.7e12}"
            )
        checked = {
            str(dtype): FLOPS.read(value, f"{dtype} FLOP/s of device kind '{self.name}'")
            for dtype, value in self.flops.items()
        }
        object.__setattr__(self, "flops", checked)
        if self.price_per_hour is not None:
            price = positive(self.price_per_hour, f"price per hour of device kind '{self.name}'")
            object.__setattr__(self, "price_per_hour", price)

    def flops_of(self, dtype: str) -> float:
        """Return the peak FLOP/s for a dtype (``torch.`` is ignored); float32's for an unlisted dtype."""
        # Assumption: a dtype that is not listed is computed as fast as float32.
        return self.flops.get(dtype.removeprefix("torch."), self.flops["float32"])

    @property
    def has_bfloat16(self) -> bool:
        """Whether the device is a GPU whose peak in bfloat16 is listed."""
        return self.type == "cuda" and "bfloat16" in self.flops

    def to_dict(self) -> dict[str, Any]:
        # Left out if empty, so that files saved for CPU ranks do not change.
        return {name: value for name, value in asdict(self).items() if name != "capability" or value}


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A link, on which a message takes ``latency_s + bytes / bandwidth_bytes_per_s`` per hop and direction.

    Attributes:
        dedicated: whether it is a wire between just two devices (NVLink without a switch); a device can use
            all of its dedicated wires at the same time.
    """

    name: str
    latency_s: float
    bandwidth_bytes_per_s: float
    source: str = ""
    dedicated: bool = False

    def __post_init__(self) -> None:
        LATENCY.read(self.latency_s, f"latency of link '{self.name}'")
        BANDWIDTH.read(self.bandwidth_bytes_per_s, f"bandwidth of link '{self.name}'")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Ranks ``0 … size-1`` as a row-major grid; the last axis is the innermost and uses the fastest links.

    Attributes:
        shape: the size of each axis, outermost first.
        names: one readable name per axis, e.g. ``("node", "gpu")``.
    """

    shape: tuple[int, ...]
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # Accept lists and numpy integers too, so that equal meshes compare and hash equal.
        object.__setattr__(self, "shape", tuple(int(size) for size in self.shape))
        if not self.shape or any(size < 1 for size in self.shape):
            raise ClusterError(
                f"mesh shape {self.shape} has no axis, or one of a size below 1; give sizes of at least 1"
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
        """The shape as text, such as ``2x4``, for people and the ``mesh`` column of the frontier CSV."""
        return "x".join(str(size) for size in self.shape)

    def normalise_axes(self, axes: Iterable[int]) -> tuple[int, ...]:
        """Return the sorted axis numbers without repeats; raise ClusterError for an unknown axis."""
        chosen = tuple(sorted(set(axes)))
        if any(not 0 <= axis < self.axis_count for axis in chosen):
            raise ClusterError(f"mesh {self.label} has axes 0 to {self.axis_count - 1}, not {chosen}")
        return chosen

    def groups(self, axes: Iterable[int]) -> tuple[tuple[int, ...], ...]:
        """Return the groups of ranks that differ only along ``axes``, each ascending, by first rank."""
        return _groups(self.shape, self.normalise_axes(axes))

    def axis_subsets(self) -> tuple[tuple[int, ...], ...]:
        """Return every non-empty set of axes, smallest first; each is one kind of communication group."""
        numbers = range(self.axis_count)
        lengths = range(1, self.axis_count + 1)
        return tuple(subset for length in lengths for subset in itertools.combinations(numbers, length))

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
    starts = offsets(axis for axis in range(len(shape)) if axis not in axes)
    return tuple(tuple(base + offset for offset in inside) for base in starts)


def _factorisations(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        if number > 1:
            yield (number,)
        return
    # Neither 1 nor the number itself: an axis of size 1 splits nothing.
    for first in _divisors(number)[1:-1]:
        for rest in _factorisations(number // first, parts - 1):
            yield (first, *rest)


@cache
def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _aligned_meshes(levels: tuple[tuple[str, int], ...], max_axes: int, *, ordered: bool) -> tuple[Mesh, ...]:
    """Return every mesh whose axes each cover whole levels or lie inside one.

    Args:
        levels: (name, size), outermost first, each size at least 2.
        max_axes: the most axes of a mesh.
        ordered: whether to keep both ``2x4`` and ``4x2`` of one level. If every pair of a level has the same
            link, the two cost the same after renaming the axes, so only the ascending one is kept.
    """
    if not levels:
        return (Mesh(shape=(1,), names=("device",)),)
    meshes: dict[tuple[int, ...], Mesh] = {}
    for cuts in itertools.product((False, True), repeat=len(levels) - 1):
        # A piece that spans several levels is one axis; a piece of one level may be split into several axes.
        choices: list[list[tuple[tuple[int, ...], tuple[str, ...]]]] = []
        bounds = [0, *(i for i, cut in enumerate(cuts, 1) if cut), len(levels)]
        for start, stop in itertools.pairwise(bounds):
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
                meshes.setdefault(shape, Mesh(shape=shape, names=names))
    return tuple(sorted(meshes.values(), key=lambda mesh: (mesh.axis_count, mesh.shape)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """A level of a cluster's hierarchy: ``size`` children, each with ``link_count`` links to the others.

    At the node level, these are the network cards of a node, which all of its devices share.
    """

    name: str
    size: int
    link: Link
    link_count: int = 1

    def __post_init__(self) -> None:
        count(self.size, f"size of level '{self.name}'")
        count(self.link_count, f"links per {self.name}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Devices by rank, and the links between them.

    Attributes:
        devices: the device kind of each rank.
        levels: the levels of links, outermost first (``node``, ``gpu``); the product of sizes is the device
            count.
        pairs: links of single pairs ``(low rank, high rank)`` that differ from the link of their level.
    """

    name: str
    devices: tuple[DeviceKind, ...]
    levels: tuple[Level, ...]
    pairs: Mapping[tuple[int, int], Link] = field(default_factory=dict, hash=False)
    source: str = ""

    def __post_init__(self) -> None:
        if not self.devices:
            raise ClusterError(f"cluster '{self.name}' has no devices; give at least one")
        object.__setattr__(self, "devices", tuple(self.devices))
        # A level with one child connects nothing and would give meshes an axis of size 1.
        object.__setattr__(self, "levels", tuple(level for level in self.levels if level.size > 1))
        product = math.prod(level.size for level in self.levels)
        if product != len(self.devices):
            sizes = " x ".join(f"{level.size} ({level.name})" for level in self.levels) or "1"
            raise ClusterError(
                f"cluster '{self.name}': levels of {sizes} have {product} devices,"
                f" but {len(self.devices)} are given; make these numbers equal"
            )
        for low, high in self.pairs:
            if not 0 <= low < high < len(self.devices):
                raise ClusterError(
                    f"cluster '{self.name}': pair ({low}, {high}) is not two of the ranks 0 to"
                    f" {len(self.devices) - 1}"
                )
        object.__setattr__(self, "pairs", dict(sorted(self.pairs.items())))

    @property
    def device_count(self) -> int:
        """The number of devices, one per rank."""
        return len(self.devices)

    @property
    def device_kinds(self) -> tuple[DeviceKind, ...]:
        """The distinct device kinds, in order of first appearance."""
        return tuple({kind.name: kind for kind in self.devices}.values())

    @property
    def device(self) -> DeviceKind:
        """The slowest device kind (by float32 FLOP/s, then memory bandwidth), at whose pace a sharded plan
        runs. CPU ranks beside GPUs do not count, as no sharded plan has both."""
        # Where a single kind is needed, as in names and keys, one has to stand for all. Costs choose the
        # slowest kind per operator (costs.compute.SlowestCompute), because no kind is the slowest at
        # everything.
        return min(self.kinds_of_type, key=lambda kind: (kind.flops["float32"], kind.memory_bandwidth))

    @property
    def kinds_of_type(self) -> tuple[DeviceKind, ...]:
        """The device kinds of the cluster's :attr:`device_type`, so without CPU ranks beside GPUs."""
        return tuple(kind for kind in self.device_kinds if kind.type == self.device_type)

    @property
    def device_type(self) -> str:
        """PyTorch's type of the devices, ``cpu`` or ``cuda``; ``cuda`` for GPUs beside CPU ranks."""
        return self.device_types[0]

    @property
    def device_types(self) -> tuple[str, ...]:
        """PyTorch's types of devices, ``cuda`` first."""
        return tuple(sorted({kind.type for kind in self.devices}, key=("cuda", "cpu").index))

    @property
    def best_first(self) -> tuple[int, ...]:
        """All ranks, those with GPUs first: the order in which TensorFlow's Placer prefers devices."""
        types = self.device_types
        return tuple(sorted(range(self.device_count), key=lambda rank: types.index(self.devices[rank].type)))

    @property
    def memory_bytes(self) -> int:
        """The memory of the smallest device, which is the most that a sharded plan may use per rank."""
        return min(kind.memory_bytes for kind in self.devices)

    def link(self, first: int, second: int) -> Link:
        """Return the link between two ranks: the pair's own link if it has one, otherwise the link of the
        outermost level where the ranks differ."""
        if first == second or not all(0 <= rank < self.device_count for rank in (first, second)):
            raise ClusterError(
                f"({first}, {second}) is not a pair of different ranks from 0 to {self.device_count - 1}"
            )
        pair = self.pairs.get((min(first, second), max(first, second)))
        return pair if pair is not None else self.crossing_level(first, second).link

    def crossing_level(self, first: int, second: int) -> Level:
        """Return the outermost level at which two different ranks differ."""
        block = self.device_count
        for level in self.levels:
            block //= level.size
            if first // block != second // block:
                return level
        raise ClusterError(f"ranks {first} and {second} are the same device")

    def meshes(self, max_axes: int = 3) -> tuple[Mesh, ...]:
        """Return every mesh of 1 … ``max_axes`` axes that follows the link levels: each axis covers whole
        levels or lies inside one. The flat mesh comes first.

        Of meshes that differ only in the order of axes inside one level, all pairs of which have the same
        link, one is kept.
        """
        count(max_axes, "max_axes")
        return _aligned_meshes(
            tuple((level.name, level.size) for level in self.levels), max_axes, ordered=bool(self.pairs)
        )

    def subset(self, device_count: int) -> Cluster:
        """Return the first ``device_count`` devices as a separate cluster.

        They must fill whole levels: any number of children of one level, each with all levels below it.
        """
        size, levels = count(device_count, "device count"), []
        remaining = size
        # Filled from the innermost level outwards, so that the subset uses the fastest links.
        for level in reversed(self.levels):
            if remaining <= level.size:
                levels.append(replace(level, size=remaining))
                remaining = 1
                break
            if remaining % level.size:
                break
            levels.append(level)
            remaining //= level.size
        if remaining != 1:
            sizes = " x ".join(str(level.size) for level in self.levels)
            raise ClusterError(
                f"{size} devices do not fill whole levels of cluster '{self.name}' ({sizes});"
                " inner levels can only be taken whole"
            )
        return replace(
            self,
            name=self.name if size == self.device_count else f"{self.name}[{size}]",
            devices=self.devices[:size],
            levels=tuple(reversed(levels)),
            pairs={pair: link for pair, link in self.pairs.items() if pair[1] < size},
        )

    @property
    def part_sizes(self) -> tuple[int, ...]:
        """The sizes among 1, 2, 4, … devices that :meth:`subset` accepts, and that of the whole cluster."""
        sizes, size = [], 1
        while size < self.device_count:
            with suppress(ClusterError):
                sizes.append(self.subset(size).device_count)
            size *= 2
        return (*sizes, self.device_count)

    @property
    def fingerprint(self) -> str:
        """A hash of devices and links, without prices, sources, capabilities and the cluster's name."""
        data = self.to_dict()
        del data["name"], data["source"]
        for part in (
            *data["kinds"],
            *(level["link"] for level in data["levels"]),
            *(p["link"] for p in data["pairs"]),
        ):
            part.pop("source", None)
            part.pop("price_per_hour", None)
            part.pop("capability", None)
        # The fingerprint is part of the keys under which the profile store keeps links: a field that says
        # nothing about links must not invalidate them.
        text = json.dumps(data, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-compatible data, which :meth:`from_dict` reads back."""
        names = [kind.name for kind in self.device_kinds]
        return {
            "name": self.name,
            "kinds": [kind.to_dict() for kind in self.device_kinds],
            "devices": [names.index(kind.name) for kind in self.devices],
            "levels": [asdict(level) for level in self.levels],
            "pairs": [{"between": list(pair), "link": asdict(link)} for pair, link in self.pairs.items()],
            "source": self.source,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Cluster:
        """Return the cluster that :meth:`to_dict` wrote; raise ClusterError for other or impossible data."""
        try:
            kinds = [DeviceKind(**kind) for kind in data["kinds"]]
            return cls(
                name=data["name"],
                devices=tuple(kinds[index] for index in data["devices"]),
                levels=tuple(Level(**{**level, "link": Link(**level["link"])}) for level in data["levels"]),
                pairs={tuple(pair["between"]): Link(**pair["link"]) for pair in data["pairs"]},
                source=data["source"],
            )
        except (KeyError, TypeError, IndexError) as error:
            raise ClusterError(
                f"this is not a saved cluster ({type(error).__name__}: {error}); save it again with to_dict"
            ) from None

    @property
    def counts(self) -> str:
        """The number of devices of each kind as text, kinds in rank order: ``8 x H100-80GB``."""
        return ", ".join(
            f"{sum(device.name == kind.name for device in self.devices)} x {kind.name}"
            for kind in self.device_kinds
        )

    def describe(self) -> str:
        """Return a one-line summary for people: ``dgx-h100: 8 x H100-80GB, gpu x8 over NVLink4``."""
        levels = ", ".join(
            f"{level.name} x{level.size} over "
            + (f"{level.link_count} x " if level.link_count > 1 else "")
            + level.link.name
            for level in self.levels
        )
        return f"{self.name}: {self.counts}" + (f", {levels}" if levels else "")

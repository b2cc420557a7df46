"""Devices, links and the cluster that they form. All figures are in bytes, seconds, FLOP/s, bytes/second."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from tensoropt.cluster.devices import DeviceKind, Link
from tensoropt.cluster.mesh import Mesh, aligned_meshes
from tensoropt.cluster.quantities import count
from tensoropt.errors import ClusterError


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One level of the hierarchy: ``size`` children, each connected to the others by ``link_count`` links.

    For the node level, ``link_count`` is the number of network cards per node, which all of the node's
    devices share.
    """

    name: str
    size: int
    link: Link
    link_count: int = 1

    def __post_init__(self) -> None:
        count(self.size, f"size of level '{self.name}'")
        count(self.link_count, f"links per {self.name}")

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain data."""
        return {
            "name": self.name,
            "size": self.size,
            "link": self.link.to_dict(),
            "link_count": self.link_count,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Devices by rank, and the links between them.

    Attributes:
        devices: the kind of each rank.
        levels: outermost first (``node``, ``gpu``); the sizes multiply to the number of devices.
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
        product = 1
        for level in self.levels:
            product *= level.size
        if product != len(self.devices):
            sizes = " x ".join(f"{level.size} ({level.name})" for level in self.levels) or "1"
            raise ClusterError(
                f"cluster '{self.name}': levels {sizes} = {product} but there are"
                f" {len(self.devices)} devices; make them equal"
            )
        if len({kind.type for kind in self.devices}) > 1:
            raise ClusterError(f"cluster '{self.name}' mixes cpu and cuda devices; use one device type")
        for low, high in self.pairs:
            if not 0 <= low < high < len(self.devices):
                raise ClusterError(
                    f"cluster '{self.name}': pair ({low}, {high}) is not two of the ranks 0 to"
                    f" {len(self.devices) - 1}"
                )
        object.__setattr__(self, "pairs", MappingProxyType(dict(sorted(self.pairs.items()))))

    @property
    def device_count(self) -> int:
        """The number of devices, one per rank."""
        return len(self.devices)

    @property
    def device_kinds(self) -> tuple[DeviceKind, ...]:
        """The distinct kinds, in order of first appearance."""
        return tuple({kind.name: kind for kind in self.devices}.values())

    @property
    def device(self) -> DeviceKind:
        """The slowest kind (by float32 FLOP/s, then memory bandwidth): a sharded plan runs at its pace."""
        # Where a single kind is needed, as in names and keys, one has to stand for all. Costs choose the
        # slowest kind per operator (costs.compute.SlowestCompute), because no kind is the slowest at
        # everything.
        return min(self.device_kinds, key=lambda kind: (kind.flops["float32"], kind.memory_bandwidth))

    @property
    def device_type(self) -> str:
        """PyTorch's type of all devices, ``cpu`` or ``cuda``."""
        return self.devices[0].type

    @property
    def memory_bytes(self) -> int:
        """The memory of the smallest device: what a sharded plan may use per rank."""
        return min(kind.memory_bytes for kind in self.devices)

    @property
    def price_per_hour(self) -> float | None:
        """The price of all devices together; None if any price is unknown."""
        prices = [kind.price_per_hour for kind in self.devices]
        return (
            None if any(price is None for price in prices) else float(sum(price or 0.0 for price in prices))
        )

    def link(self, first: int, second: int) -> Link:
        """The link between two ranks: the pair's own link if it has one, otherwise that of the outermost
        level where the ranks differ."""
        if first == second or not all(0 <= rank < self.device_count for rank in (first, second)):
            raise ClusterError(
                f"({first}, {second}) is not a pair of different ranks from 0 to {self.device_count - 1}"
            )
        pair = self.pairs.get((min(first, second), max(first, second)))
        return pair if pair is not None else self.crossing_level(first, second).link

    def crossing_level(self, first: int, second: int) -> Level:
        """The outermost level at which two different ranks differ."""
        block = self.device_count
        for level in self.levels:
            block //= level.size
            if first // block != second // block:
                return level
        raise ClusterError(f"ranks {first} and {second} are the same device")

    def meshes(self, max_axes: int = 3) -> tuple[Mesh, ...]:
        """Every mesh of 1 … ``max_axes`` axes that is aligned with the link levels; the flat mesh comes
        first.

        Of meshes that differ only in the order of axes inside one uniform level, one is kept.
        """
        count(max_axes, "max_axes")
        return aligned_meshes(
            tuple((level.name, level.size) for level in self.levels), max_axes, ordered=bool(self.pairs)
        )

    def subset(self, device_count: int) -> Cluster:
        """The first ``device_count`` devices as a separate cluster (mini-parallelism).

        The number must keep the levels regular: it is either a divisor of the innermost level's size, or
        whole inner levels times any number of outer children.
        """
        wanted, levels = count(device_count, "device count"), []
        remaining = wanted
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
                f"{wanted} devices do not fill whole levels of cluster '{self.name}' ({sizes});"
                " take whole inner levels"
            )
        return replace(
            self,
            name=self.name if wanted == self.device_count else f"{self.name}[{wanted}]",
            devices=self.devices[:wanted],
            levels=tuple(reversed(levels)),
            pairs={pair: link for pair, link in self.pairs.items() if pair[1] < wanted},
        )

    @property
    def part_sizes(self) -> tuple[int, ...]:
        """The subset sizes that :meth:`subset` accepts: 1, 2, 4, … devices, and all of them."""
        found, wanted = [], 1
        while wanted < self.device_count:
            with suppress(ClusterError):
                found.append(self.subset(wanted).device_count)
            wanted *= 2
        return (*found, self.device_count)

    @property
    def fingerprint(self) -> str:
        """16 hex digits that hash the speeds and sizes of devices and links; the cluster's name, prices,
        sources and compute capabilities do not count."""
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
            "levels": [level.to_dict() for level in self.levels],
            "pairs": [{"between": list(pair), "link": link.to_dict()} for pair, link in self.pairs.items()],
            "source": self.source,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Cluster:
        """Inverse of :meth:`to_dict`; raises ClusterError if a key is missing or a value is impossible."""
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
        """How many devices there are of each kind: ``8 x H100-80GB``, kinds in rank order."""
        return ", ".join(
            f"{sum(device.name == kind.name for device in self.devices)} x {kind.name}"
            for kind in self.device_kinds
        )

    def describe(self) -> str:
        """A one-line summary for people: ``dgx-h100: 8 x H100-80GB, gpu x8 over NVLink4``."""
        levels = ", ".join(
            f"{level.name} x{level.size} over "
            + (f"{level.link_count} x " if level.link_count > 1 else "")
            + level.link.name
            for level in self.levels
        )
        return f"{self.name}: {self.counts}" + (f", {levels}" if levels else "")

    def __reduce__(self) -> tuple:
        return Cluster.from_dict, (self.to_dict(),)

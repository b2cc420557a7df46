"""The hardware catalogue, which reads device kinds, links and clusters from the data files in ``presets/``.

``presets/host.yaml`` has the time that a host takes to issue work to a separate device, and
``presets/efficiencies.yaml`` the shares of a data sheet's peaks that kernels reach.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

import yaml

from tensoropt.cluster.hardware import Cluster, DeviceKind, Link
from tensoropt.cluster.quantities import BANDWIDTH, FLOPS, LATENCY, MEMORY
from tensoropt.errors import ClusterError, suggest

_DEVICE_FIELDS = (
    "name", "base", "type", "memory", "memory_bandwidth", "flops", "capability", "price_per_hour", "source",
    "nvml",
)  # fmt: skip
LINK_FIELDS = ("name", "latency", "alpha", "bandwidth", "beta", "dedicated", "source")


@cache
def _preset(name: str) -> dict[str, Any]:
    file = resources.files("tensoropt.cluster").joinpath("presets", f"{name}.yaml")
    return yaml.safe_load(file.read_text(encoding="utf-8"))


def process_memory_figures() -> Mapping[str, Any]:
    """Return the GPU memory that a process takes beside tensors, with sources (``presets/memory.yaml``)."""
    return _preset("memory")


def _host_figures() -> Mapping[str, Any]:
    return _preset("host")


def list_devices() -> tuple[str, ...]:
    """Return the names of the device kinds that cluster files may use."""
    return tuple(_preset("devices"))


def list_links() -> tuple[str, ...]:
    """Return the names of the links that cluster files may use."""
    return tuple(_preset("links"))


def list_clusters() -> tuple[str, ...]:
    """Return the names of the cluster presets; ``NAMExN`` stands for presets with any number of nodes N."""
    clusters = _preset("clusters").items()
    listed = ((name, f"{name}xN") if entry.get("scalable") else (name,) for name, entry in clusters)
    return tuple(itertools.chain(*listed))


def device_kind(name: str) -> DeviceKind:
    """Return the device kind of this name in the catalogue."""
    devices = _preset("devices")
    if name not in devices:
        raise ClusterError(f"unknown device kind '{name}'; {suggest(name, devices)}")
    return _kind_from(name, devices[name])


def link(name: str) -> Link:
    """Return the link of this name in the catalogue."""
    links = _preset("links")
    if name not in links:
        raise ClusterError(f"unknown link '{name}'; {suggest(name, links)}")
    return link_from({"name": name, **links[name]}, f"link '{name}'")


def cluster_preset(name: str) -> tuple[dict[str, Any], int | None] | None:
    """Return (the description of a cluster preset, the N of a name that ends in ``xN``); None if unknown."""
    clusters = _preset("clusters")
    if name in clusters:
        return clusters[name], None
    # After the plain look-up, so that a preset whose own name ends in xN keeps that name.
    match = re.fullmatch(r"(.+)x(\d+)", name)
    if match and clusters.get(match.group(1), {}).get("scalable") and int(match.group(2)) > 0:
        return clusters[match.group(1)], int(match.group(2))
    return None


def kind_by_nvml_name(nvml_name: str) -> DeviceKind | None:
    """Return the catalogue's device kind for a GPU name of NVML, or None; the longest matching name wins."""
    listed = ((part, name) for name, entry in _preset("devices").items() for part in entry.get("nvml", ()))
    found = [one for one in listed if one[0].lower() in nvml_name.lower()]
    # One listed name may be part of another; the longer one is more specific.
    return device_kind(max(found, key=lambda one: len(one[0]))[1]) if found else None


def named_kind(reported: str) -> str:
    """Return the catalogue's name for a GPU name of NVML or PyTorch; unlisted names only get hyphens."""
    kind = kind_by_nvml_name(reported)
    return reported.replace(" ", "-") if kind is None else kind.name


def device_from(value: object, where: str) -> DeviceKind:
    """Return a device kind from its entry in a cluster file.

    Args:
        value: a catalogue name, or a mapping, in which ``base`` names the kind whose figures are the
            defaults.
        where: where the entry is in the file, for error messages.
    """
    if isinstance(value, str):
        return device_kind(value)
    entry = check_fields(value, _DEVICE_FIELDS, where)
    if "name" not in entry:
        raise ClusterError(f"{where} has no name; add 'name: MyDevice'")
    base: Mapping[str, Any] = {}
    if "base" in entry:
        devices = _preset("devices")
        if not isinstance(entry["base"], str) or entry["base"] not in devices:
            raise ClusterError(f"{where}: unknown base '{entry['base']}'; {suggest(entry['base'], devices)}")
        base = devices[entry["base"]]
    # The file's own figures come last, because they override those of the base.
    return _kind_from(str(entry["name"]), {**base, **entry})


def _kind_from(name: str, entry: Mapping[str, Any]) -> DeviceKind:
    missing = [key for key in ("type", "memory", "memory_bandwidth", "flops") if key not in entry]
    if missing:
        raise ClusterError(
            f"device kind '{name}' lacks {', '.join(missing)}; add them, or name a kind of the catalogue to "
            "copy them from: 'base: KIND'"
        )
    rates = entry["flops"]
    if isinstance(rates, Mapping):
        for dtype, value in rates.items():
            FLOPS.read_written(value, f"{dtype} FLOP/s of device kind '{name}'")
    memory = MEMORY.read_written(entry["memory"], f"memory of device kind '{name}'")
    wide = BANDWIDTH.read_written(entry["memory_bandwidth"], f"memory bandwidth of device kind '{name}'")
    return DeviceKind(
        name=name,
        type=entry["type"],
        memory_bytes=int(memory),
        flops=rates,
        memory_bandwidth=wide,
        price_per_hour=entry.get("price_per_hour"),
        source=entry.get("source", "cluster file"),
        capability=str(entry.get("capability", "")),
    )


def link_from(value: object, where: str) -> Link:
    """Return a link from its entry in a cluster file.

    Args:
        value: a catalogue name, or a mapping with ``latency`` or ``alpha``, and ``bandwidth`` or ``beta``.
        where: where the entry is in the file, for error messages.
    """
    if isinstance(value, str):
        return link(value)
    entry = check_fields(value, LINK_FIELDS, where)
    for short, long in (("alpha", "latency"), ("beta", "bandwidth")):
        if short in entry and long in entry:
            raise ClusterError(f"{where} gives both {long} and {short}, which mean the same; keep one")
    alpha, beta = (entry.get("latency", entry.get("alpha")), entry.get("bandwidth", entry.get("beta")))
    if alpha is None or beta is None:
        raise ClusterError(
            f"{where} needs latency and bandwidth (or alpha and beta), for example 5us and 25GB/s"
        )
    return Link(
        name=str(entry.get("name", "custom")),
        latency_s=LATENCY.read_written(alpha, f"latency of {where}"),
        bandwidth_bytes_per_s=BANDWIDTH.read_written(beta, f"bandwidth of {where}"),
        source=str(entry.get("source", "cluster file")),
        dedicated=bool(entry.get("dedicated", False)),
    )


def check_fields(value: object, fields: tuple[str, ...], where: str) -> dict[str, Any]:
    """Return the mapping unchanged; raise ClusterError for anything else, or for a key outside ``fields``."""
    if not isinstance(value, dict):
        raise ClusterError(f"{where} is {value!r}, but must be a mapping with {', '.join(fields)}")
    for key in value:
        if key not in fields:
            raise ClusterError(f"{where} has the unknown key '{key}'; {suggest(key, fields)}")
    return value


@dataclass(frozen=True, slots=True)
class _HostSeconds:
    """Estimated times in seconds that a step takes beside computation, on a device type and its host.

    Attributes:
        kernel_s: the device's time for each kernel, in addition to that for its FLOP and memory traffic.
        forward_call_s, backward_call_s: the host's time for an operator's call, and for its node in backward.
        edge_s: the host's time for one direction of an edge (a tensor between two groups of operators).
        pass_s: the host's time for a direction in which no data are moved.
        gradient_s: the host's time to bring a gradient to its bucket.
        parameter_s: the host's time per parameter of an optimizer's step.
        again_s: the host's time for a call of a recomputed region, in addition to its second forward.
        kernel_source: the source of ``kernel_s``.
        call_source: the source of ``forward_call_s`` and ``backward_call_s``.
        other_source: the source of the other figures.
    """

    kernel_s: float
    forward_call_s: float
    backward_call_s: float
    edge_s: float
    pass_s: float
    gradient_s: float
    parameter_s: float
    again_s: float
    kernel_source: str
    call_source: str
    other_source: str


@cache
def host_seconds(device_type: str) -> _HostSeconds | None:
    """Return the times of host and device for a device type; None if the host is the device (CPU ranks)."""
    figures = _host_figures().get(device_type)
    return None if figures is None else _HostSeconds(**figures)


@dataclass(frozen=True, slots=True)
class Reached:
    """The shares of a device kind's data sheet peaks that kernels reach, each between 0 and 1.

    Attributes:
        arithmetic: share of the FLOP/s, for operators of classes that ``classes`` does not name.
        memory: share of the memory bandwidth.
        classes: share of the FLOP/s, by operator class (:class:`tensoropt.ops.calls.CostClass`).
        source: the source of the figures.
        slower_beside: the fraction by which computing slows down while a collective runs.
    """

    arithmetic: float
    memory: float
    classes: Mapping[str, float] = field(default_factory=dict, hash=False)
    source: str = ""
    slower_beside: float = 0.0

    @property
    def words(self) -> str:
        """The shares as text for people."""
        of_class = ", ".join(f"{share:.0%} in {name}" for name, share in self.classes.items())
        rates = f"{of_class}, {self.arithmetic:.0%} in others" if of_class else f"{self.arithmetic:.0%}"
        bandwidth = f"{self.memory:.0%} of the memory bandwidth"
        return f"of the FLOP/s {rates}, and {bandwidth} ({self.source})"

    def of(self, cls: str) -> float:
        """Return the share of the FLOP/s that operators of a class reach."""
        return self.classes.get(cls, self.arithmetic)


@cache
def _reached(capability: str, dated: str, compiled: bool) -> Reached:
    figures = _preset("efficiencies")
    # Oldest first; the newest have no end date.
    kernels = next(
        of
        for of in figures["kernels"]
        if ("until" not in of or (dated and dated <= of["until"])) and (compiled or "compiled" not in of)
    )
    return Reached(**{**figures["assumed"], **kernels["capability"].get(capability, {})})


ASSUMED = _reached("", "", compiled=False)
"""The shares assumed for devices of which nothing is known."""


def reached_by(device: DeviceKind, dated: str = "", *, compiled: bool = False) -> Reached:
    """Return the shares of a device kind's peaks that kernels reach. GPUs of the same compute capability are
    assumed to reach the same shares of their own peaks; CPU cores get :data:`ASSUMED` shares.

    Args:
        dated: the month of the kernels (``2024-03``, optionally followed by a day); by default the newest.
        compiled: whether neighbouring element-wise operators are fused into one kernel.
    """
    return _reached(device.capability, dated, compiled) if device.type == "cuda" else ASSUMED


@dataclass(frozen=True, slots=True)
class _JobSpread:
    """The ratio of published jobs' step times to the times predicted from :class:`Reached`.

    Attributes:
        well_tuned, slow: the ends of the range, as factors on the time; the middle is 1.
        holds: the share of jobs in the range, counted over teams whose jobs were not used to fit the range.
        source: the source of the figures.
    """

    well_tuned: float
    slow: float
    holds: float
    source: str


@cache
def job_spread() -> _JobSpread:
    """Return how far step times of published jobs are from predictions (``presets/efficiencies.yaml``)."""
    return _JobSpread(**_preset("efficiencies")["spread"])


def slower_beside(cluster: Cluster) -> float:
    """Return the fraction by which collectives slow down computing on the device kind that suffers most."""
    if cluster.device_type != "cuda":
        return 0.0
    return max(reached_by(kind).slower_beside for kind in cluster.devices)

"""The seconds that a host takes to issue work to a separate device, from ``presets/host.yaml``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from tensoropt.cluster.catalog import host_figures


@dataclass(frozen=True, slots=True)
class HostSeconds:
    """Estimates for one device type, in seconds.

    Attributes:
        kernel_s: the device's time for each kernel, in addition to that for its FLOP and bytes.
        forward_call_s, backward_call_s: the host's time for an operator's call, and for its node in backward.
        edge_s, pass_s: time for one direction of an edge, and for a direction in which nothing moves.
        gradient_s: time to bring a gradient to its bucket.
        parameter_s: time per parameter of an optimizer's step.
        again_s: time for a call of a recomputed region, in addition to its second forward.
        kernel_source, call_source, other_source: the sources of these figures.
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
def host_seconds(device_type: str) -> HostSeconds | None:
    """The host figures for a device type; None if the host is the device, as with CPU ranks."""
    figures = host_figures().get(device_type)
    return None if figures is None else HostSeconds(**figures)

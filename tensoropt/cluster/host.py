"""Seconds that a host takes to issue work to a device of its own, from ``presets/host.yaml``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from tensoropt.cluster.catalog import host_figures


@dataclass(frozen=True, slots=True)
class HostSeconds:
    """Estimates for one type of device; seconds.

    Attributes:
        kernel_s: of the device, for each kernel beside its FLOP and bytes.
        forward_call_s, backward_call_s: of the host, for an operator's call and for its node in backward.
        edge_s, pass_s: for one direction of an edge, and for one in which nothing moves.
        gradient_s: for a gradient's way to its bucket.
        parameter_s: for a parameter of an optimizer's step.
        again_s: for a call of a recomputed region, beside its second forward.
        kernel_source, call_source, other_source: where these figures come from.
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
    """Of devices of a type; None where the host is the device, as CPU ranks are."""
    figures = host_figures().get(device_type)
    return None if figures is None else HostSeconds(**figures)

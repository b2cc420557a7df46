"""The kinds of plans: what each is called, and what is said of its figures where kinds differ.

What shows, saves or explains plans reads these words, and treats all kinds alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

STAGE_AXIS = "stage"
"""The name of a mesh axis along which the stages of a pipeline lie."""


@dataclass(frozen=True)
class PlanKind:
    """A kind of plans.

    Attributes:
        name: what such a plan is called.
        first_axes: the axis along which its stages lie; operators are split along the others.
        placed: whether each operator lies on one device.
        key: what of its stages tells it apart, as :mod:`tensoropt.plan.keys` names it.
        rows: what the seconds of its operators' rows are, if not those of every device; "" if they are.
        lanes: what the rows of its timeline are, in that case.
        each: what a peak of its memory is given for.
        mesh_words: what stands before the sizes of its mesh.
        strategies: what has a strategy of its own, or a device, where no strategy on one mesh says all.
        memory_of: the devices whose memory a point has.
        headline: the devices whose memory and whose seconds a point has.
        time_of: the devices whose seconds a point has; "" if all have the same.
        idle: what a device waits for if it waits neither for a link nor for its host.
        host_wait: what idle time is if the host is slower than the device.
        host: where the host's seconds are counted, if an operator takes as long as the slower of
            device and host; "" if they are a figure of their own.
        overlap: what is assumed to overlap what.
        owners: what is not known of the owners of its memory; "" if all is.
    """

    name: str
    first_axes: tuple[str, ...] = ()
    placed: bool = False
    key: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    rows: str = ""
    lanes: str = ""
    each: str = "each device"
    mesh_words: str = ""
    strategies: str = ""
    memory_of: str = "on the fullest device"
    headline: str = "fullest, busiest device"
    time_of: str = "on the busiest device"
    idle: str = "waiting for other devices"
    host_wait: str = "waiting for the host"
    host: str = ""
    overlap: str = ""
    owners: str = ""

    def lies_on(self, axes: tuple[str, ...], *, placed: bool) -> bool:
        """Return whether such plans lie on a mesh with these axes."""
        return (axes[: len(self.first_axes)], placed) == (self.first_axes, self.placed)


SHARDED = PlanKind("sharded plan", memory_of="on each device", time_of="")
"""One stage on the whole mesh."""
PIPELINED = PlanKind(
    "pipeline",
    first_axes=(STAGE_AXIS,),
    rows="seconds of a rank of the operator's stage, in all micro-batches",
    lanes="a stage's row has its actions with their waits, between which it is idle; its devices' and links' "
    "have the work in them, of one of these devices",
    key={"pipeline": ("schedule", "again", "stages", "kinds")},
    each="the devices of each stage",
    mesh_words="pp",
    strategies="each of its stages has its own",
    idle="idle time of the pipeline, in which its busiest devices wait for others",
    host_wait="idle, or waiting for the host",
    overlap="stages compute at the same time; messages between them run beside, on CPU ranks in between",
    owners="of each micro-batch of a stage, the largest tensors are named",
)
"""Stages of several operators, through which micro-batches pass by a schedule."""
PLACED = PlanKind(
    "placed plan",
    first_axes=("device",),
    placed=True,
    key={"placed": ("splits", "transfers")},
    mesh_words="placed on ",
    strategies="each of its operators runs on one device",
    headline="fullest, busiest; all messages",
    host="in compute",
    overlap="messages run beside computing; those that share a lane queue",
)
"""Stages of one device each, which run their operators in an order of their own."""
_KINDS = (PIPELINED, PLACED, SHARDED)
PLACE_AXES = tuple(axis for kind in _KINDS for axis in kind.first_axes)
"""The axes along which stages lie: in the configuration of an operator, its stage or device."""


def numbered(part: int, parts: int, devices: int) -> str:
    """Return the numbers of the devices of one of equal parts: ``4``, or ``4–7``."""
    each = devices // parts
    return str(part) if each == 1 else f"{part * each}–{(part + 1) * each - 1}"


def devices_words(part: int, parts: int, devices: int) -> str:
    """Return ``device 4``, or ``devices 4–7``: one of equal parts of the devices, as a stage of a pipeline
    has."""
    return f"device{'s' if devices > parts else ''} {numbered(part, parts, devices)}"


def kind_on(axes: tuple[str, ...], *, placed: bool) -> PlanKind:
    """Return the kind of the plans on a mesh with these axes."""
    return next((kind for kind in _KINDS if kind.lies_on(axes, placed=placed)), SHARDED)

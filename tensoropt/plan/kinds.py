"""The kinds of plans: their names, and how texts on them differ.

Code that shows, saves or explains plans uses these words and treats all kinds alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

STAGE_AXIS = "stage"
"""The mesh axis of a pipeline's stages."""


@dataclass(frozen=True)
class PlanKind:
    """A kind of plan.

    Attributes:
        name: the kind's name.
        first_axes: the axis of its stages; operators are split along the others.
        placed: whether each operator runs on one device.
        key: the stage fields that enter a plan's key (:mod:`tensoropt.plan.keys`), by their name there.
        rows: whose seconds the rows of operators have; "" if they are those of every device.
        each: the devices for which a memory peak is given.
        mesh_words: words before the mesh's sizes.
        strategies: which parts have their own strategy or device, in words; "" if one mesh describes all.
        memory_of: the devices whose memory a point states.
        headline: the devices whose memory and seconds a point states.
        time_of: the devices whose seconds a point states; "" if all are alike.
        idle: what an idle device waits for, other than links and its host.
        host_wait: the meaning of idle time if the host is slower than the device.
        overlap: the assumed overlap.
        owners: what is unknown about the owners of its memory; "" if nothing.
    """

    name: str
    first_axes: tuple[str, ...] = ()
    placed: bool = False
    key: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    rows: str = ""
    each: str = "each device"
    mesh_words: str = ""
    strategies: str = ""
    memory_of: str = "on the fullest device"
    headline: str = "fullest, busiest device"
    time_of: str = "on the busiest device"
    idle: str = "waiting for other devices"
    host_wait: str = "waiting for the host"
    overlap: str = ""
    owners: str = ""

    def lies_on(self, axes: tuple[str, ...], *, placed: bool) -> bool:
        """Return whether such plans run on a mesh with these axes."""
        return (axes[: len(self.first_axes)], placed) == (self.first_axes, self.placed)


SHARDED = PlanKind("sharded plan", memory_of="on each device", time_of="")
"""One stage on the whole mesh."""
PIPELINED = PlanKind(
    "pipeline",
    first_axes=(STAGE_AXIS,),
    rows="seconds of a rank of the operator's stage, in all micro-batches",
    key={"pipeline": ("schedule", "again", "stages", "kinds")},
    each="the devices of each stage",
    mesh_words="pp",
    strategies="each of its stages has its own",
    idle="idle time of the pipeline, in which its busiest devices wait for others",
    host_wait="idle, or waiting for the host",
    overlap="stages compute at the same time; messages overlap computation, except on CPU ranks",
    owners="only the largest tensors of each micro-batch of a stage are named",
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
    overlap="messages overlap computation; those on the same lane queue",
)
"""Stages of one device each, with their own order of operators."""
_KINDS = (PIPELINED, PLACED, SHARDED)
PLACE_AXES = tuple(axis for kind in _KINDS for axis in kind.first_axes)
"""Axes of stages; an operator's choice on one is its stage or device."""


def numbered(part: int, parts: int, devices: int) -> str:
    """Return the device numbers of one of equal parts: ``4``, or ``4–7``."""
    each = devices // parts
    return str(part) if each == 1 else f"{part * each}–{(part + 1) * each - 1}"


def devices_words(part: int, parts: int, devices: int) -> str:
    """Return ``device 4``, or ``devices 4–7``, for one of equal parts of the devices, such as a pipeline
    stage."""
    return f"device{'s' if devices > parts else ''} {numbered(part, parts, devices)}"


def kind_on(axes: tuple[str, ...], *, placed: bool) -> PlanKind:
    """Return the kind of plans on a mesh with these axes."""
    return next((kind for kind in _KINDS if kind.lies_on(axes, placed=placed)), SHARDED)

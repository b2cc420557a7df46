"""The three kinds of plans (sharded, pipeline, placed), each with its own words for texts about plans.

Code that shows, saves or explains plans takes its words from here instead of treating each kind separately.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

STAGE_AXIS = "stage"
"""The name of the mesh axis along which a pipeline's stages lie."""


@dataclass(frozen=True)
class PlanKind:
    """A kind of plan, with phrases for texts about such plans. All attributes but the first four are phrases.

    Attributes:
        name: the kind's name.
        first_axes: the mesh axes along which stages lie; operators are split along the others.
        placed: whether each operator runs on one device.
        key: the fields of :class:`StagesInfo` that enter a plan's hash (:mod:`tensoropt.plan.keys`), by the
            name of their group there.
        rows: whose seconds a table of operators shows; "" if all devices have the same.
        each: the devices for which a table shows memory peaks.
        mesh_words: the text before the mesh's sizes.
        strategies: why no single strategy on one mesh describes the plan; "" if one does.
        memory_of, time_of: the device whose memory, or time, a point states; ``time_of`` is "" if all devices
            take the same time.
        headline: the devices whose memory and time a point states, for the title of a column.
        idle: why a device is idle, if it waits neither for a link nor for its host.
        host_wait: idle time, if the host is slower than the device.
        overlap: the assumed overlap of computation and communication.
        owners: a remark if some of the memory is not attributed to single tensors; otherwise "".
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
        """Return whether plans of this kind have a mesh with these axes and this value of ``placed``."""
        return (axes[: len(self.first_axes)], placed) == (self.first_axes, self.placed)


SHARDED = PlanKind("sharded plan", memory_of="on each device", time_of="")
"""Plans of one stage on the whole mesh."""
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
"""Plans of stages with several operators each, through which micro-batches pass by a schedule."""
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
"""Plans in which each stage is one device with its own order of operators."""
_KINDS = (PIPELINED, PLACED, SHARDED)
PLACE_AXES = tuple(axis for kind in _KINDS for axis in kind.first_axes)
"""The mesh axes along which stages lie; an operator's entry for such an axis is its stage or device."""


def numbered(part: int, parts: int, devices: int) -> str:
    """Return the device numbers of part ``part`` of the devices, split into ``parts``: ``4``, or ``4–7``."""
    each = devices // parts
    return str(part) if each == 1 else f"{part * each}–{(part + 1) * each - 1}"


def devices_words(part: int, parts: int, devices: int) -> str:
    """Return ``device 4`` or ``devices 4–7`` for part ``part`` of the devices, such as a pipeline rank."""
    return f"device{'s' if devices > parts else ''} {numbered(part, parts, devices)}"


def kind_on(axes: tuple[str, ...], *, placed: bool) -> PlanKind:
    """Return the kind of plans on a mesh with these axes; ``placed`` is :attr:`MeshInfo.placed`."""
    return next((kind for kind in _KINDS if kind.lies_on(axes, placed=placed)), SHARDED)

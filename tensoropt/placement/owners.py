"""The owners of the bytes on a device in a placed plan's step, at every change of its memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tensoropt.placement.simulate import SimulatedPlacement, device_name, holders
from tensoropt.simulate.recording import Owned
from tensoropt.simulate.timeline import Timeline

WORDS = {"parameters": "parameter", "gradients": "gradient", "optimizer": "optimizer state"}


def owned_on(simulated: SimulatedPlacement, device: int) -> list[Owned]:
    """Return all holdings on a device, each with the points of its memory curve between which it is alive."""
    timeline, owned = holders(simulated)
    where = device_name(device)
    curve = [sizes for _, sizes in timeline.memory(where)]
    takes, gives = _words(timeline, where)
    found: list[Owned] = []
    for kind, first, end, size in _spans(curve):
        holder, of = owned[int(kind)]
        stays = first == 0 and end == len(curve)
        since, until = ("", "") if stays else (takes.get(kind, ""), gives.get(kind, "the end of the step"))
        what = WORDS.get(holder.what, holder.what)
        found.append((holder.operator, holder.tensor, what, of, size, first, end, since, until))
    return found


def _spans(curve: Sequence[Mapping[str, float]]) -> Iterator[tuple[str, int, int, float]]:
    """Yield (kind, first point, the point after the last, bytes) of all holdings; each occurs once."""
    begun: dict[str, tuple[int, float]] = {}
    for point, sizes in enumerate(curve):
        for kind, size in sizes.items():
            if size and kind not in begun:
                begun[kind] = point, size
            elif not size and kind in begun:
                first, taken = begun.pop(kind)
                yield kind, first, point, taken
    for kind, (first, taken) in begun.items():
        yield kind, first, len(curve), taken


def _words(timeline: Timeline, where: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return, for each kind, the task that allocates it, and the task at whose end it is freed."""
    takes: dict[str, str] = {}
    gives: dict[str, str] = {}
    for event in timeline.events:
        task = event.task
        words = f"{task.phase} {task.name}" if task.name != task.phase else task.name
        takes.update((kind, words) for device, kind, _ in task.allocates if device == where)
        gives.update((kind, f"the end of {words}") for device, kind, _ in task.frees if device == where)
    return takes, gives

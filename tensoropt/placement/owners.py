"""The owners of the bytes on a device in a placed plan's step, at every change of its memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tensoropt.placement.simulate import SimulatedPlacement, device_name, holders
from tensoropt.simulate.recording import Owned
from tensoropt.simulate.timeline import Timeline

WORDS = {"parameters": "parameter", "gradients": "gradient", "optimizer": "optimizer state"}


def owned_on(simulated: SimulatedPlacement, device: int) -> list[Owned]:
    """Return all holdings on a device, each with the points of its memory curve between which it is alive."""
    timeline, owned = holders(simulated)
    where = device_name(device)
    steps = timeline.steps(where)
    takes, gives = _words(timeline, where)
    found: list[Owned] = []
    for kind, first, end, size in _spans(steps):
        holder, of = owned[int(kind)]
        stays = first == 0 and end == len(steps)
        since, until = ("", "") if stays else (takes.get(kind, ""), gives.get(kind, "the end of the step"))
        what = WORDS.get(holder.what, holder.what)
        found.append((holder.operator, holder.tensor, what, of, size, first, end, since, until))
    return found


def _spans(steps: Sequence[Sequence[tuple[str, float]]]) -> Iterator[tuple[str, int, int, float]]:
    """(kind, first point, the one behind the last, bytes) of all that is ever held; each is held once.

    In the order in which they are given back, of what is given back at once in the order of taking.
    """
    begun: dict[str, tuple[int, int, float]] = {}  # with its number in the order of taking
    count = 0
    for point, changes in enumerate(steps):
        ended = []
        for kind, size in changes:
            if size > 0:
                begun[kind] = count, point, size
                count += 1
            else:
                ended.append((*begun.pop(kind), kind))
        for _, first, taken, kind in sorted(ended):
            yield kind, first, point, taken
    for kind, (_, first, taken) in begun.items():
        yield kind, first, len(steps), taken


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

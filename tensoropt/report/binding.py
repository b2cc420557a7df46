"""What binds a step: computation, the links that are waited for, idle devices, the host, the budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tensoropt.cluster import Cluster
from tensoropt.plan.exploration import Exploration
from tensoropt.plan.point import Point
from tensoropt.plan.recorded import mesh_of
from tensoropt.report.rows import Detail
from tensoropt.simulate.overlap import link_levels
from tensoropt.simulate.recording import COMPUTE, TimelineEvent
from tensoropt.units import format_bytes, format_seconds

COMPUTING, WAITING, IDLE, HOST = "computation", "communication", "idle", "host"
LEAST = 0.005
"""Shares of a step below it are not spoken of."""
ROUNDING = 1e-9


@dataclass(frozen=True)
class Part:
    """A part of a step: computing, waiting for links, idle, or waiting for the host.

    Attributes:
        key: one of ``computation``, ``communication``, ``idle``, ``host``.
        title: in words, with the links and the axes of what is waited for.
        share: of the step.
    """

    key: str
    title: str
    seconds: float
    share: float


@dataclass(frozen=True)
class Binding:
    """What takes the time of a step, and what of it binds.

    Attributes:
        parts: they add up to the step; communication by the links that are waited for, where that is known.
        key: of what takes most, communication counted as one.
        sentence: what binds, with its share, and whether the budget does, too.
    """

    parts: tuple[Part, ...]
    key: str
    sentence: str


def binding(
    exploration: Exploration, index: int, detail: Detail | None, memory_bytes: float, within: int
) -> Binding:
    """What binds point ``index`` of ``all_points`` within a budget.

    Args:
        detail: of the point; without it nothing is said of operators and links.
        memory_bytes: the budget.
        within: the frontier's fastest point that fits the budget.
    """
    point = exploration.all_points[index]
    step_s = point.time_s or 1.0
    links = waiting_by_links(exploration, index, detail) if detail is not None else ()
    if not links and point.exposed_s:
        links = (("communication", point.exposed_s),)
    # A place of a pipeline is idle while it waits for others, too.
    host_s = 0.0
    if point.host_bound:
        host_s = min(point.idle_s, point.host_s - point.compute_s - point.exposed_s)
    waits = {HOST: host_s, IDLE: max(point.idle_s - host_s, 0.0)}
    titles = {HOST: "waiting for the host that issues the work", IDLE: _idle_title(exploration, index)}
    parts = [
        Part(COMPUTING, "computing", point.compute_s, point.compute_s / step_s),
        *(Part(WAITING, f"waiting for {title}", s, s / step_s) for title, s in links),
        *(Part(name, titles[name], s, s / step_s) for name, s in waits.items() if s > ROUNDING * step_s),
    ]
    sums = {COMPUTING: point.compute_s, WAITING: point.exposed_s, **waits}
    key = max(sums, key=lambda name: sums[name])
    words = {
        COMPUTING: "Computation" + _top_operator(detail),
        WAITING: "Communication that is waited for" + _links_words(parts),
        HOST: "The host, which issues work more slowly than the device does it,",
        IDLE: _idle_title(exploration, index).capitalize(),
    }
    share = 100 * sums[key] / step_s
    sentence = f"{words[key]} binds: {share:.0f} % of a step of {format_seconds(point.time_s)}."
    return Binding(tuple(parts), key, f"{sentence} {_budget_words(exploration, index, memory_bytes, within)}")


def _idle_title(exploration: Exploration, index: int) -> str:
    point = exploration.all_points[index]
    if point.pipeline is not None:
        return "idle time of the pipeline, in which its busiest place waits for others"
    return "waiting for other devices"


def _top_operator(detail: Detail | None) -> str:
    words = detail.top_words() if detail is not None else ""
    return words and f", {words},"


def _links_words(parts: Sequence[Part]) -> str:
    waits = sorted((part for part in parts if part.key == WAITING), key=lambda part: -part.seconds)
    if len(waits) < 2:
        return f" ({waits[0].title.removeprefix('waiting for ')})" if waits else ""
    return f", most of all {waits[0].title.removeprefix('waiting for ')},"


def _budget_words(exploration: Exploration, index: int, memory_bytes: float, within: int) -> str:
    """Whether the budget binds: within it, beyond it, or not at all."""
    points, point = exploration.points, exploration.all_points[index]
    best, fastest = points[within], points[-1]
    told = []
    if best.time_s < point.time_s * (1 - 1e-9):
        told.append(
            f"Point {within + 1} fits {format_bytes(memory_bytes)} and is faster: "
            f"{_faster(point.time_s, best)}."
        )
    if fastest.time_s < best.time_s * (1 - LEAST):
        told.append(
            f"The memory budget of {format_bytes(memory_bytes)} binds, too: the frontier's fastest plan "
            f"needs {format_bytes(fastest.memory_bytes)} and takes {_faster(point.time_s, fastest)}."
        )
    elif not told:
        told.append("The memory budget does not bind: no plan of the frontier is faster, whatever it needs.")
    return " ".join(told)


def _faster(before_s: float, point: Point) -> str:
    time_s = point.time_s
    percent = 100 * (time_s / before_s - 1)
    # Below one percent its first figure: "−0 %" would say that nothing changes.
    change = f"{percent:+.0f}" if abs(percent) >= 1 else f"{percent:+.1g}"
    change = change.replace("-", "−")
    return f"{format_seconds(time_s)} ({change} %)"


def waiting_by_links(exploration: Exploration, index: int, detail: Detail) -> tuple[tuple[str, float], ...]:
    """(links and axes in words, seconds waited for) of a sharded plan, the longest first; they add up to all
    that is waited for. Nothing of placed plans and pipelines, whose devices wait at different times."""
    point = exploration.all_points[index]
    if point.carried is not None or point.exposed_s <= 0:
        return ()
    lanes = waited_lanes(detail.timeline)
    total = sum(lanes.values())
    if not total:
        return ()
    space = exploration.spaces[point.space]
    cluster = Cluster.from_dict(exploration.cluster)
    mesh = mesh_of(cluster, space.mesh.shape, space.mesh.names)
    names = {level.name: level.link.name for level in cluster.levels}
    found = {}
    for lane, seconds in lanes.items():
        axes = tuple(mesh.names.index(name) for name in lane.removeprefix("link ").split("+"))
        levels = link_levels(cluster, mesh, axes)
        links = ", ".join(f"{level} links ({names[level]})" for level in levels)
        # Computation that is slower beside collectives counts as computation, and rounding is left: the parts
        # are scaled to what the simulator says is waited for.
        found[f"{links} over {_axes_words(lane)}"] = seconds * point.exposed_s / total
    return tuple(sorted(found.items(), key=lambda item: -item[1]))


def _axes_words(lane: str) -> str:
    names = lane.removeprefix("link ").split("+")
    return f"axis {names[0]}" if len(names) == 1 else f"axes {'+'.join(names)}"


def waited_lanes(timeline: Sequence[TimelineEvent]) -> dict[str, float]:
    """Per lane of links the seconds in which it sends while nothing is computed; of lanes that send at the
    same time each has its part."""
    edges: list[tuple[float, int, str]] = []
    for event in timeline:
        if event.duration_s > 0:
            edges += [
                (event.start_s, 1, event.lane),
                (event.start_s + event.duration_s, -1, event.lane),
            ]
    # What ends at a moment ends before what begins then.
    edges.sort(key=lambda edge: edge[:2])
    busy: dict[str, int] = {}
    waited: dict[str, float] = {}
    before = 0.0
    for at, change, lane in edges:
        sending = [name for name, count in busy.items() if count and name != COMPUTE]
        if sending and not busy.get(COMPUTE):
            for name in sending:
                waited[name] = waited.get(name, 0.0) + (at - before) / len(sending)
        busy[lane] = busy.get(lane, 0) + change
        before = at
    return {lane: seconds for lane, seconds in waited.items() if seconds > 0}

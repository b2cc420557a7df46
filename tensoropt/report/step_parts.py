"""The parts of a step's time: operators summed by module and kind, and everything beside them.

This is the one place that decides what takes most of a step: the page, the command line, the decision sheet
and the notebook all read these parts. They add up to the step; if devices have different loads, to the step
of the busiest one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tensoropt.cluster import Cluster
from tensoropt.plan.exploration import Exploration
from tensoropt.plan.point import Point
from tensoropt.plan.recorded import mesh_of
from tensoropt.simulate.overlap import link_levels
from tensoropt.simulate.recording import COMPUTE, TimelineEvent

COMPUTING, WAITING, IDLE, HOST = "computation", "communication", "idle", "host"
AGAIN, OPTIMIZER = "again", "optimizer"
"""The phases of recomputing and regathering, and of the update of parameters."""
RECOMPUTATION, COPIES, OPTIMIZER_TITLE = "recomputation", "copies and additions", "the optimizer"
ROUNDING = 1e-9
"""Smaller shares of a step are rounding errors."""
ROOT = "model"
"""Capture's name for the model itself, whose own operators are in no module."""
MOST_NAMED = 8
"""The most parts that a table names; the others form one row."""
_LEAST_NAMED = 0.01
"""The share of the step from which an operator has a row of its own in a table."""
KINDS = {
    "linear": "linear", "addmm": "linear", "mm": "linear", "bmm": "matrix product",
    "baddbmm": "matrix product", "matmul": "matrix product", "_grouped_mm": "product of experts",
    "convolution": "convolution", "conv1d": "convolution", "conv2d": "convolution", "conv3d": "convolution",
    "scaled_dot_product_attention": "attention", "layer_norm": "layer norm", "rms_norm": "RMS norm",
    "batch_norm": "batch norm", "group_norm": "group norm", "instance_norm": "instance norm",
    "cross_entropy_loss": "cross entropy", "nll_loss": "cross entropy", "mse_loss": "squared error",
    "lstm": "LSTM", "gru": "GRU",
}  # fmt: skip
"""What people call operators; others are called by the name of their call."""


@dataclass(frozen=True)
class Part:
    """A part of the step.

    Attributes:
        key: one of ``computation``, ``communication``, ``idle``, ``host``.
        title: the part in words: operators of one kind in equal modules, the links and axes that are waited
            for, ...
        share: its share of the step.
        count: how many groups of operators it sums; 0 for parts that are not operators.
    """

    key: str
    title: str
    seconds: float
    share: float
    count: int = 0


@dataclass(frozen=True)
class Computed:
    """The seconds that one group of operators computes.

    Attributes:
        module: the path of its module; "" if none is known.
        kind: what it computes, as named by :func:`kind_of`.
    """

    module: str
    kind: str
    seconds: float


def kind_of(target: str) -> str:
    """Return what people call an operator, given its target (``aten.addmm.default``) or a name made from that
    (``addmm_12``)."""
    parts = target.split(".")
    name = parts[1] if len(parts) > 1 else re.sub(r"_\d+$", "", parts[0])
    return KINDS.get(name) or KINDS.get(name.removeprefix("native_")) or name.strip("_").replace("_", " ")


# -- summing by module and kind -------------------------------------------------------------------------


def summed(computed: Iterable[Computed]) -> list[tuple[str, int, float]]:
    """Return (title, number of groups, seconds) by module and kind, the longest first.

    Modules count as equal if their paths differ only in numbers: ``h.0.mlp.c_fc`` and ``h.11.mlp.c_fc``.
    Without modules, as in ONNX files, groups are summed by kind.
    """
    told = [one for one in computed if one.seconds > 0]
    found: dict[str, list[float]] = {}
    for title, one in zip(titles(told), told, strict=True):
        found.setdefault(title, []).append(one.seconds)
    rows = [(title, len(seconds), sum(seconds)) for title, seconds in found.items()]
    return sorted(rows, key=lambda row: -row[2])


def titles(computed: Sequence[Computed]) -> list[str]:
    """Return, for each group, the title of the part in which it is summed."""
    keys = [(_alike(one.module), one.kind) for one in computed]
    names, counts = _short_names([module for module, _ in keys]), Counter(keys)
    return [_title(kind, names[module], counts[module, kind]) for module, kind in keys]


def _alike(module: str) -> str:
    """Return a module's path with ``*`` for what numbers its siblings: whole names that are numbers, and
    numbers at the end of a name that is not the last (``layer3.1.conv2`` becomes ``layer*.*.conv2``)."""
    *outer, last = module.split(".")
    names = [re.sub(r"\d+$", "*", name) for name in outer]
    return ".".join([*names, "*" if last.isdigit() else last])


def _short_names(modules: Sequence[str]) -> dict[str, str]:
    """Return each path without what all have in common, and without the blocks around it if nothing else has
    the same end."""
    inside = any(module.startswith(f"{ROOT}.") for module in modules)
    paths = {m: m.split(".") for m in dict.fromkeys(modules) if m and (m != ROOT or inside)}
    common = 0
    while all(len(path) > common for path in paths.values()) and (
        len({path[common] for path in paths.values()}) == 1 < len(paths)
    ):
        common += 1
    found = {"": "", ROOT: ""}
    tails = {module: _tail(path) for module, path in paths.items()}
    for module, path in paths.items():
        tail = tails[module]
        unique = tail and sum(1 for other in tails.values() if other == tail) == 1
        found[module] = tail if unique else ".".join(path[common:])
    return found


def _tail(path: Sequence[str]) -> str:
    """Return what follows the last numbered name of a path; "" if nothing is numbered, or nothing follows."""
    numbered = [i for i, name in enumerate(path) if name.endswith("*")]
    return ".".join(path[numbered[-1] + 1 :]) if numbered else ""


def _title(kind: str, module: str, count: int) -> str:
    words = f"{kind} {module}".rstrip()
    return f"{words} ({count} ×)" if count > 1 else words


# -- the parts of a step --------------------------------------------------------------------------------


def waits_of(point: Point) -> dict[str, float]:
    """Return the seconds of a step by key: computing, waiting for communication, for the host, and idle
    otherwise."""
    # A place of a pipeline is idle while it waits for others, too.
    host_s = 0.0
    if point.host_bound:
        host_s = min(point.idle_s, point.host_s - point.compute_s - point.exposed_s)
    return {
        COMPUTING: point.compute_s,
        WAITING: point.exposed_s,
        HOST: host_s,
        IDLE: max(point.idle_s - host_s, 0.0),
    }


def idle_title(point: Point) -> str:
    """Say what a device waits for if it waits neither for a link nor for its host."""
    if point.pipeline is not None:
        return "idle time of the pipeline, in which its busiest place waits for others"
    return "waiting for other devices"


def step_parts(
    exploration: Exploration,
    index: int,
    computed: Sequence[Computed] | None,
    beside: Mapping[str, float],
    timeline: Sequence[TimelineEvent],
) -> tuple[Part, ...]:
    """Return the parts of the step of point ``index`` of ``all_points``, the longest first; they add up to
    it.

    Args:
        computed: what the groups of operators compute on the busiest device; None if that is not known.
        beside: the seconds that this device computes beside them, by title.
        timeline: the step's timeline; it shows which links are waited for.
    """
    point = exploration.all_points[index]
    step_s = point.time_s or 1.0
    rows: list[tuple[str, str, float, int]] = []
    if computed is None:
        rows.append((COMPUTING, "computing", point.compute_s, 0))
    else:
        rows += [(COMPUTING, title, seconds, count) for title, count, seconds in summed(computed)]
        rows += [(COMPUTING, title, seconds, 0) for title, seconds in beside.items()]
    waits = waits_of(point)
    links = waiting_by_links(exploration, index, timeline) or (("communication", point.exposed_s),)
    rows += [(WAITING, f"waiting for {title}", seconds, 0) for title, seconds in links]
    rows.append((HOST, "waiting for the host that issues the work", waits[HOST], 0))
    rows.append((IDLE, idle_title(point), waits[IDLE], 0))
    parts = [Part(key, title, s, s / step_s, n) for key, title, s, n in rows if s > ROUNDING * step_s]
    return tuple(sorted(parts, key=lambda part: -part.seconds))


def shown_parts(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Return the parts that a table names, and a row for the other operators; they have the same sum."""
    operators = [part for part in parts if part.count]
    named = [part for part in operators[:MOST_NAMED] if part.share >= _LEAST_NAMED]
    rest = operators[len(named) :]
    if len(rest) == 1:  # a row of its own takes no more room
        named, rest = operators, []
    shown = [part for part in parts if not part.count or part in named]
    if rest:
        count = sum(part.count for part in rest)
        title = f"other operators ({count})" if named else f"operators ({count})"
        seconds, share = sum(part.seconds for part in rest), sum(part.share for part in rest)
        shown.append(Part(COMPUTING, title, seconds, share, count))
    return tuple(shown)


def largest_words(parts: Sequence[Part], most: int = 1, only: Callable[[Part], bool] | None = None) -> str:
    """Name the largest parts with their shares of the step: ``linear mlp.c_fc (12 ×), 30 %``; "" without any.

    Args:
        only: the parts to consider; all by default.
    """
    told = [part for part in parts if only is None or only(part)]
    words = [
        f"{part.title}, {100 * part.share:.0f} %" for part in told[:most] if part.share >= _LEAST_NAMED / 2
    ]
    return "; ".join(words)


# -- links that are waited for --------------------------------------------------------------------------


def waiting_by_links(
    exploration: Exploration, index: int, timeline: Sequence[TimelineEvent]
) -> tuple[tuple[str, float], ...]:
    """Return (links and axes in words, seconds waited for) of a sharded plan, the longest first; they add up
    to all that is waited for. Empty for placed plans and pipelines, whose devices wait at different times."""
    point = exploration.all_points[index]
    if point.record is not None or point.exposed_s <= 0:
        return ()
    lanes = waited_lanes(timeline)
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
        # Computation that is slower beside collectives counts as computation, and rounding remains: the parts
        # are scaled to what the simulator says is waited for.
        found[f"{links} over {_axes_words(lane)}"] = seconds * point.exposed_s / total
    return tuple(sorted(found.items(), key=lambda item: -item[1]))


def _axes_words(lane: str) -> str:
    names = lane.removeprefix("link ").split("+")
    return f"axis {names[0]}" if len(names) == 1 else f"axes {'+'.join(names)}"


def waited_lanes(timeline: Sequence[TimelineEvent]) -> dict[str, float]:
    """Return, for each lane of links, the seconds in which it sends while nothing is computed; lanes that
    send at the same time divide these seconds."""
    edges: list[tuple[float, int, str]] = []
    for event in timeline:
        if event.duration_s > 0:
            edges += [
                (event.start_s, 1, event.lane),
                (event.start_s + event.duration_s, -1, event.lane),
            ]
    # At the same moment, ends come before beginnings.
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

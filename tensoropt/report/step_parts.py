"""The parts of a step's time: operators summed by module and kind, copies, waiting for links, idle time, ...

The dashboard, the command line and the notebook all show these parts. They add up to the step's duration; if
devices have different loads, to that of the busiest one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tensoropt.cluster import Cluster
from tensoropt.exploration.exploration import Exploration
from tensoropt.plan.point import Point
from tensoropt.plan.recorded import mesh_of
from tensoropt.plan.spent import AGAIN, COPIES, OPTIMIZER, OPTIMIZER_TITLE, RECOMPUTATION, Spent, is_of_group
from tensoropt.sharding.groups import Group
from tensoropt.simulate import recording
from tensoropt.simulate.candidates import link_levels
from tensoropt.units import format_bytes, format_seconds

COMPUTING, WAITING, IDLE, HOST = "computation", "communication", "idle", "host"
_ROUNDING = 1e-9
"""The share of a step below which a part is a rounding error."""
_ROOT = "model"
"""The name that a capture gives the model itself, whose own operators are in no module."""
_MOST_NAMED = 8
"""The most parts that a table names; the others form one row."""
_LEAST_NAMED = 0.01
"""The share of the step from which an operator has a row of its own in a table."""
_KINDS = {
    "linear": "linear", "addmm": "linear", "mm": "linear", "bmm": "matrix product",
    "baddbmm": "matrix product", "matmul": "matrix product", "_grouped_mm": "product of experts",
    "convolution": "convolution", "conv1d": "convolution", "conv2d": "convolution", "conv3d": "convolution",
    "scaled_dot_product_attention": "attention", "layer_norm": "layer norm", "rms_norm": "RMS norm",
    "batch_norm": "batch norm", "group_norm": "group norm", "instance_norm": "instance norm",
    "cross_entropy_loss": "cross entropy", "nll_loss": "cross entropy", "mse_loss": "squared error",
    "lstm": "LSTM", "gru": "GRU",
}  # fmt: skip
"""The names of operators for people, by call; other operators have the name of their call."""


@dataclass(frozen=True)
class Part:
    """A part of a step's time.

    Attributes:
        key: ``computation``, ``communication``, ``idle`` or ``host``.
        title: the part in words, such as operators of one kind in equal modules, or the links of some axes.
        seconds: the part's duration in seconds.
        share: the part's share of the step.
        count: the number of groups of operators in the part; 0 if it has none.
        groups: the names of these groups' rows in the table of operators.
    """

    key: str
    title: str
    seconds: float
    share: float
    count: int = 0
    groups: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """The part with its share of the step: ``linear mlp.c_fc (12 ×), 30 %``."""
        return f"{self.title}, {100 * self.share:.0f} %"


@dataclass(frozen=True)
class Computed:
    """The computation time of one group of operators.

    Attributes:
        module: the path of the group's module; "" if none is known.
        kind: the kind of operator in words, such as ``linear``.
        seconds: the duration in seconds.
        row: the name of the group's row in the table of operators.
    """

    module: str
    kind: str
    seconds: float
    row: str = ""

    @classmethod
    def of(cls, group: Group, spent: Spent, row: str) -> Computed:
        """Return the computation time of a group: its forward and backward, without copies."""
        anchor = group.anchor
        return cls(anchor.module, _kind_of(anchor.target), spent.forward_s + spent.backward_s, row)


def _kind_of(target: str) -> str:
    """Return an operator's kind in words, from its target (``aten.addmm.default``) or name (``addmm_12``)."""
    parts = target.partition(" in stage ")[0].split(".")
    name = parts[1] if len(parts) > 1 else re.sub(r"_\d+$", "", parts[0])
    return _KINDS.get(name) or _KINDS.get(name.removeprefix("native_")) or name.strip("_").replace("_", " ")


# -- summing by module and kind -------------------------------------------------------------------------


def _summed(computed: Iterable[Computed]) -> list[tuple[str, tuple[Computed, ...], float]]:
    """Return (title, groups, seconds) of the groups of each kind in equal modules, the longest first.

    Modules count as equal if their paths differ only in numbers: ``h.0.mlp.c_fc`` and ``h.11.mlp.c_fc``.
    Without modules, as in ONNX files, groups are summed by kind.
    """
    timed = [group for group in computed if group.seconds > 0]
    inside: dict[str, list[Computed]] = {}
    for title, group in zip(_titles(timed), timed, strict=True):
        inside.setdefault(title, []).append(group)
    rows = [(title, tuple(of), sum(g.seconds for g in of)) for title, of in inside.items()]
    return sorted(rows, key=lambda row: -row[2])


def _titles(computed: Sequence[Computed]) -> list[str]:
    keys = [(_alike(group.module), group.kind) for group in computed]
    names, counts = _short_names([module for module, _ in keys]), Counter(keys)
    return [_title(kind, names[module], counts[module, kind]) for module, kind in keys]


def _alike(module: str) -> str:
    """Return a module's path with ``*`` for names that are numbers, and for numbers at the end of names but
    the last (``layer3.1.conv2`` becomes ``layer*.*.conv2``)."""
    *outer, last = module.split(".")
    names = [re.sub(r"\d+$", "*", name) for name in outer]
    return ".".join([*names, "*" if last.isdigit() else last])


def _short_names(modules: Sequence[str]) -> dict[str, str]:
    inside = any(module.startswith(f"{_ROOT}.") for module in modules)
    paths = {m: m.split(".") for m in dict.fromkeys(modules) if m and (m != _ROOT or inside)}
    common = 0
    while all(len(path) > common for path in paths.values()) and (
        len({path[common] for path in paths.values()}) == 1 < len(paths)
    ):
        common += 1
    names = {"": "", _ROOT: ""}
    tails = {module: _tail(path) for module, path in paths.items()}
    for module, path in paths.items():
        tail = tails[module]
        unique = tail and sum(1 for other in tails.values() if other == tail) == 1
        names[module] = tail if unique else ".".join(path[common:])
    return names


def _tail(path: Sequence[str]) -> str:
    numbered = [i for i, name in enumerate(path) if name.endswith("*")]
    return ".".join(path[numbered[-1] + 1 :]) if numbered else ""


def _title(kind: str, module: str, count: int) -> str:
    # A module's name may already contain the kind of operator.
    words = module if module.rpartition(".")[2] == kind else f"{kind} {module}".rstrip()
    return f"{words} ({count} ×)" if count > 1 else words


# -- the parts of a step --------------------------------------------------------------------------------


def waits_of(point: Point) -> dict[str, float]:
    """Return the seconds of a step by what a device does: compute, wait for links or its host, or be idle."""
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


def step_parts(
    exploration: Exploration,
    index: int,
    computed: Sequence[Computed],
    beside: Mapping[str, float],
    timeline: Sequence[recording.TimelineEvent],
) -> tuple[Part, ...]:
    """Return the parts of the step of point ``index`` of ``all_points``, the longest first; they add up to
    the step.

    Args:
        computed: the computation times of the groups of operators on the busiest device.
        beside: the seconds in which this device computes anything else, by title.
        timeline: the step's timeline, from which the waiting for each link is taken.
    """
    point = exploration.all_points[index]
    step_s = point.time_s or 1.0
    rows: list[tuple[str, str, float, tuple[Computed, ...]]] = []
    rows += [(COMPUTING, title, seconds, groups) for title, groups, seconds in _summed(computed)]
    rows += [(COMPUTING, title, seconds, ()) for title, seconds in beside.items()]
    waits = waits_of(point)
    links = _waiting_by_links(exploration, index, timeline) or ((_UNDIVIDED, point.exposed_s),)
    rows += [(WAITING, f"waiting for {title}", seconds, ()) for title, seconds in links]
    rows.append((HOST, "waiting for the host to launch kernels", waits[HOST], ()))
    rows.append((IDLE, point.kind.idle, waits[IDLE], ()))
    parts = [
        Part(key, title, s, s / step_s, len(of), tuple(group.row for group in of))
        for key, title, s, of in rows
        if s > _ROUNDING * step_s
    ]
    return tuple(sorted(parts, key=lambda part: -part.seconds))


def _shown_parts(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Return the parts that have a row in a table; the last row sums up the other operators."""
    operators = [part for part in parts if part.count]
    named = [part for part in operators[:_MOST_NAMED] if part.share >= _LEAST_NAMED]
    rest = operators[len(named) :]
    if len(rest) == 1:  # a row of its own takes no more room
        named, rest = operators, []
    shown = [part for part in parts if not part.count or part in named]
    if rest:
        count = sum(part.count for part in rest)
        title = f"other operators ({count})" if named else f"operators ({count})"
        seconds, share = sum(part.seconds for part in rest), sum(part.share for part in rest)
        shown.append(Part(COMPUTING, title, seconds, share, count, sum((part.groups for part in rest), ())))
    return tuple(shown)


def part_rows(parts: Sequence[Part]) -> list[tuple[str, float, float]]:
    """Return (title, seconds, share of the step) of the parts that have a row in a table."""
    return [(part.title, part.seconds, part.share) for part in _shown_parts(parts)]


# -- links that are waited for --------------------------------------------------------------------------


def _waiting_by_links(
    exploration: Exploration, index: int, timeline: Sequence[recording.TimelineEvent]
) -> tuple[tuple[str, float], ...]:
    """Return (links in words, seconds of waiting for them) by mesh axes, the longest first; they add up to
    all waiting. Links between single devices are left out, as devices wait for them at different times."""
    point = exploration.all_points[index]
    space = exploration.spaces[point.space]
    lanes = {
        lane: seconds
        for lane, seconds in _waited_lanes(timeline).items()
        if set(_axes_of(lane)) <= set(space.mesh.names)
    }
    total = sum(lanes.values())
    if not total or point.exposed_s <= 0:
        return ()
    cluster = Cluster.from_dict(exploration.cluster)
    mesh = mesh_of(cluster, space.mesh.shape, space.mesh.names)
    names = {level.name: level.link.name for level in cluster.levels}
    waits = {}
    for lane, seconds in lanes.items():
        axes = tuple(map(mesh.names.index, _axes_of(lane)))
        levels = link_levels(cluster, mesh, axes)
        links = ", ".join(f"{level} links ({names[level]})" for level in levels)
        # Computation that is slower beside collectives counts as computation, and rounding remains: the parts
        # are scaled to what the simulator says is waited for.
        waits[f"{links} over {_axes_words(lane)}"] = seconds * point.exposed_s / total
    return tuple(sorted(waits.items(), key=lambda item: -item[1]))


def _axes_of(lane: str) -> list[str]:
    return lane.removeprefix("link ").split("+")


def _axes_words(lane: str) -> str:
    names = _axes_of(lane)
    return f"axis {names[0]}" if len(names) == 1 else f"axes {'+'.join(names)}"


def _waited_lanes(timeline: Sequence[recording.TimelineEvent]) -> dict[str, float]:
    """Return, by link lane, the seconds in which it sends while nothing is computed; lanes that send at the
    same time share these seconds."""
    edges: list[tuple[float, int, str]] = []
    for event in timeline:
        if event.duration_s > 0:
            edges += [(event.start_s, 1, event.lane), (event.start_s + event.duration_s, -1, event.lane)]
    # At the same moment, ends come before beginnings.
    edges.sort(key=lambda edge: edge[:2])
    busy: dict[str, int] = {}
    waited: dict[str, float] = {}
    before = 0.0
    for at, change, lane in edges:
        sending = [name for name, count in busy.items() if count and name != recording.COMPUTE]
        if sending and not busy.get(recording.COMPUTE):
            for name in sending:
                waited[name] = waited.get(name, 0.0) + (at - before) / len(sending)
        busy[lane] = busy.get(lane, 0) + change
        before = at
    return {lane: seconds for lane, seconds in waited.items() if seconds > 0}


_MICRO = 1e6
_DEVICE = 1


def _chrome_trace(
    events: Sequence[recording.TimelineEvent],
    memory: Sequence[recording.MemoryAt],
    title: str,
    assumption: str,
) -> dict[str, Any]:
    # Compute first, then links in the order of their first use: sorted() is stable.
    used = dict.fromkeys(sorted((e.lane for e in events), key=lambda lane: lane != "compute"))
    lanes = {lane: number for number, lane in enumerate(used)}
    records: list[dict[str, Any]] = [_named("process_name", 0, f"device ({title})")]
    records += [_named("thread_name", number, lane) for lane, number in lanes.items()]
    records += [
        {
            "name": e.name, "cat": e.phase, "ph": "X", "pid": _DEVICE, "tid": lanes[e.lane],
            "ts": e.start_s * _MICRO, "dur": e.duration_s * _MICRO, "args": {"group": e.group},
        }
        for e in events
    ]  # fmt: skip
    for at in memory:
        sizes = {k: v for k, v in vars(at).items() if k != "time_s"}
        records.append({"name": "memory", "ph": "C", "pid": _DEVICE, "ts": at.time_s * _MICRO, "args": sizes})
    return {"traceEvents": records, "displayTimeUnit": "ms", "otherData": {"overlap": assumption}}


def _named(kind: str, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": _DEVICE, "tid": thread, "args": {"name": name}}


_UNDIVIDED = "communication"
"""The title of waiting for communication if the links are not known."""
_REDUCTION = "gradient reduction"
_BESIDE = (COPIES, RECOMPUTATION, _REDUCTION, OPTIMIZER_TITLE)
"""The parts that take time beside single operators."""


@dataclass(frozen=True)
class Share:
    """The memory and step time of an operator, of a device, or of other work such as the optimizer's.

    Attributes:
        memory_bytes: memory at the peak in bytes. For an operator, only its parameters, gradients and
            optimizer state count.
        compute_s, communication_s: seconds in one step. For an operator, copies and recomputation do not
            count; they are shares of their own.
        idle_s: seconds in which a device waits for other devices or for its host, but not for a link; None
            if the share is not a device's.
    """

    title: str
    memory_bytes: float
    compute_s: float
    communication_s: float
    idle_s: float | None = None


@dataclass(frozen=True, repr=False)
class Detail:
    """The simulated step of one point: its operators, timeline, memory curve and parts.

    Attributes:
        index: the point's index in ``all_points``; its number is one more.
        operators: the durations and memory of each group of operators; for a pipeline, in each stage.
        timeline, memory_curve: the events and the memory of one rank over the step's time.
        step: the point itself, which has the durations of its step.
        parts: the parts of the step, the longest first (:mod:`.step_parts`).
        overlap: the assumed overlap of computation and communication, in words.
        sources: the share of the step's duration by source of the prediction.
        places: memory peak and durations of each device of a placed plan, or of one device of each pipeline
            rank; empty if all devices are alike.
    """

    index: int
    operators: tuple[recording.OperatorRow, ...]
    timeline: tuple[recording.TimelineEvent, ...]
    memory_curve: tuple[recording.MemoryAt, ...]
    step: Point
    overlap: str
    sources: Mapping[str, float]
    parts: tuple[Part, ...] = ()
    places: tuple[Share, ...] = ()

    def __repr__(self) -> str:
        counts = f"{len(self.operators)} operators, {len(self.timeline)} events"
        return f"Detail of point {self.index + 1} ({counts})\n{self.headline()}"

    @property
    def peak(self) -> recording.MemoryAt:
        """The moment of the step at which memory is largest."""
        return max(self.memory_curve, key=lambda at: at.total)

    def shares(self) -> tuple[tuple[Share, ...], tuple[Share, ...]]:
        """Return the shares of the operators, and those of everything else; together they are the step's
        compute, communication and memory peak.

        The times are taken from the timeline, so that nothing is counted twice or left out. In placed plans
        and pipelines no single device has the sums; :attr:`places` has each device's.
        """
        names = {row.group for row in self.operators}
        seconds: dict[str, list[float]] = {}
        for event in self.timeline:
            if event.phase == AGAIN:
                of = RECOMPUTATION
            elif is_of_group(event, names) and not (event.copies and event.is_computing):
                continue  # in its row
            elif event.phase == OPTIMIZER and not event.copies:
                of = OPTIMIZER_TITLE
            else:
                of = COPIES if event.is_computing else _REDUCTION
            seconds.setdefault(of, [0.0, 0.0])[not event.is_computing] += event.duration_s
        operators = tuple(
            Share(
                row.group,
                row.parameters_bytes + row.gradients_bytes + row.state_bytes,
                row.compute_s,
                row.communication_s,
            )
            for row in self.operators
        )
        peak = self.peak
        lasting = peak.parameters + peak.gradients + peak.optimizer
        return operators, (
            *(Share(title, 0.0, *seconds[title]) for title in _BESIDE if title in seconds),
            Share("other state", lasting - sum(share.memory_bytes for share in operators), 0.0, 0.0),
            Share("kept activations", peak.kept, 0.0, 0.0),
            Share("buffers in flight", peak.transient, 0.0, 0.0),
        )

    def trace(self) -> dict[str, Any]:
        """Return the step in Chrome's trace format, which Perfetto opens too."""
        return _chrome_trace(self.timeline, self.memory_curve, f"point {self.index + 1}", self.overlap)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain data, with the point's number and durations instead of the point."""
        names = ("compute_s", "exposed_s", "hidden_s", "idle_s", "host_s")
        step = {"total_s": self.step.time_s, **{name: getattr(self.step, name) for name in names}}
        fields = asdict(replace(self, step=None))  # type: ignore[arg-type]
        return {"point": fields.pop("index") + 1, **fields, "step": step}

    def headline(self) -> str:
        """Return two sentences: on the parts of the step, and on the kinds of tensors at the memory peak."""
        return f"{self._time_words()} {self._memory_words()}"

    def _time_words(self) -> str:
        step = self.step
        share = 100 / (step.time_s or 1.0)
        shares = [f"{share * step.compute_s:.0f} % compute{self._most_of(COMPUTING)}"]
        if step.exposed_s:
            shares.append(f"{share * step.exposed_s:.0f} % waiting for communication{self._most_of(WAITING)}")
        if step.idle_s > 1e-3 * step.time_s:
            waits = step.kind.host_wait if recording.is_host_bound(step) else "idle"
            shares.append(f"{share * step.idle_s:.0f} % {waits}")
        of_whom = " ".join(filter(None, (f"A step of {format_seconds(step.time_s)} is", step.kind.time_of)))
        text = f"{of_whom} {', '.join(shares)}"
        if step.hidden_s > 1e-6 * step.time_s:  # less is rounding
            text += f"; {format_seconds(step.hidden_s)} of communication are hidden"
        return text + "."

    def _most_of(self, key: str) -> str:
        largest = next((part for part in self.parts if part.key == key), None)
        if largest is None or largest.title == f"waiting for {_UNDIVIDED}":
            return ""
        return f" (most of all {largest.words.replace('waiting for ', '')} of the step)"

    def _memory_words(self) -> str:
        peak = self.peak
        sizes = {kind: getattr(peak, kind) for kind in recording.MEMORY_KINDS}
        ordered = sorted(sizes, key=sizes.__getitem__, reverse=True)
        parts = [f"{kind} {100 * sizes[kind] / (peak.total or 1.0):.0f} %" for kind in ordered if sizes[kind]]
        return f"Its tensors peak at {format_bytes(peak.total)}: {', '.join(parts)}."

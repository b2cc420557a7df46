"""An exploration: the frontier of a model on a cluster, every point of which can become a plan.

What is saved suffices to make plans later, without the model and without searching again: per searched
space a catalogue of what each variable's configurations are called, per point their indices.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from tensoropt.costs.variables import Variable, variables
from tensoropt.errors import InfeasibleError, TensorOptError
from tensoropt.frontier import knee
from tensoropt.plan.files import written_together
from tensoropt.plan.plan import (
    CollectiveCount,
    MeshInfo,
    ModelInfo,
    OperatorPlan,
    ParameterPlan,
    Plan,
    Predicted,
    placed_fields,
)
from tensoropt.simulate.recording import MEMORY_KINDS
from tensoropt.units import format_bytes, format_seconds

SCHEMA = "tensoropt.exploration/2"
ADDITIVE_SCHEMA = "tensoropt.exploration/1"
"""Of before points were played in time: their time is the additive one, with nothing on how it came about."""


@dataclass(frozen=True)
class Space:
    """The searched space of one mesh and micro-batch count, by names.

    Attributes:
        mesh: sizes and names of the axes.
        micro_batches: how many.
        groups: per group ``micro`` (label on the micro-batch axis), ``members``, ``parameters`` (graph
            names), ``configurations`` (labels per axis) and ``options`` (per configuration, per option,
            per parameter the stored placement names).
        hubs, shared: per tensor the placement names of each configuration.
        keys: parameter name in the graph -> the model's own name.
        notes: what was heuristic.
        regions: group -> the repeated block it is recomputed with; such a group's index counts its
            configurations once plain, then once more recomputed.
    """

    mesh: MeshInfo
    micro_batches: int
    groups: Mapping[str, Mapping[str, Any]]
    hubs: Mapping[str, Sequence[Sequence[str]]]
    shared: Mapping[str, Sequence[Sequence[str]]]
    keys: Mapping[str, str]
    notes: tuple[str, ...] = ()
    regions: Mapping[str, str] = field(default_factory=dict)

    def position(self, group: str, index: int) -> int:
        """Where in the group's lists configuration ``index`` of a point is."""
        return index % len(self.groups[group]["configurations"])

    def labels(self, group: str, index: int) -> Sequence[str]:
        """Per axis what configuration ``index`` of a group splits."""
        labels: Sequence[str] = self.groups[group]["configurations"][self.position(group, index)]
        return labels

    def recomputed(self, choice: Sequence[int]) -> tuple[str, ...]:
        """The blocks that a point recomputes."""
        found = {
            self.regions[name]: None
            for name, index in zip(self.groups, choice, strict=False)
            if name in self.regions and index >= len(self.groups[name]["configurations"])
        }
        return tuple(found)

    @property
    def variables(self) -> tuple[str, ...]:
        """Order of the indices of a point; a hub and a group may share a tensor's name."""
        return variables(self.groups, self.hubs, self.shared)


@dataclass(frozen=True)
class Point:
    """One strategy of the frontier with its figures; bytes and seconds of one rank and step.

    ``memory_bytes`` and ``time_s`` are the judge's, ``additive_...`` what the search added up.
    ``communication_s`` is all of it: ``exposed_s`` is waited for, ``hidden_s`` runs beside something else;
    ``time_s = compute_s + exposed_s + idle_s``. ``sources``: shares of all these seconds.

    ``exact``: proven that no strategy of any searched space is better in the additive model, faster with no
    more memory or leaner and no slower. ``gap``: by how much a strategy of no more additive memory could be
    faster there, at most (additive time over the bound, less 1); None where nothing is proven. A point that
    the judge prefers though others are better in the additive model has the gap that this is.

    ``placed``: of a placed plan what :mod:`tensoropt.placement.points` keeps of it, instead of indices.
    """

    memory_bytes: float
    time_s: float
    compute_s: float
    communication_s: float
    exposed_s: float
    hidden_s: float
    additive_memory_bytes: float
    additive_time_s: float
    memory: tuple[float, ...]
    space: int
    choice: tuple[int, ...]
    options: tuple[int, ...]
    collectives: tuple[tuple[str, tuple[int, ...], int, int], ...]
    sources: Mapping[str, float]
    exact: bool
    gap: float | None
    planner: str = "frontier"
    idle_s: float = 0.0
    placed: Mapping[str, Any] | None = None

    @property
    def identity(self) -> tuple[Any, ...]:
        """Equal for two points only if they are the same strategy by the same planner."""
        own = json.dumps(self.placed["placed"], sort_keys=True) if self.placed else ""
        return (self.planner, self.space, self.choice, self.options, own)


@dataclass(frozen=True)
class Exploration:
    """The result of :func:`tensoropt.explore`.

    Attributes:
        points: ascending in memory, strictly descending in time.
        spaces: what was searched.
        model, cluster, settings, versions: as in a plan.
        report: facts about the run: operators, groups, coverage, seconds per stage, notes.
        others: what other planners found in the same spaces, each with its planner's name.
        comparison: what every planner asked did, as :mod:`tensoropt.planners.compare` tells it.
        captured: the capture, while in the process that explored; not saved.
        recorded: the operator graph and the costs used (:class:`~tensoropt.plan.recorded.Recorded`); None
            for explorations saved before these were kept.
    """

    points: tuple[Point, ...]
    spaces: tuple[Space, ...]
    model: ModelInfo
    cluster: Mapping[str, Any]
    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    report: Mapping[str, Any]
    others: tuple[Point, ...] = ()
    comparison: tuple[Mapping[str, Any], ...] = ()
    captured: Any = field(default=None, repr=False, compare=False)
    recorded: Any = field(default=None, repr=False, compare=False)

    @property
    def frontier(self) -> tuple[Point, ...]:
        return self.points

    @cached_property
    def all_points(self) -> tuple[Point, ...]:
        """The frontier's points, then what other planners found that is not among them."""
        known = {p.identity for p in self.points}
        return (*self.points, *(p for p in self.others if p.identity not in known))

    @property
    def devices(self) -> int:
        return int(np.prod(self.spaces[0].mesh.shape)) if self.spaces else 0

    # -- choosing ---------------------------------------------------------------------------------

    def index(
        self, *, memory_bytes: float | None = None, time_s: float | None = None, knee_point: bool = False
    ) -> int:
        """The point that fits: fastest within a memory budget, leanest within a time, or the knee.

        Raises:
            InfeasibleError: nothing fits; says what would.
        """
        if knee_point:
            return knee(_Arrays(self.points))
        if memory_bytes is not None:
            fitting = [i for i, p in enumerate(self.points) if p.memory_bytes <= memory_bytes]
            if time_s is not None:
                fitting = [i for i in fitting if self.points[i].time_s <= time_s]
            if not fitting:
                smallest = self.points[0].memory_bytes
                raise InfeasibleError(
                    f"no plan fits {format_bytes(memory_bytes)}"
                    + (f" and {format_seconds(time_s)}" if time_s is not None else "")
                    + f"; the smallest plan needs {format_bytes(smallest)}"
                )
            return fitting[-1]
        if time_s is not None:
            for i, p in enumerate(self.points):
                if p.time_s <= time_s:
                    return i
            raise InfeasibleError(
                f"no plan takes at most {format_seconds(time_s)}; the fastest takes "
                f"{format_seconds(self.points[-1].time_s)}"
            )
        return len(self.points) - 1

    def choose(
        self, *, memory_bytes: float | None = None, time_s: float | None = None, knee: bool = False
    ) -> Plan:
        """A plan: the fastest one, or what the arguments ask for (see :meth:`index`)."""
        return self.plan(self.index(memory_bytes=memory_bytes, time_s=time_s, knee_point=knee))

    def plan(self, index: int) -> Plan:
        """Point ``index`` of :attr:`all_points` as a plan."""
        return self.plan_of(self.all_points[index])

    def plan_of(self, point: Point) -> Plan:
        """A point of one of the spaces as a plan."""
        space = self.spaces[point.space]
        fields = _sharded_fields(space, point) if point.placed is None else placed_fields(point.placed)
        return Plan(
            planner=point.planner,
            model=self.model,
            cluster=dict(self.cluster),
            mesh=space.mesh,
            micro_batches=space.micro_batches,
            optimizer=self.settings["optimizer"],
            predicted=self._predicted(point),
            settings=dict(self.settings),
            versions=dict(self.versions),
            **fields,
        )

    def _predicted(self, point: Point) -> Predicted:
        return Predicted(
            memory_bytes=point.memory_bytes,
            time_s=point.time_s,
            compute_s=point.compute_s,
            communication_s=point.communication_s,
            exposed_s=point.exposed_s,
            hidden_s=point.hidden_s,
            idle_s=point.idle_s,
            additive_time_s=point.additive_time_s,
            additive_memory_bytes=point.additive_memory_bytes,
            memory=dict(zip(MEMORY_KINDS, point.memory, strict=True)),
            sources=dict(point.sources),
            collectives=tuple(
                CollectiveCount(kind=k, axes=tuple(a), bytes=b, count=c) for k, a, b, c in point.collectives
            ),
            exact=point.exact,
            gap=point.gap,
        )

    # -- files ------------------------------------------------------------------------------------

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write ``exploration.json``, ``points.npz``, ``frontier.csv``, ``recorded.json.gz``, or none."""
        from tensoropt.plan.export import write_frontier_csv
        from tensoropt.plan.recorded import FILE

        folder = Path(directory)
        by_space = [[i for i, p in enumerate(self.points) if p.space == s] for s in range(len(self.spaces))]
        arrays: dict[str, np.ndarray] = {}
        for s, members in enumerate(by_space):
            arrays[f"points_{s}"] = np.array(members, dtype=np.int32)
            arrays[f"choice_{s}"] = np.array([self.points[i].choice for i in members], dtype=np.int32)
            arrays[f"options_{s}"] = np.array([self.points[i].options for i in members], dtype=np.int32)
        data = {
            "schema": SCHEMA,
            "model": self.model.model_dump(mode="json"),
            "cluster": dict(self.cluster),
            "settings": dict(self.settings),
            "versions": dict(self.versions),
            "report": dict(self.report),
            "spaces": [_space_to_dict(space) for space in self.spaces],
            "points": [_point_to_dict(point) for point in self.points],
            "others": [vars(point) for point in self.others],
            "comparison": [dict(row) for row in self.comparison],
            "recorded": self.recorded is not None,
        }
        names = ["points.npz", "exploration.json", "frontier.csv", *([FILE] if self.recorded else [])]
        with written_together([folder / name for name in names]) as (packed, described, listed, *kept):
            for path in kept:
                self.recorded.save(path)
            with open(packed, "wb") as file:
                np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
            described.write_text(json.dumps(data) + "\n", encoding="utf-8")
            write_frontier_csv(self, listed)


def _sharded_fields(space: Space, point: Point) -> dict[str, Any]:
    """What of a plan a point's indices say."""
    names = space.mesh.names
    operators, parameters = {}, {}
    position = dict(zip(space.variables, range(len(space.variables)), strict=True))
    for name, group in space.groups.items():
        which = point.choice[position[name]]
        labels = space.labels(name, which)
        operators[name] = OperatorPlan(
            axes=dict(zip(names, labels, strict=True)),
            micro=group["micro"],
            members=tuple(group["members"]),
        )
        homes = group["options"][space.position(name, which)][point.options[position[name]]]
        for parameter, stored in zip(group["parameters"], homes, strict=True):
            parameters[parameter] = ParameterPlan(key=space.keys[parameter], stored=tuple(stored))
    for name, layouts in space.shared.items():
        stored = layouts[point.choice[position[Variable.of_parameter(name)]]]
        parameters[name] = ParameterPlan(key=space.keys[name], stored=tuple(stored))
    hubs = {
        name: tuple(layouts[point.choice[position[Variable.of_hub(name)]]])
        for name, layouts in space.hubs.items()
    }
    return {
        "operators": operators,
        "parameters": parameters,
        "hubs": hubs,
        "recomputed": space.recomputed(point.choice),
    }


class _Arrays:
    """Points as the frontier tools take them."""

    def __init__(self, points: Sequence[Point]):
        self.memory = np.array([p.memory_bytes for p in points])
        self.time = np.array([p.time_s for p in points])


def _space_to_dict(space: Space) -> dict[str, Any]:
    return {
        "mesh": space.mesh.model_dump(mode="json"),
        "micro_batches": space.micro_batches,
        "groups": {k: dict(v) for k, v in space.groups.items()},
        "hubs": dict(space.hubs),
        "shared": dict(space.shared),
        "keys": dict(space.keys),
        "notes": list(space.notes),
        "regions": dict(space.regions),
    }


_INDICES = ("choice", "options")


def _without_indices(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in fields.items() if k not in _INDICES}


def _point_to_dict(point: Point) -> dict[str, Any]:
    return _without_indices(vars(point))


def load_exploration(directory: str | os.PathLike[str]) -> Exploration:
    """Read a saved exploration.

    Raises:
        TensorOptError: the folder holds none, or its files do not fit together.
    """
    folder = Path(directory)
    file = folder / "exploration.json"
    if not file.is_file():
        raise TensorOptError(
            f"{folder} holds no exploration (no exploration.json); run `tensoropt explore` with --out"
        )
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        if data.get("schema") == ADDITIVE_SCHEMA:
            data["points"] = [_from_additive(point) for point in data["points"]]
        elif data.get("schema") != SCHEMA:
            raise TensorOptError(f"{file} has schema {data.get('schema')!r}, not '{SCHEMA}'; explore again")
        spaces = tuple(
            Space(**{**s, "mesh": MeshInfo(**s["mesh"]), "notes": tuple(s["notes"])}) for s in data["spaces"]
        )
        points: list[Point | None] = [None] * len(data["points"])
        with np.load(folder / "points.npz") as arrays:
            for s in range(len(spaces)):
                rows = zip(arrays[f"points_{s}"], arrays[f"choice_{s}"], arrays[f"options_{s}"], strict=True)
                for i, choice, options in rows:
                    points[i] = _point_from_dict(data["points"][i], choice, options)
        if any(p is None for p in points):
            raise TensorOptError(
                f"{folder}: points.npz and exploration.json are of different runs; explore again"
            )
        model = ModelInfo(**data["model"])
    except TensorOptError:
        raise
    except Exception as error:
        raise TensorOptError(
            f"{folder} is damaged ({type(error).__name__}: {error}); explore again"
        ) from error
    recorded = _load_recorded(folder) if data.get("recorded") else None
    return Exploration(
        tuple(p for p in points if p is not None),
        spaces,
        model,
        data["cluster"],
        data["settings"],
        data["versions"],
        data["report"],
        tuple(
            _point_from_dict(_without_indices(o), np.array(o["choice"]), np.array(o["options"]))
            for o in data.get("others", ())
        ),
        tuple(data.get("comparison", ())),
        recorded=recorded,
    )


def _load_recorded(folder: Path) -> Any:
    """The graph and the costs; checked against nothing here but their own form."""
    from tensoropt.plan.recorded import FILE, load_recorded

    if not (folder / FILE).is_file():
        raise TensorOptError(
            f"{folder} has lost its {FILE}; copy it from where it was saved, or explore again"
        )
    return load_recorded(folder / FILE)


def _from_additive(point: Mapping[str, Any]) -> dict[str, Any]:
    waited = {"exposed_s": point["communication_s"], "hidden_s": 0.0}
    return {**point, **waited, "additive_time_s": point["time_s"]}


def _point_from_dict(data: Mapping[str, Any], choice: np.ndarray, options: np.ndarray) -> Point:
    fields = dict(data)
    fields["memory"] = tuple(fields["memory"])
    fields["collectives"] = tuple((k, tuple(a), b, c) for k, a, b, c in fields["collectives"])
    return Point(**fields, choice=tuple(int(c) for c in choice), options=tuple(int(o) for o in options))


Item = TypeVar("Item")


def reduce_points(items: Sequence[Item], costs: Callable[[Item], tuple[float, float]]) -> tuple[Item, ...]:
    """The items no other beats in both (memory, time), ascending in memory; the first of equals."""
    kept: list[Item] = []
    best = float("inf")
    for item in sorted(items, key=costs):
        time_s = costs(item)[1]
        if time_s < best:
            kept.append(item)
            best = time_s
    return tuple(kept)


def unbeaten(points: Sequence[Point]) -> tuple[Point, ...]:
    """The points, of which none is called exact that another one beats in additive memory and time.

    Bounds are right but for rounding, so that a point of one space can lie a rounding above one of another,
    and they say nothing of what is placed. Here the figures themselves are compared, as the CSV shows them.
    """
    order = sorted(range(len(points)), key=lambda i: _additive(points[i]))
    found = list(points)
    best = (float("inf"), float("inf"))  # the least time so far, and the memory it needs
    for i in order:
        memory, time_s = _additive(points[i])
        if best[0] < time_s or (best[0] == time_s and best[1] < memory):
            found[i] = replace(points[i], exact=False)
        if time_s < best[0]:
            best = time_s, memory
    return tuple(found)


def _additive(point: Point) -> tuple[float, float]:
    return point.additive_memory_bytes, point.additive_time_s

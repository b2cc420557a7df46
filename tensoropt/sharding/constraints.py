"""A user's constraints on plans: read from parsed files, and matched with the operators of a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from tensoropt.cluster import Cluster
from tensoropt.errors import TensorOptError, suggest
from tensoropt.graph import Operator
from tensoropt.ops.index_space import NONE
from tensoropt.ops.layouts import PARTIAL, placement_code
from tensoropt.sharding.configurations import MicroBatchRefused, batch_strategies
from tensoropt.sharding.groups import (
    PARTIAL_GRADIENT,
    PASSED_ON,
    WHOLE,
    AxisStrategy,
    Group,
    GroupGraph,
    Label,
)
from tensoropt.sharding.recipes import GATHERED_INPUTS, NOTHING, RECIPES, groups_run_once, recipes_of
from tensoropt.sharding.regions import Region, find_regions

BATCH = "the batch"


class ConstraintError(TensorOptError, ValueError):
    """The error for a constraint that has no effect, contradicts another one or cannot hold."""


class LackingDevicesError(ConstraintError):
    """The error for constraints that no plan on this cluster satisfies, but one on another cluster might."""


Axes = Mapping[str, tuple[str, ...]]
"""Pattern of mesh axis names -> dims that may be split there, or placements of parameters there."""


@dataclass(frozen=True, slots=True)
class Pin:
    """A constraint on operators: the dims that mesh axes may split (``out_features``, ``none``)."""

    name: str
    operators: str
    axes: Axes
    soft: bool = False

    def __str__(self) -> str:
        return f"{self.name} ({self.operators}: {_shown(self.axes)})"


@dataclass(frozen=True, slots=True)
class StoredPin:
    """A constraint on how mesh axes shard parameters between steps: ``S(n)``, ``sharded`` or ``R``."""

    name: str
    parameters: str
    axes: Axes
    soft: bool = False

    def __str__(self) -> str:
        return f"{self.name} ({self.parameters}: {_shown(self.axes)})"


@dataclass(frozen=True, slots=True)
class Together:
    """A constraint that operators split the same dim on every mesh axis, by name or as the batch."""

    name: str
    operators: tuple[str, ...]
    soft: bool = False

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(self.operators)})"


@dataclass(frozen=True, slots=True)
class DevicePin:
    """A constraint on the devices of operators: patterns of device kinds, or device numbers, best first."""

    name: str
    operators: str
    kinds: tuple[str, ...] = ()
    numbers: tuple[int, ...] = ()
    soft: bool = False

    def __str__(self) -> str:
        devices = ", ".join(self.kinds) or f"device {', '.join(map(str, self.numbers))}"
        return f"{self.name} ({self.operators}: {devices})"

    def allowed(self, cluster: Cluster) -> tuple[int, ...]:
        """Return the numbers of allowed devices, best first; within one pattern, GPUs before CPU ranks."""
        if self.numbers:
            return tuple(number for number in self.numbers if number < cluster.device_count)
        of_kinds = (
            number
            for kind in self.kinds
            for number in cluster.best_first
            if fnmatchcase(cluster.devices[number].name, kind)
        )
        return tuple(dict.fromkeys(of_kinds))


@dataclass(frozen=True, slots=True)
class PipelinePin:
    """A constraint on the pipeline.

    Attributes:
        stages: the number of pipeline stages; 1 for no pipeline.
        schedule: the name of the pipeline schedule; None leaves the choice to the search.
        cuts: the first operator or module of each later stage; empty leaves the choice to the search.
    """

    stages: int
    schedule: str | None = None
    cuts: tuple[str, ...] = ()

    def __str__(self) -> str:
        cuts = f", cut at {', '.join(self.cuts)}" if self.cuts else ""
        return f"pipeline ({self.stages} stages, {self.schedule or 'any schedule'}{cuts})"


@dataclass(frozen=True, slots=True)
class RecomputePin:
    """A constraint on the recomputation of repeated blocks.

    Attributes:
        blocks: a pattern of module paths.
        recipe: what to recompute, a key of :data:`~tensoropt.sharding.recipes.RECIPES`, which does not
            constrain gathering again; ``gathered inputs``, to gather inputs again in backward, which does not
            constrain recomputation; or ``none``, which forbids both.
        every: n to recompute every n-th matching block, and none of the others.
    """

    name: str
    blocks: str
    recipe: str
    every: int = 1
    soft: bool = False

    def __str__(self) -> str:
        every = f", one in {self.every}" if self.every > 1 else ""
        return f"{self.name} ({self.blocks}: {self.recipe}{every})"


@dataclass(frozen=True)
class Constraints:
    """All constraints of a file in their order; ``data`` is the parsed file."""

    pins: tuple[Pin, ...] = ()
    stored: tuple[StoredPin, ...] = ()
    together: tuple[Together, ...] = ()
    devices: tuple[DevicePin, ...] = ()
    pipeline: PipelinePin | None = None
    recompute: tuple[RecomputePin, ...] = ()
    data: Mapping[str, Any] = field(default_factory=dict)


def _shown(axes: Axes) -> str:
    return ", ".join(f"{axis}={'|'.join(wanted)}" for axis, wanted in axes.items())


# -- reading ------------------------------------------------------------------------------------------

_SECTIONS = ("pin", "together", "devices", "pipeline", "recompute")


def constraints_from_dict(data: object) -> Constraints:
    """Return the constraints of a parsed file; ConstraintError names the constraint with a wrong field."""
    if not isinstance(data, Mapping):
        raise ConstraintError(f"constraints are a mapping with {', '.join(_SECTIONS)}, not {_kind(data)}")
    _fields("constraints", data, _SECTIONS)
    both = [_pin(name, entry) for name, entry in _entries(data, "pin")]
    pins = tuple(pin for pin in both if isinstance(pin, Pin))
    stored = tuple(pin for pin in both if isinstance(pin, StoredPin))
    tied = [_together(name, entry) for name, entry in _entries(data, "together")]
    devices = [_device_pin(name, entry) for name, entry in _entries(data, "devices")]
    pipeline = _pipeline(data["pipeline"]) if "pipeline" in data else None
    recompute = [_recompute_pin(name, entry) for name, entry in _entries(data, "recompute")]
    if not (pins or stored or tied or devices or pipeline or recompute):
        raise ConstraintError(f"there are no constraints; give at least one under {', '.join(_SECTIONS)}")
    return Constraints(pins, stored, tuple(tied), tuple(devices), pipeline, tuple(recompute), dict(data))


def _entries(data: Mapping[str, Any], section: str) -> Iterable[tuple[str, Any]]:
    entries = data.get(section) or ()
    if isinstance(entries, str) or not isinstance(entries, Sequence):
        raise ConstraintError(f"'{section}' is a list of entries, not {_kind(entries)}")
    return [(f"{section} {number}", entry) for number, entry in enumerate(entries, 1)]


def _pin(name: str, entry: Any) -> Pin | StoredPin:
    _mapping(name, entry)
    if ("operators" in entry) == ("parameters" in entry):
        raise ConstraintError(f"{name}: give one pattern for either 'operators' or 'parameters'")
    what = "operators" if "operators" in entry else "parameters"
    _fields(name, entry, (what, "axes", "soft"))
    given = name, _text(name, entry, what), _axes(name, entry), _soft(name, entry)
    if what == "operators":
        return Pin(*given)
    pin = StoredPin(*given)
    for wanted in (w for choices in pin.axes.values() for w in choices):
        if not _is_stored(wanted):
            raise ConstraintError(
                f"{name}: '{wanted}' is not a way to store a parameter; use S(0) for shards along dim 0, "
                f"sharded for shards along any dim, or R for all of it on every device"
            )
    return pin


def _is_stored(wanted: str) -> bool:
    try:
        return wanted == "sharded" or placement_code(wanted) >= NONE
    except ValueError:
        return False


def _together(name: str, entry: Any) -> Together:
    if isinstance(entry, Mapping):
        _fields(name, entry, ("operators", "soft"))
        return Together(name, _texts(name, entry.get("operators")), _soft(name, entry))
    return Together(name, _texts(name, entry))


def _device_pin(name: str, entry: Any) -> DevicePin:
    _fields(name, entry, ("operators", "kinds", "devices", "soft"))
    if "operators" not in entry:
        raise ConstraintError(f"{name}: 'operators' is missing; give a pattern of operators or modules")
    if ("kinds" in entry) == ("devices" in entry):
        raise ConstraintError(
            f"{name}: give either 'kinds', patterns of device kinds such as 'H100*', or 'devices', numbers "
            "of devices of the cluster; to require both, write two entries"
        )
    operators, soft = _text(name, entry, "operators"), _soft(name, entry)
    kinds = _texts(name, entry["kinds"], "kinds") if "kinds" in entry else ()
    numbers = _numbers(name, entry["devices"]) if "devices" in entry else ()
    return DevicePin(name, operators, kinds, numbers, soft)


def _numbers(name: str, value: Any) -> tuple[int, ...]:
    numbers = [value] if isinstance(value, int) else value
    # ``type is int``, because YAML's true and false pass isinstance(value, int).
    valid = isinstance(numbers, Sequence) and all(type(number) is int and number >= 0 for number in numbers)
    if not valid or not numbers:
        raise ConstraintError(
            f"{name}: 'devices' is the number of a device, or a list of numbers, each at least 0, "
            f"not {_kind(value)}"
        )
    return tuple(dict.fromkeys(numbers))


def _pipeline(entry: Any) -> PipelinePin:
    name = "pipeline"
    _fields(name, entry, ("stages", "schedule", "cuts"))
    stages, schedule = entry.get("stages"), entry.get("schedule")
    if not isinstance(stages, int) or isinstance(stages, bool) or stages < 1:
        raise ConstraintError(f"{name}: 'stages' is a number of at least 1, not {stages!r}")
    if schedule is not None and not isinstance(schedule, str):
        raise ConstraintError(f"{name}: 'schedule' is a schedule's name, such as 1f1b, not {_kind(schedule)}")
    cuts = _texts(name, entry["cuts"], "cuts") if "cuts" in entry else ()
    if stages == 1 and (schedule or cuts):
        raise ConstraintError(f"{name}: one stage is not a pipeline, so it has neither a schedule nor cuts")
    return PipelinePin(stages, schedule, cuts)


def _recompute_pin(name: str, entry: Any) -> RecomputePin:
    _fields(name, entry, ("blocks", "recipe", "every", "soft"))
    for key in ("blocks", "recipe"):
        if key not in entry:
            raise ConstraintError(f"{name}: '{key}' is missing; for example {{blocks: '*', recipe: full}}")
    recipe, every = _text(name, entry, "recipe"), entry.get("every", 1)
    known = (*RECIPES, GATHERED_INPUTS, NOTHING)
    if recipe not in known:
        raise ConstraintError(f"{name}: no recomputation is called '{recipe}'; {suggest(recipe, known)}")
    if type(every) is not int or every < 1:
        raise ConstraintError(f"{name}: 'every' is a number of at least 1, not {_kind(every)}")
    return RecomputePin(name, _text(name, entry, "blocks"), recipe, every, _soft(name, entry))


def _axes(name: str, entry: Mapping[str, Any]) -> Axes:
    axes = entry.get("axes")
    if not isinstance(axes, Mapping) or not axes:
        raise ConstraintError(
            f"{name}: 'axes' gives the dim or storage on each mesh axis, for example {{gpu: batch}}"
        )
    return {str(axis): _texts(name, wanted, f"axes, {axis}") for axis, wanted in axes.items()}


def _soft(name: str, entry: Mapping[str, Any]) -> bool:
    soft = entry.get("soft", False)
    if not isinstance(soft, bool):
        raise ConstraintError(f"{name}: 'soft' is true or false, not {soft!r}")
    return soft


def _text(name: str, entry: Mapping[str, Any], key: str) -> str:
    if not isinstance(entry[key], str) or not entry[key]:
        raise ConstraintError(f"{name}: '{key}' is one pattern, not {_kind(entry[key])}")
    return str(entry[key])


def _texts(name: str, value: Any, key: str = "operators") -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else value
    valid = isinstance(texts, Sequence) and all(isinstance(text, str) and text for text in texts)
    if not valid or not texts:
        raise ConstraintError(f"{name}: '{key}' is a text or a list of texts, not {_kind(value)}")
    return tuple(texts)


def _mapping(name: str, entry: Any) -> None:
    if not isinstance(entry, Mapping):
        raise ConstraintError(f"{name} is a mapping of fields, not {_kind(entry)}")


def _fields(name: str, entry: Any, allowed: Sequence[str]) -> None:
    _mapping(name, entry)
    for key in entry:
        if key not in allowed:
            raise ConstraintError(f"{name} has no field '{key}'; {suggest(str(key), allowed)}")


def _kind(value: object) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {value!r}"[:60]


# -- matching -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Matched:
    """Constraints, with the operators, parameters and blocks of one graph that they apply to.

    Attributes:
        pins: constraints on operators, each with its operators, one per group.
        stored: constraints on parameters, each with their names in the graph.
        together: constraints on operators that split alike, each with the names of their groups.
        batch: group -> the name of its batch dim; empty if an operator mixes samples.
        again: group in a constrained block -> whether it is recomputed.
        gathered_again: group in a constrained block -> whether backward gathers its inputs again.
    """

    constraints: Constraints
    pins: tuple[tuple[Pin, tuple[Operator, ...]], ...]
    stored: tuple[tuple[StoredPin, tuple[str, ...]], ...]
    together: tuple[tuple[Together, tuple[str, ...]], ...]
    notes: tuple[str, ...] = ()
    batch: Mapping[str, str] = field(default_factory=dict)
    again: Mapping[str, bool] = field(default_factory=dict)
    gathered_again: Mapping[str, bool] = field(default_factory=dict)


def match(constraints: Constraints, graph: GroupGraph) -> Matched:
    """Return the operators, parameters and blocks of a graph that the patterns of constraints match.

    Raises:
        ConstraintError: a pattern matches nothing, an operator lacks the dim, or groups share no dim.
    """
    notes: list[str] = []
    pins = []
    for pin in constraints.pins:
        ops = tuple(op for op in _leading(pin, pin.operators, graph) if _has_dims(pin, op, graph, notes))
        if ops:
            pins.append((pin, ops))
    stored = tuple((pin, _parameters(pin, graph)) for pin in constraints.stored)
    tied = []
    batch = _batch_dims(graph) if constraints.together else {}
    for entry in constraints.together:
        groups = _groups(entry, graph)
        if len(groups) > 1 and _share_labels(entry, groups, graph, batch, notes):
            tied.append((entry, groups))
    # Sharding does not use constraints on devices; it only refuses patterns that match nothing.
    for devices in constraints.devices:
        _leading(devices, devices.operators, graph)
    running = [pin for pin in constraints.recompute if pin.recipe != GATHERED_INPUTS]
    gathering = [pin for pin in constraints.recompute if pin.recipe in (GATHERED_INPUTS, NOTHING)]
    again, gathered = (_runs_again(pins, graph, notes) for pins in (running, gathering))
    return Matched(
        constraints, tuple(pins), stored, tuple(tied), tuple(dict.fromkeys(notes)), batch, again, gathered
    )


def _runs_again(pins: Sequence[RecomputePin], graph: GroupGraph, notes: list[str]) -> dict[str, bool]:
    again: dict[str, bool] = {}
    by: dict[str, RecomputePin] = {}
    for pin in sorted(pins, key=lambda pin: pin.soft):
        try:
            blocks = _pinned_blocks(pin, graph)
            for region in blocks:
                if (other := by.get(region.name, pin)) is not pin:
                    raise ConstraintError(
                        f"{pin} and {other} both match {region.name}; narrow one of the patterns"
                    )
        except ConstraintError as refusal:
            if not pin.soft:
                raise
            notes.append(f"given up, as it is soft: {refusal}")
            continue
        for region, once in blocks.items():
            by[region.name] = pin
            again.update({name: name not in once for name in region.groups})
    return again


def _pinned_blocks(pin: RecomputePin, graph: GroupGraph) -> dict[Region, frozenset[str]]:
    regions = find_regions(graph)
    blocks = [region for region in regions if fnmatchcase(region.name, pin.blocks)]
    if not regions:
        raise ConstraintError(f"{pin}: the model has no repeated blocks to recompute; leave the pin out")
    if not blocks:
        names = [region.name for region in regions]
        raise ConstraintError(f"{pin} matches no repeated block; {suggest(pin.blocks, names)}")
    if pin.every > len(blocks):
        raise ConstraintError(
            f"{pin}: only {len(blocks)} blocks match, so one in {pin.every} selects none; give every: "
            f"{len(blocks)} or less"
        )
    pinned: dict[Region, frozenset[str]] = {}
    for number, region in enumerate(blocks, 1):
        pinned[region] = frozenset(region.groups)
        if pin.recipe == GATHERED_INPUTS and number % pin.every == 0:
            pinned[region] = frozenset()
        elif pin.recipe != NOTHING and number % pin.every == 0:
            once = groups_run_once(graph, region, pin.recipe)
            if once is None:
                raise ConstraintError(
                    f"{pin}: the recipe recomputes nothing in {region.name}; use one of "
                    f"{', '.join(recipes_of(graph, region))}"
                )
            pinned[region] = once
    return pinned


def speaks_of(entry: Together | DevicePin, graph: GroupGraph) -> tuple[str, ...]:
    """Return the groups that a constraint's patterns match; ConstraintError if a pattern matches nothing."""
    if isinstance(entry, Together):
        return _groups(entry, graph)
    operators = _leading(entry, entry.operators, graph, cheap=True)
    return tuple(dict.fromkeys(graph.group_of[op.name].name for op in operators))


def _leading(
    constraint: object, pattern: str, graph: GroupGraph, *, cheap: bool = False
) -> tuple[Operator, ...]:
    """Return the operators that a pattern matches, one per group: those that compute; others only if there
    are none. With ``cheap``, data movement counts as computing."""
    ranked: dict[int, dict[str, Operator]] = {}
    for op in graph.atoms.graph.operators:
        if fnmatchcase(op.name, pattern) or fnmatchcase(op.module, pattern):
            group = graph.group_of[op.name]
            # 0: the anchor of a group that computes, 1: a cheap anchor, 2: a follower. Only the lowest rank
            # that the pattern matches is used, so that `*` does not pin every reshape.
            rank = 2 if op is not group.anchor else int(graph.atoms.spaces[op.name].cheap and not cheap)
            # A group has one configuration, so one of its operators represents all.
            ranked.setdefault(rank, {}).setdefault(group.name, op)
    if not ranked:
        operators = graph.atoms.graph.operators
        hint = suggest(pattern, [name for op in operators for name in (op.module, op.name) if name])
        raise ConstraintError(f"{constraint} matches no operator and no module; {hint}")
    return tuple(ranked[min(ranked)].values())


def _parameters(pin: StoredPin, graph: GroupGraph) -> tuple[str, ...]:
    used = {name for name, _ in graph.uses}
    keys = {t.name: t.key or t.name for t in graph.atoms.graph.parameters if t.name in used}
    names = tuple(n for n, key in keys.items() if fnmatchcase(key, pin.parameters))
    if not names:
        raise ConstraintError(f"{pin} matches no parameter; {suggest(pin.parameters, keys.values())}")
    return names


def _has_dims(pin: Pin, op: Operator, graph: GroupGraph, notes: list[str]) -> bool:
    group = graph.group_of[op.name]
    labels = dict.fromkeys(label_of(graph, op, s) for s in group.strategies)
    for axis, wanted in pin.axes.items():
        if not any(accepts(label, w) for label in labels for w in wanted):
            have = ", ".join(dict.fromkeys(label.dim for label in labels))
            text = f"{pin}: {op.name} ({op.target}) cannot be split that way on {axis}; valid: {have}"
            if not pin.soft:
                raise ConstraintError(text)
            notes.append(f"given up, as it is soft: {text}")
            return False
    return True


def _groups(entry: Together, graph: GroupGraph) -> tuple[str, ...]:
    operators = {op.name: op for p in entry.operators for op in _leading(entry, p, graph)}
    if len(operators) < 2:
        raise ConstraintError(f"{entry} applies to {next(iter(operators))} only; name two or more operators")
    return tuple(dict.fromkeys(graph.group_of[name].name for name in operators))


def _batch_dims(graph: GroupGraph) -> Mapping[str, str]:
    try:
        chosen = batch_strategies(graph)
    except MicroBatchRefused:
        return {}
    return {name: s.label.dim for name, s in chosen.items() if s.label.splits}


def _share_labels(
    entry: Together, names: Sequence[str], graph: GroupGraph, batch: Mapping[str, str], notes: list[str]
) -> bool:
    by_name = {g.name: g for g in graph.groups}
    sets = {n: _split_dims(by_name[n]) for n in names}
    if common_words([by_name[n] for n in names], batch) is not None or not any(sets.values()):
        return True
    have = "; ".join(f"{n}: {', '.join(sorted(labels))}" for n, labels in sets.items())
    text = (
        f"{entry}: the operators have no dim in common ({have}); use 'pin' for each of them, or list other "
        "operators"
    )
    if not entry.soft:
        raise ConstraintError(text)
    notes.append(f"given up, as it is soft: {text}")
    return False


def common_words(groups: Sequence[Group], batch: Mapping[str, str]) -> Mapping[str, str] | None:
    """Return group -> its name of the batch dim, if the groups have only the batch dim in common.

    The mapping is empty if the groups have dims of the same name. None means that they share no dim.
    """
    if set.intersection(*map(_split_dims, groups)):
        return {}
    words = {g.name: batch[g.name] for g in groups if g.name in batch}
    return words if len(words) == len(groups) else None


# -- labels -------------------------------------------------------------------------------------------


def _split_dims(group: Group) -> set[str]:
    return {s.label.dim for s in group.strategies if s.label.splits}


def accepts(label: Label, wanted: str) -> bool:
    """Return whether ``wanted`` names a label: in full, by its dim (``rows.1``) or its loop (``rows``)."""
    return wanted in (str(label), label.dim, label.loop)


def label_of(graph: GroupGraph, op: Operator, strategy: AxisStrategy) -> Label:
    """Return the label of a group's strategy in terms of the loops of ``op``, one of the group's
    operators."""
    if op.name == graph.group_of[op.name].name:
        return strategy.label
    choice = strategy.choices[op.name]
    if choice >= 0:
        return Label.parse(graph.atoms.spaces[op.name].dims[choice].name)
    return {NONE: WHOLE, PARTIAL: PASSED_ON}.get(choice, PARTIAL_GRADIENT)


def stored_as(code: int, wanted: str) -> bool:
    """Return whether a parameter's placement ``code`` is as ``wanted``: ``S(n)``, ``sharded`` or ``R``."""
    if wanted == "sharded":
        return code >= 0
    # `R` says where the parameter is stored. Whether its gradient is reduced in backward or in a bucket is
    # left open, so every negative code will do.
    return code == placement_code(wanted) or (wanted == "R" and code < 0)

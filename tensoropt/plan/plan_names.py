"""Plans by the names that people know: ``DP 8 · ZeRO-1 · TP 2 · 3/12 blocks recomputed · 4 micro-batches``.

A name is read off the plan alone: which dim of each operator a mesh axis splits, how parameters are stored.
An axis is called after what it does in most operators, and what it does otherwise in the rest is said with
their share, so that two plans that differ in a few operators have two names.

- *DP*: an axis splits the batch
- *TP*: it splits a dim of weights or heads; with *SP*, what is not split so is split along the sequence
  (Korthikanti et al., arXiv 2205.05198, section 4.2.2)
- *CP*: it splits the sequence, and attention along its queries, with keys and values gathered or sent around
  (*ring*; Liu et al., arXiv 2310.01889), or along its heads between two exchanges (*Ulysses*; Jacobs et al.,
  arXiv 2309.14509). If attention is not split, it is *SP* alone
- *ZeRO-1*, *-2*, *-3*: parameters lie in shards on axes along which they are used whole; gathered and reduced
  once per step, gathered once and reduced in every micro-batch, gathered for each use (Rajbhandari et al., SC
  2020, section 5). With ``n/m`` it is so for n of the m parameters that could be.
- *EP*: experts are split into so many parts (Lepikhin et al., GShard, ICLR 2021), whatever the same axes do
  in other operators; with ``n/m layers`` in n of the m layers of experts
- *PP*: stages of a pipeline, with their schedule
- *inputs gathered again*: copies of activations that backward gathers a second time instead of keeping them
- *LoRA r16*: adapters of that rank are trained, and nothing else; *on nf4*: beside weights of bytes
- *blocks recomputed*: wholly, by a recipe (:mod:`tensoropt.sharding.recipes`), or *in part*
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tensoropt.plan.plan import StagesInfo
from tensoropt.plan.point import Point, by_strategy
from tensoropt.plan.point_records import FULL, IN_PART, StagesRecord, by_recipes
from tensoropt.plan.space import Space
from tensoropt.units import counted_if_any

DATA, TENSOR, SEQUENCE, OTHER, WHOLE, ADDED = range(6)
"""What an operator does on one mesh axis; *added*: it computes the same on all ranks, whose gradients add up,
beside others that split the batch or the sequence."""
_KINDS = ADDED + 1
QUERIES, AROUND, HEADS, UNSPLIT_SEQUENCE = range(_KINDS, _KINDS + 4)
"""Which of these split attention along its queries, and of those, which send keys around; which split it
along its heads; which follow the sequence on other axes, and are whole on this one."""
_COUNTED = UNSPLIT_SEQUENCE + 1
TITLES = {DATA: "DP", TENSOR: "TP", SEQUENCE: "SP", OTHER: "other dims"}
UNSPLIT = ("none", "partial", "partial_grad")
"""Labels of a mesh axis along which an operator splits none of its loops."""
_WEIGHT_LOOPS = frozenset(
    (
        *("out_features", "in_features", "out_channels", "in_channels", "channels", "groups"),
        *("vocabulary", "hidden", "heads", "group", "classes", "experts", "features"),
    )
)
"""Loops of weights, and of what follows them: heads, and the classes of a loss (Megatron's section 3)."""
_QUERIES, _RING, _HEADS = "queries", "ring", ("heads", "group")
"""Loops of attention."""
_EXPERT_LOOPS = frozenset(("experts", "dispatch"))
"""Loops of experts: with all tokens on every rank, and with rows sent to the ranks of their experts."""
_ROWS, _DISPATCH = "rows", "dispatch"
SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "interleaved 1F1B",
    "zero_bubble": "zero bubble",
    "zbv": "ZBV",
}
"""Short titles of pipelines' schedules."""
PLANNER_TITLES = {
    "frontier": "frontier",
    "data_parallel": "data parallel",
    "zero": "ZeRO",
    "megatron": "Megatron",
    "optcnn": "OptCNN",
    "flexflow": "FlexFlow",
    "tofu": "ToFu",
    "galvatron": "Galvatron",
    "gpipe": "GPipe",
    "pipedream_1f1b": "PipeDream 1F1B",
    "dapple": "DAPPLE",
    "alpa": "Alpa",
    "ilp": "0-1 program",
    "m_topo": "m-TOPO",
    "m_etf": "m-ETF",
    "m_sct": "m-SCT",
    "dpos": "DPOS",
    "os_dpos": "OS-DPOS",
    "placer": "Placer",
    "pesto": "Pesto",
    "netsplit": "NetSplit",
    "post": "Post",
    "pesto_extended": "Pesto extended",
}
"""The names of planners in a legend; others appear by their own name."""
HEURISTICS = ("m_topo", "m_etf", "m_sct", "dpos")
"""Planners that put each operator on one device in a single pass, which is quick."""
YOUR_JOB = "your_job_"
"""How the planner of a point begins that a launcher runs today; its name ends with the launcher's."""
OWN = ("frontier", "local_search", "cut_search")
"""Planners that no one published: their plans are not what others are compared with."""
_STAGE_OF = {"held/P": 1, "held": 2}
"""ZeRO's stage by what a stored layout says on the micro-batch axis; else 3."""
JOIN = " · "


FAMILIES = {"placed": "placed", "PP": "PP", "CP": "CP", "SP": "CP", "TP": "TP", "ZeRO": "ZeRO", "DP": "DP"}
"""The families of plans by a word of their names; a plan is of the first that its name has."""
OTHER_FAMILY = "other"


def family(name: str) -> str:
    """Return the family of plans that one belongs to, given its name: ``DP``, ``ZeRO``, ``TP``, ``CP``,
    ``PP``, ``placed``, or ``other``."""
    words = {part.replace("-", " ").split(" ", 1)[0] for part in name.split(JOIN)}
    return next((title for word, title in FAMILIES.items() if word in words), OTHER_FAMILY)


def is_recomputed(name: str) -> bool:
    """Return whether a plan recomputes blocks, given its name."""
    return " recomputed" in name


def short_name(name: str) -> str:
    """Return a plan's name without what most plans of a frontier share or another column says."""
    parts = [re.sub(r" \(.*?\)", "", part) for part in name.split(JOIN)]
    return JOIN.join(part for part in parts if not part.endswith("micro-batches")) or name


def brief_name(name: str) -> str:
    """Return the few words that go beside a point in a picture: of several ZeRO stages the commonest, without
    counts of parameters and without inputs that are gathered again."""
    kept = []
    for part in short_name(name).split(JOIN):
        if part.startswith("ZeRO-"):
            stages = (stage.split(" ") for stage in part.split(", "))
            part = max(stages, key=lambda stage: _share(stage[1]) if len(stage) > 1 else 1.0)[0]
        if not part.endswith("gathered again"):
            kept.append(part.replace(" blocks recomputed", " recomputed").replace(" operators cut", " cut"))
    return JOIN.join(kept) or name


def _share(count: str) -> float:
    some, _, whole = count.partition("/")
    return float(some) / float(whole)


def stage_of(micro: str) -> int:
    """Return ZeRO's stage of a parameter in shards, by what its layout says on the micro-batch axis."""
    return _STAGE_OF.get(micro, 3)


def planner_title(name: str) -> str:
    """Return a planner's name for a legend."""
    if name.startswith(YOUR_JOB):
        return f"your job ({name.removeprefix(YOUR_JOB)})"
    return PLANNER_TITLES.get(name, name.replace("_", " "))


def what_it_does(label: str, batch: str, sequence: str = "") -> int:
    """Return the kind of split that a label means on one axis.

    Args:
        batch: the operator's label on the micro-batch axis.
        sequence: the label with which it follows the sequence; "" if it does not.
    """
    if label in ("none", "partial"):
        return WHOLE
    if label in UNSPLIT:
        return ADDED if label in (batch, sequence) else WHOLE
    # Where rows are sent to their experts, the tokens that they are from are split as well.
    if label.replace(_DISPATCH, _ROWS) == batch:
        return DATA
    # `rows.1@S(0)`: the loop, its atom, and what becomes of the partial sum.
    dim = label.partition("@")[0]
    if dim.partition(".")[0] in _WEIGHT_LOOPS:
        return TENSOR
    return SEQUENCE if dim in (sequence, _QUERIES, _RING) else OTHER


def _counted(label: str, batch: str, sequence: str) -> np.ndarray:
    """Return (_COUNTED,) in which of the counts an operator with this label is."""
    counted, kind = np.zeros(_COUNTED, dtype=int), what_it_does(label, batch, sequence)
    counted[kind] = 1
    counted[QUERIES], counted[AROUND] = label in (_QUERIES, _RING), label == _RING
    counted[HEADS] = label.partition(".")[0] in _HEADS
    counted[UNSPLIT_SEQUENCE] = kind == WHOLE and sequence not in ("", *UNSPLIT)
    return counted


def splits_experts(label: str) -> bool:
    """Return whether an operator's label on an axis says that its experts are split along it."""
    return label.partition("@")[0].partition(".")[0] in _EXPERT_LOOPS


def plan_names(points: Sequence[Point], spaces: Sequence[Space], adapters: str = "") -> tuple[str, ...]:
    """Return the name of every point, in one call because points of a space share most of what is looked
    up.

    Args:
        adapters: what alone is trained, such as ``LoRA r16``; "" if that is all there is.
    """
    names = [""] * len(points)
    of_spaces, records = by_strategy(points)
    for i, record in records.items():
        names[i] = _staged_name(record, spaces[points[i].space])
    for number, rows in of_spaces.items():
        for i, name in zip(rows, _sharded_names([points[i] for i in rows], spaces[number]), strict=True):
            names[i] = name
    return tuple(f"{name}{JOIN}{adapters}" for name in names) if adapters else tuple(names)


def _staged_name(record: StagesRecord, space: Space) -> str:
    stages, shape = record.info.stages, space.mesh.shape[len(record.kind.first_axes) :]
    computing = [
        (name, batch, labels)
        for stage in stages
        for name, (batch, *labels) in stage.groups.items()
        if name in record.operators  # and not what arrives or departs
    ]
    counts = np.zeros((len(shape), _COUNTED), dtype=int)
    for name, batch, labels in computing:
        for axis, label in enumerate(labels):
            counts[axis] += _counted(label, batch, space.sequence.get(name, ""))
    experts = [parts for _, _, labels in computing if (parts := _expert_parts(labels, shape)) > 1]
    of_experts = {
        axis for _, _, labels in computing for axis, label in enumerate(labels) if splits_experts(label)
    }
    outside = [a for a in range(len(shape)) if _main(counts[a]) != TENSOR and a not in of_experts]
    stored = np.zeros(4, dtype=int)
    for stage in stages:
        for layout in stage.stored.values():
            stored[0] += 1
            if any(layout[axis + 1].startswith("S(") for axis in outside):
                stored[stage_of(layout[0])] += 1
    return JOIN.join(
        (
            *(_axes_and_storage(shape, counts, stored) if np.prod(shape) > 1 else ()),
            *_experts(experts, len(experts)),
            *record.recomputing,
            *_schedule(record.info, space),
            *record.placing,
        )
    )


def _schedule(info: StagesInfo, space: Space) -> tuple[str, ...]:
    places = space.mesh.places
    if places == 1:
        return ()
    several = f" ({len(info.stages)} stages)" if len(info.stages) != places else ""
    return (*_micro(space), f"PP {places} {SCHEDULES.get(info.schedule, info.schedule)}{several}")


def _micro(space: Space) -> tuple[str, ...]:
    return (f"{space.micro_batches} micro-batches",) if space.micro_batches > 1 else ()


def _sharded_names(points: Sequence[Point], space: Space) -> Iterator[str]:
    groups, shape = len(space.groups), space.mesh.shape
    choices = np.array([p.choice for p in points], dtype=np.intp).reshape(len(points), -1)
    options = np.array([p.options for p in points], dtype=np.intp).reshape(len(points), -1)
    counts = np.zeros((len(points), len(shape), _COUNTED), dtype=int)
    stored = np.zeros((len(points), 4), dtype=int)
    regions = list(dict.fromkeys(space.regions.values()))
    runs: dict[str, list[np.ndarray]] = {region: [] for region in regions}
    experts: list[np.ndarray] = []
    for place, (name, group) in enumerate(space.groups.items()):
        if place >= choices.shape[1]:
            break
        configurations = len(group["configurations"])
        at = choices[:, place] % configurations
        counted, storage = _tables(group, len(shape), space.sequence.get(name, ""))
        counts += counted[at]
        stored += storage[at, options[:, place]]
        parts = np.array([_expert_parts(labels, shape) for labels in group["configurations"]])
        if (parts > 1).any():
            experts.append(parts[at])
        if name in space.regions:
            runs[space.regions[name]].append(choices[:, place] < configurations)
    # Behind the groups' variables are those of hubs, then those of tied parameters.
    for place, layouts in enumerate(space.shared.values(), groups + len(space.hubs)):
        if place < choices.shape[1]:
            stored += np.array([_of_tied(layout) for layout in layouts])[choices[:, place]]
    # (points, groups of a block) characters.
    written = {
        region: np.where(np.stack(flags, axis=1), ord("1"), ord("0")).astype(np.uint8)
        for region, flags in runs.items()
        if flags
    }
    known: dict[bytes, str] = {}
    for i in range(len(points)):
        # Many points share their first words, and arrays take long to word.
        key = counts[i].tobytes() + stored[i].tobytes()
        if key not in known:
            known[key] = JOIN.join(_axes_and_storage(shape, counts[i], stored[i]))
        once = {region: flags[i].tobytes().decode() for region, flags in written.items()}
        of_point = [int(parts[i]) for parts in experts]
        gathered = counted_if_any(int(options[i, len(space.variables) :].sum()), "input", "{} gathered again")
        again = *_recomputed(once, space), *gathered
        words = (known[key], *_experts(of_point, len(experts)), *again, *_micro(space))
        yield JOIN.join(words)


def _recomputed(once: Mapping[str, str], space: Space) -> Iterator[str]:
    """Yield how many blocks are recomputed, and by which recipe.

    Args:
        once: for each block, whether each of its groups runs once, as in :attr:`Space.recipes`.
    """
    ways = Counter(
        _recipe(flags, space.recipes.get(name, {})) for name, flags in once.items() if "0" in flags
    )
    if ways:
        yield f"{ways.total()}/{len(once)} blocks recomputed{by_recipes(ways)}"


def _recipe(once: str, recipes: Mapping[str, str]) -> str:
    """Return what runs again of a block."""
    if "1" not in once:
        return FULL
    return next((name for name, flags in recipes.items() if flags == once), IN_PART)


def _expert_parts(labels: Sequence[str], shape: Sequence[int]) -> int:
    """Return into how many parts a group's experts are split."""
    return math.prod(size for label, size in zip(labels, shape, strict=True) if splits_experts(label))


def _experts(parts: Sequence[int], layers: int) -> Iterator[str]:
    """Yield ``EP 8``: into how many parts the experts of layers are split.

    Args:
        parts: of each layer; 1 where they are not.
        layers: how many layers have experts.
    """
    split = [count for count in parts if count > 1]
    for count in sorted(set(split)):
        alike = split.count(count)
        yield f"EP {count}" + (f" ({alike}/{layers} layers)" if alike < layers else "")


def _tables(group: Mapping[str, Any], axes: int, sequence: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (configurations, axes, _COUNTED) in which counts a group is, and (configurations, options, 4)
    how many parameters could be stored in shards, and how many are, by ZeRO stage.
    """
    configurations = group["configurations"]
    counted = np.zeros((len(configurations), axes, _COUNTED), dtype=int)
    for c, labels in enumerate(configurations):
        for axis, label in enumerate(labels):
            counted[c, axis] = _counted(label, group["micro"], sequence)
    stored = np.zeros((len(configurations), max(map(len, group["options"]), default=1), 4), dtype=int)
    for c, options in enumerate(group["options"]):
        # Where an axis splits the parameter for its use, shards are no storage of their own.
        labels = configurations[c]
        outside = [a for a in range(axes) if not counted[c, a, TENSOR] and not splits_experts(labels[a])]
        sharded = [
            [any(layout[axis + 1].startswith("S(") for axis in outside) for layout in option]
            for option in options
        ]
        possible = [any(column) for column in zip(*sharded, strict=True)]
        for o, option in enumerate(options):
            stored[c, o, 0] = sum(possible)
            for layout, is_sharded in zip(option, sharded[o], strict=True):
                if is_sharded:
                    stored[c, o, stage_of(layout[0])] += 1
    return counted, stored


def _of_tied(layout: Sequence[str]) -> tuple[int, int, int, int]:
    """Return the same counts for a tied parameter's layout; plain shards may be those of a split use, and are
    left out.
    """
    found = [0, 0, 0, 0]
    in_shards = any(name.startswith("S(") for name in layout[1:])
    if layout[0] in (*_STAGE_OF, "ahead") and in_shards:
        found[0] = found[stage_of(layout[0])] = 1
    elif not in_shards:
        found[0] = 1
    return found[0], found[1], found[2], found[3]


def _main(counts: np.ndarray) -> int:
    """Return the kind of split after which an axis is named; ``counts`` is (_COUNTED,)."""
    # Elementwise operators follow splits of weights under names of dims: they do not name an axis that has
    # any operator of a kind that has a name.
    named = counts[:OTHER] if counts[:OTHER].any() else counts[:WHOLE]
    if named.any():
        return int(np.argmax(named))
    return DATA if counts[ADDED] else WHOLE


def _axes_and_storage(shape: Sequence[int], counts: np.ndarray, stored: np.ndarray) -> Iterator[str]:
    """Yield ``DP 8``, ``ZeRO-1``, ``TP 2``: what the axes of more than one device do, and how parameters are
    stored.
    """
    axes = [(axis, _main(counts[axis])) for axis, size in enumerate(shape) if size > 1]
    if not axes:
        yield "one device"
        return
    yield from (_axis(shape, counts, mine, DATA) for mine in [_of(axes, DATA)] if mine)
    yield from _zero(stored)
    for kind in (SEQUENCE, TENSOR, OTHER):
        yield from (_axis(shape, counts, mine, kind) for mine in [_of(axes, kind)] if mine)
    for axis in _of(axes, WHOLE):
        yield f"{shape[axis]} alike"


def _of(axes: Sequence[tuple[int, int]], kind: int) -> list[int]:
    return [axis for axis, main in axes if main == kind]


def _axis(shape: Sequence[int], counts: np.ndarray, axes: Sequence[int], kind: int) -> str:
    sizes = "×".join(str(shape[axis]) for axis in axes)
    mine = counts[list(axes)]
    queries, around, heads, unsplit_sequence = (int(n) for n in mine[:, QUERIES:].max(axis=0))
    title, left_out = TITLES[kind], {kind}
    by_heads = kind == SEQUENCE and heads > queries
    if kind == SEQUENCE:
        title = "CP" if queries or heads else title
        # What follows the sequence under the name of another dim.
        left_out |= {OTHER}
    along = kind == TENSOR and mine[:, SEQUENCE].all() and not unsplit_sequence
    if along:
        left_out |= {SEQUENCE, OTHER}
    rest = ["Ulysses"] if by_heads else []
    if kind == SEQUENCE and around:
        rest.append("ring" if around == queries else f"ring {around}/{queries}")
    for other in (DATA, TENSOR, SEQUENCE, OTHER):
        most = max((_operators(of, other, kind), int(of[:WHOLE].sum() + of[ADDED])) for of in mine)
        count = most[0] - (heads if by_heads and other == TENSOR else 0)
        if other not in left_out and count > 0:
            rest.append(f"{TITLES[other]} {count}/{most[1]}")
    return f"{title} {sizes}" + (" + SP" if along else "") + (f" ({', '.join(rest)})" if rest else "")


def _operators(counts: np.ndarray, kind: int, main: int) -> int:
    """Return the number of operators of a kind on an axis that is named after another one."""
    # What is added up belongs to the split along the sequence if the axis has that.
    added = counts[ADDED] if kind == DATA and main != SEQUENCE else 0
    return int(counts[kind] + added)


def _zero(stored: np.ndarray) -> Iterator[str]:
    possible = int(stored[0])
    parts = [(stage, int(stored[stage])) for stage in (1, 2, 3) if stored[stage]]
    if len(parts) == 1 and parts[0][1] == possible:
        yield f"ZeRO-{parts[0][0]}"
    elif parts:
        yield ", ".join(f"ZeRO-{stage} {count}/{possible}" for stage, count in parts)

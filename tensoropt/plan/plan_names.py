"""Names of plans in common terms: ``DP 8 · ZeRO-1 · TP 2 · 3/12 blocks recomputed · 4 micro-batches``.

A name is made from the dim that each mesh axis splits in each operator, and from how parameters are stored.
An axis is named after its use in most operators, weighted by their duration; other uses follow with their
share, from 2 % on. Storage is weighted by size (:mod:`tensoropt.plan.graph_facts`; without a saved operator
graph all operators and parameters weigh the same).

- *DP*: the axis splits the batch
- *TP*: the axis splits a dim of weights or heads; with *SP*, it splits the sequence in the other operators
  (Korthikanti et al., arXiv 2205.05198, section 4.2.2)
- *CP*: the axis splits the sequence, and attention along its queries, with keys and values gathered or passed
  around (*ring*; Liu et al., arXiv 2310.01889), or along its heads between two exchanges (*Ulysses*; Jacobs
  et al., arXiv 2309.14509). If attention is not split, the name is *SP* alone
- *ZeRO-1*, *-2*, *-3*: parameters are stored in shards on axes along which operators use them whole. They are
  gathered and reduced once per step (1), gathered once and reduced in every micro-batch (2), or gathered for
  each use (3) (Rajbhandari et al., SC 2020, section 5). A percentage is the share of the bytes that could be
  stored in shards
- *EP*: experts are split into that many parts (Lepikhin et al., GShard, ICLR 2021). Other operators may use
  the same axes otherwise. ``n/m layers`` means that n of the m layers of experts are split so
- *PP*: stages of a pipeline, with their schedule
- *LoRA r16*: only adapters of that rank are trained; *on nf4*: the frozen weights are quantised to that type
- *blocks recomputed*: wholly, *in part*, or the named part (:mod:`tensoropt.sharding.recipes`)
- *alike*: the devices of an axis repeat the same computation. The share of the time in which they do so is
  given if it exceeds that of the use after which the axis is named
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from tensoropt.plan.graph_facts import LEAST_SHARE, Weights
from tensoropt.plan.plan import StagesInfo
from tensoropt.plan.point import Point, by_strategy
from tensoropt.plan.point_records import FULL, IN_PART, LIGHT, StagesRecord, recomputed_words
from tensoropt.plan.space import Space
from tensoropt.units import share_words

DATA, TENSOR, SEQUENCE, OTHER, WHOLE, ADDED = range(6)
"""The uses of a mesh axis by an operator. ``ADDED``: all ranks compute the same and their gradients are
summed, beside operators that split the batch or sequence."""
_KINDS = ADDED + 1
QUERIES, AROUND, HEADS, UNSPLIT_SEQUENCE = range(_KINDS, _KINDS + 4)
"""Further counts of operators: attention split along its queries; such attention with keys passed around
(ring); attention split along its heads; operators that are split along the sequence on other axes only."""
_COUNTED = UNSPLIT_SEQUENCE + 1
_TITLES = {DATA: "DP", TENSOR: "TP", SEQUENCE: "SP", OTHER: "other dims"}
UNSPLIT = ("none", "partial", "partial_grad")
"""The labels of an axis on which an operator splits none of its loops."""
_WEIGHT_LOOPS = frozenset(
    (
        *("out_features", "in_features", "out_channels", "in_channels", "channels", "groups"),
        *("vocabulary", "hidden", "heads", "group", "classes", "experts", "features"),
    )
)
"""The loops of weights, and those that follow from them: heads, a loss's classes (Megatron, section 3)."""
_BATCH_LOOPS = frozenset(("batch", "batch0", "rows", "rows.0", "d0"))
"""The names of loops over the batch, an activation's first dim."""
_QUERIES, _RING, _HEADS = "queries", "ring", ("heads", "group")
"""The names of loops of attention."""
_EXPERT_LOOPS = frozenset(("experts", "dispatch"))
"""The loops over experts: with all tokens on every rank, or with rows sent to their experts' ranks."""
_ROWS, _DISPATCH = "rows", "dispatch"
SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "interleaved 1F1B",
    "zero_bubble": "zero bubble",
    "zbv": "ZBV",
}
"""The short titles of pipeline schedules."""
_PLANNER_TITLES = {
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
    "pesto_extended": "Pesto extended",
}
"""The display names of planners; other planners are shown by their own name."""
HEURISTICS = ("m_topo", "m_etf", "m_sct", "dpos")
"""The planners that place each operator on one device in one quick pass."""
YOUR_JOB = "your_job_"
"""The prefix of the planner name of a user's job; the launcher's name follows."""
OWN = ("frontier", "local_search", "cut_search")
"""This project's own planners, which are not baselines."""
_ALIKE = Weights()
"""The weights without a graph: everything weighs the same."""
_STAGE_OF = {"held/P": 1, "held": 2}
"""The ZeRO stage by the micro-batch entry of a stored placement; 3 for other entries."""
JOIN = " · "


_FAMILIES = {"placed": "placed", "PP": "PP", "CP": "CP", "SP": "CP", "TP": "TP", "ZeRO": "ZeRO", "DP": "DP"}
"""The family of a plan by a word of its name; the first match counts."""
OTHER_FAMILY = "other"


def family(name: str) -> str:
    """Return a plan's family by its name: ``DP``, ``ZeRO``, ``TP``, ``CP``, ``PP``, ``placed``, ``other``."""
    words = {part.replace("-", " ").split(" ", 1)[0] for part in name.split(JOIN)}
    return next((title for word, title in _FAMILIES.items() if word in words), OTHER_FAMILY)


def is_recomputed(name: str) -> bool:
    """Return whether the plan with this name recomputes blocks."""
    return " recomputed" in name


def brief_name(name: str) -> str:
    """Return a plan's name for tables and plots, with one ZeRO stage, without shares and micro-batches."""
    kept = []
    for part in name.split(JOIN):
        part = re.sub(r" \(.*?\)", "", part)
        if part.startswith("ZeRO-"):
            part = max(part.split(", "), key=_percent).partition(" ")[0]
        if not part.endswith("micro-batches"):
            part = re.sub(r"^(\d+)/\1 blocks ", "", part).replace(" blocks recomputed", " recomputed")
            kept.append(part.replace(" operators cut", " cut"))
    return JOIN.join(kept) or name


def _percent(stage: str) -> float:
    return float(stage.split(" ")[1]) if " " in stage else 100.0


def stage_of(micro: str) -> int:
    """Return the ZeRO stage (1 to 3) of a sharded parameter, given the first entry of
    :attr:`ParameterPlan.stored`."""
    return _STAGE_OF.get(micro, 3)


def planner_title(name: str) -> str:
    """Return a planner's name as people write it: ``PipeDream 1F1B`` for ``pipedream_1f1b``."""
    if name.startswith(YOUR_JOB):
        return f"your job ({name.removeprefix(YOUR_JOB)})"
    return _PLANNER_TITLES.get(name, name.replace("_", " "))


def what_it_does(label: str, batch: str, sequence: str = "") -> int:
    """Return how an operator uses a mesh axis: :data:`DATA` if the axis splits the batch, :data:`TENSOR`, ...

    Args:
        label: the name of the loop dim that the axis splits, or ``none``, ``partial``, ...
        batch: the name of the loop dim that micro-batches split; "" if the model cannot be cut into
            micro-batches (batch norm). Then usual names of loops over the batch are recognised.
        sequence: the name of the operator's loop dim over the sequence; "" if it has none.
    """
    if label in ("none", "partial"):
        return WHOLE
    if label in UNSPLIT:
        return ADDED if label in (batch, sequence) else WHOLE
    # Sending rows to their experts splits their tokens as well.
    if label.replace(_DISPATCH, _ROWS) == batch:
        return DATA
    # `rows.1@S(0)`: the loop, its atom, and the placement of the reduced partial sum.
    dim = label.partition("@")[0]
    if not batch and dim in _BATCH_LOOPS and dim != sequence:
        return DATA
    if dim.partition(".")[0] in _WEIGHT_LOOPS:
        return TENSOR
    return SEQUENCE if dim in (sequence, _QUERIES, _RING) else OTHER


@cache
def _counted(label: str, batch: str, sequence: str) -> np.ndarray:
    """Return (_COUNTED,) flags: how an operator uses an axis that splits its loop dim ``label``."""
    counted, kind = np.zeros(_COUNTED, dtype=int), what_it_does(label, batch, sequence)
    counted[kind] = 1
    counted[QUERIES], counted[AROUND] = label in (_QUERIES, _RING), label == _RING
    counted[HEADS] = label.partition(".")[0] in _HEADS
    counted[UNSPLIT_SEQUENCE] = kind == WHOLE and sequence not in ("", *UNSPLIT)
    return counted


def splits_experts(label: str) -> bool:
    """Return whether the loop dim ``label`` that a mesh axis splits in an operator is one over experts."""
    return label.partition("@")[0].partition(".")[0] in _EXPERT_LOOPS


def plan_names(
    points: Sequence[Point], spaces: Sequence[Space], adapters: str = "", weights: Weights = _ALIKE
) -> tuple[str, ...]:
    """Return the names of all plans at once, which is faster, as plans on one mesh share most look-ups.

    Args:
        adapters: the trained adapters, such as ``LoRA r16``; "" if everything is trained.
        weights: the duration of operators and size of parameters, by which small shares are left out.
    """
    names = [""] * len(points)
    of_spaces, records = by_strategy(points)
    for i, record in records.items():
        names[i] = _staged_name(record, spaces[points[i].space], weights)
    for number, rows in of_spaces.items():
        space = spaces[number]
        told = _of_space([points[i] for i in rows], space, weights)
        for i, name in zip(rows, _sharded_names(told), strict=True):
            names[i] = name
    added = f"{JOIN}{adapters}" if adapters else ""
    return tuple(f"{name}{added}" for name in names)


def exceptions(points: Sequence[Point], spaces: Sequence[Space], weights: Weights = _ALIKE) -> np.ndarray:
    """Return (points,) the degree from 0 to 1 to which each plan deviates from its name; 1 for placed plans.

    It is the largest of three shares: of the operators' duration, where an axis has another use than its name
    says; of the parameters' size, stored otherwise than most; and, except in pipelines, of blocks, recomputed
    otherwise than most.
    """
    shares = np.ones(len(points))
    of_spaces, records = by_strategy(points)
    for i, record in records.items():
        if not record.placing:
            counts, stored, _ = _of_stages(record, spaces[points[i].space], weights)
            shares[i] = max(_other_way(counts[None]).max(initial=0.0), _stored_otherwise(stored[None])[0])
    for number, rows in of_spaces.items():
        told = _of_space([points[i] for i in rows], spaces[number], weights)
        split = [axis for axis, size in enumerate(spaces[number].mesh.shape) if size > 1]
        otherwise = _other_way(told.counts[:, split]).max(axis=1, initial=0.0)
        alike = [max(ways.values(), default=0) / max(len(told.once), 1) for ways in told.ways()]
        again = 1.0 - np.array(alike) if told.once else np.zeros(len(rows))
        shares[rows] = np.maximum(np.maximum(otherwise, _stored_otherwise(told.stored)), again)
    return shares


def _stored_otherwise(stored: np.ndarray) -> np.ndarray:
    """Return (points,) the share of the parameters' size that is not stored in the most common way."""
    possible, shards = stored[:, 0], stored[:, 1:]
    ways = np.concatenate([shards, (possible - shards.sum(axis=1))[:, None]], axis=1)
    return 1.0 - np.divide(ways.max(axis=1), possible, out=np.ones_like(possible), where=possible > 0)


def _other_way(counts: np.ndarray) -> np.ndarray:
    """Return (points, axes) the share of the operators' duration for which an axis has neither the use after
    which it is named nor one that goes with that use."""
    named = counts[..., :OTHER]
    named = np.where(named.any(axis=-1, keepdims=True), named, counts[..., OTHER : OTHER + 1])
    main = named.argmax(axis=-1)
    total = counts[..., :_KINDS].sum(axis=-1)
    along = (main == TENSOR) & _is_along(counts)
    meant = named.max(axis=-1) + counts[..., WHOLE] + counts[..., ADDED]
    meant += np.where((main == SEQUENCE) | along, counts[..., OTHER], 0.0)
    meant += np.where(along, counts[..., SEQUENCE], 0.0)
    by_heads = (main == SEQUENCE) & (counts[..., HEADS] > counts[..., QUERIES])
    meant += np.where(by_heads, counts[..., HEADS], 0.0)
    return 1.0 - np.divide(np.minimum(meant, total), total, out=np.ones_like(total), where=total > 0)


def _of_stages(
    record: StagesRecord, space: Space, weights: Weights
) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Return the weights of operators by axis and use (axes, _COUNTED), the weight of all parameters that can
    be sharded followed by the weights of those in each ZeRO stage (4,), and the number of parts into which
    each expert layer is split. Without a saved graph, all weigh 1."""
    stages, shape = record.info.stages, space.mesh.shape[len(record.kind.first_axes) :]
    counts, of_experts, experts = np.zeros((len(shape), _COUNTED)), set[int](), list[int]()
    for stage in stages:
        for name, (batch, *labels) in stage.groups.items():
            if name in record.operators:  # skips received and sent tensors
                weight = weights.of_operators(record.operators[name].members or (name,))
                for axis, label in enumerate(labels):
                    counts[axis] += weight * _counted(label, batch, space.sequence.get(name, ""))
                    of_experts |= {axis} if splits_experts(label) else set()
                experts += [parts for parts in [_expert_parts(labels, shape)] if parts > 1]
    outside = [a for a in range(len(shape)) if _main(counts[a]) != TENSOR and a not in of_experts]
    stored = np.zeros(4)
    for stage in stages:
        for name, layout in stage.stored.items():
            weight = weights.of_parameter(name)
            stored[0] += weight
            if any(layout[axis + 1].startswith("S(") for axis in outside):
                stored[stage_of(layout[0])] += weight
    return counts, stored, experts


def _staged_name(record: StagesRecord, space: Space, weights: Weights) -> str:
    counts, stored, experts = _of_stages(record, space, weights)
    shape = space.mesh.shape[len(record.kind.first_axes) :]
    return JOIN.join(
        (
            *(_axes_and_storage(shape, counts, stored) if np.prod(shape) > 1 else ()),
            *_experts(experts),
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


@dataclass(frozen=True)
class _OfSpace:
    """The data from which the names of all plans on one mesh are made.

    Attributes:
        counts: (points, axes, _COUNTED) the weight of the operators with each use of each axis.
        stored: (points, 4) the weight of parameters that can be sharded, and of those in each ZeRO stage.
        once: for each block (points, groups of the block) ``0`` if the group is recomputed, otherwise ``1``.
        experts: for each expert layer (points,) the number of parts into which experts are split.
    """

    space: Space
    counts: np.ndarray
    stored: np.ndarray
    once: Mapping[str, np.ndarray]
    experts: Sequence[np.ndarray]

    def ways(self) -> Iterator[Counter[str]]:
        """Yield, for each point, how many blocks recompute which of their parts, or :data:`_NOT_AT_ALL`."""
        known: dict[tuple[str, bytes], str] = {}
        for i in range(len(self.counts)):
            found = Counter[str]()
            for block, flags in self.once.items():
                key = block, flags[i].tobytes()
                if key not in known:
                    known[key] = _recipe(key[1].decode(), self.space.recipes.get(block, {}))
                found[known[key]] += 1
            yield found


def _of_space(points: Sequence[Point], space: Space, weights: Weights) -> _OfSpace:
    groups, shape = len(space.groups), space.mesh.shape
    choices = np.array([p.choice for p in points], dtype=np.intp).reshape(len(points), -1)
    options = np.array([p.options for p in points], dtype=np.intp).reshape(len(points), -1)
    counts, stored = np.zeros((len(points), len(shape), _COUNTED)), np.zeros((len(points), 4))
    runs: dict[str, list[np.ndarray]] = {region: [] for region in dict.fromkeys(space.regions.values())}
    experts: list[np.ndarray] = []
    tables: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
    refused = all(group["micro"] in UNSPLIT for group in space.groups.values())
    for place, (name, group) in enumerate(space.groups.items()):
        if place >= choices.shape[1]:
            break
        configurations = len(group["configurations"])
        at = choices[:, place] % configurations
        batch, along = "" if refused else group["micro"], space.sequence.get(name, "")
        sizes = tuple(weights.of_parameter(parameter) for parameter in group["parameters"])
        # Layers that look alike share tables.
        key = repr((group["configurations"], group["options"], batch, along, sizes))
        if key not in tables:
            tables[key] = _tables(group, shape, batch, along, sizes)
        counted, storage, parts = tables[key]
        counts += weights.of_operators(group["members"]) * counted[at]
        stored += storage[at, options[:, place]]
        if (parts > 1).any():
            experts.append(parts[at])
        if name in space.regions:
            runs[space.regions[name]].append(choices[:, place] < configurations)
    # Variables of groups come first, then hubs, then tied parameters.
    for place, (name, layouts) in enumerate(space.shared.items(), groups + len(space.hubs)):
        if place < choices.shape[1]:
            of_tied = weights.of_parameter(name) * np.array([_of_tied(layout) for layout in layouts])
            stored += of_tied[choices[:, place]]
    once = {
        region: np.where(np.stack(flags, axis=1), ord("1"), ord("0")).astype(np.uint8)
        for region, flags in runs.items()
        if flags
    }
    return _OfSpace(space, counts, stored, once, experts)


def _sharded_names(told: _OfSpace) -> Iterator[str]:
    space, known = told.space, dict[bytes, str]()
    for i, ways in enumerate(told.ways()):
        # Formatting is slow, and many points share their first words.
        key = told.counts[i].tobytes() + told.stored[i].tobytes()
        if key not in known:
            known[key] = JOIN.join(_axes_and_storage(space.mesh.shape, told.counts[i], told.stored[i]))
        experts = _experts([int(parts[i]) for parts in told.experts])
        again = recomputed_words(
            Counter({way: count for way, count in ways.items() if way != _NOT_AT_ALL}), len(told.once)
        )
        yield JOIN.join((known[key], *experts, *again, *_micro(space)))


_NOT_AT_ALL = "not at all"
"""The word for a block that is not recomputed."""


def _recipe(once: str, recipes: Mapping[str, str]) -> str:
    if "0" not in once:
        return _NOT_AT_ALL
    if "1" not in once:
        return FULL
    exact = next((name for name, flags in recipes.items() if flags == once), None)
    light = recipes.get(LIGHT, "")
    if exact is None and light and all(b == "0" for a, b in zip(once, light, strict=True) if a == "0"):
        return LIGHT
    return exact or IN_PART


def _expert_parts(labels: Sequence[str], shape: Sequence[int]) -> int:
    return math.prod(size for label, size in zip(labels, shape, strict=True) if splits_experts(label))


def _experts(parts: Sequence[int]) -> Iterator[str]:
    """Yield ``EP 8`` for each number of parts into which an expert layer is split; ``parts`` has one per
    layer."""
    for count in sorted({*parts} - {1}):
        alike = parts.count(count)
        yield f"EP {count}" + (f" ({alike}/{len(parts)} layers)" if alike < len(parts) else "")


def _tables(
    group: Mapping[str, Any], shape: Sequence[int], batch: str, sequence: str, sizes: Sequence[float]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return three arrays on a group of operators, by configuration (the loop dims that the axes split) and
    option (a way to store its parameters): its use of each axis as flags (configurations, axes, _COUNTED),
    the weight of all shardable parameters and of those in each ZeRO stage (configurations, options, 4), and
    the number of parts into which experts are split (configurations,)."""
    configurations, axes = group["configurations"], len(shape)
    counted = np.zeros((len(configurations), axes, _COUNTED), dtype=int)
    for c, labels in enumerate(configurations):
        for axis, label in enumerate(labels):
            counted[c, axis] = _counted(label, batch, sequence)
    stored = np.zeros((len(configurations), max(map(len, group["options"]), default=1), 4))
    for c, options in enumerate(group["options"]):
        # If an axis splits the parameter's use anyway, its shards are not ZeRO's.
        labels = configurations[c]
        outside = [a for a in range(axes) if not counted[c, a, TENSOR] and not splits_experts(labels[a])]
        sharded = [
            [any(layout[axis + 1].startswith("S(") for axis in outside) for layout in option]
            for option in options
        ]
        possible = [any(column) for column in zip(*sharded, strict=True)]
        for o, option in enumerate(options):
            stored[c, o, 0] = sum(size for size, may in zip(sizes, possible, strict=False) if may)
            for layout, size, is_sharded in zip(option, sizes, sharded[o], strict=False):
                if is_sharded:
                    stored[c, o, stage_of(layout[0])] += size
    return counted, stored, np.array([_expert_parts(labels, shape) for labels in configurations])


def _of_tied(layout: Sequence[str]) -> list[bool]:
    """Return four flags of a tied parameter: whether it can be sharded, and whether it is in ZeRO stage 1, 2
    or 3. Shards that come from split operators do not count."""
    in_shards = any(name.startswith("S(") for name in layout[1:])
    of_zero = in_shards and layout[0] in (*_STAGE_OF, "ahead")
    return [of_zero or not in_shards, *(of_zero and stage_of(layout[0]) == stage for stage in (1, 2, 3))]


def _main(counts: np.ndarray) -> int:
    """Return the use after which an axis is named, given the weight of each use (_COUNTED,)."""
    # Elementwise operators follow splits of weights under names of dims, so they name an axis only if no
    # operator with a named use does.
    named = counts[:OTHER] if counts[:OTHER].any() else counts[:WHOLE]
    if named.any():
        return int(np.argmax(named))
    return DATA if counts[ADDED] else WHOLE


def _axes_and_storage(shape: Sequence[int], counts: np.ndarray, stored: np.ndarray) -> Iterator[str]:
    """Yield ``DP 8``, ``ZeRO-1``, ``TP 2``: the uses of the mesh axes, and how parameters are stored."""
    axes: dict[int, list[int]] = {}
    for axis, size in enumerate(shape):
        if size > 1:
            axes.setdefault(_main(counts[axis]), []).append(axis)
    if not axes:
        yield "one device"
        return
    for kind in (DATA, SEQUENCE, TENSOR, OTHER):
        if kind in axes:
            yield _axis(shape, counts, axes[kind], kind)
        yield from _zero(stored) if kind == DATA else ()
    for axis in axes.get(WHOLE, ()):
        yield f"{shape[axis]} alike"


def _axis(shape: Sequence[int], counts: np.ndarray, axes: Sequence[int], kind: int) -> str:
    sizes = "×".join(str(shape[axis]) for axis in axes)
    mine = counts[list(axes)]
    queries, around, heads = mine[:, QUERIES:UNSPLIT_SEQUENCE].max(axis=0)
    title, left_out = _TITLES[kind], {kind}
    by_heads = kind == SEQUENCE and heads > queries
    if kind == SEQUENCE:
        title = "CP" if queries or heads else title
        # The sequence under another dim's name.
        left_out |= {OTHER}
    along = kind == TENSOR and bool(_is_along(mine).all())
    if along:
        left_out |= {SEQUENCE, OTHER}
    rest = ["Ulysses"] if by_heads else []
    if kind == SEQUENCE and around:
        rest.append("ring" if np.isclose(around, queries) else f"ring {share_words(around / queries)}")
    for other in (DATA, TENSOR, SEQUENCE, OTHER):
        without = heads if by_heads and other == TENSOR else 0.0
        share = max((_spent(of, other, kind) - without) / of[:_KINDS].sum() for of in mine)
        if other not in left_out and share >= LEAST_SHARE:
            rest.append(f"{_TITLES[other]} {share_words(share)}")
    alike = max((of[WHOLE] / of[:_KINDS].sum() for of in mine if of[WHOLE] > of[kind]), default=0.0)
    if alike:
        rest.append(f"alike {share_words(alike)}")
    return f"{title} {sizes}" + (" + SP" if along else "") + (f" ({', '.join(rest)})" if rest else "")


def _is_along(counts: np.ndarray) -> np.ndarray:
    total = counts[..., :_KINDS].sum(axis=-1)
    return (counts[..., SEQUENCE] > 0) & (counts[..., UNSPLIT_SEQUENCE] < LEAST_SHARE * total)


def _spent(counts: np.ndarray, kind: int, main: int) -> float:
    # If the axis splits the sequence, *added* belongs to that.
    added = counts[ADDED] if kind == DATA and main != SEQUENCE else 0.0
    return float(counts[kind] + added)


def _zero(stored: np.ndarray) -> Iterator[str]:
    shares = {stage: stored[stage] / stored[0] for stage in (1, 2, 3) if stored[0]}
    said = {stage: share for stage, share in shares.items() if share >= LEAST_SHARE}
    if len(said) == 1 and max(said.values()) > 1.0 - LEAST_SHARE:
        yield f"ZeRO-{next(iter(said))}"
    elif said:
        yield ", ".join(f"ZeRO-{stage} {share_words(share)}" for stage, share in said.items())

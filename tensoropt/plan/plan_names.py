"""Plans by the names that people know: ``DP 8 · ZeRO-1 · TP 2 · 3/12 blocks recomputed · 4 micro-batches``.

A name is read off the plan alone: which dim of each operator a mesh axis splits, how parameters are stored.
An axis is called after what it does in most operators, and what it does otherwise in the rest is said with
their share, so that two plans that differ in a few operators have two names.

- *DP*: an axis splits the batch
- *TP*: it splits a dim of weights or heads
- *ZeRO-1*, *-2*, *-3*: parameters lie in shards on axes along which they are used whole; gathered and reduced
  once per step, gathered once and reduced in every micro-batch, gathered for each use (Rajbhandari et al., SC
  2020, section 5). With ``n/m`` it is so for n of the m parameters that could be.
- *PP*: stages of a pipeline, with their schedule
- *blocks recomputed*: wholly, by a recipe (:mod:`tensoropt.sharding.recipes`), or *in part*
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tensoropt.plan.plan import StagesInfo
from tensoropt.plan.point import Point, by_strategy
from tensoropt.plan.point_records import StagesRecord
from tensoropt.plan.space import Space

DATA, TENSOR, OTHER, WHOLE = range(4)
"""What an operator does on one mesh axis."""
TITLES = {DATA: "DP", TENSOR: "TP", OTHER: "other dims"}
UNSPLIT = ("none", "partial", "partial_grad")
"""Labels of a mesh axis along which an operator splits none of its loops."""
_WEIGHT_LOOPS = frozenset(
    (
        *("out_features", "in_features", "out_channels", "in_channels", "channels", "groups"),
        *("vocabulary", "hidden", "heads", "group", "classes"),
    )
)
"""Loops of weights, and of what follows them: heads, and the classes of a loss (Megatron's section 3)."""
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
_STAGE_OF = {"held/P": 1, "held": 2}
"""ZeRO's stage by what a stored layout says on the micro-batch axis; else 3."""
JOIN = " · "
FULL = "full"
"""The way of recomputing a block of which nothing runs once."""


def planner_title(name: str) -> str:
    """Return a planner's name for a legend."""
    return PLANNER_TITLES.get(name, name.replace("_", " "))


def what_it_does(label: str, batch: str) -> int:
    """Return the kind of split that a label means on one axis; ``batch`` is the operator's label on the
    micro-batch axis.
    """
    if label == batch and label not in ("none", "partial"):
        return DATA  # also an operator without a batch whose gradients add up over its ranks
    if label in UNSPLIT:
        return WHOLE
    # `rows.1@S(0)`: the loop, its atom, and what becomes of the partial sum.
    return TENSOR if label.partition("@")[0].partition(".")[0] in _WEIGHT_LOOPS else OTHER


def plan_names(points: Sequence[Point], spaces: Sequence[Space]) -> tuple[str, ...]:
    """Return the name of every point, in one call because points of a space share most of what is looked
    up.
    """
    names = [""] * len(points)
    of_spaces, records = by_strategy(points)
    for i, record in records.items():
        names[i] = _staged_name(record, spaces[points[i].space])
    for number, rows in of_spaces.items():
        for i, name in zip(rows, _sharded_names([points[i] for i in rows], spaces[number]), strict=True):
            names[i] = name
    return tuple(names)


def _staged_name(record: StagesRecord, space: Space) -> str:
    stages, shape = record.info.stages, space.mesh.shape[len(record.kind.first_axes) :]
    done = [
        [what_it_does(label, batch) for label in labels]
        for stage in stages
        for name, (batch, *labels) in stage.groups.items()
        if name in record.operators  # and not what arrives or departs
    ]
    counts = _counts(np.array(done, dtype=np.intp).reshape(len(done), len(shape)))
    outside = [axis for axis in range(len(shape)) if _main(counts[axis]) != TENSOR]
    stored = np.zeros(4, dtype=int)
    for stage in stages:
        for layout in stage.stored.values():
            stored[0] += 1
            if any(layout[axis + 1].startswith("S(") for axis in outside):
                stored[_STAGE_OF.get(layout[0], 3)] += 1
    return JOIN.join(
        (
            *(_axes_and_storage(shape, counts, stored) if np.prod(shape) > 1 else ()),
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
    counts = np.zeros((len(points), len(shape), 4), dtype=int)
    stored = np.zeros((len(points), 4), dtype=int)
    regions = list(dict.fromkeys(space.regions.values()))
    runs: dict[str, list[np.ndarray]] = {region: [] for region in regions}
    rows = np.arange(len(points))
    for place, (name, group) in enumerate(space.groups.items()):
        if place >= choices.shape[1]:
            break
        configurations = len(group["configurations"])
        at = choices[:, place] % configurations
        kinds, storage = _tables(group, len(shape))
        for axis in range(len(shape)):
            counts[rows, axis, kinds[at, axis]] += 1
        stored += storage[at, options[:, place]]
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
        yield JOIN.join((known[key], *_recomputed(once, space), *_micro(space)))


def _recomputed(once: Mapping[str, str], space: Space) -> Iterator[str]:
    """Yield how many blocks are recomputed, and by which recipe.

    Args:
        once: for each block, whether each of its groups runs once, as in :attr:`Space.recipes`.
    """
    ways = Counter(
        _recipe(flags, space.recipes.get(name, {})) for name, flags in once.items() if "0" in flags
    )
    if not ways:
        return
    blocks = f"{ways.total()}/{len(once)} blocks recomputed"
    if set(ways) == {FULL}:
        yield blocks
    elif len(ways) == 1:
        yield f"{blocks} ({next(iter(ways))})"
    else:
        yield f"{blocks} ({', '.join(f'{count} {way}' for way, count in ways.most_common())})"


def _recipe(once: str, recipes: Mapping[str, str]) -> str:
    """Return what runs again of a block."""
    if "1" not in once:
        return FULL
    return next((name for name, flags in recipes.items() if flags == once), "in part")


def _tables(group: Mapping[str, Any], axes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (configurations, axes) the kinds of split of a group, and (configurations, options, 4) how many
    parameters could be stored in shards, and how many are, by ZeRO stage.
    """
    configurations = group["configurations"]
    kinds = np.array(
        [[what_it_does(label, group["micro"]) for label in labels] for labels in configurations],
        dtype=np.intp,
    ).reshape(len(configurations), axes)
    stored = np.zeros((len(configurations), max(map(len, group["options"]), default=1), 4), dtype=int)
    for c, options in enumerate(group["options"]):
        # Where an axis splits the parameter for its use, shards are no storage of their own.
        outside = [axis for axis in range(axes) if kinds[c, axis] != TENSOR]
        sharded = [
            [any(layout[axis + 1].startswith("S(") for axis in outside) for layout in option]
            for option in options
        ]
        possible = [any(column) for column in zip(*sharded, strict=True)]
        for o, option in enumerate(options):
            stored[c, o, 0] = sum(possible)
            for layout, is_sharded in zip(option, sharded[o], strict=True):
                if is_sharded:
                    stored[c, o, _STAGE_OF.get(layout[0], 3)] += 1
    return kinds, stored


def _of_tied(layout: Sequence[str]) -> tuple[int, int, int, int]:
    """Return the same counts for a tied parameter's layout; plain shards may be those of a split use, and are
    left out.
    """
    found = [0, 0, 0, 0]
    in_shards = any(name.startswith("S(") for name in layout[1:])
    if layout[0] in (*_STAGE_OF, "ahead") and in_shards:
        found[0] = found[_STAGE_OF.get(layout[0], 3)] = 1
    elif not in_shards:
        found[0] = 1
    return found[0], found[1], found[2], found[3]


def _counts(kinds: np.ndarray) -> np.ndarray:
    """Return (axes, 4) the number of operators with each kind of split; ``kinds`` is (operators, axes)."""
    return np.stack([(kinds == kind).sum(axis=0) for kind in (DATA, TENSOR, OTHER, WHOLE)], axis=1)


def _main(counts: np.ndarray) -> int:
    """Return the kind of split after which an axis is named."""
    # Elementwise operators follow splits of weights under names of dims: they do not name an axis that has
    # any operator of a kind that has a name.
    named = counts[:2] if counts[:2].any() else counts[:3]
    return int(np.argmax(named)) if named.any() else WHOLE


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
    yield from (_axis(shape, counts, mine, TENSOR) for mine in [_of(axes, TENSOR)] if mine)
    yield from (_axis(shape, counts, mine, OTHER) for mine in [_of(axes, OTHER)] if mine)
    for axis in _of(axes, WHOLE):
        yield f"{shape[axis]} alike"


def _of(axes: Sequence[tuple[int, int]], kind: int) -> list[int]:
    return [axis for axis, main in axes if main == kind]


def _axis(shape: Sequence[int], counts: np.ndarray, axes: Sequence[int], kind: int) -> str:
    sizes = "×".join(str(shape[axis]) for axis in axes)
    rest = []
    for other in (DATA, TENSOR, OTHER):
        most = max((int(counts[axis, other]), int(counts[axis, :WHOLE].sum())) for axis in axes)
        if other != kind and most[0]:
            rest.append(f"{TITLES[other]} {most[0]}/{most[1]}")
    return f"{TITLES[kind]} {sizes}" + (f" ({', '.join(rest)})" if rest else "")


def _zero(stored: np.ndarray) -> Iterator[str]:
    possible = int(stored[0])
    parts = [(stage, int(stored[stage])) for stage in (1, 2, 3) if stored[stage]]
    if len(parts) == 1 and parts[0][1] == possible:
        yield f"ZeRO-{parts[0][0]}"
    elif parts:
        yield ", ".join(f"ZeRO-{stage} {count}/{possible}" for stage, count in parts)

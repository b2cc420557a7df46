"""The table of a plan's operators as data: how each is split, what it costs, and the rows below."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tensoropt.exploration.exploration import Exploration
from tensoropt.plan.kinds import PLACE_AXES
from tensoropt.plan.plan import Plan
from tensoropt.plan.plan_names import TENSOR, what_it_does
from tensoropt.report.step_parts import Share
from tensoropt.sharding.groups import Group
from tensoropt.sharding.storage import stored_words

from .point import KIND_TITLES, beside_tensors
from .units import Units

_Json = dict[str, Any]

_LOOP_WORDS = {
    "out_features": "output features",
    "in_features": "input features",
    "out_channels": "output channels",
    "in_channels": "input channels",
    "partial": "partial sums",
    "partial_grad": "partial gradients",
}
"""Display names of dims; others appear under their own name."""


def axes_words(
    configuration: Mapping[str, str], batch: str = "", sizes: Mapping[str, int] | None = None
) -> str:
    """Return ``batch ×2, output features ×4``: the split dims with their numbers of parts.

    Axes that split the same dim are combined, so that two meshes compare; a placed operator shows its device.

    Args:
        configuration: mesh axis -> the dim that it splits, or ``none``.
        batch: how ``configuration`` names the dim that is cut into micro-batches.
        sizes: the sizes of the mesh axes.
    """
    places = [f"{axis} {configuration[axis]}" for axis in PLACE_AXES if axis in configuration]
    split = {axis: label for axis, label in configuration.items() if axis not in PLACE_AXES}
    parts: dict[str, int] = {}
    for axis, label in split.items():
        size = (sizes or {}).get(axis, 1)
        if label == "none":
            continue
        dim = label.partition("@")[0]
        loop, _, atom = dim.partition(".")
        words = "batch" if label == batch else _LOOP_WORDS.get(loop, loop) + (f" {atom}" if atom else "")
        if loop in ("rows", "d1") and label != batch:
            words = f"dim {atom}" if atom else "dim 1"
        elif re.fullmatch(r"d\d+", loop) and label != batch:
            words = f"dim {loop[1:]}"
        parts[words] = parts.get(words, 1) * size
    return ", ".join([*places, *(f"{w} ×{n}" if n > 1 else w for w, n in parts.items())]) or "whole"


def _sizes(exploration: Exploration, row: int) -> dict[str, int]:
    mesh = exploration.spaces[exploration.all_points[row].space].mesh
    return dict(zip(mesh.names, mesh.shape, strict=True))


def operator_rows(exploration: Exploration, row: int, units: Units, detail: Any = None) -> list[_Json]:
    """Return the operators' rows in the model's order, in the page's units.

    ``memory`` is parameters, gradients and optimizer state, which exist during the whole step. ``kept`` is
    what one micro-batch saves for backward. Times are without recomputation.

    Args:
        detail: the point's simulated details; without them, rows show only what the plan contains.
    """
    plan = exploration.plan(row)
    if detail is None:
        return _planned(exploration, row, plan)
    sizes, keys = _sizes(exploration, row), {name: of.key for name, of in plan.parameters.items()}
    return [_detailed(o, plan, sizes, keys, units) for o in detail.operators]


def _planned(exploration: Exploration, row: int, plan: Plan) -> list[_Json]:
    groups = exploration.spaces[exploration.all_points[row].space].groups
    saved_groups, sizes = _groups(exploration), _sizes(exploration, row)
    places = plan.place_of
    rows = []
    for name, operator in plan.operators.items():
        group = saved_groups.get(name)
        own = group.parameters if group else groups[name]["parameters"] if name in groups else ()
        keys = {p: plan.parameters[p].key for p in own if p in plan.parameters}
        stored = [f"{p}: {', '.join(stored_words(plan.parameters[p].stored))}" for p in keys]
        configuration = {**places.get(name, {}), **operator.axes}
        rows.append(
            {
                "group": name,
                "module": group.anchor.module if group else next(iter(keys.values()), "").rpartition(".")[0],
                "axes": axes_words(configuration, operator.micro, sizes),
                "options": option_words(stored, operator.axes, operator.micro, sizes, keys),
                "source": "plan",
            }
        )
    return rows


def _groups(exploration: Exploration) -> dict[str, Group]:
    recorded = exploration.recorded
    return {group.name: group for group in recorded.grouped.groups} if recorded is not None else {}


TOTAL = "total"


def beside_rows(exploration: Exploration, row: int, detail: Any) -> tuple[Share, ...]:
    """Return rows for memory, compute and communication outside of operators, and for the plan's total.

    Empty without details. Placed plans and pipelines have a row per device instead, and a last row with the
    memory of the fullest and the times of the busiest device.
    """
    point = exploration.all_points[row]
    if detail is None:
        return ()
    if detail.places:
        headline = Share(point.kind.headline, point.memory_bytes, point.compute_s, point.communication_s)
        return (*detail.places, headline)
    operators, others = detail.shares()
    further = (Share(KIND_TITLES[kind], size, 0.0, 0.0) for kind, size in beside_tensors(point).items())
    rows = [
        share
        for share in (*others, *further)
        # Rounding residues do not make a row.
        if share.compute_s or share.communication_s or abs(share.memory_bytes) > 0.5
    ]
    columns = zip(
        *((s.memory_bytes, s.compute_s, s.communication_s) for s in (*operators, *rows)), strict=True
    )
    return (*rows, Share(TOTAL, *map(sum, columns)))


def _detailed(o: Any, plan: Plan, sizes: Mapping[str, int], keys: Mapping[str, str], units: Units) -> _Json:
    batch = plan.operators[o.group].micro if o.group in plan.operators else ""
    size, time = units.memory.of, units.time.of
    return {
        "group": o.group,
        "module": o.module,
        "axes": axes_words(o.configuration, batch, sizes),
        "options": option_words(o.options, o.configuration, batch, sizes, keys),
        "memory": _rounded(size(o.parameters_bytes + o.gradients_bytes + o.state_bytes)),
        "compute": _rounded(time(o.compute_s)),
        "copies": _rounded(time(o.copies_s)),
        "communication": _rounded(time(o.communication_s)),
        "kept": _rounded(size(o.kept_bytes)),
        "source": str(o.source),
    }


_STORED = {"held/P": "ZeRO-1", "held": "ZeRO-2", "": "ZeRO-3", "ahead": "ZeRO-3, gathered ahead"}
"""Display names of storage in shards, by the entry of a layout that says when parameters are gathered."""


def option_words(
    options: Iterable[str],
    configuration: Mapping[str, str],
    batch: str,
    sizes: Mapping[str, int],
    keys: Mapping[str, str],
) -> str:
    """Return ``weight, bias: ZeRO-1 ×8``: parameters that are stored in shards although used whole.

    Args:
        options: for each parameter ``name: placement, ...``, with a placement per mesh axis.
        keys: the model's own parameter name by graph name.
    """
    by_words: dict[str, list[str]] = {}
    for option in options:
        name, _, stored = option.partition(": ")
        placements = stored.split(", ")
        parts = 1
        for (axis, label), placement in zip(configuration.items(), placements, strict=False):
            if placement.startswith("S(") and what_it_does(label, batch) != TENSOR:
                parts *= sizes.get(axis, 1)
        if parts > 1:
            way = placements[-1] if len(placements) > len(configuration) else ""
            words = f"{_STORED.get(way, way)} ×{parts}"
            by_words.setdefault(words, []).append(keys.get(name, name).rpartition(".")[2])
    return "; ".join(f"{', '.join(names)}: {words}" for words, names in by_words.items())


def _rounded(figure: float) -> float:
    return float(f"{figure:.3g}")


def columns_of(columns: Sequence[_Json], rows: Sequence[_Json], units: Units) -> list[_Json]:
    """Return the columns with units in their headers. Columns of modules and copies are hidden if empty."""
    unit, time = units.memory.name, units.time.name
    heads = {
        "memory": f"memory, {unit}",
        "compute": f"compute, {time}",
        "copies": f"copies, {time}",
        "communication": f"communication, {time}",
        "kept": f"keeps, {unit}",
    }
    titled = [{**c, "headerName": heads.get(c["field"], c.get("headerName"))} for c in columns]
    filled = {name: any(row.get(name) for row in rows) for name in ("module", "copies")}
    return [{**c, "hide": not filled[c["field"]]} if c["field"] in filled else c for c in titled]


def bottom_rows(shares: Sequence[Share], units: Units) -> list[_Json]:
    """Return the shares outside of operators as rows at the table's bottom; zeros are left blank."""
    unit, time = units.memory, units.time
    return [
        {
            "group": share.title,
            "axes": "" if share.idle_s is None else f"idle {time.text(share.idle_s)}",
            "memory": _rounded(unit.of(share.memory_bytes)) or None,
            "compute": _rounded(time.of(share.compute_s)) or None,
            "communication": _rounded(time.of(share.communication_s)) or None,
        }
        for share in shares
    ]

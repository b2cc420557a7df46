"""The operators of a plan as data: header, one row each with its split and costs, and rows below them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class OperatorRow:
    """An operator group of a plan; sizes in bytes and seconds, None if unknown.

    Attributes:
        memory_bytes: parameters, gradients and optimizer state, allocated for the whole step.
        kept_bytes: bytes saved for backward, of one micro-batch.
        compute_s, communication_s: seconds without recomputation; ``copies_s``: seconds of copies beside
            computing.
    """

    group: str
    module: str
    axes: str
    options: str
    source: str
    memory_bytes: float | None = None
    compute_s: float | None = None
    communication_s: float | None = None
    kept_bytes: float | None = None
    copies_s: float | None = None


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
    """Return ``batch ×2, output features ×4``: the split dims with their numbers of parts, whatever the axes'
    names.

    Axes that split the same dim are combined, so that two meshes compare; a placed operator shows its device.

    Args:
        batch: the operator's label on the micro-batch axis.
        sizes: the sizes of the axes.
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


def operator_rows(exploration: Exploration, row: int, detail: Any = None) -> tuple[OperatorRow, ...]:
    """Return the operators' rows in the model's order.

    Args:
        detail: the point's detail; without it, rows show only what the plan contains.
    """
    plan = exploration.plan(row)
    if detail is None:
        return _planned(exploration, row, plan)
    sizes, keys = _sizes(exploration, row), {name: of.key for name, of in plan.parameters.items()}
    return tuple(_detailed(o, plan, sizes, keys) for o in detail.operators)


def _planned(exploration: Exploration, row: int, plan: Plan) -> tuple[OperatorRow, ...]:
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
            OperatorRow(
                group=name,
                module=group.anchor.module if group else _module_of(list(keys.values())),
                axes=axes_words(configuration, operator.micro, sizes),
                options=option_words(stored, operator.axes, operator.micro, sizes, keys),
                source="plan",
            )
        )
    return tuple(rows)


def _groups(exploration: Exploration) -> dict[str, Group]:
    """Return the operator groups by name, if the graph was saved."""
    recorded = exploration.recorded
    return {group.name: group for group in recorded.grouped.groups} if recorded is not None else {}


TOTAL = "total"


def beside_rows(exploration: Exploration, row: int, detail: Any) -> tuple[Share, ...]:
    """Return rows for the memory, compute and communication outside of operators, and the total, equal to the
    headline.

    Empty without details. Devices with different loads, in placed plans and pipelines, have a row each: the
    headline has the fullest one's memory and the busiest one's seconds.
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


def _detailed(o: Any, plan: Plan, sizes: Mapping[str, int], keys: Mapping[str, str]) -> OperatorRow:
    batch = plan.operators[o.group].micro if o.group in plan.operators else ""
    return OperatorRow(
        group=o.group,
        module=o.module,
        axes=axes_words(o.configuration, batch, sizes),
        options=option_words(o.options, o.configuration, batch, sizes, keys),
        memory_bytes=float(o.parameters_bytes + o.gradients_bytes + o.state_bytes),
        compute_s=float(o.compute_s),
        copies_s=float(o.copies_s),
        communication_s=float(o.communication_s),
        source=str(o.source),
        kept_bytes=float(o.kept_bytes),
    )


_STORED = {"held/P": "ZeRO-1", "held": "ZeRO-2", "": "ZeRO-3", "ahead": "ZeRO-3, gathered ahead"}
"""Display names of sharded storage (not of split uses), by a stored layout's micro-batch entry."""


def option_words(
    options: Iterable[str],
    configuration: Mapping[str, str],
    batch: str,
    sizes: Mapping[str, int],
    keys: Mapping[str, str],
) -> str:
    """Return ``weight, bias: ZeRO-1 ×8``: parameters stored in shards although used whole.

    Args:
        options: ``parameter: placement, ...`` for each parameter, as in details.
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


def _module_of(keys: Sequence[str]) -> str:
    return keys[0].rpartition(".")[0] if keys else ""


_Json = dict[str, Any]


def table_rows(rows: Sequence[OperatorRow], units: Units) -> list[_Json]:
    """Return a row per operator, in the page's units."""
    unit, time = units.memory, units.time
    return [
        {
            "group": o.group,
            "module": o.module,
            "axes": o.axes,
            "options": o.options,
            "memory": _known(unit.of, o.memory_bytes),
            "compute": _known(time.of, o.compute_s),
            "copies": _known(time.of, o.copies_s),
            "communication": _known(time.of, o.communication_s),
            "kept": _known(unit.of, o.kept_bytes),
            "source": o.source,
        }
        for o in rows
    ]


def _known(of: Callable[[float], float], figure: float | None) -> float | None:
    """Return a cell's value, rounded as on the rest of the page; blank without a figure."""
    return None if figure is None else float(f"{of(figure):.3g}")


def columns_of(columns: Sequence[_Json], rows: Sequence[OperatorRow], units: Units) -> list[_Json]:
    """Return the columns with units in their headers; without modules if unknown (ONNX files), without copies
    if none."""
    unit, time = units.memory.name, units.time.name
    heads = {
        "memory": f"memory, {unit}",
        "compute": f"compute, {time}",
        "copies": f"copies, {time}",
        "communication": f"communication, {time}",
        "kept": f"keeps, {unit}",
    }
    titled = [{**c, "headerName": heads.get(c["field"], c.get("headerName"))} for c in columns]
    filled = {"module": any(o.module for o in rows), "copies": any(o.copies_s for o in rows)}
    return [{**c, "hide": not filled[c["field"]]} if c["field"] in filled else c for c in titled]


def bottom_rows(shares: Sequence[Share], units: Units) -> list[_Json]:
    """Return the rows below the operators; blank instead of zero."""
    unit, time = units.memory, units.time
    return [
        {
            "group": share.title,
            "axes": "" if share.idle_s is None else f"idle {time.text(share.idle_s)}",
            "memory": _known(unit.of, share.memory_bytes) or None,
            "compute": _known(time.of, share.compute_s) or None,
            "communication": _known(time.of, share.communication_s) or None,
        }
        for share in shares
    ]

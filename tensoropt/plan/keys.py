"""Keys of plans: two plans have the same key if they do the same, whatever their figures.

A key is 16 hex digits: the hashes of the model, the optimizer, the mesh and all that a plan says of its
operators, parameters and tensors, combined in no order. It follows from a plan file and from a point's
indices alike, so that a point and the plan made from it have the same one, and neither has to keep it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from hashlib import blake2b
from operator import xor
from typing import Any

import numpy as np

from tensoropt.plan.plan import MeshInfo, Plan, plan_kind
from tensoropt.plan.point import Point, by_strategy
from tensoropt.plan.space import Space


def plan_key(plan: Plan) -> str:
    """Return the key of a plan."""
    step = plan.model.fingerprint, plan.optimizer
    return _key(_base(step, plan.mesh, plan.micro_batches), vars(plan))


def point_keys(points: Sequence[Point], spaces: Sequence[Space], step: tuple[str, str]) -> tuple[str, ...]:
    """Return the keys of the plans of some points of these spaces.

    Args:
        step: the fingerprint of the model, and the optimizer.
    """
    keys = [""] * len(points)
    bases = [_base(step, space.mesh, space.micro_batches) for space in spaces]
    of_spaces, records = by_strategy(points)
    for row, record in records.items():
        keys[row] = _key(bases[points[row].space], vars(record))
    for number, rows in of_spaces.items():
        choice = np.array([points[row].choice for row in rows], dtype=int)
        options = np.array([points[row].options for row in rows], dtype=int)
        sharded = _sharded(spaces[number], choice, options) ^ np.uint64(bases[number])
        for row, key in zip(rows, sharded.tolist(), strict=True):
            keys[row] = f"{key:016x}"
    return tuple(keys)


def _base(step: tuple[str, str], mesh: MeshInfo, micro_batches: int) -> int:
    return _hash(("step", step, mesh.shape, mesh.names, mesh.placed, micro_batches))


def _key(base: int, fields: Mapping[str, Any]) -> str:
    return f"{reduce(xor, map(_hash, _said(fields)), base):016x}"


def _said(fields: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    for name, one in fields["operators"].items():
        yield _operator(name, list(one.axes.values()), one.device, one.order, one.backward_order)
    for name, one in fields["parameters"].items():
        yield _parameter(name, one.stored, one.device)
    for name, layout in fields.get("hubs", {}).items():
        yield _hub(name, layout)
    for block in fields["recomputed"]:
        yield _recomputed(block)
    for group in fields.get("once", ()):
        yield _once(group)
    for name in fields.get("gathered_again", ()):
        yield _gathered_again(name)
    stages = fields["stages"]
    for name, own in plan_kind(stages).key.items():
        data = stages.model_dump(mode="json", include=set(own))
        yield name, {field: value for field, value in data.items() if value or field != "kinds"}


def _operator(name: str, labels: Sequence[str], *place: int | None) -> tuple[Any, ...]:
    return "operator", name, labels, place or (None, None, None)


def _parameter(name: str, stored: Sequence[str], device: int | None = None) -> tuple[Any, ...]:
    return "parameter", name, stored, device


def _hub(name: str, layout: Sequence[str]) -> tuple[Any, ...]:
    return "hub", name, layout


def _recomputed(block: str) -> tuple[Any, ...]:
    return "recomputed", block


def _once(group: str) -> tuple[Any, ...]:
    return "once", group


def _gathered_again(tensor: str) -> tuple[Any, ...]:
    return "gathered again", tensor


def _hash(piece: object) -> int:
    text = json.dumps(piece, sort_keys=True, separators=(",", ":"))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def _hashes(pieces: Iterable[object]) -> np.ndarray:
    return np.array([_hash(piece) for piece in pieces], dtype=np.uint64)


def _sharded(space: Space, choice: np.ndarray, options: np.ndarray) -> np.ndarray:
    keys = np.zeros(len(choice), dtype=np.uint64)
    again: dict[str, np.ndarray] = {}
    runs_again: dict[str, np.ndarray] = {}
    for place, (name, group) in enumerate(space.groups.items()):
        configurations = group["configurations"]
        which, option = choice[:, place] % len(configurations), options[:, place]
        keys ^= _hashes(_operator(name, labels) for labels in configurations)[which]
        if group["parameters"]:
            pairs, of_row = np.unique(np.stack([which, option]), axis=1, return_inverse=True)
            stored = [
                zip(group["parameters"], group["options"][configuration][which_option], strict=True)
                for configuration, which_option in pairs.T.tolist()
            ]
            hashes = [reduce(xor, (_hash(_parameter(*one)) for one in layouts)) for layouts in stored]
            keys ^= np.array(hashes, dtype=np.uint64)[of_row.reshape(-1)]
        if name in space.regions:
            block = again.setdefault(space.regions[name], np.zeros(len(choice), dtype=bool))
            runs_again[name] = choice[:, place] >= len(configurations)
            block |= runs_again[name]
    tensors = [_hashes(_hub(name, layout) for layout in layouts) for name, layouts in space.hubs.items()]
    tensors += [_hashes(_parameter(name, one) for one in layouts) for name, layouts in space.shared.items()]
    for place, hashes_of in enumerate(tensors, len(space.groups)):
        keys ^= hashes_of[choice[:, place]]
    for place, name in enumerate(space.moves, len(space.variables)):
        keys ^= np.where(options[:, place] > 0, np.uint64(_hash(_gathered_again(name))), np.uint64(0))
    for name, recomputed in again.items():
        keys ^= np.where(recomputed, np.uint64(_hash(_recomputed(name))), np.uint64(0))
    for name, twice in runs_again.items():
        once = again[space.regions[name]] & ~twice
        keys ^= np.where(once, np.uint64(_hash(_once(name))), np.uint64(0))
    return keys

"""The folder of a saved exploration: what is written there, and how it is read back.

What is saved suffices to make plans later, without the model and without searching again: per searched
space a catalogue of what each variable's configurations are called, per point their indices. The indices,
most of what there is, lie in ``points.npz``; everything else in ``exploration.json``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tensoropt.errors import TensorOptError
from tensoropt.plan.export import write_frontier_csv
from tensoropt.plan.figures import BREAKDOWNS, KEPT
from tensoropt.plan.files import check_size, written_together
from tensoropt.plan.findings import Findings
from tensoropt.plan.plan import MeshInfo, ModelInfo
from tensoropt.plan.point import Point
from tensoropt.plan.space import Space

SCHEMA = "tensoropt.exploration/2"
DESCRIBED, INDICES, LISTED = "exploration.json", "points.npz", "frontier.csv"
RECORDED = "recorded.json.gz"


def write_files(found: Findings, directory: str | os.PathLike[str]) -> None:
    """Write all files of an exploration, or none: :data:`RECORDED` only where its costs could be kept.

    Raises:
        TensorOptError: the folder cannot be written; what was there is kept.
    """
    folder = Path(directory)
    data = {
        "schema": SCHEMA,
        "model": found.model.model_dump(mode="json"),
        "cluster": dict(found.cluster),
        "settings": dict(found.settings),
        "versions": dict(found.versions),
        "report": dict(found.report),
        "spaces": [_space_to_dict(space) for space in found.spaces],
        "points": [_without_indices(_point_to_dict(point)) for point in found.points],
        "others": [_point_to_dict(point) for point in found.others],
        "comparison": [dict(row) for row in found.comparison],
        "recorded": found.recorded is not None,
    }
    names = [INDICES, DESCRIBED, LISTED, *([RECORDED] if found.recorded else [])]
    # Together: indices and figures of two runs would make plans that nobody searched.
    with written_together([folder / name for name in names]) as (packed, described, listed, *kept):
        for path in kept:
            found.recorded.save(path)
        with open(packed, "wb") as file:
            np.savez_compressed(file, **_indices(found))  # type: ignore[arg-type]
        described.write_text(json.dumps(data) + "\n", encoding="utf-8")
        write_frontier_csv(found, listed)


def read_files(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """The fields of a saved exploration, by name.

    Raises:
        TensorOptError: the folder holds none, it is of another version, or its files do not fit together.
    """
    folder = Path(directory)
    file = folder / DESCRIBED
    if not file.is_file():
        raise TensorOptError(
            f"{folder} holds no exploration (no {DESCRIBED}); run `tensoropt explore` with --out"
        )
    try:
        for one in (file, folder / INDICES):
            check_size(one)
        data = json.loads(file.read_text(encoding="utf-8"))
        if data.get("schema") != SCHEMA:
            raise TensorOptError(f"{file} has schema {data.get('schema')!r}, not '{SCHEMA}'; explore again")
        fields: dict[str, Any] = {
            "points": _read_points(folder, data),
            "spaces": tuple(_space_from_dict(space) for space in data["spaces"]),
            "model": ModelInfo(**data["model"]),
            "others": tuple(_point_from_dict(o, o["choice"], o["options"]) for o in data["others"]),
            "comparison": tuple(data["comparison"]),
            **{name: data[name] for name in ("cluster", "settings", "versions", "report")},
        }
        costs_saved = bool(data["recorded"])
    except TensorOptError:
        raise
    # Any damage may surface as any error; the sentence names the folder and the remedy.
    except Exception as error:
        raise TensorOptError(
            f"{folder} is damaged ({type(error).__name__}: {error}); explore again"
        ) from error
    return {**fields, "recorded": _read_recorded(folder) if costs_saved else None}


def _read_points(folder: Path, data: Mapping[str, Any]) -> tuple[Point, ...]:
    """The frontier's points: figures from ``data``, indices from the arrays of their space."""
    points: list[Point | None] = [None] * len(data["points"])
    with np.load(folder / INDICES) as arrays:
        for s in range(len(data["spaces"])):
            rows = zip(arrays[f"points_{s}"], arrays[f"choice_{s}"], arrays[f"options_{s}"], strict=True)
            for i, choice, options in rows:
                points[i] = _point_from_dict(data["points"][i], choice, options)
    if any(point is None for point in points):
        raise TensorOptError(f"{folder}: {INDICES} and {DESCRIBED} are of different runs; explore again")
    return tuple(point for point in points if point is not None)


def _read_recorded(folder: Path) -> Any:
    """The graph and the costs; checked against nothing here but their own form."""
    if not (folder / RECORDED).is_file():
        raise TensorOptError(
            f"{folder} has lost its {RECORDED}; copy it from where it was saved, or explore again"
        )
    from tensoropt.plan.recorded import load_recorded  # brings torch, which figures alone do not need

    return load_recorded(folder / RECORDED)


def _indices(found: Findings) -> dict[str, np.ndarray]:
    """Per space the numbers of its points and their indices: rows of one length, which a file needs."""
    arrays: dict[str, np.ndarray] = {}
    for s in range(len(found.spaces)):
        members = [i for i, point in enumerate(found.points) if point.space == s]
        # Per space, as points of different spaces have different numbers of variables.
        arrays[f"points_{s}"] = np.array(members, dtype=np.int32)
        arrays[f"choice_{s}"] = np.array([found.points[i].choice for i in members], dtype=np.int32)
        arrays[f"options_{s}"] = np.array([found.points[i].options for i in members], dtype=np.int32)
    return arrays


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


def _space_from_dict(data: Mapping[str, Any]) -> Space:
    return Space(**{**data, "mesh": MeshInfo(**data["mesh"]), "notes": tuple(data["notes"])})


def _without_indices(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in fields.items() if k not in ("choice", "options")}


def _point_to_dict(point: Point) -> dict[str, Any]:
    figures = {name: point.figures.get(name) for name, figure in KEPT.items() if figure.part is None}
    fields = {name: value for name, value in vars(point).items() if name != "figures"}
    return figures | {name: getattr(point, name) for name in BREAKDOWNS} | fields


def _point_from_dict(data: Mapping[str, Any], choice: Sequence[int], options: Sequence[int]) -> Point:
    fields = _without_indices(data)
    fields["collectives"] = tuple((k, tuple(a), b, c) for k, a, b, c in fields["collectives"])
    return Point.of(**fields, choice=tuple(map(int, choice)), options=tuple(map(int, options)))

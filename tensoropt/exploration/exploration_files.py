"""Reading and writing the folder of a saved exploration.

The files suffice to make plans later, without the model or a new search: ``points.npz`` has a column per
figure, and each point's indices per searched space; ``strategies.json.gz`` has the meaning of the indices,
and the plans of points without indices; ``exploration.json``, which is small, has the rest.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from tensoropt.errors import TensorOptError
from tensoropt.exploration.export import write_frontier_csv
from tensoropt.files import SETTINGS_FILE, check_size, folder_lock, plain, unpacked, written_together
from tensoropt.plan.findings import Findings
from tensoropt.plan.graph_facts import GraphFacts
from tensoropt.plan.needs import all_needs, device_of
from tensoropt.plan.plan import ModelInfo
from tensoropt.plan.point import Point, by_strategy
from tensoropt.plan.point_records import record_of
from tensoropt.plan.point_table import PointTable, point_arrays, read_points
from tensoropt.plan.space import Space

_SCHEMA = "tensoropt.exploration/4"
_RECORDS_BY_KIND = "tensoropt.exploration/3"
"""Schema with records named after plan kinds; read, and saved as :data:`_SCHEMA`."""
_OLD_SCHEMA = "tensoropt.exploration/2"
"""Schema with points inside :data:`DESCRIBED`; read, and saved as :data:`_SCHEMA`."""
DESCRIBED, POINTS, LISTED = SETTINGS_FILE, "points.npz", "frontier.csv"
STRATEGIES, RECORDED = "strategies.json.gz", "recorded.json.gz"
_SPACES = TypeAdapter(tuple[Space, ...])
_GRAPH = TypeAdapter(GraphFacts | None)


def write_files(findings: Findings, directory: str | os.PathLike[str]) -> None:
    """Write all files of an exploration, or none; :data:`RECORDED` only if its costs can be saved.

    Raises:
        TensorOptError: the folder cannot be written; its old content is kept.
    """
    folder = Path(directory)
    data = {
        "schema": _SCHEMA,
        "model": findings.model.model_dump(mode="json"),
        "cluster": dict(findings.cluster),
        "settings": dict(findings.settings),
        "versions": dict(findings.versions),
        "report": dict(findings.report),
        "points": len(findings.points),
        "others": len(findings.others),
        "comparison": [dict(row) for row in findings.comparison],
        "recorded": findings.recorded is not None,
        "graph": _GRAPH.dump_python(findings.graph_facts, mode="json"),
    }
    rows = (*findings.points, *findings.others)
    strategies = {
        "spaces": findings.spaces,
        "carried": {row: {"record": record.to_data()} for row, record in by_strategy(rows)[1].items()},
    }
    names = [POINTS, STRATEGIES, DESCRIBED, LISTED, *([RECORDED] if findings.recorded else [])]
    # All at once: indices and figures of different runs would make false plans.
    with written_together([folder / name for name in names]) as (packed, named, described, listed, *kept):
        for path in kept:
            findings.recorded.save(path)
        with open(packed, "wb") as file:
            np.savez_compressed(file, **point_arrays(rows, findings.spaces))  # type: ignore[arg-type]
        # Without a timestamp, so that the same exploration gives the same bytes.
        named.write_bytes(gzip.compress(json.dumps(strategies, default=plain).encode(), mtime=0))
        described.write_text(json.dumps(data) + "\n", encoding="utf-8")
        write_frontier_csv(findings, listed)


def read_files(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the fields of a saved exploration, by name.

    Raises:
        TensorOptError: the folder holds no exploration, one of another version, or mismatched files.
    """
    folder = Path(directory)
    if not folder.is_dir():
        return _read_files(folder)
    with folder_lock(folder):
        return _read_files(folder)


def _read_files(folder: Path) -> dict[str, Any]:
    file = folder / DESCRIBED
    if not file.is_file():
        raise TensorOptError(
            f"{folder} holds no exploration (no {DESCRIBED}); run `tensoropt explore` with --out"
        )
    try:
        data = read_described(folder)
        check_size(folder / POINTS)
        if data.get("schema") not in (_SCHEMA, _RECORDS_BY_KIND, _OLD_SCHEMA):
            raise TensorOptError(f"{file} has schema {data.get('schema')!r}, not '{_SCHEMA}'; explore again")
        fields: dict[str, Any] = {
            **(_read_old if data["schema"] == _OLD_SCHEMA else _read_tables)(folder, data),
            "model": ModelInfo(**data["model"]),
            "comparison": tuple(data["comparison"]),
            **{name: data[name] for name in ("cluster", "settings", "versions", "report")},
        }
        costs_saved = bool(data["recorded"])
        # Folders of earlier versions have no facts: these are found once more in the graph.
        known = {"graph_facts": _GRAPH.validate_python(data["graph"])} if "graph" in data else {}
    except TensorOptError:
        raise
    # Damaged files may raise any error; the message names the folder and the remedy.
    except Exception as error:
        raise TensorOptError(
            f"{folder} is damaged ({type(error).__name__}: {error}); explore again"
        ) from error
    costs = _costs_in(folder) if costs_saved else None
    return {**fields, "costs": costs if known or costs is None else costs(), **known}


def read_described(folder: Path) -> dict[str, Any]:
    """Return the content of :data:`DESCRIBED`, unchecked."""
    check_size(folder / DESCRIBED)
    return dict(json.loads((folder / DESCRIBED).read_text(encoding="utf-8")))


@dataclass(frozen=True, eq=False)
class Costs:
    """Columns of a frontier: needed bytes per device and seconds of each point, and its number of devices."""

    needs: np.ndarray
    time: np.ndarray
    devices: np.ndarray


def read_costs(folder: Path) -> Costs:
    """Return the costs of a saved frontier's points; the large strategies file is read only if needed."""
    with folder_lock(folder):
        return _read_costs(folder)


def _read_costs(folder: Path) -> Costs:
    data = read_described(folder)
    check_size(folder / POINTS)
    cluster = device_of(data["cluster"])
    if data["schema"] == _OLD_SCHEMA:
        found = _read_old(folder, data)
        points, spaces = PointTable.of(found["points"]), found["spaces"]
        devices = np.array([space.devices for space in spaces], dtype=int)[points.column("space")]
        return Costs(all_needs(points, lambda: spaces, cluster), points.time, devices)
    with np.load(folder / POINTS) as arrays:
        points = PointTable(read_points(arrays)[: int(data["points"])])
        devices = arrays["devices"][: len(points)]
    spaces_of = cache(lambda: _read_tables(folder, data)["spaces"])
    return Costs(all_needs(points, spaces_of, cluster), points.time, devices)


def _read_tables(folder: Path, data: Mapping[str, Any]) -> dict[str, Any]:
    check_size(folder / STRATEGIES)
    strategies = json.loads(unpacked((folder / STRATEGIES).read_bytes(), folder / STRATEGIES))
    spaces = _SPACES.validate_python(strategies["spaces"])
    carried = {int(row): plan for row, plan in strategies["carried"].items()}
    count = int(data["points"])
    with np.load(folder / POINTS) as arrays:
        rows = read_points(arrays, len(spaces), carried)
    if len(rows) != count + int(data["others"]):
        raise TensorOptError(f"{folder}: {POINTS} and {DESCRIBED} are of different runs; explore again")
    return {"points": rows[:count], "others": rows[count:], "spaces": spaces}


def _read_old(folder: Path, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables of an old folder, with figures in ``data`` and index arrays per space."""
    points: list[Point | None] = [None] * len(data["points"])
    with np.load(folder / POINTS) as arrays:
        for s in range(len(data["spaces"])):
            rows = zip(arrays[f"points_{s}"], arrays[f"choice_{s}"], arrays[f"options_{s}"], strict=True)
            for i, choice, options in rows:
                points[i] = _old_point(data["points"][i], choice, options)
    if any(point is None for point in points):
        raise TensorOptError(f"{folder}: {POINTS} and {DESCRIBED} are of different runs; explore again")
    return {
        "points": tuple(point for point in points if point is not None),
        "others": tuple(_old_point(o, o["choice"], o["options"]) for o in data["others"]),
        "spaces": _SPACES.validate_python(data["spaces"]),
    }


def _old_point(data: Mapping[str, Any], choice: Sequence[int], options: Sequence[int]) -> Point:
    fields = {**data, "choice": tuple(map(int, choice)), "options": tuple(map(int, options))}
    fields["collectives"] = tuple((k, tuple(a), b, c) for k, a, b, c in data["collectives"])
    record = record_of({name: fields.pop(name, None) for name in ("placed", "pipeline")})
    fields.pop("allocator", None)  # points no longer have allocator peaks
    return Point.of(**fields, record=record)


def _costs_in(folder: Path) -> Callable[[], Any]:
    if not (folder / RECORDED).is_file():
        raise TensorOptError(
            f"{folder} has lost its {RECORDED}; copy it from where it was saved, or explore again"
        )
    check_size(folder / RECORDED)
    # Read now, as another process may write the folder again, and understood when it is needed.
    return partial(_understood, (folder / RECORDED).read_bytes(), folder / RECORDED)


def _understood(content: bytes, path: Path) -> Any:
    from tensoropt.plan.recorded import read_recorded  # imports torch, which figures alone do not need

    return read_recorded(content, path)

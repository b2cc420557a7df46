"""Functions that read and write the folder of a saved exploration.

Plans can be made from these files without the model or a new search. ``points.npz`` has a column per figure,
and each point's choices as indices into the tables of its mesh and micro-batch count. ``strategies.json.gz``
has the meaning of these indices, and the plans of placed and pipelined points. ``exploration.json`` has the
rest.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from tensoropt.errors import TensorOptError
from tensoropt.exploration.export import write_frontier_csv
from tensoropt.files import SETTINGS_FILE, check_size, folder_lock, plain, unpacked, written_together
from tensoropt.plan.findings import Findings, SavedCosts
from tensoropt.plan.graph_facts import GraphFacts
from tensoropt.plan.plan import ModelInfo
from tensoropt.plan.point import by_strategy
from tensoropt.plan.point_table import point_arrays, read_points
from tensoropt.plan.space import Space

_SCHEMA = "tensoropt.exploration/4"
DESCRIBED, POINTS, LISTED = SETTINGS_FILE, "points.npz", "frontier.csv"
STRATEGIES, RECORDED = "strategies.json.gz", "recorded.json.gz"
_SPACES = TypeAdapter(tuple[Space, ...])
_GRAPH = TypeAdapter(GraphFacts | None)


def write_files(findings: Findings, directory: str | os.PathLike[str]) -> None:
    """Write all files of an exploration, or none. The file of costs is left out if an operator has an
    argument that JSON cannot hold.

    Raises:
        TensorOptError: the folder cannot be written; its old content is kept.
    """
    folder = Path(directory)
    recorded = findings.costs if isinstance(findings.costs, SavedCosts) else findings.recorded
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
        "recorded": recorded is not None,
        "graph": _GRAPH.dump_python(findings.graph_facts, mode="json"),
    }
    rows = (*findings.points, *findings.others)
    strategies = {
        "spaces": findings.spaces,
        "carried": {row: {"record": record.to_data()} for row, record in by_strategy(rows)[1].items()},
    }
    names = [POINTS, STRATEGIES, DESCRIBED, LISTED, *([RECORDED] if recorded is not None else [])]
    # All at once: indices and figures of different runs would make false plans.
    with written_together([folder / name for name in names]) as (packed, named, described, listed, *kept):
        for path in kept:
            recorded.save(path)
        with open(packed, "wb") as file:
            np.savez_compressed(file, **point_arrays(rows, findings.spaces))  # type: ignore[arg-type]
        # Without a timestamp, so that the same exploration gives the same bytes.
        named.write_bytes(gzip.compress(json.dumps(strategies, default=plain).encode(), mtime=0))
        described.write_text(json.dumps(data) + "\n", encoding="utf-8")
        write_frontier_csv(findings, listed)


def read_files(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the fields of a saved exploration, by the names of :class:`Findings`.

    Raises:
        TensorOptError: the folder holds no exploration, one of another version, or files of different runs.
    """
    folder = Path(directory)
    with folder_lock(folder) if folder.is_dir() else nullcontext():
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
        if data.get("schema") != _SCHEMA:
            raise TensorOptError(f"{file} has schema {data.get('schema')!r}, not '{_SCHEMA}'; explore again")
        if "graph" not in data:
            raise TensorOptError(f"{folder} was saved by an earlier version; explore again")
        fields: dict[str, Any] = {
            **_read_tables(folder, data),
            "model": ModelInfo(**data["model"]),
            "comparison": tuple(data["comparison"]),
            **{name: data[name] for name in ("cluster", "settings", "versions", "report")},
        }
        facts, costs_saved = _GRAPH.validate_python(data["graph"]), bool(data["recorded"])
    except TensorOptError:
        raise
    # Damaged files may raise any error; the message names the folder and the remedy.
    except Exception as error:
        raise TensorOptError(
            f"{folder} is damaged ({type(error).__name__}: {error}); explore again"
        ) from error
    return {**fields, "costs": _costs_in(folder, facts) if costs_saved else None}


def read_described(folder: Path) -> dict[str, Any]:
    """Return the content of ``exploration.json``, whose schema is not checked."""
    check_size(folder / DESCRIBED)
    return dict(json.loads((folder / DESCRIBED).read_text(encoding="utf-8")))


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


def _costs_in(folder: Path, facts: GraphFacts | None) -> SavedCosts:
    path = folder / RECORDED
    if not path.is_file():
        raise TensorOptError(
            f"{folder} has lost its {RECORDED}; copy it from where it was saved, or explore again"
        )
    check_size(path)
    # Read now, as another process may write the folder again, and understood when it is needed.
    return SavedCosts(facts, path.read_bytes(), path)

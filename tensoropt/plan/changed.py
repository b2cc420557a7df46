"""What an exploration was made from, where it is another one with one thing changed.

One small file beside the exploration, ``changed.json``: ``tensoropt why DIR --deep CHANGE --out DIR2`` writes
it, and with it the answer to a question that was asked before is found again without opening anything else.
``tensoropt recost DIR --planners NAMES --only-beside --out DIR2`` does so too: where only planners differ,
one exploration can be shown in the other's place.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from tensoropt.errors import TensorOptError
from tensoropt.files import write_text
from tensoropt.plan.findings import Findings
from tensoropt.plan.point import FRONTIER, Point

SCHEMA = "tensoropt.changed/1"
FILE = "changed.json"
PLANNERS, COSTS = "planners", "costs"
"""Keys of what ``recost --only-beside`` has made: with the same frontier, or with another one."""
MOST_BYTES = 2**16
"""Of a file that is read; ours have a few hundred."""


@dataclass(frozen=True)
class Changed:
    """Which exploration this one was made from, and what is different.

    Attributes:
        of: the other's :func:`fingerprint`.
        key: of the change, as ``--deep`` takes it; of planners beside it :data:`PLANNERS` or :data:`COSTS`.
        title: the change in words.
    """

    of: str
    key: str
    title: str


def fingerprint(found: Findings) -> str:
    """16 hex digits of an exploration's model, cluster, settings and figures; saving it changes nothing."""
    data = [
        found.model.fingerprint,
        found.cluster,
        found.settings,
        [[p.planner, p.memory_bytes, p.time_s] for p in found.all_points],
    ]
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), default=_plain)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def only_planners_differ(before: Findings, after: Findings) -> bool:
    """Whether the search found the same in both; points that a planner's plan beats may be missing."""

    def own(of: Findings) -> dict[tuple[str, float, float], Point]:
        rows = zip(of.keys, of.points, strict=False)
        return {(key, p.memory_bytes, p.time_s): p for key, p in rows if p.planner == FRONTIER}

    def beaten(point: Point, of: Findings) -> bool:
        return any(p.memory_bytes <= point.memory_bytes and p.time_s <= point.time_s for p in of.points)

    first, second = own(before), own(after)
    return all(beaten(first[known], after) for known in first.keys() - second.keys()) and all(
        beaten(second[known], before) for known in second.keys() - first.keys()
    )


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{value!r} is no plain data")


def save_changed(folder: str | os.PathLike[str], changed: Changed) -> None:
    """Write the file beside the exploration in ``folder``; TensorOptError where that cannot be done."""
    write_text(Path(folder) / FILE, json.dumps({"schema": SCHEMA, **asdict(changed)}) + "\n")


def load_changed(folder: str | os.PathLike[str]) -> Changed | None:
    """What the exploration in ``folder`` was made from; None for one that was asked for by itself.

    Raises:
        TensorOptError: the file is damaged.
    """
    file = Path(folder) / FILE
    if not file.is_file():
        return None
    try:
        if file.stat().st_size > MOST_BYTES:
            raise ValueError(f"more than {MOST_BYTES} bytes")
        data = json.loads(file.read_text(encoding="utf-8"))
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema {data['schema']!r}")
        return Changed(str(data["of"]), str(data["key"]), str(data["title"]))
    # Deeply nested JSON exceeds Python's recursion before it is decoded.
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise TensorOptError(
            f"{file} is damaged ({type(error).__name__}: {error}); delete it, or explore again"
        ) from error

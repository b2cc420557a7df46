"""The machine and the moment that a result belongs to, and where results go."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
QUICK = Path("out")


def dated(folder: str, name: str, *, quick: bool = False, out: Path | None = None) -> Path:
    """Where a result goes, without its ending: ``results/FOLDER/DATE-NAME``.

    Args:
        quick: a taste of it goes to ``out/FOLDER`` instead, where no page looks for figures.
        out: another folder.
    """
    where = out or (QUICK if quick else RESULTS) / folder
    return where / f"{datetime.date.today().isoformat()}-{name}"


def write(stem: Path, data: Mapping[str, Any], markdown: str, svg: str | None = None) -> None:
    """``stem`` with ``.json``, ``.md`` and, where there is a picture, ``.svg``."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    parts = {".json": json.dumps(data, indent=1), ".md": markdown, ".svg": svg}
    for ending, text in parts.items():
        if text is not None:
            stem.with_suffix(ending).write_text(text.rstrip() + "\n", encoding="utf-8")


def machine() -> dict[str, Any]:
    """Processor, memory, versions, and how busy the machine is with other things."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next((line.split(":")[1].strip() for line in lines if "model name" in line), "")
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return {
        "processor": model or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory, 1),
        "python": platform.python_version(),
        "numpy": version("numpy"),
        "torch": version("torch"),
        "load_at_start": round(os.getloadavg()[0], 2),
    }


def described(of: dict[str, Any]) -> str:
    """A machine on one line."""
    return ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in of.items())


class Results:
    """A dated result, ``results/FOLDER/DATE-NAME.json``, written again after every row.

    Rows of the same date are kept, so that a long benchmark may be run in parts.
    """

    def __init__(self, folder: str, name: str, about: dict[str, Any], *, quick: bool = False) -> None:
        date = datetime.date.today().isoformat()
        self.stem = dated(folder, name, quick=quick)
        path = self.stem.with_suffix(".json")
        old = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
        self.data: dict[str, Any] = {"date": date, **about, "machine": machine(), "rows": old}

    def add(self, key: str, row: dict[str, Any]) -> None:
        """Put a row in the place of the one with the same ``key``, or last."""
        rows = [r for r in self.data["rows"] if r[key] != row[key]]
        self.data["rows"] = [*rows, {**row, "load": round(os.getloadavg()[0], 2)}]

    def write(self, markdown: str, svg: str | None = None) -> None:
        write(self.stem, self.data, markdown, svg)

"""The commit, the machine and the moment that a result belongs to, and where results go."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import time
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
QUICK = Path("out")
WRITTEN = (
    "tests/benchmarks/results",
    "notebooks/frontier.svg",
    "README.md",
    "tensoropt/README.md",
    "tensoropt/cli/README.md",
    "tensoropt/costs/README.md",
    "tests/benchmarks/README.md",
)
"""What the benchmarks write themselves: a change there does not change what is measured next."""
REQUIRED = ("date", "commit", "dirty", "machine")
"""Without these no result is written."""


def commit(root: Path = ROOT) -> dict[str, Any]:
    """The short hash of what is checked out, and whether anything but results differs from it (both None
    where this is no repository)."""
    others = [f":(exclude){name}" for name in WRITTEN]
    head = _git(root, "rev-parse", "--short=7", "HEAD")
    changes = _git(root, "status", "--porcelain", "--", ".", *others)
    return {"commit": head, "dirty": None if changes is None else bool(changes)}


def _git(root: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


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
        "load_at_start": _load(),
    }


def _load() -> float:
    return round(os.getloadavg()[0], 2)


def _stolen_s() -> float:
    """Seconds that the host of this virtual machine gave to others while a core had work to do, since it
    started (the steal time of all cores, in clock ticks); 0 if the system does not report them."""
    try:
        return int(Path("/proc/stat").read_text().split("\n", 1)[0].split()[8]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return 0.0


class Taking:
    """A benchmark that is run: what every result of it says, and what each of its parts says.

    Attributes:
        about: date, commit, whether the tree differed from it, machine with its load at the start.
    """

    def __init__(self) -> None:
        self.about = {"date": datetime.date.today().isoformat(), **commit(), "machine": machine()}
        self._start_part()

    def _start_part(self) -> None:
        self._begun_s, self._taken_s = time.perf_counter(), _stolen_s()

    def part(self) -> dict[str, Any]:
        """Commit, processor, load now, and since the last part (or the start) the seconds and the share of
        the machine's cores that its host gave to others. A file may hold parts of several runs."""
        seconds = time.perf_counter() - self._begun_s
        stolen = (_stolen_s() - self._taken_s) / max(seconds, 1e-9) / (os.cpu_count() or 1)
        self._start_part()
        return {
            **{key: self.about[key] for key in ("commit", "dirty")},
            "processor": self.about["machine"]["processor"],
            "load": _load(),
            "stolen": round(stolen, 4),
            "seconds": round(seconds, 1),
        }


def named(of: Mapping[str, Any]) -> str:
    """The commit of a result or of a part of it, in words."""
    if not of.get("commit"):
        return "an unrecorded commit"
    return f"commit {of['commit']}" + (" with changes" if of.get("dirty") else "")


def described(of: Mapping[str, Any]) -> str:
    """Commit and machine of a result on one line, for its Markdown."""
    about = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in of["machine"].items())
    return f"{named(of)} on {about}"


def part_described(part: Mapping[str, Any]) -> str:
    """The circumstances of a part of a result on one line."""
    spent = f"{part['stolen']:.1%} of the cores stolen, {part['seconds']:.0f} s"
    return f"{named(part)}, {part['processor']}, load {part['load']}, {spent}"


def rows_described(rows: Iterable[Mapping[str, Any]], key: str) -> list[str]:
    """A line of Markdown per row: what it was taken from, and under which load."""
    return [f"- {row[key]}: {part_described(row['taken'])}" for row in rows]


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
    missing = [key for key in REQUIRED if key not in data]
    assert not missing, f"a result without {', '.join(missing)} is not written: begin it with Taking().about"
    stem.parent.mkdir(parents=True, exist_ok=True)
    parts = {".json": json.dumps(data, indent=1), ".md": markdown, ".svg": svg}
    for ending, text in parts.items():
        if text is not None:
            stem.with_suffix(ending).write_text(text.rstrip() + "\n", encoding="utf-8")


class Results:
    """A dated result, ``results/FOLDER/DATE-NAME.json``, written again after every row.

    Rows of the same date are kept, so that a long benchmark may be run in parts; each row says under
    ``taken`` what it was taken from, and under which load.
    """

    def __init__(
        self, folder: str, name: str, about: Mapping[str, Any], *, quick: bool = False, rows: str = "rows"
    ) -> None:
        self.taking, self.rows = Taking(), rows
        self.stem = dated(folder, name, quick=quick)
        path = self.stem.with_suffix(".json")
        old = json.loads(path.read_text(encoding="utf-8"))[rows] if path.exists() else []
        self.data: dict[str, Any] = {**self.taking.about, **about, rows: old}

    def add(self, key: str, row: Mapping[str, Any]) -> None:
        """Put a row in the place of the one with the same ``key``, or last."""
        others = [r for r in self.data[self.rows] if r[key] != row[key]]
        self.data[self.rows] = [*others, {**row, "taken": self.taking.part()}]

    def write(self, markdown: str, svg: str | None = None) -> None:
        write(self.stem, self.data, markdown, svg)

"""Explorations of the file of questions, and what they answer within each budget."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import lzma
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tensoropt.profiling.store import ProfileStore
from tests.gate.answers import Answers, GateError

HERE = Path(__file__).parent
FACTS = HERE / "facts.jsonl.xz"


class Task(NamedTuple):
    """One exploration: the words behind ``explore``, the budgets, the folder of its profile store."""

    name: str
    words: Sequence[str]
    budgets: Sequence[str]
    store: Path


def tasks(asked: Mapping[str, Any], stores: Path) -> Iterator[Task]:
    """Yield the explorations of the file of questions."""
    import onnx

    light = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
    for name, of in asked["explorations"].items():
        words = f"{of['explore']} {asked['always']}".format(here=HERE, light=light).split()
        yield Task(name, words, of["budgets"], stores / {"kept": "kept", "found": name}[of["facts"]])


def answered(task: Task) -> tuple[Answers, str, float]:
    """Explore; return the answer within each budget, what went wrong, and the seconds."""
    begin, answers, error = time.perf_counter(), {}, ""
    os.environ["TENSOROPT_CACHE"] = str(task.store)
    with tempfile.TemporaryDirectory() as folder:
        try:
            _run("explore", *task.words, "--out", folder)
            whole = _of_the_frontier(folder)
            answers = {f"{task.name} {within}": whole | _chosen(folder, within) for within in task.budgets}
        except GateError as failure:
            error = f"{task.name}: {failure}"
    return answers, error, time.perf_counter() - begin


def _of_the_frontier(folder: str) -> dict[str, Any]:
    with open(Path(folder) / "frontier.csv", encoding="utf-8", newline="") as file:
        points = [(float(row["memory_bytes"]), float(row["time_s"])) for row in csv.DictReader(file)]
    knee = _run("choose", folder, "--knee")
    ends = {"fastest": min(points, key=lambda costs: costs[::-1]), "leanest": min(points)}
    ends["knee"] = knee["memory_bytes"], knee["time_s"]
    answer: dict[str, Any] = {}
    for end, (memory, seconds) in ends.items():
        answer |= {f"{end}_bytes": memory, f"{end}_s": seconds}
    return answer


def _chosen(folder: str, budget: str) -> dict[str, Any]:
    import tensoropt

    try:
        chosen = _run("choose", folder, "--memory", budget)
    except GateError:
        with contextlib.suppress(tensoropt.InfeasibleError):
            tensoropt.choose(folder, memory=budget)
            raise
        return {"verdict": "nothing fits"}
    costs = {"chosen_bytes": chosen["memory_bytes"], "chosen_s": chosen["time_s"]}
    fit = chosen["fit"]
    return {**costs, "need_bytes": fit["needed_bytes"], "verdict": fit["verdict"], "name": chosen["name"]}


def _run(*words: str) -> dict[str, Any]:
    """Run a verb and return its JSON; raise :class:`GateError` with its own message if it fails."""
    from tensoropt import cli

    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as said:
        code = cli.main([*words, "--json"])
    if code:
        raise GateError(f"{words[0]}: {' '.join((out.getvalue() or said.getvalue()).split())[-500:]}")
    return json.loads(out.getvalue())


def unpack_facts(store: Path) -> None:
    """Fill a profile store with the kept facts."""
    store.mkdir(parents=True)
    lines = store / "facts.jsonl"
    lines.write_bytes(lzma.decompress(FACTS.read_bytes()))
    with ProfileStore(store / "profiles.sqlite") as profiles:
        profiles.import_file(lines)


def pack_facts(store: Path) -> None:
    """Keep the facts of a profile store."""
    lines = store / "facts.jsonl"
    with ProfileStore(store / "profiles.sqlite") as profiles:
        profiles.export_file(lines)
    FACTS.write_bytes(lzma.compress(lines.read_bytes(), preset=9))


def facts_in(store: Path) -> int:
    """Return the number of facts in a profile store."""
    with ProfileStore(store / "profiles.sqlite") as profiles:
        return profiles.count()

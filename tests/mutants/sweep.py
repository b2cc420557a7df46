"""All mutants of some targets: each in a fork of its own, a few at a time, what is known kept on disk."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import select
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.mutants.mutant import ROOT, Mutant
from tests.mutants.targets import Target
from tests.mutants.trial import Running, Trial, start

STATE = ROOT / "out" / "mutants"
PATIENCE = 6.0
"""How many times as long as usual a test may take, beside :data:`GRACE_S`; other forks run meanwhile."""
GRACE_S = 15.0
RANKS_GRACE_S = 90.0
"""The first test that needs ranks starts them for all."""
Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Baseline:
    """What the tests of a target do with the code as it is.

    Attributes:
        seconds: per test.
        lines: per file and line the tests that execute it, in this process.
    """

    seconds: dict[str, float]
    lines: dict[str, dict[str, list[str]]]

    def order(self, mutant: Mutant, grace_s: float) -> dict[str, float]:
        """Tests and the seconds each may take; those that execute the line first, quickest file first."""
        of_file = self.lines.get(mutant.file, {})
        height = mutant.before.count("\n") + 1
        covering = {t for at in range(mutant.line, mutant.line + height) for t in of_file.get(str(at), ())}
        quickest: dict[tuple[bool, str], float] = {}
        slowest: dict[str, float] = {}
        for test, seconds in self.seconds.items():
            key = test not in covering, test.split("::")[0]
            quickest[key] = min(quickest.get(key, seconds), seconds)
            slowest[key[1]] = max(slowest.get(key[1], 0.0), seconds)

        def place(test: str) -> tuple[Any, ...]:
            key = test not in covering, test.split("::")[0]
            return key[0], quickest[key], key[1], self.seconds[test]

        def allowed_s(test: str) -> float:
            # whichever test of a file comes first makes what they share
            return grace_s + PATIENCE * (self.seconds[test] + slowest[test.split("::")[0]])

        return {test: allowed_s(test) for test in sorted(self.seconds, key=place)}


def warm_up() -> None:
    """Import what costs seconds and belongs to others; forks find it loaded."""
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[variable] = "1"
    for name in (
        "torch", "torch.distributed", "torch.distributed.tensor", "torch.export", "torch._dynamo",
        "torch._subclasses.fake_tensor", "torch.testing", "torch.utils.flop_counter", "numba",
        "numba.core.registry", "scipy.sparse", "scipy.optimize", "networkx", "pydantic", "yaml", "psutil",
        "moocore", "hypothesis.strategies", "pytest", "coverage", "transformers.models.gpt2",
        "transformers.models.bert", "transformers.models.llama",
    ):  # fmt: skip
        try:
            importlib.import_module(name)
        except ImportError as error:
            print(f"not loaded in advance: {error}", file=sys.stderr)


def digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def digest_of_tests() -> str:
    """Of all that tests consist of, this folder left out."""
    files = sorted(p for p in (ROOT / "tests").rglob("*.py") if "mutants" not in p.parts)
    return digest(*(f"{p}{p.read_text(encoding='utf-8')}" for p in files))


def digest_of_package() -> str:
    files = sorted((ROOT / "tensoropt").rglob("*.py"))
    return digest(*(f"{p}{p.read_text(encoding='utf-8')}" for p in files))


def follow(trials: Iterable[tuple[Any, Trial]], workers: int) -> Iterator[tuple[Any, Running, Record]]:
    """Run trials, at most ``workers`` at a time; gives each with what became of it."""
    under_way: dict[int, tuple[Any, Running]] = {}
    try:
        for tag, trial in trials:
            running = start(trial)
            under_way[running.pid] = tag, running
            while len(under_way) >= workers:
                yield from _ended(under_way)
        while under_way:
            yield from _ended(under_way)
    finally:  # forks are sessions of their own, which Ctrl-C does not reach
        for _, running in under_way.values():
            running.stop()
            shutil.rmtree(running.folder, ignore_errors=True)


def _ended(under_way: dict[int, tuple[Any, Running]]) -> Iterator[tuple[Any, Running, Record]]:
    select.select([r.stream for _, r in under_way.values()], [], [], 0.2)
    for pid, (tag, running) in list(under_way.items()):
        running.read()
        if time.monotonic() > running.deadline and not running.stuck:
            running.stuck = next((e["test"] for e in reversed(running.events) if "test" in e), "collection")
            running.stop()
        ended, status, usage = os.wait4(pid, os.WNOHANG)
        if not ended:
            continue
        running.read()
        running.stop()  # what it may have left behind
        os.close(running.stream)
        del under_way[pid]
        log = Path(running.folder, "log")
        yield (
            tag,
            running,
            {
                "code": os.waitstatus_to_exitcode(status),
                "seconds": round(time.monotonic() - running.began, 2),
                "cpu_s": round(usage.ru_utime + usage.ru_stime, 2),
                "log": log.read_text(errors="replace")[-4000:] if log.exists() else "",
            },
        )
        shutil.rmtree(running.folder, ignore_errors=True)


def outcome_of(running: Running, ended: Record) -> Record:
    """What a mutant's trial shows: ``killed``, ``timed out`` or ``survived``, and by which test."""
    record = {key: ended[key] for key in ("seconds", "cpu_s")}
    failed = next((e for e in running.events if "failed" in e), None)
    if running.stuck:
        return record | {"outcome": "timed out", "by": running.stuck, "words": ""}
    if failed is not None:
        return record | {"outcome": "killed", "by": failed["failed"], "words": failed["words"]}
    if ended["code"] == 0:
        return record | {"outcome": "survived", "by": "", "words": ""}
    begun = next((e["test"] for e in reversed(running.events) if "test" in e), "collection")
    return record | {"outcome": "killed", "by": begun, "words": f"exit code {ended['code']}"}


def baseline_of(target: Target, state: Path = STATE) -> Baseline:
    """Seconds and lines of a target's tests, which have to pass; kept while nothing changes."""
    key = digest(repr(target), digest_of_package(), digest_of_tests())
    path = state / f"baseline-{target.name.replace(' ', '-')}.json"
    if path.exists():
        known = json.loads(path.read_text(encoding="utf-8"))
        if known["key"] == key:
            return Baseline(known["seconds"], known["lines"])
    cover = [str(ROOT / file) for file in target.sources]
    trial = Trial(tests=target.test_files, jit=target.jit, ranks=target.ranks, cover=cover)
    ((_, running, ended),) = follow([(target, trial)], 1)
    seconds = {e["passed"]: e["seconds"] for e in running.events if "passed" in e}
    lines = next((e["lines"] for e in running.events if "lines" in e), {})
    if ended["code"] != 0 or not seconds:
        raise RuntimeError(f"the tests of {target.name!r} do not pass as they are:\n{ended['log']}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"key": key, "seconds": seconds, "lines": lines}), encoding="utf-8")
    return Baseline(seconds, lines)


class Known:
    """Records of trials, one JSON line each, written as soon as there is one."""

    def __init__(self, state: Path, *, resume: bool) -> None:
        self.path, self.records = state / "trials.jsonl", {}
        self.tests = digest_of_tests()
        if resume and self.path.exists():
            for line in self.path.read_text(encoding="utf-8").splitlines():
                record = json.loads(line)
                self.records[record["id"]] = record
        elif self.path.exists():
            self.path.replace(self.path.with_suffix(".earlier.jsonl"))

    def of(self, mutant: Mutant) -> Record | None:
        """What is known of a mutant: what killed it still does; a survivor is tried again with new tests."""
        record = self.records.get(mutant.id)
        if record is None or record["source"] != digest(mutant.source):
            return None
        return record if record["outcome"] != "survived" or record["tests"] == self.tests else None

    def add(self, mutant: Mutant, record: Record) -> Record:
        record = {"id": mutant.id, "source": digest(mutant.source), "tests": self.tests, **record}
        self.records[mutant.id] = record
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        return record


def sweep(
    target: Target,
    mutants: list[Mutant],
    known: Known,
    *,
    workers: int,
    state: Path = STATE,
    told: Callable[[Mutant, Record], None] = lambda mutant, record: None,
) -> dict[str, Record]:
    """Try mutants of one target; gives a record per id."""
    found = {m.id: record for m in mutants if (record := known.of(m)) is not None}
    left = [m for m in mutants if m.id not in found]
    if not left:
        return found
    baseline, folder = baseline_of(target, state), state / "sources"

    def trials() -> Iterator[tuple[Mutant, Trial]]:
        for number, mutant in enumerate(left):
            path = folder / f"{os.getpid()}-{number}" / Path(mutant.file).name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(mutant.source, encoding="utf-8")
            order = baseline.order(mutant, RANKS_GRACE_S if target.ranks else GRACE_S)
            files = list(dict.fromkeys(test.split("::")[0] for test in order))
            yield (
                mutant,
                Trial(
                    tests=files,
                    order=order,
                    module=mutant.module,
                    path=str(path),
                    jit=target.jit,
                    ranks=target.ranks,
                ),
            )

    try:
        for mutant, running, ended in follow(trials(), workers):
            found[mutant.id] = known.add(mutant, outcome_of(running, ended))
            told(mutant, found[mutant.id])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return found

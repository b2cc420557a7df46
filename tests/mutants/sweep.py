"""All mutants of some targets: each in a process of its own, a few at a time, what is known kept on disk."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.mutants.mutant import ROOT, Mutant
from tests.mutants.targets import Target
from tests.mutants.trial import Ran, Trial, run

STATE = ROOT / "out" / "mutants"
PATIENCE = 6.0
"""How many times as long as usual tests may take, beside :data:`GRACE_S`; other trials run meanwhile."""
GRACE_S = 15.0
RANKS_GRACE_S = 90.0
"""The first test that needs ranks starts them for all."""
IMPORT_S = 120.0
"""How long collection may take."""
Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Baseline:
    """What the tests of a target do with the code as it is.

    Attributes:
        seconds: per test file.
        slowest_s: of a test.
        lines: per file and line the test files that execute it, in this process.
    """

    seconds: dict[str, float]
    slowest_s: float
    lines: dict[str, dict[str, list[str]]]

    def order(self, mutant: Mutant) -> list[str]:
        """Test files that execute the line, quick ones first; all where lines run as modules are imported."""
        of_file = self.lines.get(mutant.file, {})
        height = mutant.before.count("\n") + 1
        covering = {t for at in range(mutant.line, mutant.line + height) for t in of_file.get(str(at), ())}
        files = self.seconds.keys() & covering if mutant.function else self.seconds.keys()
        return sorted(files or self.seconds, key=lambda file: (self.seconds[file], file))


def digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def digest_of(folder: str) -> str:
    """Of all Python files of a folder of the repository, this one left out."""
    files = sorted(p for p in (ROOT / folder).rglob("*.py") if "mutants" not in p.parts)
    return digest(*(f"{p}{p.read_text(encoding='utf-8')}" for p in files))


def outcome_of(ran: Ran) -> Record:
    """What a mutant's trial shows: ``killed``, ``timed out`` or ``survived``, and by which test."""
    outcome = "timed out" if ran.code is None else "killed" if ran.code else "survived"
    words = ran.words or (f"exit code {ran.code}" if ran.code else "")
    return {"outcome": outcome, "by": ran.by, "words": words, "seconds": ran.seconds}


def baseline_of(target: Target) -> Baseline:
    """Seconds and lines of a target's tests, which have to pass; kept while nothing changes."""
    key = digest(repr(target), digest_of("tensoropt"), digest_of("tests"))
    path = STATE / f"baseline-{target.name.replace(' ', '-')}.json"
    if path.exists():
        known = json.loads(path.read_text(encoding="utf-8"))
        if known.pop("key") == key:
            return Baseline(**known)
    cover = [str(ROOT / file) for file in target.sources]
    ran = run(Trial(tests=target.test_files, jit=target.jit, ranks=target.ranks, cover=cover))
    if ran.code != 0 or not ran.test_s:
        raise RuntimeError(f"the tests of {target.name!r} do not pass as they are:\n{ran.log}")
    found = Baseline(ran.test_s, ran.slowest_s, ran.lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"key": key, **asdict(found)}), encoding="utf-8")
    return found


class Known:
    """Records of trials, one JSON line each, written as soon as there is one."""

    def __init__(self, state: Path, *, resume: bool) -> None:
        self.path, self.records = state / "trials.jsonl", {}
        self.tests = digest_of("tests")
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
    told: Callable[[Mutant, Record], None],
) -> dict[str, Record]:
    """Try mutants of one target; gives a record per id."""
    found = {m.id: record for m in mutants if (record := known.of(m)) is not None}
    left = [m for m in mutants if m.id not in found]
    if not left:
        return found
    baseline, folder = baseline_of(target), STATE / "sources"
    grace_s = RANKS_GRACE_S if target.ranks else GRACE_S
    all_s = IMPORT_S + grace_s + PATIENCE * sum(baseline.seconds.values())

    def tried(numbered: tuple[int, Mutant]) -> Ran:
        number, mutant = numbered
        path = folder / str(number) / Path(mutant.file).name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(mutant.source, encoding="utf-8")
        return run(
            Trial(
                tests=baseline.order(mutant), test_s=grace_s + PATIENCE * baseline.slowest_s, all_s=all_s,
                module=mutant.module, path=str(path), jit=target.jit, ranks=target.ranks,
            )
        )  # fmt: skip

    try:
        with ThreadPoolExecutor(workers) as pool:
            for mutant, ran in zip(left, pool.map(tried, enumerate(left)), strict=True):
                found[mutant.id] = known.add(mutant, outcome_of(ran))
                told(mutant, found[mutant.id])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return found

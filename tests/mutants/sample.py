"""Which mutants are tried: a seeded sample of the generated ones, and the list made by hand."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from tests.mutants.edits import Text
from tests.mutants.mutant import ROOT, Mutant, numbered
from tests.mutants.operators import mutants_of
from tests.mutants.targets import EQUAL_RESULTS, Target

SEED = 1
HANDMADE = Path(__file__).parent / "handmade.yaml"


def generated(file: str, root: Path = ROOT) -> list[Mutant]:
    """All mutants of a file but those of constants that change no result."""
    source = (root / file).read_text(encoding="utf-8")
    lines = _lines_of(source, EQUAL_RESULTS.get(file, ()))
    return [m for m in mutants_of(file, source) if m.line not in lines]


def _lines_of(source: str, names: Iterable[str]) -> set[int]:
    """The lines at module level that assign to the names."""
    wanted, found = set(names), set()
    for statement in ast.parse(source).body:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        for target in targets:
            inner = target.elts if isinstance(target, ast.Tuple) else [target]
            if wanted & {n.id for n in inner if isinstance(n, ast.Name)}:
                found.update(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))
    return found


def sampled(target: Target, count: int | None = None, seed: int = SEED) -> list[Mutant]:
    """About ``count`` mutants of a target, every file with a share by how many it has.

    A mutant's place in the draw comes from its identity, so that a changed file changes only its own draw and
    a smaller sample is a part of a larger one.
    """
    wanted = target.sample if count is None else count
    by_file = {file: generated(file) for file in target.sources}
    total = sum(map(len, by_file.values())) or 1
    result = []
    for found in by_file.values():
        share = max(1, round(wanted * len(found) / total))
        drawn = sorted(found, key=lambda m: hashlib.sha256(f"{seed} {m.id}".encode()).digest())
        runnable = (m for m in drawn if m.compiles())
        result += [m for m, _ in zip(runnable, range(share), strict=False)]
    return result


def handmade(root: Path = ROOT, path: Path = HANDMADE) -> tuple[list[Mutant], list[str]]:
    """The mutants made by hand, and what is wrong with those that no longer fit the source."""
    found: dict[str, list[Mutant]] = {}
    complaints = []
    for entry in yaml.safe_load(path.read_text(encoding="utf-8")):
        mutant, words = _by_hand(entry, root)
        if mutant is None:
            complaints.append(words)
        else:
            found.setdefault(mutant.file, []).append(mutant)
    return [m for of_file in found.values() for m in numbered(of_file)], complaints


def _by_hand(entry: dict[str, Any], root: Path) -> tuple[Mutant | None, str]:
    file, before, after = f"tensoropt/{entry['file']}", entry["before"], entry["after"]
    path = root / file
    source = path.read_text(encoding="utf-8") if path.exists() else ""
    times = source.count(before)
    if times != 1:
        return None, f"{file}: {before!r} is found {times} times, not once"
    start = source.index(before)
    function = _function_at(source, source.count("\n", 0, start) + 1)
    mutant = Text(file, source).changed(start, start + len(before), after, function, "hand")
    if mutant is None or not mutant.compiles():
        return None, f"{file}: {after!r} is no other Python there"
    return mutant, ""


def _function_at(source: str, line: int) -> str:
    """The qualified name of the innermost function or class around a line."""
    path: list[str] = []
    nodes: list[ast.stmt] = ast.parse(source).body
    while True:
        inside = [n for n in nodes if n.lineno <= line <= (n.end_lineno or n.lineno)]
        if not inside:
            return ".".join(path)
        if isinstance(inside[0], (ast.FunctionDef, ast.ClassDef)):
            path.append(inside[0].name)
        nodes = [n for n in ast.iter_child_nodes(inside[0]) if isinstance(n, ast.stmt)]

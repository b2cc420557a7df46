"""Decisions about mutants follow their places when files, functions or names are renamed.

    python -m tests.mutants.follow COMMIT     # a commit at which the decisions fitted the source

A mutant's name is a digest of its file, function and lines, so a renaming gives it another. Each decision
that names no mutant of the working tree is looked up at COMMIT; the mutant of the same kind whose lines and
place are most like it now gets the decision, where no other is as like: one of the file that the decision
names, if there is such a file, else one of any. What is left is printed.
"""

from __future__ import annotations

import difflib
import subprocess
import sys

from tests.mutants.mutant import ROOT, Mutant
from tests.mutants.operators import mutants_of
from tests.mutants.report import DECISIONS, decisions, outdated

ENOUGH = 0.75
"""How alike two mutants must be: one renamed word in a line of ten leaves about 0.9 of it. An assumption;
what is taken over is printed beside what it was, to be read before it is kept."""


def git(*words: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True)
    return done.stdout


def then(commit: str) -> dict[tuple[str, str], Mutant]:
    """The mutants of a commit's source by kind and digest."""
    files = git("ls-tree", "-r", "--name-only", commit, "tensoropt").split()
    found = {}
    for file in files:
        if file.endswith(".py"):
            for mutant in mutants_of(file, git("show", f"{commit}:{file}")):
                found[_key(mutant.id)] = mutant
    return found


def now(operator: str) -> list[Mutant]:
    """The mutants of one kind in the working tree."""
    sources = sorted((ROOT / "tensoropt").rglob("*.py"))
    found = []
    for path in sources:
        for mutant in mutants_of(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")):
            if mutant.operator == operator:
                found.append(mutant)
    return found


def _key(name: str) -> tuple[str, str]:
    _, operator, digest = name.rsplit(":", 2)
    return operator, digest


def likeness(old: Mutant, new: Mutant) -> float:
    """Between 0 and 1: of the changed lines, and a little of file and function."""
    lines = difflib.SequenceMatcher(
        None, f"{old.before}\n{old.after}", f"{new.before}\n{new.after}", autojunk=False
    )
    if lines.real_quick_ratio() < ENOUGH:
        return 0.0
    place = difflib.SequenceMatcher(
        None, f"{old.file}:{old.function}", f"{new.file}:{new.function}", autojunk=False
    )
    return 0.8 * lines.ratio() + 0.2 * place.ratio() - 0.01 * abs(old.occurrence - new.occurrence)


def main(commit: str) -> int:
    """Rewrite the names in decisions.yaml; 1 where a decision was left without its mutant."""
    text = DECISIONS.read_text(encoding="utf-8")
    lost = [line.split(" has a decision")[0] for line in outdated(decisions())]
    was = then(commit)
    by_operator = {operator: now(operator) for operator in {_key(name)[0] for name in lost} - {"hand"}}
    left = 0
    for name in lost:
        old = was.get(_key(name))
        file = f"tensoropt/{name.split(':')[0]}"
        anywhere = by_operator.get(old.operator, []) if old else []
        there = [m for m in anywhere if m.file == file] or anywhere
        found = sorted(((likeness(old, m), m) for m in there if old), key=lambda pair: -pair[0])
        if not found or found[0][0] < ENOUGH or (len(found) > 1 and found[0][0] == found[1][0]):
            print(f"left: {name}\n    {old.before!r} -> {old.after!r}" if old else f"left: {name}")
            left += 1
            continue
        alike, new = found[0]
        text = text.replace(f"\n{name}:\n", f"\n{new.id}:\n")
        print(f"{alike:.2f} {name} -> {new.id}\n    {old.before!r}\n    {new.before!r}")
    DECISIONS.write_text(text, encoding="utf-8")
    return int(left > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

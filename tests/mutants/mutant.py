"""One changed place of a source file: what it is called, and the text of the file with the change."""

from __future__ import annotations

import difflib
import hashlib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change of one file.

    Attributes:
        file: relative to the repository.
        function: qualified name of what encloses the change, empty at module level.
        operator: the kind of change.
        before, after: the changed lines, without indentation.
        line: where, counted from 1; no part of the identity.
        occurrence: 1 unless equal lines of one function are changed in the same way.
        source: the whole file with the change.
    """

    file: str
    function: str
    operator: str
    before: str
    after: str
    line: int
    occurrence: int
    source: str

    @property
    def id(self) -> str:
        """Stays the same when lines move: the file, the function, the kind, a digest of the changed lines."""
        text = "\n".join((self.file, self.function, self.operator, self.before, self.after))
        if self.occurrence > 1:
            text += f"\n{self.occurrence}"
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        return (
            f"{self.file.removeprefix('tensoropt/')}:{self.function or '<module>'}:{self.operator}:{digest}"
        )

    @property
    def module(self) -> str:
        return module_of(self.file)

    def compiles(self) -> bool:
        try:
            compile(self.source, self.file, "exec")
        except (SyntaxError, ValueError):
            return False
        return True

    def diff(self, root: Path = ROOT) -> str:
        old = (root / self.file).read_text(encoding="utf-8").splitlines(keepends=True)
        new = self.source.splitlines(keepends=True)
        return "".join(difflib.unified_diff(old, new, self.file, self.file))


def module_of(file: str) -> str:
    """The name under which a file is imported."""
    path = file.removesuffix(".py").removesuffix("/__init__")
    return (f"tensoropt_{path}" if path.startswith("app/") else path).replace("/", ".")


def file_of(name: str) -> str:
    """The file of a mutant's id."""
    path = name.split(":")[0]
    return path if path.startswith("app/") else f"tensoropt/{path}"


def numbered(found: list[Mutant]) -> list[Mutant]:
    """Mutants of one file, those that read alike told apart by their order."""
    seen: dict[tuple[str, ...], int] = {}
    result = []
    for m in found:
        key = m.function, m.operator, m.before, m.after
        seen[key] = seen.get(key, 0) + 1
        result.append(Mutant(m.file, m.function, m.operator, m.before, m.after, m.line, seen[key], m.source))
    return result

"""Places in source text: from the positions of syntax nodes to changed files."""

from __future__ import annotations

import ast
import re

from tests.mutants.mutant import Mutant


class Text:
    """A source file whose nodes can be replaced by other text."""

    def __init__(self, file: str, source: str) -> None:
        self.file, self.source = file, source
        self._starts = [0]
        self._lines = source.splitlines(keepends=True)
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))

    def offset(self, line: int, column: int) -> int:
        """The position of a line, counted from 1, and a column in UTF-8 bytes, as ``ast`` counts."""
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def span(self, node: ast.AST) -> tuple[int, int]:
        return (self.offset(node.lineno, node.col_offset), self.offset(node.end_lineno, node.end_col_offset))

    def of(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.source[start:end]

    def changed(self, start: int, end: int, new: str, function: str, operator: str) -> Mutant | None:
        """The file with ``source[start:end]`` replaced; None where that changes nothing."""
        source = self.source[:start] + new + self.source[end:]
        if source == self.source:
            return None
        first = self.source.rfind("\n", 0, start) + 1
        last = self.source.find("\n", end)
        last = len(self.source) if last < 0 else last
        line = self.source.count("\n", 0, start) + 1
        before = plain(self.source[first:last])
        after = plain(source[first : last + len(new) - (end - start)])
        return Mutant(self.file, function, operator, before, after, line, 1, source)

    def between(self, left: ast.AST, right: ast.AST, old: str, new: str) -> tuple[int, int, str] | None:
        """The edit that replaces an operator written between two nodes."""
        start, end = self.span(left)[1], self.span(right)[0]
        words = r"\s+".join(re.escape(word) for word in old.split())
        found = re.search(rf"(?<!\w){words}(?!\w)" if old[0].isalpha() else words, self.source[start:end])
        return (start + found.start(), start + found.end(), new) if found else None


def plain(lines: str) -> str:
    """Return lines without their indentation."""
    return "\n".join(line.strip() for line in lines.splitlines())

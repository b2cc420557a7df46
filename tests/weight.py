"""The weight of the code: lines with code of package, page and tests, which may only fall.

    python -m tests.weight

Docstrings, comments and blank lines are not code. The limits are in ``pyproject.toml``
(``[tool.tensoropt.weight]``): a change that raises one says in its message what the lines buy.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = {"package": "tensoropt", "app": "app", "tests": "tests"}
"""By its name in ``pyproject.toml`` the folder that is weighed."""
SLACK = 200
"""How many lines a limit may stay above what there is, so that it is not lowered each time."""
_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip


def weight(text: str) -> tuple[int, int]:
    """Return (lines of code, lines of docstrings) of a source text."""
    docstrings = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        for part in node.body
        if isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant)
        if isinstance(part.value.value, str)
        for line in range(part.lineno, (part.end_lineno or part.lineno) + 1)
    }  # fmt: skip
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    code = {
        line
        for token in tokens
        if token.type not in _NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(code - docstrings), len(docstrings)


def of_files(files: Iterable[Path]) -> tuple[int, int]:
    """Return the same of several files together."""
    code, docstrings = 0, 0
    for file in files:
        one = weight(file.read_text(encoding="utf-8"))
        code, docstrings = code + one[0], docstrings + one[1]
    return code, docstrings


def faults(found: Mapping[str, int], limits: Mapping[str, int]) -> list[str]:
    """Return a sentence for each folder that is heavier than its limit, or whose limit should be lowered."""
    said = [
        f"{name} has {found[name]:,} lines of code, and may have {limit:,}: take lines out, or raise it in "
        "pyproject.toml and say what they buy"
        for name, limit in limits.items()
        if found[name] > limit
    ]
    return said + [
        f"{name} has {found[name]:,} lines of code, and may have {limit:,}: lower the limit in pyproject.toml"
        for name, limit in limits.items()
        if found[name] < limit - SLACK
    ]


def main() -> int:
    """Print each folder's weight; return 1 if one is not as its limit says."""
    limits = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["tensoropt"][
        "weight"
    ]
    found = {}
    for name, folder in FOLDERS.items():
        found[name], docstrings = of_files((ROOT / folder).rglob("*.py"))
        print(f"{name}: {found[name]:,} lines of code, {docstrings:,} of docstrings (limit {limits[name]:,})")
    for fault in (wrong := faults(found, limits)):
        print(fault, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""The Markdown that people read: its blocks, links, tables and figures.

How it is written, so that it can be checked:

- every block is fenced and names its language; ``text`` is for what is shown (output, diagrams, formulas),
  everything else is run by ``test_blocks.py``;
- a block whose first line is a comment with a file name (``# train.py``) is that file; YAML always is;
- a shell line that ends in ``# needs N GPUs`` is not run, only its words are checked;
- tables and sentences of what was measured are generated, between two lines that name them (``figures.py``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = {"CHANGELOG.md"}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:\A|\n)\n(    \S[^\n]*)")
INLINE = re.compile(r"`((?:tensoropt|make) [^`]+)`")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
TITLE = re.compile(r"^#+ (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block: where it stands, its language, its text."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def file_name(self) -> str | None:
        """The file that the block is, if its first line says so."""
        found = re.match(r"# ([\w./-]+\.\w+)\s*$", self.text.split("\n", 1)[0])
        return found[1] if found else None


def pages() -> list[Path]:
    """README.md, CONTRIBUTING.md and the stages' READMEs."""
    folders = ("tensoropt", "app", "tests", "notebooks")
    found = [p for p in ROOT.glob("*.md") if p.name not in LEFT_OUT]
    found += [p for folder in folders for p in (ROOT / folder).rglob("README.md")]
    return sorted(found)


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [Block(page, text.count("\n", 0, m.start()) + 1, m[1], m[2]) for m in FENCE.finditer(text)]


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def shell_lines(block: Block) -> Iterator[tuple[str, str]]:
    """(command, remark) per line; lines that end in a backslash are joined."""
    for line in block.text.replace("\\\n", " ").splitlines():
        command, _, remark = line.partition("  #")
        if command.strip() and not command.lstrip().startswith("#"):
            yield command.strip(), remark.strip()


def inline_commands(page: Path) -> list[str]:
    """Commands in backticks within sentences: of a page, or of a notebook's text."""
    if page.suffix != ".ipynb":
        return INLINE.findall(prose(page))
    cells = json.loads(page.read_text(encoding="utf-8"))["cells"]
    return INLINE.findall("\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown"))


def links(page: Path) -> list[str]:
    return LINK.findall(prose(page))


def anchors(page: Path) -> set[str]:
    """The titles of a page as GitHub writes their anchors."""
    titles = (m[1].lower().replace("`", "") for m in TITLE.finditer(prose(page)))
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}

"""One word, one meaning: the code says what the glossary of ``tensoropt/README.md`` says.

Names that are defined in ``tensoropt/`` and ``app/`` (modules, classes, functions, arguments, attributes,
variables) are taken apart into words, and so are docstrings, comments and pages. ``NAMES`` and ``TEXTS`` say
which words they do not use, with the word to use instead.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def by_word(said: dict[str, str]) -> dict[str, str]:
    """What is said instead of each word."""
    return {word: instead for instead, words in said.items() for word in words.split()}


TEXTS = by_word({
    "candidates": "menu menus", "simulated, StepMetrics": "played", "simulates": "plays",
    "the simulator; to simulate, to evaluate": "judge judges judged", "gradient alias": "heir heirs",
    "lifetimes": "estate", "view alias": "lodger lodgers lodging", "overheads": "upkeep",
    "eta, estimate": "outlook", "timer": "stopwatch", "zoo statistics": "census",
    "the rule itself: nothing refers to a design outside of the repository": "design",
})  # fmt: skip
"""Words of docstrings, comments and pages that are not used, and what is said instead; ``design`` in
capitals."""

NAMES = by_word({
    "simulate": "play", "simulate; traverse for a graph": "walk", "step schedule": "course",
    "workspace_bytes": "spot", "unsharded; gathered once": "held", "timeout": "patience", "local": "here",
    "pin_ranks; otherwise the verb of what is done": "settle settled", "probe operator": "twin twins",
    "pruning target": "aim aimed hope hoped", "materialised placement of a hub": "home homes",
}) | {word: instead for word, instead in TEXTS.items() if word != "design"}  # fmt: skip
"""Words of names that are not used, and what is said instead."""

ALLOWED = {"home_folder"}
"""Names that use a word in another field's sense: a user's home folder."""

ONCE = {
    "Cluster", "Collective", "Configuration", "Exploration", "Floats", "LoadedModel", "Mesh", "Placement",
    "Plan", "Point", "Problem", "Progress", "Settings", "Strategy",
}  # fmt: skip
"""Aliases and classes of any folder that one file at most defines, as each public class of the package: a
reader who meets the name knows what it is."""

REFERENCE = re.compile(r":\w+:`~?(tensoropt\.[\w.]+)`")
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
FILES = sorted(p for top in ("tensoropt", "app") for p in (ROOT / top).rglob("*.py"))
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(p for top in ("tensoropt", "app", "tests", "notebooks") for p in (ROOT / top).rglob("README.md")),
    ]
)
STAGES = sorted(p.name for p in (ROOT / "tensoropt").iterdir() if (p / "__init__.py").exists())


def words(name: str) -> set[str]:
    """``menu`` and ``of`` of ``MenuOf``, ``_menu_of`` and ``MENU_OF``."""
    return {word.lower() for word in WORD.findall(name)}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def names(path: Path) -> Iterator[str]:
    """Every name that a file defines, its own included."""
    yield path.stem
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def texts(path: Path) -> Iterator[str]:
    """Docstrings, strings that stand alone, and comments."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield str(node.value.value)
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def banned(path: Path) -> set[str]:
    """What the file calls otherwise than the glossary: words of texts as they are, names in backticks."""
    is_page, content = path.suffix == ".md", path.read_text(encoding="utf-8")
    found = set() if is_page else {f"`{n}`" for n in set(names(path)) - ALLOWED if words(n) & NAMES.keys()}
    if not unsaid(content):
        return found  # comments need not be told from code, which takes long
    for text in [content] if is_page else texts(path):
        found |= unsaid(text)
    return found


def unsaid(text: str) -> set[str]:
    """The words of a text that are not used."""
    found = (set(re.findall(r"[a-z]+", text.lower())) & TEXTS.keys()) - {"design"}
    return found | ({"design"} if "DESIGN" in text or "first design" in text else set())


def defined_more_than_once() -> dict[str, set[str]]:
    """Files by the public class of the package, or the name of ``ONCE``, that several of them define."""
    found = defaultdict(set)
    for path in FILES:
        in_package = path.is_relative_to(ROOT / "tensoropt")
        for node in parsed(path).body:
            is_class = isinstance(node, ast.ClassDef)
            targets = [node] if is_class else getattr(node, "targets", ())
            for name in (getattr(t, "name", getattr(t, "id", "")) for t in targets):
                if name in ONCE or (is_class and in_package and not name.startswith("_")):
                    found[name].add(short(path))
    return {name: files for name, files in found.items() if len(files) > 1}


def unknown_references(path: Path) -> set[str]:
    """The references of a file's docstrings to what the package does not have: a module, a name that its file
    defines or imports, a member that any file defines."""
    found = set()
    for name in REFERENCE.findall(path.read_text(encoding="utf-8")):
        parts, at = name.split("."), ROOT
        while parts and (at / parts[0]).is_dir():
            at /= parts.pop(0)
        if parts and (at / f"{parts[0]}.py").exists():
            at /= f"{parts.pop(0)}.py"
        module = at if at.is_file() else at / "__init__.py"
        if (parts and parts[0] not in defined_in(module)) or not set(parts[1:]) <= every_name():
            found.add(name)
    return found


@cache
def defined_in(module: Path) -> set[str]:
    imported = (n for n in ast.walk(parsed(module)) if isinstance(n, ast.Import | ast.ImportFrom))
    return {*names(module), *(alias.asname or alias.name for node in imported for alias in node.names)}


@cache
def every_name() -> set[str]:
    return {name for path in FILES for name in names(path)}


def short(path: Path) -> str:
    return str(path.relative_to(ROOT))


def advice(words_used: set[str]) -> str:
    said = {**TEXTS, **NAMES}
    return "; ".join(
        f"{used}: say {', '.join(said[w] for w in sorted(words(used)) if w in said)}" for used in words_used
    )


def test_files_use_the_words_of_the_glossary() -> None:
    found = {short(path): banned(path) for path in (*FILES, *PAGES)}
    assert not {path: advice(used) for path, used in found.items() if used}


def test_references_lead_to_what_is_there() -> None:
    dead = {short(path): unknown_references(path) for path in FILES}
    assert not {path: sorted(found) for path, found in dead.items() if found}


def test_names_of_classes_and_of_the_seams_are_defined_once() -> None:
    assert {name: sorted(files) for name, files in defined_more_than_once().items()} == {}


def test_a_stage_says_what_goes_in_and_what_comes_out() -> None:
    for stage in STAGES:
        text = (ROOT / "tensoropt" / stage / "README.md").read_text(encoding="utf-8")
        assert re.search(r"^(\*\*)?In:", text, re.MULTILINE), f"{stage}/README.md has no line 'In:'"
        assert re.search(r"\bOut:", text), f"{stage}/README.md has no line 'Out:'"


def architecture() -> str:
    return (ROOT / "tensoropt" / "README.md").read_text(encoding="utf-8")


def test_the_architecture_page_describes_every_stage() -> None:
    rows = re.findall(r"^\| `(\w+)/` +\|", architecture(), re.MULTILINE)
    assert sorted(rows) == STAGES


def test_the_glossary_does_not_use_what_it_replaces() -> None:
    glossary = architecture().split("## Glossary", 1)[1]
    entries = re.findall(r"^- \*\*(.+?)\*\*", glossary, re.MULTILINE)
    assert len(entries) == len(set(entries))
    assert not {word for entry in entries for word in words(entry)} & NAMES.keys()

"""Links lead somewhere, named files exist, and the reference of the command line is the command line's."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from tensoropt.cli.parser import parser
from tests.docs.pages import (
    INDENTED,
    ROOT,
    Block,
    anchors,
    blocks,
    inline_commands,
    links,
    pages,
    prose,
    shell_lines,
)
from tests.docs.programs import CHECKED_ELSEWHERE, PROGRAMS

PAGES = pages()
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NAMES = [str(p.relative_to(ROOT)) for p in PAGES]
EVERYWHERE = {"--json", "--debug", "--help"}
each_page = pytest.mark.parametrize("page", PAGES, ids=NAMES)


@each_page
def test_blocks_say_what_they_are(page: Path) -> None:
    text = prose(page)
    assert not INDENTED.findall(text), "fence blocks and name their language, text if it is not to be run"
    assert {b.language for b in blocks(page)} <= {"text", "sh", "python", "yaml"}


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        target, _, anchor = link.partition("#")
        if target.startswith(("http://", "https://")):
            continue
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), link
        assert not anchor or anchor in anchors(file), link


def missing_files(page: Path) -> set[str]:
    """Of the first column of a table of files, in backticks: what is neither beside the page nor below it."""
    found = set()
    for row in re.findall(r"^\| (`[^|]+`) +\|", prose(page), re.MULTILINE):
        for name in re.findall(r"`([\w./-]+(?:\.py|\.json|\.yaml|/))`", row):
            if page.parent != ROOT and not (page.parent / name).exists() and not any(page.parent.rglob(name)):
                found.add(name)
    return found


def missing_paths(page: Path) -> set[str]:
    """Of anything in backticks that looks like a path of this repository."""
    named = re.findall(r"`((?:tensoropt|app|tests|notebooks)/[\w./-]+)`", prose(page))
    return {name for name in named if not (ROOT / name).exists()}


@each_page
def test_named_files_exist(page: Path) -> None:
    assert not missing_files(page) | missing_paths(page)


def verbs() -> dict[str, argparse.ArgumentParser]:
    [action] = [a for a in parser()._actions if isinstance(a, argparse._SubParsersAction)]
    return dict(action.choices)


def reference() -> dict[str, set[str]]:
    """Options by verb, as the tables of the command line's README have them."""
    text = prose(ROOT / "tensoropt" / "cli" / "README.md")
    section = text.split("\n## Verbs and options\n", 1)[1].split("\n## ", 1)[0]
    found: dict[str, set[str]] = {}
    for names, rest in re.findall(r"^\| (.+?) \| (.+) \|$", section, re.MULTILINE):
        for name in re.findall(r"`([a-z-]+)", names):
            if name in verbs():
                found.setdefault(name, set()).update(re.findall(r"(--[a-z-]+)", names + rest))
    return found


def test_the_reference_names_every_verb_and_option() -> None:
    expected = {
        name: {o for a in verb._actions for o in a.option_strings if o.startswith("--")} - EVERYWHERE
        for name, verb in verbs().items()
    }
    assert reference() == expected


def sh_blocks() -> list[Block]:
    return [b for page in PAGES for b in blocks(page) if b.language == "sh"]


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


@pytest.mark.parametrize("block", sh_blocks(), ids=lambda b: f"{b.page.relative_to(ROOT)}:{b.line}")
def test_words_of_commands_are_known(block: Block) -> None:
    """Also of those that are not run: verbs and options parse, make targets and extras exist."""
    for command, _ in shell_lines(block):
        words = command.split()
        if words[0] == "tensoropt" and words[1] != "--version":
            parser().parse_args(words[1:])
        elif words[0] == "make":
            assert {w for w in words[1:] if "=" not in w} <= targets(), command
        else:
            assert words[0] in {*PROGRAMS, *CHECKED_ELSEWHERE}, command


@pytest.mark.parametrize(
    "page", [*PAGES, *sorted((ROOT / "notebooks").glob("*.ipynb"))], ids=lambda p: p.name
)
def test_words_of_commands_in_sentences_are_known(page: Path) -> None:
    for command in inline_commands(page):
        program, *words = command.split()
        if program == "make":
            assert {w for w in words if "=" not in w} <= targets(), command
            continue
        options = {o for a in verbs()[words[0]]._actions for o in a.option_strings}
        assert {w for w in words if w.startswith("--")} <= options, command

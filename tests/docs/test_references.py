"""Links lead somewhere, named files exist, and the reference of the command line is the command line's."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

from tensoropt.cli.parser import parser
from tests.docs.pages import (
    INDENTED,
    ROOT,
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


def test_blocks_say_what_they_are():
    """They are fenced and name their language, which is text if they are not to be run."""
    assert [page for page in PAGES if INDENTED.search(prose(page))] == []
    assert {block.language for page in PAGES for block in blocks(page)} <= {"text", "sh", "python", "yaml"}


def test_links_lead_somewhere():
    for page in PAGES:
        for link in links(page):
            target, _, anchor = link.partition("#")
            if target.startswith(("http://", "https://")):
                continue
            file = (page.parent / target).resolve() if target else page
            assert file.exists(), (page, link)
            assert not anchor or anchor in anchors(file), (page, link)


def missing_files(page: Path) -> set[str]:
    """Of the first column of a table of files, in backticks: what is neither beside the page nor below it."""
    rows = [] if page.parent == ROOT else re.findall(r"^\| (`[^|]+`) +\|", prose(page), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([\w./-]+(?:\.py|\.json|\.yaml|/))`", row)}
    return {n for n in named if not (page.parent / n).exists() and not any(page.parent.rglob(n))}


def missing_paths(page: Path) -> set[str]:
    """Of anything in backticks that looks like a path of this repository."""
    named = re.findall(r"`((?:tensoropt|app|tests|notebooks)/[\w./-]+)`", prose(page))
    return {name for name in named if not (ROOT / name).exists()}


def test_named_files_exist():
    missing = {page: missing_files(page) | missing_paths(page) for page in PAGES}
    assert not {page: names for page, names in missing.items() if names}


def verbs() -> dict[str, argparse.ArgumentParser]:
    [action] = [a for a in parser()._actions if isinstance(a, argparse._SubParsersAction)]
    return dict(action.choices)


def test_the_help_of_every_verb_ends_with_two_uses_of_it():
    for name, verb in verbs().items():
        _, *examples = str(verb.epilog).split("\n  tensoropt ")
        assert [parser().parse_args(shlex.split(words)).verb for words in examples] == [name] * 2


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def test_words_of_commands_are_known():
    """Also of those that are not run: verbs and options parse, make targets and extras exist."""
    shell = [block for page in PAGES for block in blocks(page) if block.language == "sh"]
    for command, _ in (line for block in shell for line in shell_lines(block)):
        words = command.split()
        if words[0] == "tensoropt" and words[1] != "--version":
            parser().parse_args(words[1:])
        elif words[0] == "make":
            assert {w for w in words[1:] if "=" not in w} <= targets(), command
        else:
            assert words[0] in {*PROGRAMS, *CHECKED_ELSEWHERE}, command


def test_words_of_commands_in_sentences_are_known():
    for command in (command for page in (*PAGES, *NOTEBOOKS) for command in inline_commands(page)):
        program, *words = command.split()
        if program == "make":
            assert {w for w in words if "=" not in w} <= targets(), command
            continue
        options = {o for a in verbs()[words[0]]._actions for o in a.option_strings}
        assert {w for w in words if w.startswith("--")} <= options, command

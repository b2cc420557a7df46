"""Every block of the documentation that claims to work is run, page by page and top to bottom.

A page's blocks share a folder and, for Python, their names: what one block writes or defines, the next may
use, as for a person who follows the page. Shell commands run as they stand, our own and scripts in this
process, jobs on ranks that were started once; ``make`` and ``pip`` are checked in ``test_references.py``
instead. ``tests/execute/test_train.py`` and ``test_jobs.py`` have jobs of real processes.
"""

from __future__ import annotations

import _thread
import os
import shlex
import signal
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any
from unittest import mock

import onnx
import pytest

from tensoropt.cli.parser import main
from tensoropt.console import ProgressDisplay
from tensoropt.ranks.pool import RankPool
from tests.capture.onnx.models import perceptron
from tests.docs.figures import README
from tests.docs.pages import ROOT, Block, blocks, pages, shell_lines
from tests.docs.programs import CHECKED_ELSEWHERE, run_job, run_python
from tests.lent_ranks import lend_ranks

LONG = ("tensoropt/cli", "tensoropt/execute", "tensoropt/integrations")
"""Folders whose pages explore and train for minutes; README.md does both in the quick suite."""
RUN = [
    pytest.param(
        page,
        id=str(page.relative_to(ROOT)),
        marks=[pytest.mark.slow] * (str(page.parent.relative_to(ROOT)) in LONG),
    )
    for page in pages()
    if any(b.language != "text" for b in blocks(page))
]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", RUN)
def test_a_page_works_from_top_to_bottom(page, tmp_path, monkeypatch, capsys, ranks):
    lend_ranks(monkeypatch, ranks)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.syspath_prepend(tmp_path)
    onnx.save(perceptron(), "model.onnx")  # what a reader brings along
    names: dict[str, Any] = {"__name__": "__page__"}
    for block in blocks(page):
        if block.file_name and (ROOT / block.file_name).exists():
            assert excerpt(block) in (ROOT / block.file_name).read_text(encoding="utf-8")
        elif block.file_name:
            Path(block.file_name).write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            exec(compile(block.text, f"{page.name}:{block.line}", "exec"), names)
        elif block.language == "yaml":
            pytest.fail(f"{page.name}:{block.line}: name the file, so that a command can use it")
        elif block.language == "sh":
            for command, remark in shell_lines(block):
                if not remark.startswith("needs "):
                    capsys.readouterr()
                    shell(command, block, ranks)
        elif page == README:  # what the last command printed, without the lines between those of dots
            printed = iter(capsys.readouterr().out.splitlines())
            for line in block.text.splitlines():
                assert line == "..." or line in printed, f"{page.name}:{block.line}: not printed: {line}"


def excerpt(block: Block) -> str:
    """A block that shows a file of the repository, without the line that names it."""
    return block.text.split("\n", 1)[1].strip()


def shell(command: str, block: Block, ranks: RankPool) -> None:
    program, *words = shlex.split(command)
    known = set(sys.modules)
    if program == "python":
        run_python(words)
    elif program == "torchrun":
        run_job(ranks, words)
    elif program == "tensoropt":
        answer = serves if words[0] == "dashboard" else main
        assert answer(words) == 0, f"{block.page.name}:{block.line}: {command}"
    else:
        assert program in CHECKED_ELSEWHERE
    for name in set(sys.modules) - known:  # what a page's folder holds is not the next page's
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(os.getcwd()):
            del sys.modules[name]


def serves(words: list[str]) -> int:
    """Interrupt the server once it has answered at the address that it says."""
    answers, note = [], ProgressDisplay.note

    def visit(address: str) -> None:
        try:
            answers.append(urllib.request.urlopen(address, timeout=60).status)
        finally:
            _thread.interrupt_main()

    def noted(display: ProgressDisplay, text: str) -> None:
        note(display, text)
        for address in (word for word in text.split() if word.startswith("http://127.0.0.1")):
            threading.Thread(target=visit, args=(address,)).start()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job may ignore it
    try:
        with mock.patch.object(ProgressDisplay, "note", noted):
            code = main([*words, "--port", "0"])
    finally:
        signal.signal(signal.SIGINT, before)
    assert answers == [200]
    return code

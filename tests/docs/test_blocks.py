"""Every block of the documentation that claims to work is run, page by page and top to bottom.

A page's blocks share a folder and, for Python, their names: what one block writes or defines, the next may
use, as for a person who follows the page. Shell commands run as they stand, our own and scripts in this
process, on ranks that were started once; ``make`` and ``pip`` are checked in ``test_references.py`` instead.
"""

from __future__ import annotations

import os
import runpy
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import onnx
import pytest

from tensoropt.cli.parser import main
from tensoropt.ranks.pool import RankPool
from tests.capture.onnx.models import perceptron
from tests.docs.pages import ROOT, Block, blocks, pages, shell_lines
from tests.docs.programs import CHECKED_ELSEWHERE, PROGRAMS
from tests.lent_ranks import lend_ranks

TIMEOUT_S = 600.0
RUN = [page for page in pages() if any(b.language != "text" for b in blocks(page))]


@pytest.mark.distributed
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", RUN, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_works_from_top_to_bottom(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: RankPool
) -> None:
    lend_ranks(monkeypatch, ranks)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(tmp_path)]))
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
                    shell(command, block)


def excerpt(block: Block) -> str:
    """A block that shows a file of the repository, without the line that names it."""
    return block.text.split("\n", 1)[1].strip()


def shell(command: str, block: Block) -> None:
    words = shlex.split(command)
    if words[0] in CHECKED_ELSEWHERE:
        return
    full = [*PROGRAMS[words[0]], *words[1:]]
    if words[:2] == ["tensoropt", "dashboard"]:
        serves([*full, "--port", "0"])
        return
    if words[0] == "tensoropt":
        in_this_process(words[1:], f"{block.page.name}:{block.line}: {command}")
        return
    if words[0] == "python" and words[1].endswith(".py"):
        with mock.patch.object(sys, "argv", words[1:]):
            runpy.run_path(words[1], run_name="__main__")
        return
    done = subprocess.run(full, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, f"{block.page.name}:{block.line}: {command}\n{done.stdout}\n{done.stderr}"


def in_this_process(arguments: list[str], what: str) -> None:
    """One of our own commands, without a new process's seconds of imports."""
    known = set(sys.modules)
    code = main(arguments)
    for name in set(sys.modules) - known:  # what a page's folder holds is not the next page's
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(os.getcwd()):
            del sys.modules[name]
    assert code == 0, what


def serves(command: list[str]) -> None:
    """The server says where it is, and ends when interrupted."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job may ignore it
    started = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    signal.signal(signal.SIGINT, before)
    with started as server:
        assert server.stderr is not None
        try:
            said = ""
            while "http://127.0.0.1" not in said:
                line = server.stderr.readline()
                assert line, said
                said += line
            server.send_signal(signal.SIGINT)
            server.wait(timeout=60)
        finally:
            server.kill()  # else leaving would wait for it

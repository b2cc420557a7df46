"""Functions that people name on the command line, in files and modules."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tensoropt.files import named_function

BESIDE = "WIDTH = 12\n"
JOB = "from shapes_of_this_job import WIDTH\n\n\ndef build():\n    return WIDTH\n"


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file that imports another one of its folder."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = tmp_path / "a job"
    folder.mkdir()
    (folder / "shapes_of_this_job.py").write_text(BESIDE)
    (folder / "sft.py").write_text(JOB)
    yield folder
    sys.modules.pop("shapes_of_this_job", None)


def test_a_file_imports_the_files_beside_it(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(job.parent)
    assert named_function("a job/sft.py:build", "()")() == 12


def test_the_files_folder_comes_before_all_others(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = job.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "shapes_of_this_job.py").write_text("WIDTH = 99\n")
    monkeypatch.syspath_prepend(elsewhere)
    assert named_function(str(job / "sft.py:build"), "()")() == 12

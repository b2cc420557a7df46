"""What is built can be installed and used: nothing that the code reads is left out of the wheel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Sequence
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest

from tensoropt import __version__

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("tensoropt", "app", "tests", "notebooks", ".ci")
NOT_SHIPPED = {"README.md"}
"""For readers of the source; in the source distribution only."""


def run(command: Sequence[str | Path], cwd: Path, **more: str) -> str:
    env, words = {**os.environ, **more}, [str(c) for c in command]
    done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def shipped() -> set[str]:
    """Files of the two packages, by their place in the wheel."""
    found = set()
    for folder, name in (("tensoropt", "tensoropt"), ("app", "tensoropt_app")):
        for file in (ROOT / folder).rglob("*"):
            inside = file.relative_to(ROOT / folder)
            if file.is_dir() or "__pycache__" in inside.parts or file.suffix in (".pyc", ".nbi", ".nbc"):
                continue
            if file.name in NOT_SHIPPED or (folder == "app" and inside.parts[0] == "screenshots"):
                continue
            found.add(str(Path(name) / inside))
    return found


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with the source distribution, and the wheel that was made from it."""
    copy = tmp_path_factory.mktemp("source")
    left_out = shutil.ignore_patterns("__pycache__", "*.pyc", "*.nb[ic]")
    for folder in SOURCES:
        shutil.copytree(ROOT / folder, copy / folder, ignore=left_out)
    for file in ROOT.iterdir():
        if file.is_file() and not file.name.startswith(".coverage"):
            shutil.copy(file, copy)
    out = tmp_path_factory.mktemp("dist")
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", out, "."], copy)
    return out


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """The wheel alone, unpacked as pip does it, without its dependencies."""
    target = tmp_path_factory.mktemp("installed")
    [wheel] = built.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps"]
    run([*pip, "--target", target, wheel], target)
    return target


def test_the_wheel_has_every_file_and_no_other(built):
    [wheel] = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == shipped()
    assert "tensoropt/py.typed" in names


def test_the_source_distribution_can_be_tested(built):
    [sdist] = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    top = {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "constraints.txt"}
    assert {*top, "pyproject.toml", ".ci/make-venv", "tests/naive.py", "tensoropt/README.md"} <= names
    for endings in ("*.py", "*.md", "*.json"):  # results too: the pages' figures are traced to them
        assert {str(file.relative_to(ROOT)) for file in (ROOT / "tests").rglob(endings)} <= names


def test_the_metadata(built):
    [wheel] = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        [name] = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        data = Parser().parsestr(archive.read(name).decode())
    named = data["Name"], data["Version"], data["License-Expression"]
    assert named == ("tensoropt", __version__, "Apache-2.0")
    assert set(data.get_all("Provides-Extra", [])) == project()["optional-dependencies"].keys()
    assert data.get_payload().startswith("# TensorOpt")


@pytest.mark.slow
def test_it_works_where_only_the_wheel_is(installed, tmp_path):
    inside = {"PYTHONPATH": str(installed), "PYTHONSAFEPATH": "1"}
    where = run([sys.executable, "-c", "import tensoropt; print(tensoropt.__file__)"], tmp_path, **inside)
    assert Path(where.strip()).is_relative_to(installed)
    command = installed / "bin" / "tensoropt"
    assert run([command, "--version"], tmp_path, **inside).strip() == f"tensoropt {__version__}"
    assert "dgx-h100" in run([command, "list", "clusters"], tmp_path, **inside)
    assert "zoo:gpt2" in run([command, "list", "models"], tmp_path, **inside)


def test_every_dependency_has_a_lowest_version():
    """``make test-oldest`` installs these."""
    pinned = run([sys.executable, ROOT / ".ci" / "oldest.py"], ROOT).split()
    extras = project()["optional-dependencies"]
    chosen = extras.keys() - {"all", "test"}
    used = [*project()["dependencies"], *(r for e in chosen for r in extras[e])]
    assert len(pinned) == len({requirement.partition(">=")[0] for requirement in used})
    assert all("==" in line for line in pinned)

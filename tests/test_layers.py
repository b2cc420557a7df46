"""The architecture as tests: imports go downward only, and ``import tensoropt`` stays light."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from importlinter import api

ROOT = Path(__file__).resolve().parent.parent


def test_imports_go_downward_only() -> None:
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"]
    run = subprocess.run([*command, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def test_every_stage_has_its_layer() -> None:
    contracts = {
        c["id"]: c for c in api.read_configuration(str(ROOT / "pyproject.toml"))["contracts_options"]
    }
    layers = contracts["layers"]["layers"]
    assert layers[-9:] == [
        "plan | search",
        "simulate",
        "costs | frontier",
        "profiling",
        "sharding",
        "ranks",
        "capture | cluster | zoo",
        "graph",
        "errors : units : console",
    ]


@pytest.mark.parametrize("module", ["tensoropt", "tensoropt.errors", "tensoropt.units"])
def test_import_is_light(module: str) -> None:
    code = (
        f"import sys, {module}\n"
        "heavy = {'torch', 'numba', 'transformers', 'dash', 'plotly', 'onnx', 'scipy'} & set(sys.modules)\n"
        "sys.exit(f'imported {sorted(heavy)}' if heavy else 0)"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_the_search_runs_without_torch() -> None:
    code = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "import tensoropt.frontier, tensoropt.search\n"
    )  # fmt: skip
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_every_package_is_installed() -> None:
    """The list in pyproject.toml names every folder of Python files, ``app`` as ``tensoropt_app``."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert config["package-dir"] == {"tensoropt_app": "app"}
    found = {
        str(file.parent.relative_to(ROOT)).replace("/", ".")
        for top in ("tensoropt", "app")
        for file in (ROOT / top).rglob("__init__.py")
    }
    renamed = {"tensoropt_" + name if name.split(".")[0] == "app" else name for name in found}
    assert set(config["packages"]) == renamed

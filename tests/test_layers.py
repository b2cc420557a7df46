"""The architecture as tests: imports go downward only, and ``import tensoropt`` stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

import networkx as nx

from tests.test_processes import succeeds
from tests.test_vocabulary import parsed

ROOT = Path(__file__).resolve().parent.parent


def test_imports_go_downward_only() -> None:
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"]
    run = subprocess.run([*command, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def test_imports_are_light() -> None:
    succeeds("""
import sys, tensoropt, tensoropt.errors, tensoropt.units
assert issubclass(tensoropt.InfeasibleError, tensoropt.errors.TensorOptError)
dir(tensoropt)
heavy = {'torch', 'numba', 'transformers', 'dash', 'plotly', 'onnx', 'scipy'} & set(sys.modules)
assert not heavy, heavy
sys.modules['torch'] = None
import tensoropt.frontier, tensoropt.search
""")


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


def module_names() -> dict[str, Path]:
    """Every file of the package and the dashboard by the name under which it is imported."""
    found = {}
    for top, name in (("tensoropt", "tensoropt"), ("app", "tensoropt_app")):
        for path in (ROOT / top).rglob("*.py"):
            parts = (name, *path.relative_to(ROOT / top).with_suffix("").parts)
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(name: str, files: Mapping[str, Path]) -> set[str]:
    """The files that a file imports, also inside functions and for type checkers only."""
    found = set()
    package = name if files[name].name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(parsed(files[name])):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.rsplit(".", node.level - 1)[0] + "." if node.level else ""
            module = f"{above}{node.module or ''}".rstrip(".")
            for alias in node.names:
                inner = f"{module}.{alias.name}"
                found.add(inner if inner in files else module)
    return (found & files.keys()) - {name}


def test_no_circle_of_imports() -> None:
    """A circle inside a layer is not seen by the contracts: neither file can be read or changed alone."""
    files = module_names()
    graph = nx.DiGraph((name, other) for name in files for other in imported(name, files))
    assert [sorted(part) for part in nx.strongly_connected_components(graph) if len(part) > 1] == []

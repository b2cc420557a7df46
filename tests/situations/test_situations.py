"""What people bring, each once through ``tensoropt explore``: a frontier, or a refusal that says what to do.

Every function ``build*`` of the modules beside this one is a situation: a small model of its own that the
function returns as model files do. One that has to be refused says with what in its attribute ``refused``, a
regular expression; one that takes longer than the others has ``slow = True``.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tensoropt.cli.parser import main

HERE = Path(__file__).parent
LOGGED = re.compile(r"^[VIWEF]\d{4} ", re.MULTILINE)
"""How a line of PyTorch's own log begins."""
INTERNAL = re.compile(
    r"unexpected|itself failed|Traceback|__(?!init__)\w+__|\b[a-z]+_\w*_graph_\d|Error:|<eval_with_key>|"
    r"internal|report an issue|file an issue|FakeTensor|UserWarning|set TORCH",
    re.IGNORECASE,
)
"""What a refusal never says: names of exceptions, of code that was generated, requests to debug PyTorch."""


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"situations_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up the module of a class by name
    spec.loader.exec_module(module)
    return module


def _situations() -> Iterator[Any]:
    for path in sorted(HERE.glob("*.py")):
        if path.name.startswith("test_"):
            continue
        for name, build in vars(_module(path)).items():
            if name.startswith("build") and callable(build):
                marks = [pytest.mark.slow] if getattr(build, "slow", False) else []
                yield pytest.param(path, name, build, id=f"{path.stem}-{name}", marks=marks)


@pytest.mark.parametrize(("path", "name", "build"), list(_situations()))
def test_a_situation_is_explored_or_refused(
    path: Path, name: str, build: Callable[[], Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["explore", f"{path}:{name}", "--cluster", "local:2", "--measure", "never", "--json"]
    words += ["--epsilon", "0.5", "--max-points", "8", "--out", str(tmp_path / "out")]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("default")
        code = main(words)
    printed, said = capfd.readouterr()
    answer = json.loads(printed)
    assert not [str(w.message) for w in warned if issubclass(w.category, UserWarning)]
    assert not LOGGED.search(said), said
    refused = getattr(build, "refused", None)
    if refused is None:
        assert (code, "error" in answer) == (0, False), answer
        assert answer["points"]
    else:
        assert (code, "error" in answer) == (2, True), "it was explored"
        assert re.search(refused, answer["error"], re.IGNORECASE), answer["error"]
        assert not INTERNAL.search(answer["error"]), answer["error"]


def test_every_module_has_situations() -> None:
    """A module whose functions are all called otherwise would be read by nobody."""
    found = {parameters.values[0] for parameters in _situations()}
    assert found == {path for path in HERE.glob("*.py") if not path.name.startswith("test_")}

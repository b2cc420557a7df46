"""What people bring is captured and explored, or refused with what to do.

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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tensoropt.api import _prepared
from tensoropt.cli.parser import main
from tensoropt.cluster import load_cluster
from tensoropt.question.model_source import load_model
from tensoropt.question.settings import Settings
from tensoropt.session.session import Session

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


def _situations() -> Iterator[tuple[Path, str, Callable[[], Any]]]:
    for path in sorted(HERE.glob("*.py")):
        if path.name.startswith("test_"):
            continue
        for name, build in vars(_module(path)).items():
            if name.startswith("build") and callable(build):
                yield path, name, build


EXPLORED = {
    "asked-build_held_in_forward", "branching-build_two_towers", "gradients-build_not_reentrant",
    "guarded-build_contrastive", "habits-build_nested_arguments", "readers-build_split_weights",
    "state-build_codebook", "untrainable-build_complex_select",
}  # fmt: skip
"""One of each module, which the fast tests explore; the others they capture."""


SITUATIONS = {
    f"{path.stem}-{name}": (path, name, getattr(build, "refused", None), hasattr(build, "slow"))
    for path, name, build in _situations()
}
TAKEN = [id for id, (_, _, refused, _) in SITUATIONS.items() if refused is None]


def each(ids: Iterable[str], slow: Callable[[str], bool]) -> pytest.MarkDecorator:
    """A test for each of these situations, which is slow where it says so."""
    return pytest.mark.parametrize(
        "id", [pytest.param(id, marks=[pytest.mark.slow] if slow(id) else []) for id in ids]
    )


@pytest.fixture(autouse=True)
def only_our_words(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """No warning for users, no line of PyTorch's log."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("default")
        yield
    said = capfd.readouterr().err
    assert not [str(w.message) for w in warned if issubclass(w.category, UserWarning)]
    assert not LOGGED.search(said), said


def explored(id: str, out: Path, capfd: pytest.CaptureFixture[str]) -> tuple[int, Any]:
    """The exit code, and the answer."""
    path, name, *_ = SITUATIONS[id]
    words = ["explore", f"{path}:{name}", "--cluster", "local:2", "--measure", "never", "--json"]
    code = main([*words, "--epsilon", "0.5", "--max-points", "8", "--out", str(out)])
    printed, said = capfd.readouterr()
    sys.stderr.write(said)  # which is looked at behind the test
    return code, json.loads(printed)


@each((id for id in SITUATIONS if id not in TAKEN), lambda id: SITUATIONS[id][3])
def test_a_situation_is_refused(id: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, answer = explored(id, tmp_path / "out", capfd)
    assert (code, "error" in answer) == (2, True), "it was explored"
    assert re.search(SITUATIONS[id][2], answer["error"], re.IGNORECASE), answer["error"]
    assert not INTERNAL.search(answer["error"]), answer["error"]


@each((id for id in TAKEN if id not in EXPLORED), lambda id: SITUATIONS[id][3])
def test_a_situation_is_captured(id: str) -> None:
    path, name, *_ = SITUATIONS[id]
    session = Session(load_cluster("local:2"), Settings(measure="never"))
    _, problem = _prepared(session, load_model(f"{path}:{name}"), None)
    assert problem.graph.groups


@pytest.mark.slow
@each(TAKEN, lambda id: id not in EXPLORED)
def test_a_situation_is_explored(id: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, answer = explored(id, tmp_path / "out", capfd)
    assert (code, "error" in answer) == (0, False), answer
    assert answer["points"]


def test_one_of_every_module_is_explored_in_the_fast_tests() -> None:
    """A module whose functions are all called otherwise would be read by nobody."""
    modules = {path.stem for path in HERE.glob("*.py") if not path.name.startswith("test_")}
    assert set(TAKEN) >= EXPLORED
    assert {path.stem for path, *_ in SITUATIONS.values()} == modules
    assert {id.split("-")[0] for id in EXPLORED} == {id.split("-")[0] for id in TAKEN}

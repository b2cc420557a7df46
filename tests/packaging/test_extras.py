"""What is refused where an extra is not installed: the package, and what installs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
THERE = ("--cluster", "dgx-h100[2]", "--out", "out")
"""Devices that are not here: for local ones ranks are started while the model is opened."""
ASKED = {
    "app": [("dashboard",)],
    "onnx": [("explore", "model.onnx", *THERE), ("verify", "model.onnx", "--random", "1", *THERE[:2])],
    "solvers": [("explore", "zoo:mlp", *THERE, "--planners", "data_parallel,netsplit")],
    "zoo": [("explore", "zoo:gpt2-tiny", *THERE), ("verify", "zoo:bert-tiny", "--random", "1", *THERE[:2])],
}
PACKAGES = {"app": "dash", "onnx": "onnx", "solvers": "ortools", "zoo": "transformers"}
WITHOUT = """
import contextlib, io, json, sys
packages, asked = json.loads(sys.argv[1])
sys.modules.update(dict.fromkeys(packages))  # importing them fails as where they are not installed
import tensoropt
from tensoropt.cli.parser import main
answers = []
for words in asked:
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code = main(words)
    answers.append((code, said.getvalue()))
try:
    tensoropt.load_onnx("model.onnx")
except tensoropt.errors.TensorOptError as error:
    answers.append((2, str(error)))
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """By extra: exit code and last words of each command, in one process that has none of the packages."""
    place = tmp_path_factory.mktemp("without")
    (place / "model.onnx").touch()
    commands = [words for group in ASKED.values() for words in group]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, json.dumps([list(PACKAGES.values()), commands])],
        cwd=place, capture_output=True, text=True, check=True,
        env={"PYTHONPATH": str(ROOT), "TENSOROPT_CACHE": str(place / "cache"), "PATH": ""},
    )  # fmt: skip
    assert not (place / "out").exists(), "a refused command leaves nothing"
    said = iter(json.loads(done.stdout))
    found = {extra: [next(said) for _ in group] for extra, group in ASKED.items()}
    found["onnx"].extend(said)  # the Python function
    return found


@pytest.mark.parametrize("extra", ASKED)
def test_a_missing_extra_is_named_with_what_installs_it(answers, extra):
    for code, said in answers[extra]:
        assert code == 2, said
        assert f"needs the package {PACKAGES[extra]}, which is not installed" in said
        assert f"pip install 'tensoropt[{extra}]'" in said

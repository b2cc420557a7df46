"""Lowered programs on fake CUDA tensors: made for GPUs, checked without one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tensoropt import zoo
from tensoropt.errors import TensorOptError
from tests.fake_cuda import library as fake_cuda
from tests.fake_cuda.steps import ON_THE_CPU

ROOT = Path(__file__).parents[2]
CELLS = {"zoo:gnmt-tiny", "zoo:lstm-lm-tiny"}
"""Recurrent layers come apart into cells without cuDNN, which send and keep alive other things."""
WITHIN = 0.03
"""How far memory may be from what is predicted."""


def case(model: str, dtype: str = "float32", kind: str = "sharded", seed: int = 0) -> dict[str, Any]:
    return {"kind": kind, "model": model, "dtype": dtype, "mesh": [2, 2, 2], "seed": seed}


QUICK = (
    case("tests.fake_cuda.models:drawing"),
    case("zoo:lenet", "bfloat16"),
    case("tests.fake_cuda.models:drawing", "bfloat16", "placed"),
    case("tests.fake_cuda.models:drawing", kind="through_host"),
    case("tests.fake_cuda.models:drawing", kind="one_process"),
    case("zoo:mlp", kind="script"),
    case("zoo:bert-tiny", "bfloat16", kind="captured"),
    case("zoo:mlp", kind="from_plan"),
)
"""Every kind, on the smallest model that has what it is about."""
MORE = (
    case("zoo:gpt2-tiny-dropout", seed=1),
    case("zoo:gpt2-tiny", kind="one_process"),
    case("zoo:gpt2-tiny-dropout", kind="script"),
    case("zoo:llama-tiny", kind="captured"),
)
SCRIPTS = [
    case(f"zoo:{name}", kind="script")
    for name in ("bert-tiny", "gpt-mini", "llama-tiny", "mlp", "transformer-tiny", "vgg11-tiny")
]
FAMILIES = ("albert", "gpt_neox", "t5", "convnext")
WHOLE = [
    *(f"zoo:{entry.name}" for entry in zoo.list_models() if entry.size == "laptop"),
    *(f"tests.simulate.held_out:{name}" for name in FAMILIES),
    "tests.fake_cuda.models:drawing",
]


def seen(library: Path, cases: Sequence[dict[str, Any]], timeout: int) -> list[dict[str, Any]]:
    """What a process with fake CUDA devices saw of the cases."""
    command = [sys.executable, "-m", "tests.fake_cuda.sweep", str(library)]
    run = subprocess.run(
        command, input=json.dumps(cases), capture_output=True, text=True, timeout=timeout, cwd=ROOT,
        check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def wrong(found: dict[str, Any]) -> list[str]:
    """What is not as it should be, in words."""
    name = f"{found['kind']} {found['model']} {found['dtype']}"
    if "error" in found:
        return [f"{name}: {found['error']}"]
    faults = [
        f"{name}: {operator} gives a CPU tensor" for operator in found["cpu"] if operator not in ON_THE_CPU
    ]
    if found.get("carried", ["cpu"]) != ["cpu"]:
        faults.append(f"{name}: messages through the host are {found['carried']}")
    if "alike" not in found or found["model"] in CELLS:
        return faults
    if not found["alike"]:
        faults.append(f"{name}: other collectives than on the CPU")
    if abs(found["predicted"] / found["tracked"] - 1) > WITHIN:
        faults.append(f"{name}: {found['tracked']} bytes, predicted {found['predicted']}")
    return faults


def check(library: Path, cases: Sequence[dict[str, Any]], timeout: int) -> None:
    found = seen(library, cases, timeout)
    assert len(found) == len(cases)
    assert [fault for one in found for fault in wrong(one)] == []


@pytest.mark.timeout(300)
def test_some_models_on_fake_cuda_devices(fake_cuda_library: Path) -> None:
    check(fake_cuda_library, QUICK, 280)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("cases", [MORE, SCRIPTS], ids=["larger models", "scripts"])
def test_more_on_fake_cuda_devices(fake_cuda_library: Path, cases: Sequence[dict[str, Any]]) -> None:
    check(fake_cuda_library, cases, 850)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["sharded", "placed"])
def test_all_models_on_fake_cuda_devices(fake_cuda_library: Path, dtype: str, kind: str, part: int) -> None:
    check(fake_cuda_library, [case(model, dtype, kind, seed=2) for model in WHOLE[part::4]], 850)


def test_what_is_wrong_is_noticed() -> None:
    good = {**case("zoo:mlp"), "alike": True, "tracked": 100.0, "predicted": 100.5, "cpu": []}
    assert wrong(good) == wrong({**good, "predicted": 102.9}) == []
    for found, words in (
        ({**good, "alike": False}, "other collectives"),
        ({**good, "cpu": ["aten.rand.default"]}, "gives a CPU tensor"),
        ({**good, "carried": ["cpu", "cuda"]}, "messages"),
        ({**good, "error": "device mismatch"}, "device mismatch"),
        *(({**good, "predicted": bytes_}, "predicted") for bytes_ in (96.0, 104.0)),
    ):
        assert words in wrong(found)[0]


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fake_cuda.shutil, "which", lambda _: None)
    with pytest.raises(TensorOptError, match=r"no g\+\+ .*apt-get install"):
        fake_cuda.compiled(tmp_path)


def test_after_pytorch_it_is_too_late(tmp_path: Path) -> None:
    import torch  # noqa: F401

    with pytest.raises(TensorOptError, match="before PyTorch is imported"):
        fake_cuda.load(tmp_path / "library.so")

"""The usual questions, asked as the README has them: what each answer begins with, beside rules of thumb."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tensoropt.cli.parser import main
from tensoropt.exploration.exploration import Exploration, load_exploration

pytest.importorskip("transformers")
README = (Path(__file__).parents[2] / "tensoropt" / "cli" / "README.md").read_text(encoding="utf-8")
_, TABLE = README.split("## The usual questions")
QUESTIONS = dict(re.findall(r"\| ([^|`]+) \| `tensoropt ([^`]+)`", TABLE.partition("\n## ")[0]))
BEGINS = {
    "Does it fit?": r"Within 76 GiB .+ of each of 2 H100-80GB: .+ a step, [0-9.]+ GiB",
    "Which plan within 24 GiB? If none: which would?": r"Within 24 GiB of each of 2 H100-80GB: .+ a step",
    "How many GPUs?": r"Fewest devices that fit: \d+ x H100-80GB \(.+ of each\)",
    "And to train adapters alone?": r"Fewest devices that fit: \d+ x H100-80GB \(.+ of each\)",
    "8 H100, or 16 A100?": r"Fastest without limits: dgx-",
    "What does a billion tokens cost?": r"(?s)Within .+?1B tokens: [^\n]+; costs [0-9]",
}
"""How each answer begins."""


QUICK = "--epsilon 0.2 --max-points 8 --micro-batches 1 --placements never --pipelines never"


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSOROPT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_all_are_tried():
    """But for the largest batch, which takes a dozen explorations (``test_cli.py`` has three)."""
    assert QUESTIONS.keys() - BEGINS.keys() == {"How large may the batch be?"}


@pytest.mark.slow
@pytest.mark.parametrize("question", BEGINS)
def test_one_command_answers_with_a_sentence(question, place, capsys):
    # On fewer devices than people have, which takes seconds.
    command = QUESTIONS[question].replace("dgx-h100", "dgx-h100[2]").replace("dgx-a100x2", "dgx-a100[4]")
    assert main(shlex.split(f"{command} {QUICK}")) == 0
    answer = capsys.readouterr().out
    assert re.match(BEGINS[question], answer), answer[:300]


@pytest.mark.slow
def test_what_would_fit_is_said_and_kept(place, capsys):
    words = QUESTIONS["Which plan within 24 GiB? If none: which would?"].replace("24GiB", "1MiB")
    assert main(shlex.split(f"{words} {QUICK}")) == 2
    said = capsys.readouterr().err
    assert re.search(r"smallest .+ a step\); the points are in out/q1", said), said
    assert load_exploration(place / "out" / "q1").points


# -- rules of thumb -----------------------------------------------------------------------------------------

ADAM = 16, 18
"""Bytes a parameter in mixed precision: master weights, gradients and two moments, 4 bytes each, and up to 2
for a copy to compute with (Rajbhandari et al., SC 2020, section 3.1, counts 16 with gradients in half)."""


def on_one(model: str, **more: Any) -> tuple[Exploration, float]:
    """Explored on one device, and the bytes of its parameters, gradients and optimizer state."""
    from tensoropt import explore, load_model

    found = explore(
        load_model(model, device="meta", **more), cluster="dgx-h100[1]", dtype="bfloat16", measure="never",
        recompute="never", micro_batches=(1,), process_memory=False, progress=False,
    )  # fmt: skip
    return found, sum(found.fastest.memory[:3])


@pytest.mark.slow
@pytest.mark.parametrize("model", ["zoo:gpt2-tiny", "zoo:llama-tiny"])
def test_training_everything_takes_16_to_18_bytes_a_parameter(model, place):
    found, size = on_one(model)
    least, most = ADAM
    assert least <= size / found.model.parameters <= most


@pytest.mark.slow
def test_training_adapters_takes_the_frozen_weights_and_16_bytes_for_each_of_theirs(place):
    plain, _ = on_one("zoo:llama-tiny")
    found, size = on_one("zoo:llama-tiny", lora="r=4,targets=q_proj+v_proj")
    adapters = found.model.parameters - plain.model.parameters
    frozen = 2 * plain.model.parameters
    least, most = (frozen + each * adapters for each in ADAM)
    assert least <= size <= most

"""Models that are kept: small ones beside the last one, as long as their files do not change."""

from __future__ import annotations

import os
from pathlib import Path

from tensoropt.engine import models
from tensoropt.engine.models import ModelSpec, load_model

FILE = """
from torch import nn, ones, sum

def build():
    return nn.Sequential(nn.Linear(8, {width}), nn.Flatten(0)), (ones(1, 8),), {{}}, sum
"""


def write(file: Path, width: int) -> ModelSpec:
    file.write_text(FILE.format(width=width))
    os.utime(file, ns=(width, width))
    return ModelSpec(f"{file}:build")


def test_small_models_are_kept_until_their_files_change(tmp_path, monkeypatch):
    first, second = write(tmp_path / "first.py", 4), write(tmp_path / "second.py", 4)
    model = load_model(first).captured.model
    load_model(second)
    assert load_model(first).captured.model is model
    # What the model gave is not kept beside another one.
    load_model(first).results["some"] = 1
    load_model(second)
    assert not load_model(first).results
    write(tmp_path / "first.py", 6)
    assert load_model(first).captured.model[0].out_features == 6
    kept = load_model(first).captured.model
    monkeypatch.setattr(models, "_KEPT_BYTES", 0)
    write(tmp_path / "second.py", 6)
    load_model(second)
    assert load_model(first).captured.model is not kept

"""Python's and numpy's random numbers: the same in every process, and noted."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from tensoropt.capture import capture
from tensoropt.capture.draws import seeded
from tensoropt.question.model_source import load_model

X = torch.randn(4, 8)


class Drawn(nn.Module):
    """Layers that are dropped by a function."""

    def __init__(self, drop):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(12))
        self.drop = drop
        self.generator = np.random.default_rng(3)

    def forward(self, x):
        for layer in self.layers:
            if not self.drop(self):
                x = x + layer(x)
        return x.mean()


DROPS = {
    "random": lambda model: random.random() < 0.5,
    "randint": lambda model: random.randint(0, 1) == 0,
    "numpy": lambda model: np.random.rand() < 0.5,
    "own": lambda model: model.generator.random() < 0.5,
}


@pytest.mark.parametrize("kind", DROPS)
def test_every_capture_draws_the_same_and_names_the_line(kind):
    model = Drawn(DROPS[kind])
    graphs = []
    for seed in (1, 2):
        random.seed(seed)
        np.random.seed(seed)
        before = random.getstate(), np.random.get_state()[1].tolist(), model.generator.bit_generator.state
        graphs.append(capture(model, (X,)).graph)
        after = random.getstate(), np.random.get_state()[1].tolist(), model.generator.bit_generator.state
        assert before == after
    assert graphs[0].fingerprint == graphs[1].fingerprint
    line = DROPS[kind].__code__.co_firstlineno
    assert any(f"test_draws.py:{line} draws numbers" in note for note in graphs[0].notes)


def test_no_note_where_nothing_is_drawn():
    assert capture(Drawn(lambda model: False), (X,)).graph.notes == ()


def test_a_model_file_is_seeded(tmp_path):
    """Whatever its function draws with, every rank builds the same model."""
    file = tmp_path / "drawn.py"
    file.write_text(
        "import random, numpy, torch\n"
        "def build():\n"
        "    layer = torch.nn.Linear(2, 2)\n"
        "    layer.drawn = random.random(), float(numpy.random.rand())\n"
        "    return layer, (torch.ones(1, 2),)\n"
    )
    state = random.getstate()
    models = [load_model(f"{file}:build", seed=seed).model.drawn for seed in (5, 5, 6)]
    assert models[0] == models[1] != models[2]
    assert random.getstate() == state


def test_what_was_drawn_is_told():
    with seeded() as drew:
        assert not drew()
        random.random()
        assert drew()


def test_the_note_names_the_models_line_not_numpys():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            order = np.random.permutation(4)
            return self.layer(x[torch.as_tensor(order)]).square().mean()

    (note,) = (n for n in capture(Mixed(), (X,)).graph.notes if "draws numbers" in n)
    assert note.count(".py:") == 1
    assert "test_draws.py" in note

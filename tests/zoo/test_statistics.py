"""The committed figures are what the zoo gives now."""

from __future__ import annotations

import pytest

from tensoropt import zoo
from tensoropt.zoo.figures import figures
from tests.zoo.statistics import count


@pytest.mark.parametrize("name", ["lenet", "vgg11-tiny", "gpt-mini"])
def test_figures_of_small_models_are_true(name):
    assert count(name) == figures()[name]


def test_figures_are_of_models_there_are():
    entries = {e.name: e for e in zoo.list_models()}
    assert set(figures()) <= set(entries)
    for name, found in figures().items():
        assert found.batch == entries[name].batch, name

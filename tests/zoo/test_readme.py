"""The zoo's README lists what is registered, with the true sizes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tensoropt import zoo
from tensoropt.zoo.figures import figures

README = (Path(zoo.__file__).parent / "README.md").read_text()
ROWS = {m[1]: m[2] for m in re.finditer(r"^\| `([^`]+)` \| ([\d.]+ [GMk]) \|", README, re.MULTILINE)}


def test_every_model_has_a_row() -> None:
    assert set(ROWS) == {e.name for e in zoo.list_models()}


@pytest.mark.parametrize("name", sorted(ROWS))
def test_the_size_is_true(name: str) -> None:
    if package := zoo.entry(name).requires:
        pytest.importorskip(package)
    number, unit = ROWS[name].split()
    expected = float(number) * {"G": 1e9, "M": 1e6, "k": 1e3}[unit]
    assert zoo.build(name, device="meta").parameter_count == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("paper", "name"),
    [
        ("RNN 126", "rnn-lm"),
        ("Transformer 74", "transformer-2.6b"),
        ("VGG16 30", "vgg16"),
        ("WideResNet 83", "wide-resnet-152"),
    ],
)
def test_memory_beside_the_paper_is_as_counted(paper: str, name: str) -> None:
    found = re.search(rf"{paper}, here\s+(\d+) / (\d+)", README)
    assert found
    of = figures()[name]
    expected = [round((of.parameter_bytes + more) / 2**30) for more in (of.kept_bytes, of.output_bytes)]
    assert list(map(int, found.groups())) == expected

"""Budgets from ``--headroom``.

What ``show`` and ``choose`` say a training takes and costs, and what they refuse.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tensoropt.cli.parser import main
from tensoropt.cluster import load_cluster
from tensoropt.errors import TensorOptError
from tensoropt.exploration.exploration import Exploration
from tensoropt.units import headroom_bytes
from tests.exploration.test_rates import explored


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """One point of 0.5 s on two H100 that reads 8 samples of 128 tokens, at a tenth of their peak."""
    folder = tmp_path_factory.mktemp("amounts") / "one"
    found: Exploration = explored(flops={"float32": 0.1 * 2 * 66.9e12 * 0.5})
    assert found.cluster == load_cluster("dgx-h100[2]").to_dict()
    found.save(folder)
    return folder


def test_a_training_of_tokens_in_words_and_as_data(saved, capsys):
    words = [
        "choose", str(saved), "--knee", "--tokens", "7.3728M", "--price", "H100-80GB=3", "--currency", "EUR",
    ]  # fmt: skip
    assert main(words) == 0
    told = capsys.readouterr().out
    assert "throughput: 2,050 tokens/s (1,020 per device), 16.0 samples/s (8.00 per device)" in told
    assert "MFU: 10 %" in told
    assert "7,372,800 tokens: 1.00 h, 2.00 device-hours; costs 6.00 EUR" in told
    assert main([*words, "--json"]) == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)["rates"]
    assert (data["steps"], data["hours"], data["device_hours"], data["cost"]) == (7200, 1.0, 2.0, 6.0)
    assert (data["samples_per_step"], data["tokens_per_step"], data["currency"]) == (8, 1024, "EUR")


def test_without_a_price_money_is_unknown_and_says_why(saved, capsys):
    assert main(["choose", str(saved), "--knee"]) == 0
    told = capsys.readouterr().out
    assert "1,000 steps: 8.33 min, 0.278 device-hours; money unknown: no price of a device-hour" in told


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["--tokens", "many"], "--tokens 'many' is not a count"),
        (["--tokens", "0"], "give more than 0"),
        (["--price", "free"], "'free' is not a price"),
        (["--price", "-1"], "the price of all devices is -1 per hour"),
        (["--price", "A100-80GB=2"], "price given for A100-80GB, which is no device"),
        (["--price", "1", "--price", "2"], "two prices for all devices"),
    ],
)
def test_nonsense_ends_with_code_2_and_the_rule(saved, capsys, more, why):
    assert main(["choose", str(saved), "--knee", *more]) == 2
    told = capsys.readouterr()
    assert why in told.err
    assert "Traceback" not in told.err


DEVICE = 80 * 2**30


@pytest.mark.parametrize(("headroom", "share"), [("25%", 0.25), ("2GiB", 1 / 40), ("0%", 0.0)])
def test_headroom_is_a_share_of_the_device(headroom, share):
    assert headroom_bytes(headroom, DEVICE) / DEVICE == share


@pytest.mark.parametrize("headroom", ["much", "%", "5%%", "-5%", "100%", "81GiB"])
def test_headroom_that_means_nothing_is_refused(headroom):
    with pytest.raises(TensorOptError, match=r"--headroom|size"):
        headroom_bytes(headroom, DEVICE)

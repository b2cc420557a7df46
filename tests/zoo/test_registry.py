"""Names, overrides and seeds of the zoo."""

from __future__ import annotations

import sys

import pytest
import torch

from tensoropt import zoo
from tensoropt.errors import TensorOptError


def test_an_unknown_name_lists_the_nearest() -> None:
    with pytest.raises(TensorOptError, match=r"no model 'gpt2-tyni'.*gpt2-tiny"):
        zoo.build("gpt2-tyni")


def test_a_name_like_nothing_lists_all() -> None:
    with pytest.raises(zoo.ZooError, match=r"Valid: .*mlp.*vgg16"):
        zoo.build("@@@@")


def test_an_unknown_override_lists_the_settings() -> None:
    with pytest.raises(zoo.ZooError, match=r"'mlp' has no setting 'width'; it has: features=256"):
        zoo.build("mlp", width=3)


def test_a_batch_below_one_is_refused() -> None:
    with pytest.raises(zoo.ZooError, match="batch 0"):
        zoo.build("mlp", batch=0)


def test_batch_and_overrides_reach_the_builder() -> None:
    built = zoo.build("gpt-mini", batch=3, sequence=16, device="meta")
    assert [tuple(a.shape) for a in built.args] == [(3, 16), (3, 16)]
    assert zoo.entry("gpt-mini-dropout").overrides["dropout"] == 0.1


def test_the_same_seed_gives_the_same_weights_and_leaves_the_global_state() -> None:
    before = torch.random.get_rng_state()
    first, second, other = zoo.build("mlp"), zoo.build("mlp"), zoo.build("mlp", seed=1)
    assert torch.equal(before, torch.random.get_rng_state())
    pairs = zip(first.model.parameters(), second.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert torch.equal(first.args[0], second.args[0])
    assert not torch.equal(first.args[0], other.args[0])


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(zoo.MissingExtraError, match=r"zoo:gpt2-tiny needs .*pip install 'tensoropt\[zoo\]'"):
        zoo.build("gpt2-tiny", device="meta")


def test_the_list_is_sorted_and_says_what_each_is() -> None:
    entries = zoo.list_models()
    assert [e.name for e in entries] == sorted(e.name for e in entries)
    assert all(e.description and not e.description.endswith(".") and e.batch >= 1 for e in entries)

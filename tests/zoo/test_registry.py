"""Names, overrides and seeds of the zoo."""

from __future__ import annotations

import re

import pytest
import torch

from tensoropt import zoo


@pytest.mark.parametrize(("name", "says"), [
    ("@@@@", r"Valid: .*mlp.*vgg16"),
    ("mlp?widht=3", "'mlp' has no option 'widht'; it has: features=256"),
    ("vgg16?imgae=64", r"no option 'imgae'; did you mean 'image'\? it has: depth=16, image=224, "),
    ("gpt2-tyni?layers=1", r"no model 'gpt2-tyni'.*gpt2-tiny"),
    ("mlp?", r"'' is no OPTION=VALUE. 'mlp' has: features=256"),
    ("mlp?features", "'features' is no OPTION=VALUE"),
    ("mlp?features=2&features=4", "the option 'features' twice"),
    ("mlp?features=2.5", "features: '2.5' is not a whole number; write for example 8; its default is 256"),
    ("mlp?features=0", "'mlp': features=0 has to be at least 1; its default is 256"),
    ("moe-mini?slack=0", "slack=0.0 has to be above 0; its default is 1.25"),
    ("moe-mini?slack=inf", "slack"),
    ("lstm-lm-tiny?unrolled=1", "unrolled: '1' is neither true nor false; its default is False"),
    ("mlp?batch=3", "give it by --batch, in Python"),
    ("resnet50?depth=7", "depth=7 is none of 26, 50, 101, 152, 200; use one of them; its defaults are "),
    ("vgg16?dropout=2", "dropout=2.0 has to be between 0 and 1; its default is 0.0"),
    ("unet?image=7", r"'unet': image=7 is no multiple of 16, as 4 levels .*; use 16; its defaults are "),
    ("unet-tiny?image=10", "image=10 is no multiple of 4, .*; use 8 or 12"),
    ("vgg16?image=31", "image=31 is below 32, as five stages halve it; use 32 or more"),
])  # fmt: skip
def test_options_that_cannot_be_used_are_refused_with_those_that_can(name, says):
    with pytest.raises(zoo.ZooError, match=says):
        zoo.build(name, device="meta")


ONE_OF_EACH_BUILDER = {(e.description, *e.overrides): e.name for e in zoo.list_models() if e.size == "laptop"}
"""A small model of each builder."""


@pytest.mark.parametrize("name", ONE_OF_EACH_BUILDER.values())
def test_a_value_with_which_a_model_cannot_run_is_refused_at_once(name):
    """Whatever is built runs: what a model's structure needs of a size is refused before."""
    entry = zoo.entry(name)
    if entry.requires:
        pytest.importorskip(entry.requires)
    refused = re.compile(
        rf"'{name}': \S+=\S+ (is (no|none|below) .*; use .*|has to be .*); its default(s are| is) "
    )
    for option, default in entry.overrides.items():
        for value in () if isinstance(default, bool) else (-1, 0, 1, 3, default + 1):
            refusal, built = built_or_refused(name, option, value)
            if built is None:
                assert refused.match(refusal), (option, value)
            else:
                assert value > 0 or option == "dropout", (option, value)
                assert built.model(*built.args, **built.kwargs).shape == (), (option, value)


def built_or_refused(name: str, option: str, value: float) -> tuple[str, zoo.ZooModel | None]:
    try:
        return "", zoo.build(name, batch=2, **{option: value})
    except zoo.ZooError as refusal:
        return str(refusal), None


def test_every_option_can_be_written():
    for entry in zoo.list_models():
        written = "&".join(f"{name}={value}" for name, value in entry.overrides.items())
        assert zoo.read_name(f"{entry.name}?{written}") == (entry.name, entry.overrides)
        assert zoo.read_name(entry.name) == (entry.name, {})


def test_written_options_reach_the_builder_and_keywords_win():
    written = zoo.build("gpt-mini?sequence=16&hidden=32", device="meta")
    given = zoo.build("gpt-mini", sequence=16, hidden=32, device="meta")
    assert (written.name, written.parameter_count) == ("gpt-mini", given.parameter_count)
    assert [a.shape for a in written.args] == [a.shape for a in given.args]
    assert zoo.build("gpt-mini?sequence=16", sequence=8, device="meta").args[0].shape[1] == 8


def test_keywords_are_refused_alike():
    with pytest.raises(zoo.ZooError, match="batch 0"):
        zoo.build("mlp", batch=0)
    with pytest.raises(zoo.ZooError, match=r"'mlp' has no option 'width'; it has: features=256"):
        zoo.build("mlp", width=3)


def test_the_same_seed_gives_the_same_weights_and_leaves_the_global_state():
    before = torch.random.get_rng_state()
    first, second, other = zoo.build("mlp"), zoo.build("mlp"), zoo.build("mlp", seed=1)
    assert torch.equal(before, torch.random.get_rng_state())
    pairs = zip(first.model.parameters(), second.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert torch.equal(first.args[0], second.args[0])
    assert not torch.equal(first.args[0], other.args[0])


def test_the_list_is_sorted_and_says_what_each_is():
    entries = zoo.list_models()
    assert [e.name for e in entries] == sorted(e.name for e in entries)
    assert all(e.description and not e.description.endswith(".") and e.batch >= 1 for e in entries)

"""Recipes name the parts of a block that run again; constraints pin them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tensoropt.sharding.constraints import ConstraintError, constraints_from_dict, match
from tensoropt.sharding.groups import GroupGraph
from tensoropt.sharding.recipes import RECIPES, groups_run_once, recipe_name, recipes_of
from tensoropt.sharding.regions import find_regions
from tests.models import Call
from tests.sharding.models import grouped_model


def decoder(fused: bool) -> nn.Module:
    """Attention is one kernel, or products and a softmax with a mask and dropout."""

    def block(m: Any, x: torch.Tensor) -> torch.Tensor:
        parts = m.qkv(m.first(x)).chunk(3, dim=-1)
        q, k, v = (part.view(2, 4, 2, 4).transpose(1, 2) for part in parts)
        if fused:
            mixed = F.scaled_dot_product_attention(q, k, v)
        else:
            mixed = F.dropout((q @ k.transpose(-2, -1) * 0.5).softmax(-1), 0.1) @ v
        x = x + m.out(mixed.transpose(1, 2).reshape(2, 4, 8))
        h = m.second(x)
        return x + m.down(m.up(h) * torch.sigmoid(m.gate(h)))

    def layers(m: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in m.layers:
            x = layer(x)
        return x.square().mean()

    def layer() -> nn.Module:
        sizes = {"qkv": (8, 24), "out": (8, 8), "up": (8, 16), "gate": (8, 16), "down": (16, 8)}
        held = {name: nn.Linear(*size) for name, size in sizes.items()}
        return Call(block, first=nn.LayerNorm(8), second=nn.LayerNorm(8), **held)

    return Call(layers, layers=nn.ModuleList(layer() for _ in range(3)))


@pytest.fixture(scope="module", params=[True, False], ids=["fused", "scores"])
def graph(request: pytest.FixtureRequest) -> GroupGraph:
    return grouped_model(decoder(request.param), torch.randn(2, 4, 8), loss=None)


def modules_run_again(graph: GroupGraph, recipe: str) -> set[str]:
    """The modules of the second block whose groups run again, or operators of the block itself."""
    region = find_regions(graph)[1]
    once = groups_run_once(graph, region, recipe)
    assert once is not None
    anchors = [graph.group_of[name].anchor for name in region.groups if name not in once]
    return {op.module.removeprefix("layers.1").lstrip(".") or op.target.split(".")[1] for op in anchors}


PRODUCTS = {"qkv", "out", "up", "gate", "down"}
NORMS = {"first", "second"}


def test_recipes_run_again_what_they_say(graph: GroupGraph) -> None:
    everything = modules_run_again(graph, "full")
    assert everything > PRODUCTS | NORMS
    core = modules_run_again(graph, "attention core")
    assert core
    assert not core & (PRODUCTS | NORMS)
    again = modules_run_again(graph, "products")
    assert again >= NORMS
    assert not again & (PRODUCTS | core)
    assert modules_run_again(graph, "products/2") == again | {"out", "gate"}
    assert modules_run_again(graph, "attention products") == again | {"up", "gate", "down"}
    assert modules_run_again(graph, "query, key, value products") == everything - {"qkv"}
    activations = modules_run_again(graph, "norms and activations")
    assert activations >= NORMS
    assert not activations & PRODUCTS


def test_what_runs_again_has_the_name_of_its_recipe(graph: GroupGraph) -> None:
    region = find_regions(graph)[1]
    for recipe, once in recipes_of(graph, region).items():
        for own in (once, once | set(region.rest)):
            assert recipes_of(graph, region)[recipe_name(graph, region, own) or ""] == once, recipe
    alone = [name for name in region.groups if graph.group_of[name].anchor.module == "layers.1.up"]
    assert recipe_name(graph, region, alone) is None


def test_a_block_without_attention_has_no_core() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)) for _ in "ab"))
    graph = grouped_model(model, torch.randn(4, 8), loss=lambda out: out.square().mean())
    for region in find_regions(graph):
        assert groups_run_once(graph, region, "attention core") is None
        assert set(recipes_of(graph, region)) <= {*RECIPES} - {"attention core", "attention products"}


def pinned(graph: GroupGraph, *entries: dict) -> dict[str, set[str]]:
    """For each block, the groups that run again."""
    again = match(constraints_from_dict({"recompute": list(entries)}), graph).again
    blocks = {region.name: region.groups for region in find_regions(graph)}
    return {block: {name for name in groups if again.get(name)} for block, groups in blocks.items()}


def test_a_pin_speaks_of_every_kth_block(graph: GroupGraph) -> None:
    first, second, third = find_regions(graph)
    found = pinned(graph, {"blocks": "*", "recipe": "products", "every": 2})
    once = groups_run_once(graph, second, "products")
    assert found == {first.name: set(), second.name: {*second.groups} - once, third.name: set()}
    apart = pinned(
        graph, {"blocks": "layers.[01]", "recipe": "none"}, {"blocks": "layers.2", "recipe": "full"}
    )
    assert apart == {first.name: set(), second.name: set(), third.name: set(third.groups)}


def test_gathered_inputs_are_pinned_beside_what_runs_again(graph: GroupGraph) -> None:
    first, second, third = find_regions(graph)
    gathered = {"blocks": "*", "recipe": "gathered inputs", "every": 2}
    entries = [gathered, {"blocks": "layers.[12]", "recipe": "products"}]
    matched = match(constraints_from_dict({"recompute": entries}), graph)
    assert matched.gathered_again == {
        name: region is second for region in (first, second, third) for name in region.groups
    }
    assert matched.again.keys() == {*second.groups, *third.groups}
    nothing = match(constraints_from_dict({"recompute": [{"blocks": "*", "recipe": "none"}]}), graph)
    assert not any(nothing.gathered_again.values())
    assert nothing.gathered_again == nothing.again
    with pytest.raises(ConstraintError, match=r"both match layers\.1"):
        pinned(graph, gathered, {"blocks": "layers.1", "recipe": "none"})


def test_pins_that_cannot_hold_are_refused_or_given_up(graph: GroupGraph) -> None:
    full = {"blocks": "*", "recipe": "full"}
    for entries, says in (
        ([full, {"blocks": "layers.0", "recipe": "none"}], "both match layers.0"),
        ([{"blocks": "layer.*", "recipe": "full"}], "matches no repeated block"),
        ([{**full, "every": 4}], "only 3 blocks match, so one in 4 selects none; give every: 3 or less"),
    ):
        with pytest.raises(ConstraintError, match=says):
            pinned(graph, *entries)
    soft = constraints_from_dict(
        {"recompute": [full, {"blocks": "layers.0", "recipe": "none", "soft": True}]}
    )
    matched = match(soft, graph)
    assert all(matched.again.values())
    assert any("given up, as it is soft" in note for note in matched.notes)

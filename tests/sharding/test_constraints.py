"""What constraints may say, and which operators and parameters they speak of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tensoropt.cluster import load_cluster
from tensoropt.ops.layouts import PARTIAL_GRAD, REPLICATE
from tensoropt.sharding.constraints import ConstraintError, accepts, constraints_from_dict, match, stored_as
from tensoropt.sharding.groups import GroupGraph, Label
from tests.models import Call
from tests.sharding.models import grouped_model


@pytest.fixture(scope="module")
def graph() -> GroupGraph:
    def block(m: Any, x: torch.Tensor) -> torch.Tensor:
        return x + m.down(torch.relu(m.up(m.norm(x))))

    def layers() -> dict[str, nn.Module]:
        return {"norm": nn.LayerNorm(16), "up": nn.Linear(16, 32), "down": nn.Linear(32, 16)}

    blocks = nn.ModuleList(Call(block, **layers()) for _ in range(2))
    model = Call(lambda m, x: m.blocks[1](m.blocks[0](x)).mean(), blocks=blocks)
    return grouped_model(model, torch.randn(8, 16), loss=None)


def pin(operators: str, axes: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"pin": [{"operators": operators, "axes": axes, **more}]}


def test_what_is_read_is_kept_as_data() -> None:
    data = {
        "pin": [
            {"operators": "blocks.*.up", "axes": {"*": ["out_features", "none"]}},
            {"parameters": "*.norm.weight", "axes": {"gpu": "R"}, "soft": True},
        ],
        "together": [["a", "b"], {"operators": ["c*"], "soft": True}],
        "devices": [
            {"operators": "*", "kinds": "H100*"},
            {"operators": "a", "devices": [2, 0, 2], "soft": True},
            {"operators": "b", "devices": 1},
        ],
    }
    found = constraints_from_dict(data)
    assert found.data == data
    assert found.pins[0].axes == {"*": ("out_features", "none")}
    assert not found.pins[0].soft
    assert found.stored[0].soft
    assert found.stored[0].name == "pin 2"
    assert [t.soft for t in found.together] == [False, True]
    assert found.devices[0].kinds == ("H100*",)
    assert [pin.numbers for pin in found.devices] == [(), (2, 0), (1,)]
    assert [pin.soft for pin in found.devices] == [False, True, False]
    assert str(found.devices[1]) == "devices 2 (a: device 2, 0)"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ([], "a mapping with pin, together, devices"),
        ({}, "there are no constraints"),
        ({"pins": []}, "did you mean 'pin'"),
        ({"pin": {"operators": "a"}}, "'pin' is a list"),
        ({"pin": ["a"]}, "pin 1 is a mapping"),
        ({"pin": [{"axes": {"x": "batch"}}]}, "either 'operators' or 'parameters'"),
        (pin("a", {}), "'axes' gives the dim or storage on each mesh axis"),
        (pin("a", {"x": 3}), "a text or a list of texts"),
        (pin("", {"x": "y"}), "one pattern"),
        (pin("a", {"x": "y"}, soft="yes"), "true or false"),
        (pin("a", {"x": "y"}, sofft=True), "did you mean 'soft'"),
        ({"pin": [{"parameters": "a", "axes": {"x": "P/R"}}]}, "is not a way to store a parameter"),
        ({"together": "a"}, "'together' is a list"),
        ({"devices": [{"operators": "a"}]}, "either 'kinds', .* or 'devices', numbers of devices"),
        ({"devices": [{"operators": "a", "kinds": "H*", "devices": 0}]}, "either 'kinds', .* write two"),
        ({"devices": [{"kinds": "H*"}]}, "'operators' is missing"),
        ({"devices": [{"operators": "a", "kinds": []}]}, "'kinds' is a text or a list"),
        ({"devices": [{"operators": "a", "devices": []}]}, "a list of numbers, each at least 0, not list"),
        ({"devices": [{"operators": "a", "devices": [0, -1]}]}, "each at least 0"),
        ({"recompute": [{"blocks": "*"}]}, "'recipe' is missing"),
        ({"recompute": [{"blocks": "*", "recipe": "product"}]}, "did you mean 'products'"),
        ({"recompute": [{"blocks": "*", "recipe": "full", "every": 0}]}, "at least 1, not int 0"),
    ],
)
def test_what_cannot_be_understood_is_named(data: object, says: str) -> None:
    with pytest.raises(ConstraintError, match=says.replace("(", r"\(")):
        constraints_from_dict(data)


def test_allowed_devices_come_best_first() -> None:
    kinds = [{"kind": name, "count": 2} for name in ("H100-80GB", "A100-80GB", "A100-40GB")]
    cluster = load_cluster({"devices": kinds, "links": {"intra_node": "NVLink3"}})

    def allowed(**wanted: Any) -> tuple[int, ...]:
        (pin,) = constraints_from_dict({"devices": [{"operators": "*", **wanted}]}).devices
        return pin.allowed(cluster)

    assert allowed(kinds=["A100*", "H100*"]) == (2, 3, 4, 5, 0, 1)
    assert allowed(kinds=["A100-40GB", "*"]) == (4, 5, 0, 1, 2, 3)
    assert allowed(kinds="V100*") == ()
    assert allowed(devices=[5, 9, 0]) == (5, 0)


def test_patterns_speak_of_what_computes(graph: GroupGraph) -> None:
    found = match(constraints_from_dict(pin("blocks.*.up", {"x": "out_features"})), graph)
    ((_, operators),) = found.pins
    assert [(op.target, op.module) for op in operators] == [
        ("aten.linear.default", "blocks.0.up"),
        ("aten.linear.default", "blocks.1.up"),
    ]
    found = match(constraints_from_dict(pin("blocks.0*", {"x": ["batch", "rows", "d0", "rows.0"]})), graph)
    assert not any(graph.atoms.spaces[op.name].cheap for op in found.pins[0][1])


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (pin("blocks.*.upp", {"x": "none"}), "did you mean .*blocks.*up"),
        (pin("blocks.0.up", {"x": "heads"}), "cannot be split that way on x; valid: none, .*out_features"),
        ({"pin": [{"parameters": "*.up.wieght", "axes": {"x": "R"}}]}, "did you mean 'blocks.*up.weight'"),
        ({"together": [["blocks.0.up"]]}, "name two or more"),
        ({"together": [["blocks.0.up", "nothing"]]}, "matches no operator"),
        ({"devices": [{"operators": "nothing", "kinds": "H100*"}]}, "matches no operator"),
    ],
)
def test_what_matches_nothing_is_an_error_even_where_soft(
    graph: GroupGraph, data: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConstraintError, match=says):
        match(constraints_from_dict(data), graph)


def test_a_soft_pin_to_a_dim_that_is_not_there_is_given_up(graph: GroupGraph) -> None:
    found = match(constraints_from_dict(pin("blocks.0.up", {"x": "heads"}, soft=True)), graph)
    assert found.pins == ()
    assert "given up, as it is soft: pin 1 (blocks.0.up: x=heads)" in found.notes[0]


def test_labels_are_accepted_by_name_dim_or_whole() -> None:
    label = Label.parse("rows.1@S(0)")
    assert all(accepts(label, wanted) for wanted in ("rows", "rows.1", "rows.1@S(0)"))
    assert not any(accepts(label, wanted) for wanted in ("rows.0", "rows.1@R", "none"))


def test_stored_placements() -> None:
    assert stored_as(0, "S(0)")
    assert stored_as(1, "sharded")
    assert stored_as(REPLICATE, "R")
    assert stored_as(PARTIAL_GRAD, "R")
    assert not stored_as(1, "S(0)")
    assert not stored_as(REPLICATE, "sharded")

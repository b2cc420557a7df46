"""What constraints leave on a mesh, and that it can be searched.

Storage options of parameters, by hand and by rule.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from tensoropt import explore
from tensoropt.capture import capture
from tensoropt.cluster import Cluster, load_cluster
from tensoropt.costs.restrictions import (
    _sharded_layout,
    ahead_options,
    check_devices,
    labels_of,
    restrict,
    storage_options,
    unsharded_options,
)
from tensoropt.evaluation.problem import Problem, prepare
from tensoropt.graph import Tensor
from tensoropt.ops.layouts import (
    GATHERED_AHEAD,
    GATHERED_ONCE,
    PARTIAL,
    PARTIAL_GRAD,
    REDUCED_LAST,
    REPLICATE,
)
from tensoropt.profiling.store import ProfileStore
from tensoropt.sharding.configurations import enumerate_configurations
from tensoropt.sharding.constraints import ConstraintError, constraints_from_dict, match
from tensoropt.sharding.reshard.steps import forward_placements, resharding_steps
from tests.models import Call

R, RP, PR = REPLICATE, PARTIAL_GRAD, PARTIAL
WEIGHT = Tensor("w", (8, 6), "float32", "parameter", True)
BIAS = Tensor("b", (8,), "float32", "parameter", True)
FROZEN = Tensor("f", (8, 6), "float32", "parameter", False)


def options(tensor, sizes, use, mesh):
    return [home for (home,) in storage_options((tensor,), (sizes,), (use,), mesh)]


def weight(*sizes: int) -> Tensor:
    return Tensor("o", sizes, "float32", "parameter", True)


@pytest.mark.parametrize(
    ("tensor", "use", "mesh", "homes"),
    [
        # Data parallelism: whole or sharded, by each axis and by both.
        (WEIGHT, (R, RP), (1, 2), [(R, RP), (R, 0)]),
        (WEIGHT, (R, RP, RP), (1, 2, 2), [(R, RP, RP), (R, 0, 0), (R, 0, RP), (R, RP, 0)]),
        # An axis that splits the use is no choice: ZeRO goes inside the shard where one gather brings it.
        (WEIGHT, (R, 0), (1, 2), [(R, 0)]),
        (WEIGHT, (R, 0, RP), (1, 2, 2), [(R, 0, RP), (R, 0, 0)]),
        # The outer axis cannot shard the same atom and be gathered alone: it takes the next one.
        (WEIGHT, (R, RP, 0), (1, 2, 2), [(R, RP, 0), (R, 1, 0)]),
        # What does not divide stays whole.
        (weight(7, 6), (R, RP), (1, 2), [(R, RP), (R, 1)]),
        (weight(7, 5), (R, RP), (1, 2), [(R, RP)]),
        (weight(), (R, RP), (1, 2), [(R, RP)]),
        (BIAS, (R, PR), (1, 2), [(R, R), (R, 0)]),  # an added bias
        (FROZEN, (R, RP), (1, 2), [(R, R), (R, 0)]),  # without a gradient there is no partial one
    ],
)
def test_homes_of_a_parameter(tensor, use, mesh, homes):
    assert options(tensor, tensor.shape, use, mesh) == homes


def test_parameters_of_a_group_choose_together():
    found = storage_options((WEIGHT, BIAS), ((8, 6), (8,)), ((R, RP), (R, RP)), (1, 2))
    assert found == (((R, RP), (R, RP)), ((R, 0), (R, 0)))


@pytest.mark.parametrize("mesh", [(1, 2), (2, 2), (1, 2, 2), (1, 2, 4), (1, 2, 2, 2)], ids=str)
def test_every_option_comes_back_by_one_gather(mesh):
    for sizes in [(8, 6), (4, 2, 6), (12,), (3, 16)]:
        for use in itertools.product((R, RP, 0), repeat=len(mesh) - 1):
            whole = (R, *use)
            found = options(Tensor("w", sizes, "float32", "parameter", True), sizes, whole, mesh)
            assert found[0] == whole
            assert len(found) == len(set(found))
            for home in found[1:]:
                assert all(h == w for h, w in zip(home, whole, strict=True) if w not in (R, RP))
                steps = resharding_steps(sizes, mesh, forward_placements(home), forward_placements(whole))
                assert [s.kind for s in steps] == ["all_gather"]
            axes = tuple(a for a in range(1, len(mesh)) if whole[a] != 0)
            if axes:
                home = _sharded_layout(sizes, mesh, whole, axes)
                assert home is None or home in found


MIXED = Tensor("m", (8, 6), "bfloat16", "parameter", True, master_dtype="float32")
LATER = (((GATHERED_ONCE, 0),), ((REDUCED_LAST, 0),))
"""A gradient can wait for the last of several micro-batches."""


@pytest.mark.parametrize(
    ("tensors", "mesh", "found"),
    [
        ((WEIGHT,), (1, 2), (((GATHERED_ONCE, 0),),)),
        ((WEIGHT,), (1, 2, 2), (((GATHERED_ONCE, *axes),) for axes in ((0, 0), (0, RP), (RP, 0)))),
        ((WEIGHT,), (2, 2), LATER),
        ((MIXED,), (2, 2), LATER),  # added up in the type in which it is stored
        ((weight(7, 5),), (2, 2), ()),  # only what is sharded is held, and trained
        ((FROZEN,), (2, 2), ()),
        ((WEIGHT, FROZEN), (1, 2), (((GATHERED_ONCE, 0), (R, 0)),)),
    ],
)
def test_gathered_copies_can_be_held(tensors, mesh, found):
    uses = tuple((R, *(RP for _ in mesh[1:])) for _ in tensors)
    homes = storage_options(tensors, tuple(t.shape for t in tensors), uses, mesh)
    assert unsharded_options(tensors, homes, mesh) == tuple(found)


def test_what_is_sharded_can_be_gathered_ahead():
    every = storage_options((WEIGHT, BIAS), ((8, 6), (8,)), ((R, RP, RP), (R, RP, RP)), (1, 2, 2))
    assert ahead_options(every) == tuple(
        tuple((GATHERED_AHEAD, *layout[1:]) for layout in layouts) for layouts in every[1:]
    )
    assert ahead_options(every[:1]) == ()


@pytest.mark.parametrize(
    ("sizes", "mesh", "axes", "layout"),
    [
        ((47, 33), (1, 2), (1,), (REPLICATE, 0)),  # 24 rows and 23
        ((47, 32), (1, 2), (1,), (REPLICATE, 1)),  # an atom that divides goes first
        ((15,), (1, 2), (1,), None),  # the largest would be too much larger than the mean
        ((47, 33), (1, 2, 2), (1, 2), None),  # two axes would cut pieces of pieces
    ],
)
def test_what_no_atom_divides_is_cut_unevenly_by_one_axis(sizes, mesh, axes, layout):
    whole = (REPLICATE, *(PARTIAL_GRAD for _ in mesh[1:]))
    assert _sharded_layout(sizes, mesh, whole, axes) == layout


NET = Call(
    lambda m, x, y: nn.functional.cross_entropy(m.b(torch.relu(m.a(x))), y),
    a=nn.Linear(16, 32),
    b=nn.Linear(32, 6),
)
"""The second layer has 6 outputs, which 4 devices do not divide."""
INPUTS = (torch.randn(8, 16), torch.randint(0, 6, (8,)))


@pytest.fixture(scope="module")
def problem() -> Problem:
    return prepare(capture(NET, INPUTS))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    file = tmp_path_factory.mktemp("cluster") / "four.yaml"
    file.write_text("devices: [{kind: H100-80GB, count: 4}]\nlinks: {intra_node: NVLink4}\n")
    return load_cluster(file)


def left(problem: Problem, cluster: Cluster, data: dict[str, Any]) -> Any:
    matched = match(constraints_from_dict(data), problem.graph)
    return restrict(matched, problem.graph, problem.micro, cluster.meshes(2), (1,))


def pins(*entries: tuple[Any, ...]) -> dict[str, Any]:
    return {"pin": [{"operators": o, "axes": a, "soft": bool(soft)} for o, a, *soft in entries]}


def labels(problem: Problem, mesh: tuple[int, ...], restriction: Any, name: str) -> set[tuple[str, ...]]:
    group = problem.graph.group_of[name]
    found = enumerate_configurations(problem.graph.atoms, group, mesh, problem.micro[group.name])
    return {labels_of(found[i], {}) for i in restriction.kept[group.name]}


def test_a_pin_leaves_what_it_allows(problem: Problem, cluster: Cluster) -> None:
    found = left(problem, cluster, pins(("a", {"*": "out_features"})))
    assert found.notes == ()
    assert set(found.spaces) == {("4", 1), ("2x2", 1)}
    assert labels(problem, (1, 4), found.spaces["4", 1], "linear") == {("out_features",)}
    one_axis = left(problem, cluster, pins(("a", {"gpu0": "out_features"})))
    on_first = labels(problem, (1, 2, 2), one_axis.spaces["2x2", 1], "linear")
    assert {a for a, _ in on_first} == {"out_features"}
    assert len({b for _, b in on_first}) > 1


def test_a_mesh_without_the_axis_is_left_out_with_a_note(problem: Problem, cluster: Cluster) -> None:
    found = left(problem, cluster, pins(("a", {"gpu0": "none"})))
    assert set(found.spaces) == {("2x2", 1)}
    assert found.notes == ("not searched: mesh 4: pin 1 (a: gpu0=none): the mesh has no axis 'gpu0'",)


def test_a_soft_pin_falls_back_with_a_note(problem: Problem, cluster: Cluster) -> None:
    found = left(problem, cluster, pins(("b", {"*": "out_features"}, True)))
    assert set(found.spaces) == {("4", 1), ("2x2", 1)}
    assert found.spaces["4", 1].kept == {}
    assert any(note.startswith("given up on mesh 4") and "linear_1" in note for note in found.notes)


REFUSED = {
    "a size that does not divide": (
        pins(("b", {"*": "out_features"})),
        r"cannot hold for linear_1, whose dims have the sizes .*6.*mesh 4",
    ),
    "a contradiction": (
        pins(("a", {"*": "out_features"}), ("linear", {"*": "in_features"})),
        r"pin 2 \(linear: .*contradicts pin 1 \(a: \*=out_features\) for operator linear",
    ),
    "together, but pinned apart": (
        pins(("a", {"*": "out_features"}), ("b", {"*": "none"})) | {"together": [["a", "b"]]},
        r"together 1 \(a, b\).*given pin 1 .* and pin 2 ",
    ),
    "an axis that no mesh has": (
        pins(("a", {"gpu9": "none"}, True)),
        r"no searched mesh has an axis 'gpu9'; did you mean 'gpu'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_hold_is_named(name: str, problem: Problem, cluster: Cluster) -> None:
    data, says = REFUSED[name]
    with pytest.raises(ConstraintError, match=says):
        left(problem, cluster, data)


def test_a_soft_side_yields_whatever_the_order(problem: Problem, cluster: Cluster) -> None:
    found = left(problem, cluster, pins(("a", {"*": "out_features"}, True), ("linear", {"*": "none"})))
    assert labels(problem, (1, 4), found.spaces["4", 1], "linear") == {("none",)}
    assert "pin 1" in found.notes[0]
    assert "contradicts pin 2" in found.notes[0]


def test_together_leaves_common_labels(problem: Problem, cluster: Cluster) -> None:
    found = left(problem, cluster, {"together": [["a", "b"]]} | pins(("a", {"*": ["out_features", "none"]})))
    space = found.spaces["4", 1]
    assert space.together == (("linear", "linear_1"),)
    assert labels(problem, (1, 4), space, "linear") == labels(problem, (1, 4), space, "linear_1")


def test_operators_of_other_kinds_have_the_batch_in_common(cluster: Cluster) -> None:
    """A projection, its attention and a normalisation."""

    def attending(m: Any, x: torch.Tensor) -> torch.Tensor:
        q = m.project(x).view(8, 4, 4, 4).transpose(1, 2)
        y = nn.functional.scaled_dot_product_attention(q, q, q)
        return m.norm(y.transpose(1, 2).flatten(2)).square().mean()

    model = Call(attending, project=nn.Linear(16, 16), norm=nn.LayerNorm(16))
    problem = prepare(capture(model, (torch.randn(8, 4, 16),)))
    attention = next(g.name for g in problem.graph.groups if "attention" in g.name)
    found = left(problem, cluster, {"together": [["project", attention]]})
    space = found.spaces["4", 1]
    assert labels(problem, (1, 4), space, "linear") == {("none",), ("d0",)}
    assert labels(problem, (1, 4), space, attention) == {("none",), ("batch0",)}
    pinned = {"together": [["project", attention]]} | pins((attention, {"*": "heads"}))
    with pytest.raises(ConstraintError, match=r"together 1 .* cannot be split alike given pin 1"):
        left(problem, cluster, pinned)


def checked(cluster: Cluster, soft: bool = False, **wanted: Any) -> tuple[tuple[str, ...], str]:
    entry = {"operators": "*", "soft": soft, **wanted}
    return check_devices(constraints_from_dict({"devices": [entry]}), cluster)


def test_device_kinds(cluster: Cluster) -> None:
    assert checked(cluster, kinds=["A100*", "H100*"]) == ((), "")
    (note,), refusal = checked(cluster, kinds="A100*", soft=True)
    assert "given up, as it is soft: devices 1 (*: A100*)" in note
    assert "the constraint excludes H100-80GB" in note
    assert refusal == ""
    notes, refusal = checked(cluster, kinds="A100*")
    assert notes == ()
    assert "every device of four runs every operator, and the constraint excludes H100-80GB" in refusal
    with pytest.raises(ConstraintError, match=r"no device kind 'H100-80'; did you mean 'H100-80GB'"):
        checked(cluster, kinds="H100-80", soft=True)


def test_device_numbers(cluster: Cluster) -> None:
    assert checked(cluster, devices=[3, 2, 1, 0]) == ((), "")
    excluded = "every device of four runs every operator, and the constraint excludes device 0, 2"
    assert excluded in checked(cluster, devices=[1, 3])[1]
    assert "given up, as it is soft" in checked(cluster, devices=[1, 3], soft=True)[0][0]
    with pytest.raises(ConstraintError, match=r"four has devices 0 to 3, not 4, 9; name other devices"):
        checked(cluster, devices=[4, 0, 9])
    assert "passed over, as it is soft" in checked(cluster, devices=[4, 0], soft=True)[0][0]


def test_stored_pins_hold_at_every_point(cluster: Cluster, store: ProfileStore) -> None:
    pinned = [
        {"operators": "a", "axes": {"*": "d0"}},
        {"parameters": "a.weight", "axes": {"*": "sharded"}},
        {"parameters": "b.weight", "axes": {"*": "R"}},
    ]
    how = {"constraints": {"pin": pinned}, "micro_batches": (1,), "store": store}
    found = explore(NET, INPUTS, cluster=cluster, **how)
    assert found.points
    for i in range(len(found.points)):
        stored = {p.key: p.stored for p in found.plan(i).parameters.values()}
        assert all(word.startswith("S") for word in stored["a.weight"][1:])
        assert all(word.startswith("R") for word in stored["b.weight"][1:])

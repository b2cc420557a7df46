"""Backwards of a user's own that clip or normalise: gradients are added before them."""

import pytest

from tensoropt.capture import capture
from tensoropt.ops.overloads import FUNCTIONS
from tensoropt.question.model_source import load_model
from tensoropt.sharding.atoms import refine_graph
from tensoropt.sharding.discovery.discover import Discovery, Split, discover
from tensoropt.sharding.groups import PARTIAL_GRADIENT, group_operators


def found(name, function):
    built = load_model(f"tests/situations/gradients.py:{name}")
    graph = capture(built.model, built.args, compare=False).graph
    ops = [op for op in graph.operators if op.target.startswith(f"{FUNCTIONS}.{function}_")]
    return graph, ops, [discover(op, graph) for op in ops]


def test_what_is_split_is_right_forward_and_backward():
    _, _, (first, second) = found("build_straight_through", "Round")
    assert first.splits == second.splits == (Split((0,), (0,)), Split((1,), (1,)))
    assert first.additive
    # Rounding is not linear, and of no function a partial sum is let through.
    assert not first.linear


def test_a_backward_that_looks_at_all_of_its_gradient_is_kept_whole():
    _, _, (clip,) = found("build_clipped", "Clip")
    assert clip == Discovery(additive=False)


@pytest.mark.slow
@pytest.mark.parametrize(("function", "adds"), [("Clip", False), ("LearnedStep", True)])
def test_gradients_of_a_weight_are_added_before_a_backward_that_does_not_add_up(function, adds):
    graph, ops, discovered = found("build_clipped_weight", function)
    groups = group_operators(refine_graph(graph))
    of_weights = [op for op in ops if all(graph.tensors[n].kind == "parameter" for n in op.inputs())]
    assert of_weights
    assert {d.additive for d in discovered} == {adds}
    for op in of_weights:
        labels = {s.label for s in groups.group_of[op.name].strategies}
        assert (PARTIAL_GRADIENT in labels) is adds


def test_records_say_what_does_not_add_up():
    for discovery in (Discovery(additive=False), Discovery((Split((0,), (0,)),))):
        assert Discovery.from_record(discovery.to_record()) == discovery
    assert "additive" not in Discovery((Split((0,), (0,)),)).to_record()

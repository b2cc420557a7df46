"""Where models are cut, what crosses, and the graphs of the stages.

Blocks dealt to stages, and cuts that even out what stages have.

What stages make for themselves and what they are sent.
"""

import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from tensoropt import PlanError, Settings
from tensoropt.capture import capture
from tensoropt.cluster.files import cluster_from
from tensoropt.costs.source import CostSource
from tensoropt.evaluation.problem import prepare
from tensoropt.pipeline.stages import (
    Cutter,
    Stage,
    _crossing_tensor,
    balanced,
    block_cuts,
    cheaper_to_duplicate,
    dealt,
    dealt_cuts,
    has_ends,
    is_crossing,
    parameter_bytes_of,
    stages_to_a_place,
)
from tensoropt.profiling.store import ProfileStore
from tensoropt.sharding.configurations import micro_batch_strategies
from tensoropt.sharding.regions import find_regions
from tests.costs.models import Recipe, four, gpt2, llama, problem
from tests.execute.models import vgg_norm_plain
from tests.models import Call
from tests.pipeline.models import (
    adapted,
    block,
    blocks_of,
    frozen,
    frozen_but_the_last,
    layers,
    masked,
    skip,
    tables,
    tied,
)


@pytest.mark.parametrize(
    ("blocks", "stages", "dealt"),
    [(4, 2, [2, 2]), (6, 4, [1, 2, 2, 1]), (6, 2, [3, 3]), (5, 3, [2, 2, 1]), (2, 4, [0, 1, 1, 0])],
)
def test_stages_have_as_many_blocks(blocks, stages, dealt):
    graph = blocks_of(blocks)
    cutter, ends = Cutter(graph), len(graph.groups)
    cuts = (0, *dealt_cuts(cutter, stages), ends)
    starts = [cutter.place[region.groups[0]] for region in find_regions(graph)]
    assert [sum(a <= s < b for s in starts) for a, b in pairwise(cuts)] == dealt


def test_more_stages_than_blocks_are_refused():
    with pytest.raises(PlanError, match="2 repeated blocks are fewer than 5 stages"):
        dealt_cuts(Cutter(blocks_of(2)), 5)


@cache
def stacked(blocks: int, *, stem: bool, head: bool) -> Cutter:
    """Alike blocks, with or without a layer before and one behind them."""
    ends = {n: nn.Linear(24, 24) if one else nn.Identity() for n, one in (("stem", stem), ("head", head))}
    between = nn.Sequential(*(block() for _ in range(blocks)))
    model = Call(lambda m, x: m.head(m.blocks(torch.tanh(m.stem(x)))).square().mean(), **ends, blocks=between)
    return Cutter(prepare(capture(model, (torch.randn(4, 24),), {})).graph)


@pytest.mark.slow
@given(st.sampled_from([1, 4]), st.integers(2, 8), st.booleans(), st.booleans())
def test_blocks_are_dealt_to_stages_whatever_the_model_begins_and_ends_with(blocks, stages, stem, head):
    """Cuts that a pipeline can have, or a refusal, also of a bare stack of blocks."""
    cutter = stacked(blocks, stem=stem, head=head)
    try:
        cuts = dealt_cuts(cutter, stages)
    except PlanError:
        starts = {region.groups[0] for region in find_regions(cutter.graph)}
        fitting = [cut for cut in cutter.cuts if cutter.graph.groups[cut].name in starts]
        assert len(fitting) + has_ends(cutter) < stages - 1 or len(starts) < stages
    else:
        assert len(cuts) == stages - 1
        assert len(cutter.stages(cuts)) == stages


@pytest.mark.parametrize(("blocks", "stages"), [(4, 3), (4, 6), (6, 4), (6, 8), (2, 4)])
def test_a_bare_stack_has_no_ends_that_count(blocks, stages):
    cutter = stacked(blocks, stem=False, head=False)
    assert not has_ends(cutter)
    if blocks < stages:
        with pytest.raises(PlanError, match=f"{blocks} repeated blocks are fewer than {stages} stages"):
            dealt_cuts(cutter, stages)
    else:
        assert len(cutter.stages(dealt_cuts(cutter, stages))) == stages


@pytest.mark.parametrize(("blocks", "places", "micro_batches", "count"), [
    # Llama 3's job: 126 blocks and both ends are 8 for each of 16 places.
    (126, 16, 16, 8), (126, 8, 8, 16),
    # Seven and both ends are one for each of nine stages; of six stages the first would have one more.
    (7, 3, 64, 3), (6, 2, 2, 4), (7, 2, 64, 3), (10, 2, 64, 6), (4, 2, 2, 3), (3, 2, 2, 1), (0, 2, 2, 1),
])  # fmt: skip
def test_stages_to_a_place(blocks, places, micro_batches, count):
    assert stages_to_a_place(blocks, places, micro_batches, 16) == count


@given(st.integers(0, 200), st.integers(2, 16), st.integers(1, 64), st.integers(2, 16))
def test_a_place_has_no_more_stages_than_there_are_blocks(blocks, places, micro_batches, most):
    count = stages_to_a_place(blocks, places, micro_batches, most)
    assert 1 <= count <= most
    assert count == 1 or blocks + 2 >= places * count
    sizes = dealt(blocks, places * count)
    assert sum(sizes) in (blocks, blocks + 2)
    assert max(sizes) - min(sizes) <= 1


def test_the_heaviest_stage_is_as_light_as_can_be():
    assert balanced(np.array([4.0, 1.0, 1.0, 2.0]), [1, 2, 3], 2) == (1,)
    assert balanced(np.array([1.0, 1.0]), [1], 3) == ()


def test_stronger_stages_get_more():
    # Three times as strong: six of eight, whichever stage it is.
    assert balanced(np.ones(8), range(1, 8), 2, (3.0, 1.0)) == (6,)
    assert balanced(np.ones(8), range(1, 8), 2, (1.0, 3.0)) == (2,)
    assert balanced(np.ones(8), range(1, 8), 3, (2.0, 1.0, 1.0)) == (4, 6)


@pytest.mark.parametrize(("bandwidth", "made"), [("100MB/s", True), ("1000TB/s", False)])
def test_the_cheaper_of_making_and_sending(bandwidth, made):
    """A softmax of the inputs reads 1,536 bytes and writes as many: over 2 TB/s, or over the link."""
    links = {"inter_node": {"latency": "5us", "bandwidth": bandwidth}}
    devices = [{"kind": "A100-80GB", "count": 1}]
    cluster = cluster_from({"devices": devices, "nodes": 2, "links": links}, name="two")
    cutter = Cutter(problem(tables).graph)
    with ProfileStore(":memory:") as store:
        found = cheaper_to_duplicate(cutter, CostSource(cluster, store, Settings(measure="never")))
    assert cutter.duplicable
    assert found == (cutter.duplicable if made else frozenset())


ROWS = 16 * 24 * 4
"""Bytes of what the layers of the small models hand on: 16 rows of 24 single-precision numbers."""


@cache
def cutter(build: Callable[[], Recipe], mode: str = "train") -> Cutter:
    return Cutter(problem(build, mode).graph)


def own(stage: Stage) -> list[str]:
    """The groups of a stage that compute something."""
    return [group.name for group in stage.graph.groups if not is_crossing(group)]


# -- cuts -----------------------------------------------------------------------------------------


def test_cuts_leave_parameters_on_both_sides_but_in_inference():
    # Four products, then the loss: a stage of the loss alone would have none.
    assert [g.name for g in cutter(four).graph.groups] == [
        "linear", "linear_1", "linear_2", "linear_3", "mse_loss",
    ]  # fmt: skip
    assert (cutter(four).cuts, cutter(four, "inference").cuts) == ((1, 2, 3), (1, 2, 3, 4))
    for stage in cutter(four, "inference").stages((2,)):
        assert not stage.has_backward
        assert not stage.returns_gradients


def test_cuts_behind_what_has_no_gradient_hand_none_back():
    # softmax of the input, softmax of a parameter, dropout of a constant, then the first layer.
    found = cutter(tables)
    assert [g.name for g in found.graph.groups[:4]] == ["softmax", "softmax_1", "dropout", "linear"]
    assert found.cuts[0] == 2
    assert not found.has_parameters(0, 1)
    assert found.has_parameters(0, 2)
    # What is dropped of the input cannot be made again, but there is nothing to learn before it is sent.
    model = Call(lambda m, x: m.both(functional.dropout(x)).sum(), both=nn.Sequential(*layers(2)))
    assert Cutter(prepare(capture(model, (torch.randn(4, 24),), {})).graph).cuts == (2,)


def test_operators_without_parameters_are_no_stage():
    found = cutter(gpt2)
    residual = found.place["add_1"]
    assert found.has_parameters(residual, residual + 2)
    assert not found.has_parameters(residual, residual + 1)


@pytest.mark.slow
@pytest.mark.parametrize("build", [frozen, adapted, frozen_but_the_last])
def test_stages_without_trained_parameters_are_cut_like_others(build):
    """Where the same model, all of it trained, is cut; those before the first trained one have no
    backward."""
    whole, args, kwargs = build()
    trained = Cutter(prepare(capture(whole.requires_grad_(True), args, kwargs)).graph)
    found = cutter(build)
    assert found.cuts == trained.cuts
    reached = [any(found.source.tensors[n].requires_grad for n in found.crossing(c)) for c in found.cuts]
    # First none has a gradient, then each has.
    assert reached == sorted(reached)
    for cut, gradient in zip(found.cuts, reached, strict=True):
        first, last = found.stages((cut,))
        assert (first.has_backward, last.has_backward) == (gradient, True)
        assert (first.returns_gradients, last.returns_gradients) == (False, gradient)
    assert not all(reached)


def test_a_frozen_stage_behind_a_trained_one_hands_gradients_back():
    found = cutter(frozen)
    # Block 4 of 6 is frozen behind block 3, which is not.
    stage = found.stages((found.beginning("blocks.4"), found.beginning("blocks.5")))[1]
    assert not any(tensor.requires_grad for tensor in stage.graph.atoms.graph.parameters)
    assert stage.has_backward
    assert stage.returns_gradients


def test_blocks_are_dealt_with_those_that_are_frozen():
    found = cutter(frozen)
    assert [region.name for region in find_regions(found.graph)] == [f"blocks.{n}" for n in (3, 4, 5)]
    assert block_cuts(found) == [found.beginning(f"blocks.{n}") for n in range(6)]
    assert dealt_cuts(found, 3) == tuple(found.beginning(f"blocks.{n}") for n in (2, 4))


def test_trained_parameters_are_stored_with_gradient_and_state():
    found = cutter(adapted)
    stored = dict(zip((g.name for g in found.graph.groups), parameter_bytes_of(found.graph), strict=True))
    groups = {name: g.name for g in found.graph.groups for name in (*g.parameters, *g.shared)}
    assert stored[groups["p_model_table_weight"]] == 40 * 24 * 4
    assert stored[groups["p_model_down_0_weight"]] == 4 * 2 * 24 * 4


# -- what crosses ---------------------------------------------------------------------------------


def test_what_is_made_before_and_read_behind_crosses():
    found = cutter(four)
    assert [found.crossing(cut) for cut in found.cuts] == [("relu",), ("relu_1",), ("relu_2",)]
    assert [found.crossing_bytes(cut) for cut in found.cuts] == [ROWS] * 3


def test_a_shortcut_crosses_all_cuts_up_to_its_reader():
    found = cutter(skip)
    assert [found.crossing(cut) for cut in (1, 2, 3, 4, 5)] == [
        ("relu",), ("relu", "relu_1"), ("relu", "relu_2"), ("relu", "linear_3"), ("add",),
    ]  # fmt: skip
    assert [found.crossing_bytes(cut) for cut in (1, 2)] == [ROWS, 2 * ROWS]


def test_what_only_a_later_stage_reads_passes_through_those_between():
    first, second, third = cutter(skip).stages((1, 2))
    assert first.departing == second.arriving == ("relu",)
    assert second.departing == third.arriving == ("relu", "relu_1")
    assert own(second) == ["linear_1"]
    # Three stages further it is handed on untouched.
    between = cutter(skip).stages((1, 2, 3))[2]
    assert between.arriving == ("relu", "relu_1")
    assert between.departing == ("relu", "relu_2")
    assert [g.name for g in between.graph.groups] == [
        "arrive.relu", "arrive.relu_1", "linear_2", "depart.relu", "depart.relu_2",
    ]  # fmt: skip


def test_only_what_needs_neither_parameters_nor_luck_is_made_again():
    found = cutter(tables)
    # Of the input alone; of a parameter there is a gradient, and dropout would draw other numbers.
    assert found.duplicable == {"softmax"}
    # Made by reading the input once and writing as much.
    assert found.duplication_bytes("softmax") == 2 * ROWS


@pytest.mark.parametrize("build", [gpt2, llama])
def test_labels_of_language_models_can_be_made_again(build):
    found = cutter(build)
    (labels,) = [g for g in found.graph.groups if g.name == "pad"]
    assert {n for op in labels.operators for n in op.outputs} == found.duplicable
    assert not labels.parameters


def test_a_stage_makes_again_what_it_would_receive():
    found = cutter(tables)
    cut = found.place["linear_1"]
    sent, again = found.stages((cut,)), found.stages((cut,), frozenset({"softmax"}))
    assert "softmax" in sent[1].arriving
    assert "softmax" not in own(sent[1])
    assert set(sent[1].arriving) - {"softmax"} == set(again[1].arriving)
    assert own(again[1]) == ["softmax", *own(sent[1])]
    # The first stage is the same but for what it sends.
    assert own(again[0]) == own(sent[0])
    assert again[0].departing == again[1].arriving


def test_a_stage_makes_nothing_again_that_it_does_not_read():
    found = cutter(gpt2)
    again = found.duplicable
    first, *rest = found.stages((found.place["layer_norm_2"], found.place["layer_norm_4"]), again)
    assert "pad" not in own(first)
    assert ["pad" in own(stage) for stage in rest] == [False, True]


# -- where stages begin ---------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "group"), [
    ("layer_norm_2", "layer_norm_2"), ("transformer.h.1", "layer_norm_2"),
    ("transformer.h.1.mlp", "addmm_6"), ("transformer.h.1.mlp.c_proj", "addmm_7"), ("lm_head", "linear"),
])  # fmt: skip
def test_a_stage_begins_with_an_operator_or_a_module(name, group):
    found = cutter(gpt2)
    assert found.beginning(name) == found.place[group]


@pytest.mark.parametrize("name", ["transformer.h.2", "transformer.h.", "transformer.h.1.ml", "", "addmm_99"])
def test_what_the_model_has_not_begins_no_stage(name):
    with pytest.raises(PlanError, match=f"no operator or module called {re.escape(name)} that a stage"):
        cutter(gpt2).beginning(name)


# -- graphs of stages -----------------------------------------------------------------------------


def test_a_stage_is_a_graph_of_its_own():
    whole = cutter(four)
    first, last = whole.stages((2,))
    graph = last.graph.atoms.graph
    # The model's inputs are every stage's; what arrives is one more.
    assert graph.inputs == (*whole.source.inputs, "arriving_0")
    assert graph.tensors["arriving_0"].shape == whole.source.tensors["relu_1"].shape
    assert graph.outputs == whole.source.outputs
    assert [t.name for t in graph.parameters] == ["p_model_layers_2_weight", "p_model_layers_3_weight"]
    # What departs is no result of the model.
    assert first.graph.atoms.graph.outputs == ()
    assert [t.name for t in first.graph.atoms.graph.parameters] == [
        "p_model_layers_0_weight", "p_model_layers_1_weight",
    ]  # fmt: skip


def test_what_crosses_does_so_in_any_placement_that_it_can_have():
    _, last = cutter(four).stages((2,))
    arrives = last.graph.group_of["arrive.relu_1"]
    assert _crossing_tensor(arrives) == "relu_1"
    assert [str(s.label) for s in arrives.strategies] == ["none", "d0", "d1", "partial", "partial_grad"]
    mask = cutter(tables).stages((cutter(tables).place["linear_1"],))[1].graph.group_of["arrive.softmax"]
    assert [str(s.label) for s in mask.strategies] == ["none", "d0", "d1"]


def test_a_stage_follows_the_batch_as_the_whole_model_does():
    whole = cutter(four)
    micro = micro_batch_strategies(whole.graph)
    for stage in whole.stages((1, 3)):
        found = stage.micro(micro)
        assert set(found) == {group.name for group in stage.graph.groups}
        for group in stage.graph.groups:
            if is_crossing(group):
                assert str(found[group.name].label) == "d0"
            else:
                assert found[group.name] is micro[group.name]


def test_a_parameter_of_two_stages_is_in_both():
    first, last = cutter(tied).stages((2,))
    name = "p_model_first_weight"
    whole = problem(tied).graph
    assert whole.group_of["linear"].shared == whole.group_of["linear_3"].shared == (name,)
    # Within a stage one operator uses it.
    assert first.graph.group_of["linear"].parameters == last.graph.group_of["linear_3"].parameters == (name,)
    assert first.graph.shared == last.graph.shared == ()


def test_repeated_blocks_stay_those_of_the_whole_model():
    found = cutter(gpt2)
    blocks = [(region.name, region.groups) for region in find_regions(found.graph)]
    first, last = found.stages((found.place["layer_norm_2"],))
    assert [*first.graph.regions, *last.graph.regions] == blocks
    assert len(blocks) == 2
    # A block that is cut is recomputed by neither side.
    first, last = found.stages((found.place["layer_norm_3"],))
    assert [*first.graph.regions, *last.graph.regions] == blocks[:1]


def test_a_buffer_that_moves_does_so_in_one_stage():
    found = cutter(vgg_norm_plain)
    mutations = found.source.mutations
    assert mutations
    first, last = found.stages((found.place["linear"],))
    assert first.graph.atoms.graph.mutations == mutations
    assert last.graph.atoms.graph.mutations == {}


@given(st.data())
def test_any_cuts_give_stages_that_are_the_whole_model(data):
    found = cutter(data.draw(st.sampled_from([four, skip, tables, tied, llama])))
    cuts = tuple(sorted(data.draw(st.sets(st.sampled_from(found.cuts), min_size=1, max_size=4))))
    again = frozenset(data.draw(st.sets(st.sampled_from(sorted(found.duplicable) or [""]))) - {""})
    ends = (0, *cuts, len(found.graph.groups))
    if not all(found.has_parameters(start, stop) for start, stop in pairwise(ends)):
        with pytest.raises(PlanError, match="has no parameters"):
            found.stages(cuts, again)
        return
    stages = found.stages(cuts, again)
    makers = {found.maker[name].name for name in again}
    counts = Counter(name for stage in stages for name in own(stage))
    assert list(dict.fromkeys(n for stage in stages for n in own(stage) if n not in makers)) == [
        g.name for g in found.graph.groups if g.name not in makers
    ]
    assert set(counts) == {g.name for g in found.graph.groups}
    assert all(count == 1 for name, count in counts.items() if name not in makers)
    # What one stage sends the next one receives, in this order, and nothing of what is made again.
    for before, behind in pairwise(stages):
        assert before.departing == behind.arriving
        assert again.isdisjoint(behind.arriving)
    assert stages[0].arriving == stages[-1].departing == ()
    # Each has whatever its operators read.
    for stage in stages:
        graph = stage.graph.atoms.graph
        made = {n for op in graph.operators for n in op.outputs}
        for op in graph.operators:
            assert all(graph.tensors[n].kind != "activation" or n in made for n in op.inputs())
        assert list(stage.graph.group_of) == [op.name for g in stage.graph.groups for op in g.operators]


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("build", "cuts", "says"), [
    (four, (2, 2), "the stage that begins with linear_2 is empty; give cuts in order, each once"),
    (four, (3, 1), "the stage that begins with linear_3 is empty; give cuts in order, each once"),
    (four, (0,), "the stage that begins with linear is empty"),
    (four, (5,), "begins with mse_loss is empty"),
    (four, (4,), "a stage cannot begin with mse_loss: every stage needs parameters, and must receive "
                 "an activation from the previous stage, with a gradient if an earlier stage is trained; "
                 "move its cut"),
    (tables, (1,), "the stage that begins with softmax has no parameters; move its cut"),
    (tables, (4, 5), "the stage that begins with mul has no parameters; move its cut"),
])  # fmt: skip
def test_cuts_that_cannot_be_are_refused(build, cuts, says):
    with pytest.raises(PlanError, match=says):
        cutter(build).stages(cuts)


@pytest.mark.parametrize("name", ["softmax_1", "dropout.0", "linear"])
def test_what_cannot_be_made_again_is_refused(name):
    with pytest.raises(PlanError, match=f"{name} depends on parameters or random numbers"):
        cutter(tables).stages((9,), frozenset({name}))


def test_what_is_made_again_is_not_sent_on_the_way():
    found = cutter(masked)
    for name in sorted(found.duplicable):
        # Building a stage refuses what arrives and is made as well.
        for stage in found.stages((found.cuts[0], found.cuts[-1]), frozenset({name})):
            assert name not in stage.arriving

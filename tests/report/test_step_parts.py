"""What a step's time goes into: sums by module and kind that add up to the step, and the words for it."""

from __future__ import annotations

import pytest

from tensoropt.exploration.exploration import Exploration
from tensoropt.plan.spent import COPIES, OPTIMIZER_TITLE, RECOMPUTATION
from tensoropt.report.detail import recorded_of
from tensoropt.report.explain import _parts_table
from tensoropt.report.rebuilt import rebuilt
from tensoropt.report.step_parts import COMPUTING, Computed, Part, _kind_of, _shown_parts, _summed


@pytest.mark.parametrize(("target", "kind"), [
    ("aten.addmm.default", "linear"),
    ("aten.linear.default", "linear"),
    ("addmm_12", "linear"),
    ("aten.scaled_dot_product_attention.default", "attention"),
    ("aten.native_layer_norm.default", "layer norm"),
    ("aten.some_thing.out", "some thing"),
])  # fmt: skip
def test_an_operator_is_called_as_people_call_it(target, kind):
    assert _kind_of(target) == kind


def test_modules_that_differ_in_numbers_alone_are_one_part():
    """What each block takes of one kind is summed; no single operator stands out here but the head."""
    blocks = [Computed(f"net.h.{i}.mlp.{name}", "linear", s) for i in range(12)
              for name, s in (("c_fc", 2.0), ("c_proj", 1.0))]  # fmt: skip
    blocks += [Computed(f"net.h.{i}.attn", "attention", 1.5) for i in range(12)]
    blocks += [Computed("net.head", "linear", 5.0), Computed("net.idle", "linear", 0.0)]
    assert [(title, len(rows), seconds) for title, rows, seconds in _summed(blocks)] == [
        ("linear mlp.c_fc (12 ×)", 12, 24.0),
        ("attention attn (12 ×)", 12, 18.0),
        ("linear mlp.c_proj (12 ×)", 12, 12.0),
        ("linear head", 1, 5.0),
    ]


TWO_SIDES = [("encoder.layers.{}.fc", 1.0), ("decoder.layers.{}.fc", 2.0)]


@pytest.mark.parametrize(("computed", "titles"), [
    # Blocks of two kinds keep what tells them apart.
    ([(module.format(i), "linear", seconds) for module, seconds in TWO_SIDES for i in range(3)],
     ["linear decoder.layers.*.fc (3 ×)", "linear encoder.layers.*.fc (3 ×)"]),
    # ResNet's ``layer1.0.conv1`` ... are one part; a block's first and second convolution are two.
    ([(f"layer{i}.{j}.conv{k}", "convolution", float(k)) for i in (1, 2) for j in (0, 1) for k in (1, 2)],
     ["convolution conv2 (4 ×)", "convolution conv1 (4 ×)"]),
    # A module that says what it computes is named once, a sequence by its own name.
    ([("net.wte.embedding", "embedding", 2.0), ("net.attention", "linear", 1.0)],
     ["wte.embedding", "linear attention"]),
    ([(f"model.net.{i}", "linear", 1.0) for i in (0, 2, 4)], ["linear model.net.* (3 ×)"]),
    # Without modules kinds are summed.
    ([("", "linear", 1.0), ("", "relu", 2.5), ("", "linear", 2.0)], ["linear (2 ×)", "relu"]),
])  # fmt: skip
def test_parts_are_called_by_what_their_modules_share_the_longest_first(computed, titles):
    assert [title for title, *_ in _summed(Computed(*one) for one in computed)] == titles


def test_what_a_table_leaves_out_is_named_and_all_of_it_adds_up():
    parts = tuple(Part(COMPUTING, f"operator {i}", 2.0**-i, 2.0**-i / 2, 1) for i in range(14))
    parts += (Part(COMPUTING, OPTIMIZER_TITLE, 2.0**-13, 2.0**-14),)
    shown = _shown_parts(parts)
    assert sum(part.share for part in shown) == pytest.approx(1.0)
    assert sum(part.count for part in shown) == 14
    assert [part.title for part in shown[-2:]] == [OPTIMIZER_TITLE, "other operators (8)"]
    assert "other operators (8)" in _parts_table(parts)


LINEAR = ("aten.addmm", "aten.linea")


def by_hand(found: Exploration, index: int) -> dict[str, float]:
    """Seconds of one step by what computes, summed from the clock's own events with modules of this model
    written out: a second way that shares nothing with the first."""
    plan = rebuilt(found, index, recorded_of(found))
    timed = plan.plan.evaluated(plan.costs()).timed()
    groups = found.recorded.grouped.group_of
    seconds: dict[str, float] = {}
    for event in timed.events:
        if event.axes is not None:
            continue
        if event.phase == "again":
            what = RECOMPUTATION
        elif event.kind in ("compute", "inner"):
            what = f"{groups[event.group].anchor.target} in {groups[event.group].anchor.module}"
        else:
            what = OPTIMIZER_TITLE if event.kind == "step" else COPIES
        seconds[what] = seconds.get(what, 0.0) + event.duration_s
    return seconds


def test_parts_and_rows_are_what_the_simulated_step_has(gpus, details):
    """Figures per operator are the timeline's, forward, backward, copies and all."""
    for index, told in details:
        truth = by_hand(gpus.found, index)
        parts = {part.title: part.seconds for part in told.parts}
        assert sum(parts.values()) == pytest.approx(gpus.found.points[index].time_s)
        copies = sum(row.copies_s for row in told.operators)
        assert copies == pytest.approx(truth.get(COPIES, 0.0), abs=1e-15)
        for title in (RECOMPUTATION, COPIES, OPTIMIZER_TITLE):
            assert parts.get(title, 0.0) == pytest.approx(truth.pop(title, 0.0), abs=1e-15)
        # The model has one block, so that each of its linear modules is a part.
        linear = sorted(s for what, s in truth.items() if what.startswith(LINEAR))
        assert sorted(s for title, s in parts.items() if title.startswith("linear ")) == pytest.approx(linear)
        worked = pytest.approx(sum(truth.values()))
        assert sum(part.seconds for part in told.parts if part.count) == worked
        assert sum(row.forward_s + row.backward_s for row in told.operators) == worked


def test_the_headline_names_the_largest_part(gpus, details):
    for index, told in details:
        top = max((part for part in told.parts if part.key == COMPUTING), key=lambda part: part.seconds)
        words = f"{top.title}, {100 * top.seconds / gpus.found.points[index].time_s:.0f} %"
        assert f"most of all {words} of the step" in told.headline()
        assert words in repr(told)

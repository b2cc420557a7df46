"""Names of plans, read off what axes split and how parameters are stored."""

from __future__ import annotations

from typing import Any

import pytest

from tensoropt import Point, Space
from tensoropt.exploration.figure_rows import FigureRow, points_data
from tensoropt.pipeline.strategy import SCHEDULES as KNOWN
from tensoropt.plan.figures import FIXED
from tensoropt.plan.graph_facts import Weights
from tensoropt.plan.plan import MeshInfo, OperatorPlan, StagePlan, StagesInfo
from tensoropt.plan.plan_names import (
    ADDED,
    DATA,
    OTHER,
    SCHEDULES,
    SEQUENCE,
    TENSOR,
    WHOLE,
    brief_name,
    exceptions,
    family,
    is_recomputed,
    plan_names,
    what_it_does,
)
from tensoropt.plan.point_records import StagesRecord
from tensoropt.report.table import point_lines
from tests.plan.explorations import csv_of, point, small_exploration

COLUMNS, DOWN = ["rows", "out_features"], ["rows", "in_features"]


def group(configurations: list[list[str]], options: list[list[Any]], micro: str = "rows") -> dict[str, Any]:
    parameters = [f"p{i}" for i in range(len(options[0][0]))]
    return {"micro": micro, "members": [], "parameters": parameters, "configurations": configurations,
            "options": options}  # fmt: skip


def space(groups: dict[str, Any], shape: tuple[int, ...] = (8, 2), **more: Any) -> Space:
    fields: dict[str, Any] = {"micro_batches": 4, "hubs": {}, "shared": {}, "keys": {}}
    return Space(mesh=MeshInfo(shape=shape, names=("a", "b")[: len(shape)]), groups=groups, **fields | more)


def name(of: Space, choice: tuple[int, ...], options: tuple[int, ...]) -> str:
    return plan_names([point(1.0, 1.0, 0, choice=choice, options=options)], [of])[0]


def options_on(first: str) -> list[list[list[str]]]:
    """Whole, and in shards on the first axis by each of ZeRO's stages."""
    return [[["R/P", "R/P", first]], *([[m, "S(0)", first]] for m in ("held/P", "held", "R/P"))]


def test_megatrons_split_is_named_as_people_name_it():
    inner = group([COLUMNS], [options_on("S(0)")])
    norm = group([["rows", "none"]], [options_on("R")])
    of = space({"up": inner, "down": group([DOWN], [options_on("S(1)")]), "norm": norm})
    assert name(of, (0, 0, 0), (0, 0, 0)) == "DP 8 · TP 2 · 4 micro-batches"
    assert name(of, (0, 0, 0), (1, 1, 1)) == "DP 8 · ZeRO-1 · TP 2 · 4 micro-batches"
    assert name(of, (0, 0, 0), (2, 2, 2)) == "DP 8 · ZeRO-2 · TP 2 · 4 micro-batches"
    assert name(of, (0, 0, 0), (3, 3, 3)) == "DP 8 · ZeRO-3 · TP 2 · 4 micro-batches"
    assert name(of, (0, 0, 0), (3, 1, 0)) == "DP 8 · ZeRO-1 33 %, ZeRO-3 33 % · TP 2 · 4 micro-batches"


def test_operators_split_otherwise_are_counted_in_brackets():
    data = group([["rows"], ["out_features"], ["rows.1"], ["none"]], [[[]]] * 4)
    of = space({str(i): data for i in range(5)}, (4,), micro_batches=1)
    assert name(of, (0,) * 5, (0,) * 5) == "DP 4"
    assert name(of, (0, 0, 0, 1, 3), (0,) * 5) == "DP 4 (TP 20 %)"
    assert name(of, (0, 1, 1, 2, 3), (0,) * 5) == "TP 4 (DP 20 %, other dims 20 %)"
    assert name(of, (2, 3, 3, 3, 3), (0,) * 5) == "other dims 4 (alike 80 %)"
    assert name(of, (3,) * 5, (0,) * 5) == "4 alike"


def test_two_axes_along_the_batch_are_one_word():
    of = space({"g": group([["rows", "rows"]], [[[]]])}, (2, 4))
    assert name(of, (0,), (0,)) == "DP 2×4 · 4 micro-batches"


def test_split_experts_are_named_beside_what_the_axes_do():
    """Weights that an axis splits for their use are not in shards of ZeRO."""
    sent = [["R/P", "S(0)", "R/P"]]
    layer = group(
        [["dispatch", "features"], ["experts", "rows"], ["dispatch", "dispatch"], ["rows", "features"]],
        [[sent], [sent], [sent], [[["R/P", "R/P", "S(1)"]]]],
    )
    dense = group([COLUMNS], [[[["R/P", "R/P", "S(0)"]]]])
    of = space({"a": layer, "b": layer, "dense": dense}, (4, 2), micro_batches=1)
    assert name(of, (0, 0, 0), (0, 0, 0)) == "DP 4 · TP 2 · EP 4"
    assert name(of, (0, 2, 0), (0, 0, 0)) == "DP 4 · TP 2 (DP 33 %) · EP 4 (1/2 layers) · EP 8 (1/2 layers)"
    assert name(of, (3, 0, 0), (0, 0, 0)) == "DP 4 · TP 2 · EP 4 (1/2 layers)"
    assert name(of, (3, 3, 0), (0, 0, 0)) == "DP 4 · TP 2"
    assert name(of, (1, 1, 0), (0, 0, 0)) == "DP 2 (TP 33 %) · TP 4 (DP 33 %) · EP 4"


def test_recomputed_blocks_are_counted_of_those_that_may_be():
    plain = group([["rows"]], [[[]]])
    blocks = {"a": "h.0", "b": "h.0", "c": "h.1"}
    of = space(dict.fromkeys("abc", plain), (8,), regions=blocks, micro_batches=1)
    assert name(of, (1, 1, 0), (0, 0, 0)) == "DP 8 · 1/2 blocks recomputed"
    assert name(of, (1, 1, 1), (0, 0, 0)) == "DP 8 · 2/2 blocks recomputed"


def test_blocks_are_recomputed_by_recipes_or_in_part():
    plain = group([["rows"]], [[[]]])
    blocks = {name: f"h.{i}" for i, pair in enumerate(("ab", "cd", "ef")) for name in pair}
    recipes = {block: {"full": "00", "products": "10"} for block in ("h.0", "h.1", "h.2")}
    of = space(dict.fromkeys("abcdef", plain), (8,), regions=blocks, recipes=recipes, micro_batches=1)

    def says(*again: int) -> str:
        return name(of, again, (0,) * 6).removeprefix("DP 8 · ")

    assert says(1, 1, 0, 0, 1, 1) == "2/3 blocks recomputed"
    assert says(0, 1, 0, 1, 0, 0) == "products of 2/3 blocks recomputed"
    assert says(1, 0, 0, 0, 0, 0) == "1/3 blocks recomputed in part"
    assert says(1, 1, 0, 1, 0, 1) == "3/3 blocks recomputed in part"


def test_tied_parameters_count_where_a_copy_serves_the_step():
    layouts = [["R/P", "R/P"], ["held", "S(0)"], ["R/P", "S(0)"]]
    of = space({"g": group([["rows"]], [[[]]])}, (8,), shared={"tied": layouts}, micro_batches=1)
    assert (name(of, (0, 0), (0, 0)), name(of, (0, 1), (0, 0))) == ("DP 8", "DP 8 · ZeRO-2")
    # Plain shards may be what a split lookup reads.
    assert name(of, (0, 2), (0, 0)) == "DP 8"


def test_one_device_has_no_axes():
    of = space({"g": group([[]], [[[["R"]]]])}, (), micro_batches=2)
    assert name(of, (0,), (0,)) == "one device · 2 micro-batches"


@pytest.mark.parametrize(
    ("label", "batch", "sequence", "kind"),
    [("rows.0", "rows.0", "", DATA), ("rows.1", "rows.0", "", OTHER),
     ("out_features.2", "rows.0", "", TENSOR), ("queries", "batch0", "", SEQUENCE),
     ("rows.1", "rows.0", "rows.1", SEQUENCE), ("d1", "d0", "d1", SEQUENCE), ("d2", "d0", "d1", OTHER),
     ("d1", "none", "d1", SEQUENCE), ("d0.1@R", "d0.0", "d0.1", SEQUENCE),
     ("in_features@S(0)", "rows.0", "d1", TENSOR), ("heads", "batch0", "queries", TENSOR),
     ("partial", "d0", "d1", WHOLE), ("partial_grad", "partial_grad", "", ADDED),
     ("partial_grad", "none", "partial_grad", ADDED), ("none", "none", "d1", WHOLE)],
)  # fmt: skip
def test_what_a_label_does(label, batch, sequence, kind):
    assert what_it_does(label, batch, sequence) == kind


ALONG = {"norm": "d1", "up": "d1", "core": "queries", "down": "d1"}
"""A block, and with which labels it follows the sequence."""


def of_block(*labels: tuple[str, str], batch: str = "d0") -> str:
    """The name of a plan of four operators on two axes."""
    groups = {
        name: group([list(own)], [[[]]], "batch0" if batch != "none" and name == "core" else batch)
        for name, own in zip(ALONG, labels, strict=True)
    }
    return name(space(groups, (4, 2), micro_batches=1, sequence=ALONG), (0,) * 4, (0,) * 4)


def test_split_sequences_are_named_after_their_attention():
    assert of_block(("d0", "d1"), ("d0", "d1"), ("batch0", "queries"), ("d0", "d1")) == "DP 4 · CP 2"
    assert of_block(("d0", "d1"), ("d0", "d1"), ("batch0", "heads"), ("d0", "d1")) == "DP 4 · CP 2 (Ulysses)"
    assert of_block(("d0", "d1"), ("d0", "d1"), ("batch0", "none"), ("d0", "d1")) == "DP 4 · SP 2"
    split = ("d1", "d1"), ("d1", "out_features"), ("queries", "queries"), ("d1", "d1")
    assert of_block(*split, batch="none") == "CP 4×2 (TP 25 %)"
    assert of_block(("d0", "d1"), ("d0", "d1"), ("batch0", "ring"), ("d0", "d1")) == "DP 4 · CP 2 (ring)"


def test_sequence_parallel_regions_are_named_beside_tensor_parallelism():
    products = ("d0", "out_features"), ("batch0", "heads"), ("d0", "in_features@S(1)")
    assert of_block(("d0", "d1"), *products) == "DP 4 · TP 2 + SP"
    assert of_block(("d0", "none"), *products) == "DP 4 · TP 2"
    context = ("d1", "out_features"), ("queries", "heads"), ("d1", "in_features@S(1)")
    assert of_block(("d1", "d1"), *context) == "CP 4 · TP 2 + SP"


def test_pipelines_say_their_parts_and_their_schedule():
    stage = StagePlan(groups={"up": ("rows", "rows"), "arrive.x": ("rows", "none")}, hubs={},
                      stored={"w": ("held/P", "S(0)")})  # fmt: skip

    def pipelined(schedule: str, stages: list[StagePlan], *recomputed: str) -> Point:
        info = StagesInfo(schedule=schedule, stages=tuple(stages))
        record = StagesRecord(info, {"up": OperatorPlan(axes={}, micro="")}, recomputed=recomputed)
        made: Point = point(1.0, 1.0, 0, choice=(), options=(), record=record)
        return made

    of = Space(MeshInfo(shape=(4, 8), names=("stage", "gpu")), 8, {}, {}, {}, {})
    made = pipelined("1f1b", [stage] * 4, "h.0")
    wanted = ("DP 8 · ZeRO-1 · 1 block recomputed · 8 micro-batches · PP 4 1F1B",)
    assert plan_names([made], [of]) == wanted
    interleaved = pipelined("interleaved_1f1b", [stage] * 8)
    assert plan_names([interleaved], [of])[0].endswith("PP 4 interleaved 1F1B (8 stages)")
    alone = Space(MeshInfo(shape=(2,), names=("stage",)), 2, {}, {}, {}, {})
    single = stage.model_copy(update={"groups": {"up": ("rows",)}, "stored": {"w": ("R",)}})
    assert plan_names([pipelined("gpipe", [single] * 2)], [alone]) == ("2 micro-batches · PP 2 GPipe",)


def test_every_schedule_has_a_short_title():
    assert set(SCHEDULES) == set(KNOWN)


def test_it_is_the_same_everywhere(tmp_path):
    found = small_exploration()
    rows = csv_of(found, tmp_path)
    assert list(rows[0])[: len(FIXED)] == [figure.name for figure in FIXED]
    assert [row["name"] for row in rows] == list(found.names)
    assert [row["name"] for row in points_data(found)] == list(found.names)
    for i, named in enumerate(found.names):
        assert named in "\n".join(point_lines(FigureRow.of(found, i)))
    assert len(set(found.names)) == 4


@pytest.mark.parametrize(("name", "known", "recomputed"), [
    ("DP 8", "DP", False),
    ("DP 8 · ZeRO-2 · 2 micro-batches", "ZeRO", False),
    ("DP 2 · ZeRO-3 10/12 · TP 4 + SP · 12/12 blocks recomputed", "TP", True),
    ("DP 2 · CP 4 (ring) · TP 2", "CP", False),
    ("DP 4 · TP 2 · 8 micro-batches · PP 2 1F1B", "PP", False),
    ("placed on 4 devices", "placed", False),
    ("4 alike", "other", False),
    ("one device", "other", False),
])  # fmt: skip
def test_the_family_of_a_plan_is_in_its_name(name, known, recomputed):
    assert (family(name), is_recomputed(name)) == (known, recomputed)


def test_a_brief_name_says_what_sets_plans_apart():
    name = "DP 8 (TP 12 %, other dims 3 %) · ZeRO-1 24 %, ZeRO-3 72 % · 4 micro-batches"
    assert brief_name(name) == "DP 8 · ZeRO-3"
    assert brief_name("ZeRO-2 · 5/12 blocks recomputed in part") == "ZeRO-2 · 5/12 recomputed in part"
    assert brief_name("ZeRO-2 · 12/12 blocks recomputed") == "ZeRO-2 · recomputed"
    assert brief_name("2 micro-batches · PP 2 GPipe") == "PP 2 GPipe"
    assert brief_name("4 micro-batches") == "4 micro-batches"


def test_a_part_of_norms_and_activations_is_called_so():
    recipes = {"h.0": {"full": "0000", "products": "1010", "norms and activations": "1001"}}
    of = space(
        dict.fromkeys("abcd", group([["rows"]], [[[]]])), (8,), regions=dict.fromkeys("abcd", "h.0"),
        recipes=recipes, micro_batches=1,
    )  # fmt: skip
    for again, words in {
        (0, 1, 1, 0): "norms and activations recomputed",
        (0, 1, 0, 0): "norms and activations recomputed",
        (0, 1, 0, 1): "products recomputed",
        (1, 1, 0, 0): "1/1 blocks recomputed in part",
    }.items():
        assert name(of, again, (0,) * 4) == f"DP 8 · {words}"


def test_what_takes_little_time_or_few_bytes_is_not_in_the_name():
    """One operator of two, and one parameter of two, at each side of 2 %."""
    many = group([["rows"], ["out_features"]], [[[["R/P", "R"]], [["held", "S(0)"]]]] * 2)
    groups = {n: {**many, "members": [n], "parameters": [f"w{n}"]} for n in "ab"}
    of, names = space(groups, (8,), micro_batches=1), {}
    for share in (0.019, 0.021):
        weights = Weights({"a": 1 - share, "b": share}, {"wa": 1 - share, "wb": share})
        for choice, options in (((0, 1), (0, 0)), ((0, 0), (1, 0)), ((0, 0), (0, 1))):
            made = [point(1.0, 1.0, 0, choice=choice, options=options)]
            names[share, choice, options] = plan_names(made, [of], weights=weights)[0]
            assert exceptions(made, [of], weights) == pytest.approx([share])
    assert list(names.values()) == [
        "DP 8", "DP 8 · ZeRO-2", "DP 8",
        "DP 8 (TP 2 %)", "DP 8 · ZeRO-2 98 %", "DP 8 · ZeRO-2 2 %",
    ]  # fmt: skip


def test_the_share_of_exceptions_is_of_what_a_name_leaves_open():
    """None in what belongs to the kind of parallelism, some in blocks that are recomputed otherwise."""
    groups = {name: group([["d0", "d1"], ["d0", "out_features"]], [[[]]] * 2, "d0") for name in ALONG}
    of = space(groups, (4, 2), micro_batches=1, sequence=ALONG)
    points = [point(1.0, 1.0, 0, choice=c, options=(0,) * 4) for c in ((0, 1, 0, 1), (0, 0, 0, 0))]
    assert exceptions(points, [of]).tolist() == [0.0, 0.0]
    plain = group([["rows"]], [[[]]])
    blocks = space(dict.fromkeys("abc", plain), (8,), regions={n: f"h.{n}" for n in "abc"}, micro_batches=1)
    again = [point(1.0, 1.0, 0, choice=c, options=(0,) * 3) for c in ((0, 0, 0), (1, 1, 1), (1, 0, 0))]
    assert exceptions(again, [blocks]) == pytest.approx([0.0, 0.0, 1 / 3])


def test_convolutions_split_along_the_batch_are_data_parallel():
    """Batch norms refuse micro-batches, so that no operator says which loop is the batch."""
    labels = {"conv": "batch", "norm": "batch", "relu": "d0", "linear": "rows", "loss": "batch0"}
    of = space({n: group([[label]], [[[]]], "none") for n, label in labels.items()}, (8,), micro_batches=1)
    assert name(of, (0,) * 5, (0,) * 5) == "DP 8"

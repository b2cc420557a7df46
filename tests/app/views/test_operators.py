"""The operators of a plan as data.

The table of a plan's operators as the page gets it.
"""

from types import SimpleNamespace

import pytest
from samples_app import GIB, exploration, placed
from tensoropt_app.views import operators
from tensoropt_app.views.frontier import FrontierData

from tensoropt import explore, zoo
from tensoropt.plan.kinds import PIPELINED
from tensoropt.profiling.store import ProfileStore
from tensoropt.report.detail import detail
from tensoropt.report.step_parts import Share

UNITS = FrontierData.of(exploration()).units  # GiB and ms
KNOWN, UNKNOWN = {"module": "m.a"}, {"module": ""}


def test_figures_are_in_the_units_of_the_heads():
    sizes = {f"{name}_bytes": 2**29 for name in ("parameters", "gradients", "state", "kept")}
    one = SimpleNamespace(group="a", module="m", configuration={}, options=(), source="fitted", **sizes,
                          compute_s=0.002, copies_s=0.0, communication_s=0.001)  # fmt: skip
    (row,) = operators.operator_rows(DATA.exploration, 0, UNITS, SimpleNamespace(operators=[one]))
    assert [row[name] for name in ("memory", "kept", "compute", "communication")] == [1.5, 0.5, 2.0, 1.0]


def test_heads_have_units_and_modules_are_hidden_where_none_is_known():
    columns = [
        {"field": "module"},
        {"field": "kept", "headerName": "keeps"},
        {"field": "axes", "headerName": "split"},
    ]
    heads = operators.columns_of(columns, (KNOWN, UNKNOWN), UNITS)
    assert [head["headerName"] for head in heads[1:]] == ["keeps, GiB", "split"]
    assert heads[0]["hide"] is False
    assert operators.columns_of(columns, (UNKNOWN,), UNITS)[0]["hide"] is True


def test_below_the_operators_nothing_stands_for_zero():
    (row,) = operators.bottom_rows((Share("optimizer", 0.0, 0.003, 0.0),), UNITS)
    assert row == {"group": "optimizer", "axes": "", "memory": None, "compute": 3.0, "communication": None}


def test_figures_are_rounded_as_elsewhere_on_the_page():
    """The browser rounds a half up, Python to the even digit: 0.3125 GiB would be told as two sizes."""
    (row,) = operators.bottom_rows((Share("device 2", 0.3125 * 2.0**30, 0.0, 0.0),), UNITS)
    assert row["memory"] == 0.312
    assert UNITS.memory.text(0.3125 * 2.0**30) == "0.312 GiB"


DATA = FrontierData.of(exploration())


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory):
    """A small GPT-2 on two CPU ranks, among whose plans are pipelines of two stages."""
    built = zoo.build("gpt2-tiny", batch=4, device="meta", seed=0)
    with ProfileStore(tmp_path_factory.mktemp("store") / "profiles.sqlite") as store:
        return explore(
            built.model, built.args, built.kwargs, cluster="cpu:2", measure="never", micro_batches=[2],
            pipelines="always", store=store,
        )  # fmt: skip


@pytest.mark.slow
def test_operators_of_a_pipeline_say_their_stage(pipelines):
    rows = [i for i, found in enumerate(pipelines.points) if found.kind is PIPELINED]
    assert rows
    for row in rows:
        plan, told = pipelines.plan(row), detail(pipelines, row)
        found = {o["group"]: o for o in operators.operator_rows(pipelines, row, UNITS, told)}
        # What stands for a tensor that arrives has a row if it takes time.
        assert [name for name in found if " stage " not in name] == list(plan.operators)
        for number, stage in enumerate(plan.stages.stages):
            own = [found[name] for name in stage.groups if name in found]
            assert own
            assert all(o["axes"].startswith(f"stage {number}") for o in own)
        assert all(o["compute"] for o in found.values())


def test_below_the_operators_of_a_pipeline_stand_its_places(pipelines):
    for row, one in enumerate(pipelines.points):
        if one.kind is not PIPELINED:
            continue
        *places, headline = operators.beside_rows(pipelines, row, detail(pipelines, row))
        assert [place.title for place in places] == ["device 0, stage 0", "device 1, stage 1"]
        assert all(row["axes"].startswith("idle ") for row in operators.bottom_rows(places, UNITS))
        assert headline.memory_bytes == max(place.memory_bytes for place in places)
        seconds = [(place.compute_s, place.communication_s) for place in places]
        assert (headline.compute_s, headline.communication_s) in seconds


def test_operators_name_the_axis_and_the_dim_it_splits():
    rows = {o["group"]: o for o in operators.operator_rows(DATA.exploration, 0, UNITS)}
    assert (rows["embedding"]["axes"], rows["mlp"]["axes"]) == ("batch ×8", "whole")
    assert rows["mlp"]["module"] == "model.mlp"


def test_a_placed_plan_names_devices_instead_of_axes():
    found = placed()
    row = len(found.points)
    assert [o["axes"] for o in operators.operator_rows(found, row, UNITS)] == ["device 0", "device 1"] * 2


def test_below_devices_of_different_loads_stands_what_the_headline_says():
    found = placed()
    row = len(found.points)
    devices = Share("device 0", 20 * GIB, 0.4, 0.02), Share("device 1", 10 * GIB, 0.65, 0.0)
    told = SimpleNamespace(places=devices)
    assert operators.beside_rows(found, row, None) == ()
    *shown, headline = operators.beside_rows(found, row, told)
    assert tuple(shown) == devices
    mark = found.all_points[row]
    assert headline == Share(mark.kind.headline, mark.memory_bytes, mark.compute_s, mark.communication_s)


def test_what_is_split_and_stored_is_said_in_words():
    sizes = {"a": 2, "b": 4}
    wanted = "batch ×2, output features 2 ×4"
    assert operators.axes_words({"a": "rows.0", "b": "out_features.2@S(0)"}, "rows.0", sizes) == wanted
    assert operators.axes_words({"a": "none", "b": "d2"}, "d0", sizes) == "dim 2 ×4"
    configuration = {"a": "rows", "b": "out_features"}
    keys = {"p_w": "model.fc.weight", "p_b": "model.fc.bias"}
    stored = "p_w: S(0), S(1), held", "p_b: R, S(0)"
    told = operators.option_words(stored, configuration, "rows", sizes, keys)
    assert told == "weight: ZeRO-2 ×2"

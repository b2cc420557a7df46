"""The page Result as data: the answer, the choices, what if, and which points are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from samples_app import CALL, GIB, exploration, long_exploration, of_model, point
from tensoropt_app.library import Library
from tensoropt_app.state import View
from tensoropt_app.views import result
from tensoropt_app.views.frontier import FrontierData

from tensoropt import Exploration, load_cluster

HANDS = (
    point(90 * GIB, 0.15, planner="data_parallel", choice=(2, 2, 2, 2)),
    point(33 * GIB, 0.9, planner="zero", choice=(1, 1, 1, 1)),
)
DATA = FrontierData.of(exploration(others=HANDS))


def line(data: FrontierData, view: View) -> result.AnswerLine:
    found = data.answer(view)
    return result.answer_line(data, view, found, data.chosen(view, found))


def chosen(data: FrontierData, view: View) -> list[result.Choice]:
    found = data.answer(view)
    return result.choices(data, view, found, data.chosen(view, found))


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(4.126, "4.1 s"), (0.1912, "190 ms"), (27.31, "27 s"), (134.0, "130 s"), (0.0409, "41 ms"),
     (222e-6, "220 µs"), (0.996, "1.0 s"), (33e-6, "33 µs"), (0.0, "0 s"), (1234.0, "1,200 s")],
)  # fmt: skip
def test_times_have_two_digits(seconds, words):
    assert result.two_digits(seconds) == words


def test_the_answer_says_whether_it_fits_and_what_is_better():
    found = line(DATA, View(budget_bytes=35 * GIB))
    assert (found.mark, found.verdict, found.needs) == ("fits", "✓ Fits", "30.0 of 35 GiB")
    assert found.time.startswith("600 ms a step")
    assert found.beside == "The fastest plan that fits; none within 3 % of it is simpler."
    other = line(DATA, View(point=0, budget_bytes=35 * GIB))
    assert other.beside == "Not the recommended plan within 35 GiB, which is 25 % faster."
    over = line(DATA, View(point=4, budget_bytes=35 * GIB))
    assert (over.mark, over.verdict) == ("over", "✕ Does not fit")
    assert over.beside.endswith("which is 50 % slower.")


def test_where_nothing_fits_it_says_what_would():
    found = line(DATA, View(budget_bytes=8 * GIB))
    assert found.mark == "over"
    wanted = "No plan fits 8 GiB; the leanest needs 10.0 GiB. Use more or larger devices, or a smaller batch."
    assert found.beside == wanted


def test_choices_are_four_and_the_chosen_one():
    found = chosen(DATA, View(budget_bytes=31 * GIB))
    assert [choice.title for choice in found] == ["recommended, fastest", "safest", "DDP", found[3].title]
    assert found[3].title.startswith(("FSDP", "ZeRO"))
    assert [choice.mark for choice in found] == ["tight", "fits", "over", "over"]
    assert [choice.chosen for choice in found] == [True, False, False, False]
    assert found[1].link == "/result?point=2&budget=33285996544"
    # What was chosen otherwise comes last, under the name of how it was chosen.
    assert chosen(DATA, View(point=5))[-1].title == "chosen"
    limited = chosen(DATA, View(time_s=0.65))[-1]
    assert (limited.title, limited.chosen, limited.needs) == ("leanest within 650 ms", True, "30.0 GiB")


def test_baselines_are_in_their_best_form_and_refusals_say_why():
    tried = {"megatron": {"refusal": "megatron finds no plan: heads do not divide"}}
    data = FrontierData.of(replace(DATA.exploration, report={**DATA.exploration.report, "tried": tried}))
    rows = {row.title: row for row in result.baseline_rows(data, data.answer(View()))}
    assert rows["DDP"].verdict == "does not fit, needs 90 GiB"
    (refused,) = [row for row in rows.values() if not row.plan]
    assert "heads do not divide" in refused.verdict


def saved(folder: Path, **made: Exploration) -> Library:
    for name, found in made.items():
        found.save(folder / name)
    return Library(folder)


def asked(library: Library, key: str) -> dict[str, result.WhatIf]:
    data, view = FrontierData.of(library.load(key)), View(key)
    return {one.title: one for one in result.what_if(library, data, view, data.answer(view))}


def at(batch: int, times: Sequence[float], cluster: str = "dgx-h100[4]") -> Exploration:
    points = [point((20 + 20 * i) * GIB, time_s) for i, time_s in enumerate(times)]
    return of_model(exploration(points, cluster=cluster), batch=batch, call=CALL)


def test_what_is_known_is_said_and_the_rest_can_be_planned(tmp_path):
    library = saved(tmp_path, half=at(8, (1.0, 0.5)), whole=at(8, (0.6, 0.3), "dgx-h100"))
    found = asked(library, "opened-half")
    assert found["96 GiB of memory"].words == "500 ms a step (as fast)"
    assert found["96 GiB of memory"].link == ""
    assert (found["8 × H100-80GB"].words, found["8 × H100-80GB"].action) == ("300 ms a step (−40 %)", "show")
    assert found["8 × H100-80GB"].link == "/result?x=opened-whole"
    wanted = ("not known yet", "/new?from=opened-half&batch=16")
    assert (found["batch 16"].words, found["batch 16"].link) == wanted
    # Twice the devices of what is known are planned.
    more = asked(library, "opened-whole")["16 × H100-80GB"]
    assert more.link == "/new?from=opened-whole&devices=16xH100-80GB"


def test_another_batch_is_said_by_its_throughput(tmp_path):
    found = asked(saved(tmp_path, small=at(8, (1.0, 0.5)), large=at(16, (1.0, 0.8))), "opened-small")
    assert found["batch 16"].words.endswith("/s")
    assert found["batch 16"].link == "/result?x=opened-large"


def test_memory_beyond_a_budget_is_shown_where_the_device_has_it():
    library = Library()
    data, view = (
        FrontierData.of(library.load("llama3-8b-8x24gib")),
        View("llama3-8b-8x24gib", budget_bytes=21 * GIB),
    )
    first, *_ = result.what_if(library, data, view, data.answer(view))
    assert (first.title, first.action) == ("24 GiB of memory", "show")
    assert f"budget={24 * GIB:.0f}" in first.link
    assert load_cluster("rtx-4090x2").memory_bytes == 24 * GIB


def test_few_points_are_drawn_near_the_budget_and_all_on_demand():
    long = FrontierData.of(long_exploration(5_000))
    view = View(budget_bytes=40 * GIB)
    row = long.chosen(view)
    low, high = result.near(long, view, row)
    assert low <= long.needs[row] <= 40 * GIB <= high
    assert (low, high) == pytest.approx((0.8 * 40 * GIB, 1.5 * 40 * GIB), rel=0.02)
    seen = result.seen_rows(long, view, row)
    assert 2 < len(seen) <= 30
    assert np.all((long.needs[seen] >= low) & (long.needs[seen] <= high))
    whole = replace(view, whole=True)
    assert result.near(long, whole, row) == (long.needs.min(), long.needs.max())
    assert len(result.seen_rows(long, whole, row)) <= 30
    # Notable ones always have a dot.
    assert set(long.notable) & set(long.line.tolist()) <= set(result.seen_rows(long, whole, row).tolist())

"""The decision sheet: one page that holds what it must, fetches nothing, runs nothing, and takes any name.

What a plan was chosen over, and why.
"""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import tensoropt
from tensoropt.cluster import load_cluster
from tensoropt.errors import TensorOptError
from tensoropt.exploration.rates import Amount, Tariff
from tensoropt.exploration.verified import Verified, fingerprint
from tensoropt.report.detail import detail
from tensoropt.report.sheet import SheetOptions, alternatives, decision_sheet, verdict_words
from tests.plan.explorations import MIB, point, small_exploration


def compared() -> Any:
    """ZeRO has two plans, of which one fits 25 MiB; another planner refuses."""
    found = replace(small_exploration(), cluster=load_cluster("dgx-h100[2]").to_dict())
    others = (
        point(15 * MIB, 0.3, 0, planner="zero", choice=(0, 1, 0, 0)),
        point(30 * MIB, 0.145, 0, planner="zero", choice=(0, 0, 1, 0)),
    )
    row = {"limit_bytes": None, "search_s": 0.1, "gap": None, "notes": []}
    comparison = (
        {**row, "planner": "frontier", "memory_bytes": 40 * MIB, "time_s": 0.14, "points": 4},
        {**row, "planner": "zero", "memory_bytes": 30 * MIB, "time_s": 0.145, "points": 2},
        {**row, "planner": "m_topo", "memory_bytes": None, "time_s": None, "points": 0, "notes": ["no room"]},
    )
    return replace(found, others=others, comparison=comparison)


def test_ends_planners_and_what_was_not_run() -> None:
    found = {one.name: one for one in alternatives(compared(), 1, 25 * MIB, "the budget")}
    assert set(found) == {
        "leanest (point 1)", "fastest within the budget (point 3)", "fastest (point 4)",
        "ZeRO", "m-TOPO", "data parallel",
    }  # fmt: skip
    assert found["leanest (point 1)"].verdict == "slower by 100 %, with 2 MiB less memory"
    assert (
        found["fastest (point 4)"].verdict
        == "does not fit the budget of 25 MiB: 15 MiB too much; faster by 30 %"
    )
    assert found["ZeRO"].time_s == 0.3
    assert found["m-TOPO"].verdict == "no plan: no room"
    assert found["data parallel"].time_s is None
    assert "tensoropt recost DIR --planners data_parallel --only-beside" in found["data parallel"].verdict


def test_a_baseline_that_found_no_plan_beside_the_search_says_why() -> None:
    found = small_exploration()
    report = {**found.report, "tried": {"data_parallel": {"refusal": "odd"}}}
    told = {one.name: one for one in alternatives(replace(found, report=report), 1, 25 * MIB, "the budget")}
    assert told["data parallel"].verdict == "no plan: odd"


def test_a_planner_of_which_nothing_fits_shows_its_leanest() -> None:
    found = {one.name: one for one in alternatives(compared(), 0, 11 * MIB, "the budget")}
    assert found["ZeRO"].memory_bytes == 15 * MIB
    assert found["ZeRO"].verdict.startswith("does not fit the budget of 11 MiB: 4 MiB too much")


def test_the_chosen_one_is_no_alternative_to_itself() -> None:
    found = compared()
    assert not any("(point 4)" in one.name for one in alternatives(found, 3, 50 * MIB, "the budget"))
    of_zero = [one for one in alternatives(found, 4, 25 * MIB, "the budget") if one.name.startswith("ZeRO")]
    assert of_zero == []  # its fastest that fits is the chosen one


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ((10.0 * MIB, 1.0), "as fast, with as much memory"),
        ((10.0 * MIB, 1.1), "slower by 10 %, with as much memory"),
        ((12.0 * MIB, 0.5), "faster by 50 %, with 2 MiB more memory"),
        ((30.0 * MIB, 0.5), "does not fit the device of 20 MiB: 10 MiB too much; faster by 50 %"),
    ],
)
def test_verdicts(other: tuple[float, float], words: str) -> None:
    assert verdict_words((10.0 * MIB, 1.0), other, 20 * MIB, "the device") == words


HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(1)>&amp;'


class Page(HTMLParser):
    """Tags, what they are told, and the text of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def small(**changes: Any) -> Any:
    found = replace(small_exploration(), cluster=load_cluster("dgx-h100[2]").to_dict())
    return replace(found, **changes)


def page(found: Any, index: int = 1, **options: Any) -> Page:
    return Page(decision_sheet(found, index, SheetOptions(**options)))


def test_it_holds_what_a_decision_rests_on(gpus: Any) -> None:
    found = gpus.found
    told = page(
        found, 1, folder=str(gpus.folder), detail=detail(found, 1), made=datetime(2026, 11, 25, 4, 30),
        tariff=Tariff(2.0, currency="EUR"), amount=Amount(5000.0, "samples"),
    ).text  # fmt: skip
    one = found.points[1]
    for words in (
        "Decision sheet, 2026-11-25 04:30", f"exploration {fingerprint(found)}", found.title(1),
        found.names[1], "binds:", "Not chosen, and why", "leanest (point 1)", "fastest (point",
        "Within 24 GiB of each of 4 RTX-4090: ", "DDP", "FSDP (ZeRO-3)",
        "price of a device-hour 2.00 EUR (as given)",
        "cost of 5,000 samples", "throughput", "MFU",
        "by the sums that the search adds up", "not yet: nothing about this plan was measured",
        "Estimated, approximated",
        f"tensoropt choose {gpus.folder} --memory {int(one.memory_bytes) + 1} --out plan.json",
        "tensoropt.execute plan.json", f"torch {found.versions['torch']}", "beside computation run",
    ):  # fmt: skip
        assert words in told, words
    for note in found.report["notes"]:
        assert " ".join(note.split()) in told
    # Of an exploration that was saved before the plans of baselines stayed beside every search.
    before = replace(found, others=())
    assert "not run beside this frontier" in page(before, 1).text


def test_nothing_runs_and_nothing_is_fetched(gpus: Any) -> None:
    told = page(gpus.found, 0)
    assert not {tag for tag, _ in told.tags} & {"script", "img", "link", "iframe", "object", "style "}
    for _, attributes in told.tags:
        assert not {name for name in attributes if name.startswith("on") or name in ("src", "href", "srcset")}
    policy = next(a for tag, a in told.tags if tag == "meta" and a.get("http-equiv"))["content"]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"
    style = decision_sheet(gpus.found, 0).partition("<style>")[2].partition("</style>")[0]
    assert "url(" not in style
    assert "@import" not in style
    assert "size: A4" in style


def test_names_from_elsewhere_are_text() -> None:
    found = small()
    hostile = replace(
        found,
        model=found.model.model_copy(update={"source": HOSTILE}),
        cluster={**found.cluster, "name": HOSTILE},
        report={**found.report, "notes": [HOSTILE], "operators_without_rule": [HOSTILE],
                "micro_batches_refused": HOSTILE},
        versions={HOSTILE: HOSTILE},
        comparison=({"planner": HOSTILE, "limit_bytes": None, "memory_bytes": None, "time_s": None,
                     "points": 0, "notes": [HOSTILE], "search_s": 0.0, "gap": None},),
    )  # fmt: skip
    verified = Verified(
        hostile.keys[1], "1x2", 1, 12 * MIB, 0.2, None, None, None, None, False, HOSTILE, HOSTILE
    )
    text = decision_sheet(
        hostile, 1, SheetOptions(folder=HOSTILE, tariff=Tariff(2.0, currency=HOSTILE), verified=[verified])
    )
    told, plain = Page(text), Page(decision_sheet(found, 1))
    assert {tag for tag, _ in told.tags} <= {tag for tag, _ in plain.tags} | {"p", "code"}
    assert "<script" not in text
    assert "<img" not in text
    assert HOSTILE in " ".join(told.words)  # it is there, as what it is


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "Fits the memory of an H100-80GB of 80 GiB"),
        ({"headroom": 0.05}, "Fits what 5 % headroom leaves of an H100-80GB of 76 GiB"),
        ({"memory_bytes": 16 * MIB}, "Tensors alone fit the budget of 16 MiB: uses 75 % of it."),
        ({"memory_bytes": 11 * MIB}, "Does not fit the budget of 11 MiB: 1 MiB too much."),
    ],
)
def test_whether_it_fits(options: dict[str, float], words: str) -> None:
    assert words in page(small(), **options).text


def test_the_price_is_the_clusters_own_or_unknown() -> None:
    cluster = load_cluster("dgx-h100[2]")
    priced = replace(cluster, devices=tuple(replace(kind, price_per_hour=4.0) for kind in cluster.devices))
    told = page(small(cluster=priced.to_dict())).text
    assert "price of a device-hour 4.00 (the cluster's own)" in told
    assert "costs 0.444" in told  # 2 devices x 200 s x 4 an hour
    free = replace(cluster, devices=tuple(replace(kind, price_per_hour=None) for kind in cluster.devices))
    told = page(small(cluster=free.to_dict())).text
    assert "price of a device-hour unknown: no price of a device-hour is known for H100-80GB" in told
    assert "0.111 device-hours" in told


def test_what_was_run_is_told() -> None:
    found = small()
    plan = found.points[1]
    one = Verified(
        found.keys[1], found.spaces[plan.space].mesh.label, found.spaces[plan.space].micro_batches,
        plan.tensor_bytes, plan.time_s, plan.tensor_bytes * 1.1, 0.25, 1e-7, 1e-7, True, "2 GPUs",
    )  # fmt: skip
    told = page(found, verified=[one]).text
    assert "250 ms measured (200 ms predicted, +25 %)" in told
    assert "numbers as of the unsplit model (2 GPUs)" in told
    slow = page(found, verified=[replace(one, time_measured_s=0.866)]).text
    assert "866 ms measured (200 ms predicted, +333 %, far off)" in slow
    # Nobody predicted what GPUs' plan takes CPU ranks.
    elsewhere = page(found, verified=[replace(one, checked_on="run on 2 CPU ranks of this machine")]).text
    assert "250 ms measured (200 ms predicted, for other devices than these)" in elsewhere
    assert "not yet" in page(found, 0, verified=[one]).text  # another point's


def test_the_chosen_point_is_marked_in_the_picture() -> None:
    for index in range(4):
        text = decision_sheet(small(), index)
        assert len(re.findall(r'<circle [^>]*r="9"', text)) == 1
        assert re.search(r"chosen[^<]*: \d+ MiB, \d+ ms</text>", text)
    beside = small().points[0].changed(planner="zero", memory_bytes=99 * MIB, choice=(0, 0, 0, 0))
    assert "chosen: 99 MiB" in decision_sheet(small(others=(beside,)), 4)


def test_a_point_that_there_is_not() -> None:
    with pytest.raises(TensorOptError, match="there is no point 5; there are points 1 to 4"):
        decision_sheet(small(), 4)


def test_it_is_written_of_a_folder(gpus: Any, tmp_path: Path) -> None:
    number = tensoropt.export_sheet(gpus.folder, tmp_path / "s.html", memory_bytes=2**34, headroom=0.1)
    assert number == len(gpus.found.points)
    assert f"tensoropt verify plan.json --save {gpus.folder}" in (tmp_path / "s.html").read_text()
    assert tensoropt.export_sheet(small(), tmp_path / "t.html", 1) == 1
    assert "tensoropt choose DIR" in (tmp_path / "t.html").read_text()

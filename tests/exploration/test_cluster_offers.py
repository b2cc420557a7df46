"""Which cluster to take: by hand, and against a search through all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tensoropt import Exploration, load_cluster
from tensoropt.exploration.cluster_offers import ClusterQuestion, Offers, offers, offers_data
from tensoropt.exploration.rates import Amount, Tariff
from tests.exploration.test_rates import explored
from tests.plan.explorations import needing, point, space

GIB = 2.0**30
PRICES = {"H100-80GB": 3.0, "A100-80GB": 1.0}


def on(cluster: str, *points: tuple[float, float]) -> Exploration:
    """Points of (GiB, seconds) on two devices of a preset."""
    found = explored(f"{cluster}[2]")
    cluster_data = {**load_cluster(f"{cluster}[2]").to_dict(), "name": cluster}
    device = load_cluster(cluster).memory_bytes
    made = tuple(needing(size * GIB, seconds, device) for size, seconds in points)
    return replace(found, points=made, cluster=cluster_data)


FAST, CHEAP, SMALL = (
    on("dgx-h100", (10, 0.4), (90, 0.2)),  # the fastest needs more than a device has
    on("dgx-a100", (10, 0.9), (40, 0.6)),
    on("rtx-4090", (30, 0.1)),
)
ALL = (FAST, CHEAP, SMALL)


def names(found: Offers) -> tuple[str | None, str | None]:
    return tuple(row and row.cluster for row in (found.cheapest, found.fastest))  # type: ignore[return-value]


def test_every_cluster_offers_its_fastest_plan_that_fits():
    rows = offers(ALL, ClusterQuestion(tariff=Tariff(by_kind=PRICES))).rows
    assert [row.index for row in rows] == [0, 1, None]
    assert "does not fit: needs 30 GiB, a device may use 22.8 GiB" in rows[2].reason
    # 1,000 steps of 0.4 s on two devices at 3 an hour.
    assert rows[0].cost == pytest.approx(1000 * 0.4 / 3600 * 2 * 3.0)
    assert rows[0].device_hours == pytest.approx(2 * (rows[0].hours or 0))


@pytest.mark.parametrize(("limits", "cheapest", "fastest"), [
    ({}, "dgx-a100", "dgx-h100"),
    ({"memory_bytes": 20 * GIB}, "dgx-a100", "dgx-h100"),
    ({"memory_bytes": 5 * GIB}, None, None),
])  # fmt: skip
def test_cheapest_and_fastest_within_limits(limits, cheapest, fastest):
    found = offers(ALL, ClusterQuestion(tariff=Tariff(by_kind=PRICES), **limits))
    assert names(found) == (cheapest, fastest)
    assert all(row.reason for row in found.rows if row not in found.within)


def test_steps_of_different_batches_are_compared_by_sample():
    """Of the same seconds, the step with more samples is the faster one."""
    small, large = (
        replace(
            explored(f"dgx-h100[{n}]", call={"args": [{"tensor": [8 * n, 3], "dtype": "float32"}]}),
            points=(point(GIB, seconds, 0),),
            spaces=(space((n,), 1),),
        )
        for n, seconds in ((1, 0.4), (2, 0.5))
    )
    found = offers((small, large), ClusterQuestion(tariff=Tariff(price=1.0)))
    assert found.weak
    assert [row.batch for row in found.rows] == [8, 16]
    assert found.question.amount.words == "16,000 samples"
    assert [row.hours for row in found.rows] == pytest.approx([2000 * 0.4 / 3600, 1000 * 0.5 / 3600])
    assert names(found) == ("dgx-h100[1]", "dgx-h100[2]")
    assert "dgx-h100[2] at batch 16, 500 ms a step (32.0 samples/s)" in " ".join(found.sentences())
    assert not offers(ALL).weak


def test_what_has_no_price_is_said_and_can_be_the_fastest_only():
    found = offers(ALL, ClusterQuestion(tariff=Tariff(by_kind={"A100-80GB": 1.0})))
    assert names(found) == ("dgx-a100", "dgx-h100")
    nothing = offers(ALL, ClusterQuestion())
    assert nothing.cheapest is None
    assert "of unknown price" in " ".join(nothing.sentences())


def test_the_answer_in_words():
    asked = ClusterQuestion(amount=Amount(1e6, "tokens"), tariff=Tariff(by_kind=PRICES))
    cheapest, fastest = offers(ALL, asked).sentences()
    assert cheapest == ("Cheapest without limits: dgx-a100, 0.326 for 1,000,000 tokens at 600 ms a step.")
    assert fastest == "Fastest without limits: dgx-h100, 400 ms a step, 0.651."
    nothing = offers(ALL, replace(asked, memory_bytes=GIB)).sentences()
    assert list(nothing) == ["No cluster is within 1 GiB a device."]


def test_what_could_not_be_explored_is_a_row_with_its_reason():
    found = offers((FAST,), ClusterQuestion(tariff=Tariff(2.0)), {"mine.yaml": "it is gone"})
    assert {row.cluster: row.reason for row in found.rows} == {"dgx-h100": "", "mine.yaml": "it is gone"}
    first, second = offers_data(found)
    assert (first["point"], first["time_s"], first["price_per_hour"]) == (1, 0.4, 4.0)
    assert first["tokens_per_s"] == 1024 / 0.4
    assert (second["cluster"], second["cost"], second["reason"]) == ("mine.yaml", None, "it is gone")

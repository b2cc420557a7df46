"""Which cluster to take, and how many devices of it: tables, the fewest that will do, folders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tensoropt import Exploration, InfeasibleError, TensorOptError, load_cluster
from tensoropt.exploration.cluster_offers import (
    ClusterQuestion,
    Offers,
    fewest_devices,
    folders_in,
    load_sweep,
    of_batches,
    offers,
    offers_data,
)
from tensoropt.exploration.rates import Amount, Tariff
from tests.exploration.test_rates import explored
from tests.plan.explorations import MIB, needing, point, small_exploration, space

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


# -- of several numbers of devices -----------------------------------------------------------------


def of_toys(devices: int, points: Sequence[tuple[float, float]]) -> Exploration:
    """(MiB, seconds) points on so many devices."""
    shape = (devices,) if devices > 1 else ()
    return replace(
        small_exploration(),
        points=tuple(point(m * MIB, t, 0) for m, t in points),
        spaces=(space(shape, 1),),
        cluster={"name": "toy", "kinds": [{"name": "Toy", "memory_bytes": 100 * MIB}]},
    )


FAMILY = (of_toys(1, [(64, 1.0)]), of_toys(2, [(16, 1.2), (32, 0.6)]), of_toys(4, [(4, 1.5), (16, 0.5)]))


def test_every_row_has_the_time_within_each_budget():
    found = offers(FAMILY)
    assert [round(b / MIB) for b in found.budgets_bytes] == [4, 7, 12, 21, 37, 64]
    assert [row.within_s for row in found.rows] == [
        (None, None, None, None, None, 1.0),
        (None, None, None, 1.2, 0.6, 0.6),
        (1.5, 1.5, 1.5, 0.5, 0.5, 0.5),
    ]


def test_the_budgets_stop_at_the_devices_memory():
    sweep = of_toys(1, [(64, 2.0), (200, 1.0)]), of_toys(2, [(32, 0.9), (80, 0.6), (90, 0.5)])
    found = offers(sweep)
    assert max(found.budgets_bytes) == pytest.approx(100 * MIB)
    assert [row.within_s[-1] for row in found.rows] == [2.0, 0.5]


def test_mini_parallelism_takes_the_fewest_devices_that_will_do():
    for limits, devices in (({"memory_bytes": 64 * MIB}, 1), ({"memory_bytes": 20 * MIB}, 2),
                            ({"memory_bytes": 8 * MIB}, 4), ({"time_s": 0.6}, 2)):  # fmt: skip
        assert fewest_devices(FAMILY, limits).devices == devices
    with pytest.raises(InfeasibleError, match=r"1, 2, 4 devices .* leanest needs 4.*MiB on 4"):
        fewest_devices(FAMILY, {"memory_bytes": 2 * MIB})


def test_a_folder_of_explorations_is_a_sweep(tmp_path):
    for one in reversed(FAMILY):
        one.save(tmp_path / f"{one.devices}-devices")
    (tmp_path / "notes").mkdir()
    assert [f.name for f in folders_in(tmp_path)] == ["1-devices", "2-devices", "4-devices"]
    assert [one.devices for one in load_sweep(tmp_path)] == [1, 2, 4]
    assert [one.devices for one in load_sweep(tmp_path / "2-devices")] == [2]
    with pytest.raises(TensorOptError, match="holds no exploration"):
        load_sweep(tmp_path / "notes")


def weak(devices: int, batch: int, **changes: object) -> Exploration:
    """A model with a batch of its own, hence with operators of its own."""
    found = of_toys(devices, [(4, 1.0)])
    model = found.model.model_copy(update={"fingerprint": f"{batch:064}", "batch": batch, **changes})
    return replace(found, model=model)


UNLIKE = weak(1, 8, fingerprint="0" * 64)
BY_SGD = replace(weak(2, 8), settings={"optimizer": "sgd", "mode": "train"})


@pytest.mark.parametrize(
    "other", [weak(2, 24), weak(1, 16, source="zoo:other"), weak(1, 16, seed=9), UNLIKE, BY_SGD]
)
def test_other_batches_models_and_settings_are_none(other, tmp_path):
    weak(1, 8).save(tmp_path / "1")
    other.save(tmp_path / "2")
    with pytest.raises(TensorOptError, match="different models or settings"):
        load_sweep(tmp_path)


def test_batches_on_one_cluster_are_a_sweep(tmp_path):
    for one in (weak(2, 32), weak(2, 8), weak(2, 12)):
        one.save(tmp_path / f"batch-{one.model.batch}")
    sweep = load_sweep(tmp_path)
    assert [one.model.batch for one in sweep] == [8, 12, 32]
    assert of_batches(sweep)
    assert not of_batches([weak(1, 8), weak(2, 16)])

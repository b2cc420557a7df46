"""One model on several numbers of devices: a table, the fewest that will do, folders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tensoropt import Exploration, InfeasibleError, TensorOptError
from tensoropt.exploration.cluster_offers import fewest_devices, folders_in, load_sweep, of_batches, offers
from tests.plan.explorations import MIB, point, small_exploration, space


def on(devices: int, points: Sequence[tuple[float, float]]) -> Exploration:
    """(MiB, seconds) points on so many devices."""
    shape = (devices,) if devices > 1 else ()
    return replace(
        small_exploration(),
        points=tuple(point(m * MIB, t, 0) for m, t in points),
        spaces=(space(shape, 1),),
        cluster={"name": "toy", "kinds": [{"name": "Toy", "memory_bytes": 100 * MIB}]},
    )


FAMILY = (on(1, [(64, 1.0)]), on(2, [(16, 1.2), (32, 0.6)]), on(4, [(4, 1.5), (16, 0.5)]))


def test_every_row_has_the_time_within_each_budget():
    found = offers(FAMILY)
    assert [round(b / MIB) for b in found.budgets_bytes] == [4, 7, 12, 21, 37, 64]
    assert [row.within_s for row in found.rows] == [
        (None, None, None, None, None, 1.0),
        (None, None, None, 1.2, 0.6, 0.6),
        (1.5, 1.5, 1.5, 0.5, 0.5, 0.5),
    ]


def test_the_budgets_stop_at_the_devices_memory():
    sweep = on(1, [(64, 2.0), (200, 1.0)]), on(2, [(32, 0.9), (80, 0.6), (90, 0.5)])
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
    found = on(devices, [(4, 1.0)])
    model = found.model.model_copy(update={"fingerprint": f"{batch:064}", "batch": batch, **changes})
    return replace(found, model=model)


BY_SGD = replace(weak(2, 8), settings={"optimizer": "sgd", "mode": "train"})


@pytest.mark.parametrize("other", [weak(2, 24), weak(1, 16, source="zoo:other"), weak(1, 16, seed=9), BY_SGD])
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

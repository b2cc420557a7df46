"""How a rank of a pipeline starts: with the parameters of its stages, and never with the whole model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensoropt.ranks.pool import RankPool
from tests.execute import start_jobs as jobs


@pytest.fixture(scope="module")
def stored(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of ``drawn(3)`` as a checkpoint of a sharded plan of two ranks."""
    folder = tmp_path_factory.mktemp("weights")
    ranks.run(jobs.save, str(folder / "dcp"))
    return str(folder / "dcp")


@pytest.mark.sweep
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("source", "schedule"),
    [
        ("drawn", "interleaved_1f1b"),
        ("stored", "1f1b"),
        pytest.param("drawn", "1f1b", marks=pytest.mark.slow),
        pytest.param("stored", "interleaved_1f1b", marks=pytest.mark.slow),
    ],
)
def test_a_rank_starts_with_its_stages_and_one_layer(
    ranks: RankPool, stored: str, source: str, schedule: str
) -> None:
    every = ranks.run(jobs.start_stages, source, stored, schedule, 1)
    names = [set(found["names"]) for found in every]
    assert set.union(*names) == set(every[0]["all"]) != names[0]
    for found in every:
        assert not found["differ"]
        assert found["loss"] < 1e-5
        # Gradients are as large as parameters.
        assert found["kept"] / 2 < 0.9 * found["whole"]
        assert found["peak"] <= found["kept"] + jobs.LAYER + jobs.SMALL


@pytest.mark.sweep
@pytest.mark.distributed
@pytest.mark.parametrize("source", ["drawn", "stored"])
def test_a_rank_never_holds_more_than_its_stages_and_a_layer(
    ranks: RankPool, tmp_path: Path, source: str
) -> None:
    """Also in training, where the gradients that autograd makes take the place of those there were."""
    for found in ranks.run(jobs.resident, 256, 12, 2, str(tmp_path / "dcp") if source == "stored" else "", 2):
        own, layer = found["parameters"], found["layer"]
        assert own == found["whole"] / 2
        assert found["tracked"] <= 2 * own + 1.1 * layer
        assert found["tracked_in_training"] <= 2 * own + 1.5 * layer


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("source", ["drawn", "stored"])
def test_a_process_grows_by_its_stages_and_not_by_the_whole_model(
    four_ranks: RankPool, tmp_path: Path, source: str
) -> None:
    """As the system counts it: parameters and gradients of its stage, layers that are read, leftovers."""
    path = str(tmp_path / "dcp") if source == "stored" else ""
    four_ranks.run(jobs.resident, 64, 32, 4, "", 2)  # what a first step loads of libraries is no parameter
    for found in four_ranks.run(jobs.resident, 1024, 32, 4, path, 2):
        own, layer = found["parameters"], found["layer"]
        assert own == found["whole"] / 4
        # What the whole model's parameters alone take is out of reach.
        assert found["started"] < 2 * own + 8 * layer + 2**24 < found["whole"]
        assert found["trained"] < 2 * own + 12 * layer + 2**24

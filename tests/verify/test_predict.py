"""Where strategies are verified, above all on ranks that share one GPU; here CPU ranks stand for them."""

from typing import Any

import pytest

from tensoropt import MeasurementError, TensorOptError, load_cluster
from tensoropt.cli.verify import verify_text
from tensoropt.engine.engine import unsplit_strategy
from tensoropt.engine.models import ModelSpec, load_model
from tensoropt.ranks.local_hardware import why_no_gpu
from tensoropt.ranks.pool import RankPool
from tensoropt.verify import predict, real_ranks, verify_random
from tensoropt.verify.predict import Place, cluster_of, place_for
from tests.lent_ranks import KeptRanks
from tests.verify import gpu_jobs


@pytest.fixture
def one_gpu(monkeypatch):
    """A GPU to share, as far as the machine is asked."""
    monkeypatch.setattr(predict, "why_no_gpu", lambda: "")


def test_ranks_share_a_gpu_over_gloo(one_gpu):
    place = place_for(2, "cuda", "two", "share-gpu")
    assert (place.kind, place.backend, place.device, place.shared) == ("cuda", "gloo", "cuda", True)
    assert "not timed, as their times would mean nothing" in place.text
    with place.pool(2, 60.0) as pool:
        assert (pool.backend, pool.world_size) == ("gloo", 2)
        assert [pool._setup(rank)["gpu"] for rank in range(2)] == [0, 0]


def test_each_rank_of_nccl_has_its_own_gpu():
    with Place("cuda", "").pool(2, 60.0) as pool:
        assert [pool._setup(rank)["gpu"] for rank in range(2)] == [0, 1]
    with Place("cpu", "").pool(2, 60.0) as pool:
        assert [pool._setup(rank)["gpu"] for rank in range(2)] == [None, None]
    with pytest.raises(MeasurementError, match="one rank per GPU; give backend='gloo'"):
        RankPool(2, backend="nccl", share_gpu=True)


@pytest.mark.skipif(not why_no_gpu(), reason="there is a GPU here")
def test_without_a_gpu_there_is_none_to_share():
    with pytest.raises(TensorOptError, match=r"no GPU to share: .*--ranks"):
        place_for(2, "cuda", "two", "share-gpu")


def test_cpu_ranks_beside_gpus_are_checked_on_fake_ranks(monkeypatch):
    monkeypatch.setattr(predict, "local_gpus", lambda: ("H100",) * 4)
    devices = {"name": "beside", "devices": ["H100-80GB", "CPU-core"], "links": {"intra_node": "PCIe4"}}
    where = cluster_of(load_cluster(devices).to_dict())
    assert where == ("cuda and cpu", "beside")
    place = place_for(2, *where)
    assert place.kind == "fake"
    assert place.text.startswith("2 devices of beside are not here, so this was checked on fake ranks")
    assert place_for(2, *where, wanted="ranks").kind == "cpu"


def test_a_shared_gpu_has_room_for_few_ranks(one_gpu):
    with pytest.raises(TensorOptError, match="are too many"):
        place_for(1000, "cuda", "many", "share-gpu")


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize(
    "kind", [{}, {"placed": True}, {"pipeline": 2}], ids=["sharded", "placed", "pipeline"]
)
def test_verifying_on_a_shared_gpu_times_nothing(one_gpu, monkeypatch, ranks, kind):
    monkeypatch.setattr(Place, "device", "cpu")
    monkeypatch.setattr(Place, "pool", lambda place, count, timeout_s: KeptRanks(ranks))
    monkeypatch.setattr(real_ranks, "check_plan", gpu_jobs.check_through_host)
    # A model with messages both ways; prices are data sheets, as nothing is timed.
    told: dict[str, bool] = {}
    kind = kind | {"progress": lambda stage, done, total, what: told.update({stage: done == total})}
    data: dict[str, Any] = verify_random("zoo:mlp", "cpu:2", 2, where="share-gpu", **kind)
    assert told["reference"]
    assert all(told.values())
    assert data["ok"], data
    assert [plan["time_measured_s"] for plan in data["plans"]] == [None, None]
    assert [plan["loss_difference"] < 1e-5 for plan in data["plans"]] == [True, True]
    assert "share the first GPU" in verify_text(data)


@pytest.mark.parametrize(("name", "recurrent"), [("mlp", False), ("lstm-lm-tiny", True)])
def test_memory_is_judged_where_kernels_are_those_predicted(name, recurrent):
    strategy = unsplit_strategy(load_model(ModelSpec(f"zoo:{name}", device="meta")).graph)
    for kind in ("cpu", "fake"):
        assert Place(kind, "").keeps_as_predicted(strategy, "cpu")
        for devices in ("cuda", "cuda and cpu"):
            assert Place(kind, "").keeps_as_predicted(strategy, devices) is not recurrent
    assert Place("cuda", "").keeps_as_predicted(strategy, "cuda")
    assert not Place("cuda", "", shared=True).keeps_as_predicted(strategy, "cuda")

"""What verify does on GPUs, tried on CPU ranks: the unsplit model on one, near replicas, the allocator."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tensoropt.capture.steps import largest_of
from tensoropt.engine.models import load_model
from tensoropt.execute.executable import engine_of
from tensoropt.verify import rank_checks, reference
from tensoropt.verify.fake_ranks import RunStep, tracked_memory
from tensoropt.verify.findings import replicas_near
from tensoropt.verify.reference import Results
from tests.engine.test_replicas import on_two_ranks
from tests.execute import jobs
from tests.verify import gpu_jobs


def test_one_rank_runs_the_unsplit_model_for_all(ranks):
    found = ranks.run(gpu_jobs.shared_results)
    assert [ran for ran, _, _ in found] == [True, False]
    for _, values, left in found:
        assert values["out"].tolist() == [1.0, 1.0, 1.0]
        assert values["w"].tolist() == [2.0, 2.0, 2.0]
        assert left == []


def test_the_unsplit_model_runs_on_the_cpu_where_a_gpu_is_too_small(monkeypatch):
    loaded = replace(load_model(jobs.spec("mlp")), device=torch.device("cuda", 0))
    asked = []
    run = reference._unsplit_on

    def small(device: torch.device, *more: Any) -> Results:
        asked.append(device.type)
        if device.type == "cuda":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run(device, *more)

    monkeypatch.setattr(reference, "_unsplit_on", small)
    found = reference._unsplit(loaded, 0, None)
    assert asked == ["cuda", "cpu"]
    assert found.ran_on == "cpu"
    assert found.floor == reference.GRADIENT_FLOOR * largest_of(found.gradients.values())


def test_replicas_are_measured_by_their_largest_difference(ranks):
    whole, sharded = on_two_ranks("R", "R/P"), on_two_ranks("R", "S(0)")
    assert ranks.run(gpu_jobs.spreads, whole, 0.0) == [0.0, 0.0]
    for spread in ranks.run(gpu_jobs.spreads, whole, 0.5):
        assert 0.3 < spread < 0.51
    assert ranks.run(gpu_jobs.spreads, sharded, 0.5) == [0.0, 0.0]  # nothing to compare with


def test_near_replicas_agree_only_where_bits_do_not_decide():
    near = [(0.0, "float64"), (1e-6, "float32")]
    far = [(None, "float32"), (1e-6, "float64"), (1e-3, "float32"), (float("nan"), "float32")]
    assert all(replicas_near(*one) for one in near)
    assert not any(replicas_near(*one) for one in far)
    assert rank_checks._spread(jobs_step().engine, [{}]) is None  # on a CPU


def jobs_step() -> RunStep:
    loaded = load_model(jobs.spec("mlp"))
    strategy = jobs.strategy_of(loaded, (1, 1), 1)
    engine = engine_of(strategy, loaded.values)
    return RunStep(engine, loaded.inputs, "adam")


ASKED = [
    "synchronize", "reset_peak_memory_stats", "synchronize", "max_memory_allocated", "max_memory_reserved",
]  # fmt: skip


@pytest.fixture
def cuda(monkeypatch):
    """An allocator that answers, and notes what it is asked."""
    asked: list[str] = []

    def note(name: str) -> Any:
        answer = {"max_memory_allocated": 4096, "max_memory_reserved": 2**21}.get(name)
        return lambda *_: asked.append(name) or answer

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ASKED:
        monkeypatch.setattr(torch.cuda, name, note(name))
    return asked


def test_the_allocator_is_asked_beside_the_tracker(cuda):
    step = jobs_step()
    step()
    on_cpu = tracked_memory(step)
    assert not {"allocated", "reserved"} & on_cpu.keys()
    step.engine.runtime.device = torch.device("cuda", 0)  # after lowering: the step itself stays on the CPU
    found = tracked_memory(step)
    assert found == on_cpu | {"allocated": 4096, "reserved": 2**21}
    assert cuda == ASKED

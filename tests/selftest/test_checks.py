"""Every check of the self-test passes on CPU ranks, and fails where a fault is planted."""

from __future__ import annotations

import contextlib
import importlib
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

from tensoropt.engine.models import ModelSpec, forget_models
from tensoropt.profiling.facts import Facts
from tensoropt.ranks.pool import RankPool
from tensoropt.selftest import timing
from tensoropt.selftest.checks import (
    CHECKS,
    checkpoint,
    clock,
    dropout,
    facts,
    fake_devices,
    memory,
    numerics,
    overhead,
    shared_device,
    step_time,
    streams,
)
from tensoropt.selftest.checks.fake_steps import MadeOnTheCpu
from tensoropt.selftest.models import small_models, timed_models
from tensoropt.selftest.outcome import CheckContext, Outcome
from tensoropt.verify import real_ranks
from tests.lent_ranks import KeptRanks, lend_ranks
from tests.selftest.wrong_ranks import wrong_on_the_last_rank

CPU = torch.device("cpu")


@pytest.fixture
def context(tmp_path: Path) -> CheckContext:
    return CheckContext("cpu", tmp_path)


@pytest.fixture
def on_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CheckContext:
    """A GPU for which the CPU stands, as far as a check asks for its device."""
    for module in (dropout, streams):
        monkeypatch.setattr(module, "device_of_check", lambda context: CPU)
    return CheckContext("cuda", tmp_path)


@pytest.fixture
def mlp_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One small model, on a machine that nobody else uses."""
    monkeypatch.setattr(timing, "share_of_core", lambda: 1.0)

    def one(context: CheckContext) -> list[ModelSpec]:
        return [ModelSpec("zoo:mlp")]

    for module, name in (
        (numerics, "small_models"),
        (facts, "small_models"),
        (streams, "small_models"),
        (memory, "timed_models"),
        (step_time, "timed_models"),
        (overhead, "timed_models"),
    ):
        monkeypatch.setattr(module, name, one)


def too_much(outcome: Outcome) -> str:
    """The figures of a failed check that are beyond their bounds."""
    assert outcome.state == "failed", outcome
    return "; ".join(figure.what for figure in outcome.figures if not figure.ok)


# -- numbers --------------------------------------------------------------------------------------


def test_the_graph_computes_what_the_module_does(context: CheckContext, mlp_alone: None) -> None:
    assert numerics.run(context).state == "passed"


def test_a_wrong_gradient_of_the_graph_is_seen_in_both_precisions(
    context: CheckContext, mlp_alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensoropt.verify import reference

    forget_models()  # and with the model what its unsplit graph gave
    true = reference.first_step

    def wrong(*given: Any) -> Any:
        outputs, gradients = true(*given)
        return outputs, {name: 1.2 * value for name, value in gradients.items()}

    monkeypatch.setattr(reference, "first_step", wrong)
    monkeypatch.setattr(numerics, "first_step", wrong)
    found = numerics.run(context)
    forget_models()
    assert too_much(found) == "mlp, float32: gradients; mlp, bfloat16: gradients over autocast's"


def test_dropout_draws_the_same_bits(context: CheckContext, on_gpu: CheckContext) -> None:
    found = dropout.run(context)
    assert found.state == "passed"
    assert "no GPU" in found.notes[0]
    assert dropout.run(on_gpu).state == "passed"


def test_shards_that_ignore_where_they_are_are_seen(
    context: CheckContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dropout._Shard, "coordinate", lambda shard, axes: 0)
    assert too_much(dropout.run(context)) == "bits of masks that differ, shards against the whole"


def test_other_bits_on_the_device_are_seen(on_gpu: CheckContext, monkeypatch: pytest.MonkeyPatch) -> None:
    true, calls = dropout.keep_mask, []

    def other(*given: Any) -> torch.Tensor:
        calls.append(given)
        found = true(*given)
        if len(calls) == 5 + dropout.SHARDS:  # three of the CPU, the shards, then the device's
            found[0, 0] = ~found[0, 0]
        return found

    monkeypatch.setattr(dropout, "keep_mask", other)
    assert too_much(dropout.run(on_gpu)) == "bits of masks that differ, GPU against CPU"


def test_a_mask_that_is_the_same_in_every_step_is_seen(
    context: CheckContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = dropout.mask
    monkeypatch.setattr(dropout, "mask", lambda step, device: true(0, device))
    assert too_much(dropout.run(context)) == "bits that are alike in two steps, beyond chance"


def test_training_goes_on_from_a_checkpoint(context: CheckContext) -> None:
    found = checkpoint.run(context)
    assert found.state == "passed"
    assert found.figures[1].value > 30


def test_a_checkpoint_without_the_optimizer_is_seen(
    context: CheckContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = checkpoint.load_checkpoint
    monkeypatch.setattr(checkpoint, "load_checkpoint", lambda path, model, optimizer: true(path, model))
    assert too_much(checkpoint.run(context)) == (
        "tensors that are not what was saved, bit for bit; losses of the steps after"
    )


@pytest.mark.distributed
def test_two_ranks_on_one_device(
    context: CheckContext, monkeypatch: pytest.MonkeyPatch, ranks: RankPool
) -> None:
    lend_ranks(monkeypatch, ranks)
    monkeypatch.setattr(shared_device, "STRATEGIES", (("zoo:mlp", "float32", False, 1),))
    assert shared_device.run(context).state == "passed"
    monkeypatch.setattr(real_ranks, "check_plan", wrong_on_the_last_rank)
    assert too_much(shared_device.run(context)) == "mlp, float32, 1 random strategies: wrong ones"


def test_a_graph_that_is_not_the_module_is_wrong_though_its_plans_agree() -> None:
    plan = {"ok": True, "loss_difference": 0.0, "gradient_difference": None}
    wrong, loss, gradient = shared_device.figures_of("mlp", {"ok": False, "plans": [plan]})
    assert (wrong.value, wrong.ok, loss.value, gradient.value) == (1, False, 0.0, math.inf)


# -- memory ---------------------------------------------------------------------------------------


@pytest.mark.distributed
def test_facts_of_fake_tensors_and_of_real_ones(
    context: CheckContext, mlp_alone: None, monkeypatch: pytest.MonkeyPatch, ranks: RankPool
) -> None:
    monkeypatch.setattr(facts, "RankPool", lambda *_, **__: KeptRanks(ranks))
    assert facts.run(context).state == "passed"
    true = facts.find_facts

    def more(*given: Any) -> Facts:
        found = true(*given)
        return replace(found, kept_bytes=found.kept_bytes * 2)

    monkeypatch.setattr(facts, "find_facts", more)
    found = facts.run(context)
    assert "mlp, float32: kept for backward" in too_much(found)
    assert found.details["unlike_count"] > 0


def test_memory_is_what_is_predicted_and_tracked(
    context: CheckContext, mlp_alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert memory.run(context).state == "passed"
    true = memory.allocated_above
    monkeypatch.setattr(memory, "allocated_above", lambda *given: 2 * true(*given))
    assert too_much(memory.run(context)) == (
        "mlp: tracked, against the allocator; mlp: predicted, against the allocator"
    )


def test_memory_beside_a_gpus_allocator(
    mlp_alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracked = {"parameters": 100, "gradients": 100, "optimizer": 200, "peak": 1000}
    tracked |= {"constants": 0, "inputs_and_constants": 50, "allocated": 1080, "reserved": 2**21}
    monkeypatch.setattr(memory, "tracked_memory", lambda step: dict(tracked))
    monkeypatch.setattr(memory, "predicted_peak", lambda loaded, capability: 995.0)
    for name, answer in (
        ("get_device_capability", (9, 0)),
        ("synchronize", None),
        ("memory_allocated", 400 + 80),  # a workspace of 30 beside inputs and constants
        ("memory_reserved", 2**21),
        ("mem_get_info", (2**30, 2**31)),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    found = memory.run(CheckContext("cuda", tmp_path))
    assert found.state == "passed"
    assert [round(figure.value, 4) for figure in found.figures[:2]] == [0.0, 0.0046]
    assert [figure.value for figure in found.figures[4:]] == [2**30 - 2**21, 80, 50]
    tracked["allocated"] = 1100
    assert too_much(memory.run(CheckContext("cuda", tmp_path))) == (
        "mlp: tracked, against the allocator; mlp: predicted, against the allocator"
    )


# -- time -----------------------------------------------------------------------------------------


def test_a_clock_that_is_wrong_is_seen(context: CheckContext, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy() -> None:
        torch.mm(*(torch.ones(256, 256),) * 2)

    monkeypatch.setattr(clock, "works", lambda device: [busy] * 3)
    monkeypatch.setattr(clock, "profiled_s", lambda seen, device: 1.0)
    monkeypatch.setattr(clock, "device_seconds", lambda work, device, ahead: work() or 1.04)
    assert clock.run(context).state == "passed"
    monkeypatch.setattr(clock, "device_seconds", lambda work, device, ahead: work() or 0.9)
    assert too_much(clock.run(context)).count("clock against profiler") == 3


def test_a_gpus_seconds_are_those_of_its_kernels() -> None:
    def event(on: DeviceType, us: float, annotation: bool = False, key: str = "sgemm") -> SimpleNamespace:
        return SimpleNamespace(
            device_type=on, self_device_time_total=us, is_user_annotation=annotation, key=key
        )

    lead = "at::cuda::(anonymous namespace)::spin_kernel(long)"  # seen on an H200
    averages = [
        event(DeviceType.CPU, 5e6),
        event(DeviceType.CUDA, 5e6),
        event(DeviceType.CUDA, 9e6, True),
        event(DeviceType.CUDA, 7e6, key=lead),
    ]
    seen: Any = SimpleNamespace(key_averages=lambda: averages)
    assert clock.profiled_s(seen, torch.device("cuda")) == 5.0


def test_the_profilers_seconds_are_those_of_operators() -> None:
    a = torch.randn(400, 400)
    ratio = clock.ratio(lambda: [torch.mm(a, a) for _ in range(20)], CPU)
    # The clock takes the smallest of repeats, the profiler sees one run, which other processes may disturb.
    assert 0.2 < ratio < 2.0


@pytest.mark.slow
@pytest.mark.distributed
def test_a_step_is_predicted(context: CheckContext, mlp_alone: None) -> None:
    found = step_time.run(context)
    assert [figure.unit for figure in found.figures] == ["share", "s", "s", "share"]
    assert found.figures[1].value > 0


@pytest.mark.parametrize(("predicted", "state"), [(1.1, "passed"), (1.3, "failed"), (math.nan, "failed")])
def test_a_prediction_that_is_far_off_is_seen(
    context: CheckContext,
    mlp_alone: None,
    monkeypatch: pytest.MonkeyPatch,
    predicted: float,
    state: str,
) -> None:
    plan = {"ok": True, "error": "", "time_predicted_s": predicted, "time_measured_s": 1.0}
    monkeypatch.setattr(step_time, "ranks_with", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(step_time, "predict_and_run", lambda *_, **__: {"plans": [plan]})
    assert step_time.run(context).state == state
    plan |= {"ok": False, "error": "out of memory"}
    assert "out of memory" in step_time.run(context).reason


def test_a_slow_graph_is_seen(
    context: CheckContext, mlp_alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overhead, "ROUNDS", 3)
    found = overhead.run(context)
    assert [figure.unit for figure in found.figures] == ["share", "s", "s"]
    true = overhead.step_of_graph

    def slow(*given: Any) -> Callable[[], object]:
        step = true(*given)
        return lambda: (step(), time.sleep(0.05))

    monkeypatch.setattr(overhead, "step_of_graph", slow)
    assert too_much(overhead.run(context)) == "mlp: over the module's step"


@pytest.mark.slow
def test_the_compiled_graph(context: CheckContext, mlp_alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "ROUNDS", 3)
    found = overhead.run_compiled(context)
    assert found.figures or found.state == "skipped"


def test_without_a_compiler_nothing_is_compiled(
    context: CheckContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overhead, "why_not_compiled", lambda context: "there is no compiler")
    assert overhead.run_compiled(context) == Outcome.skipped("there is no compiler")


# -- what a GPU has -------------------------------------------------------------------------------


def test_streams_need_a_gpu(context: CheckContext) -> None:
    assert streams.run(context).state == "skipped"


class _Stream:
    """A stream of a device that does all at once."""

    def __init__(self, device: object = None):
        pass

    def wait_stream(self, other: object) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


def test_streams_that_do_not_overlap_are_seen(
    on_gpu: CheckContext, mlp_alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, answer in (
        ("Stream", _Stream),
        ("stream", lambda stream: stream),
        ("current_stream", _Stream),
        ("synchronize", lambda device: None),
    ):
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(streams, "_works", lambda device: (lambda: None, lambda: None))
    monkeypatch.setattr(streams, "in_turns", lambda works, device, rounds: [[0.1], [0.08], [0.11]])
    assert streams.run(on_gpu).state == "passed"
    monkeypatch.setattr(streams, "in_turns", lambda works, device, rounds: [[0.1], [0.08], [0.17]])
    assert too_much(streams.run(on_gpu)) == "share of a copy that computation does not hide"


def test_a_step_that_is_wrong_in_a_side_stream_is_seen(
    on_gpu: CheckContext, mlp_alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    true, calls = streams.first_step, []

    def racing(*given: Any) -> Any:
        outputs, gradients = true(*given)
        calls.append(1)
        return outputs, {n: v * (1 if len(calls) == 1 else 1.01) for n, v in gradients.items()}

    for name, answer in (("Stream", _Stream), ("stream", lambda s: s), ("current_stream", _Stream)):
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(streams, "first_step", racing)
    monkeypatch.setattr(streams, "_works", lambda device: (lambda: None, lambda: None))
    monkeypatch.setattr(streams, "in_turns", lambda works, device, rounds: [[0.1], [0.08], [0.1]])
    assert too_much(streams.run(on_gpu)) == "mlp: gradients in a side stream"


def test_what_is_wrong_on_fake_devices_is_seen() -> None:
    good = {"alike": True, "tracked": 100, "predicted": 100.5, "cpu": ["aten.lift_fresh.default"]}

    def state(**other: Any) -> str:
        return Outcome.of(fake_devices.figures_of("mlp", {**good, **other})).state

    assert state() == "passed"
    assert state(alike=False) == "failed"
    assert state(predicted=102) == "failed"
    assert state(cpu=["aten.rand.default"]) == "failed"


def test_tensors_that_are_made_on_the_cpu_are_noted() -> None:
    with MadeOnTheCpu() as noted:
        torch.rand(2)
        torch.empty(2, device="meta").add_(1)
    assert noted.operators == {"aten.rand.default"}


def test_fake_devices_are_for_machines_without_a_gpu(
    context: CheckContext, on_gpu: CheckContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "there is a GPU" in fake_devices.run(on_gpu).reason
    assert fake_devices.built_for_cuda() == torch.backends.cuda.is_built()
    monkeypatch.setattr(fake_devices, "built_for_cuda", lambda: True)
    assert "built for CUDA" in fake_devices.run(context).reason


# -- models ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_models_are_there_by_name_and_settings(device: str, tmp_path: Path) -> None:
    context = CheckContext(device, tmp_path)
    specs = [*small_models(context), *timed_models(context)]
    assert len(specs) == 8
    for spec in specs:
        model, args, _ = replace(spec, device="meta").build()
        assert next(model.parameters()).device.type == "meta"
        assert args


def test_every_check_names_a_function() -> None:
    for check in CHECKS.values():
        module, _, name = check.function.partition(":")
        assert callable(getattr(importlib.import_module(module), name))
        assert check.expected_s.keys() == {"cpu", "cuda"}

"""Timing on a GPU that is a fake: it works through its queue in a time of its own."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tensoropt.graph import Ref
from tensoropt.ops.calls import LocalCall
from tensoropt.profiling.timers import GPU_CACHE_BYTES, EventTimer, WallTimer, end_if_lost
from tensoropt.profiling.workload import TensorSpec, Workload, makes_tensors
from tensoropt.profiling.workload_timing import MIN_REPEATS, joined, time_workload

COLD_MS, WARM_MS, ZEROING_MS = 3.0, 2.0, 100.0


class FakeCuda:
    """``torch.cuda``'s part in timing: marks are put into a queue and have a time only once it was waited
    for.

    Between two marks lies :data:`COLD_MS` if something zeroed the cache just before the first of them.
    """

    def __init__(self, l2: int | None = 4096, lost: bool = False):
        self.queue: list[Any] = []
        self.log: list[str] = []
        self.l2, self.lost = l2, lost
        self.now = 0.0

    def get_device_properties(self, device: torch.device) -> Any:
        return SimpleNamespace() if self.l2 is None else SimpleNamespace(L2_cache_size=self.l2)

    def current_stream(self, device: torch.device) -> str:
        return f"stream of {device}"

    def Event(self, enable_timing: bool) -> FakeEvent:  # noqa: N802  # as PyTorch calls it
        assert enable_timing
        return FakeEvent(self)

    def synchronize(self, device: torch.device) -> None:
        if self.lost:
            raise RuntimeError("CUDA error: device-side assert triggered")
        self.log.append("synchronize")
        cold, last_ms = False, 0.0
        for item in self.queue:
            if isinstance(item, FakeEvent):
                self.now += last_ms
                item.at, last_ms = self.now, 0.0
            else:
                last_ms = ZEROING_MS if item == "zero" else COLD_MS if cold else WARM_MS
                cold = item == "zero"
        self.queue.clear()

    def empty_cache(self) -> None:
        self.log.append("empty")


class FakeEvent:
    def __init__(self, cuda: FakeCuda):
        self.cuda, self.at = cuda, None

    def record(self, stream: str) -> None:
        assert stream == "stream of cpu"
        self.cuda.queue.append(self)
        self.cuda.log.append("mark")

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.at is not None, "read before the device was done"
        return end.at - self.at


class Issued(TorchDispatchMode):
    """Puts what PyTorch computes into the fake's queue: what zeroes its cache, and any other kernel."""

    def __init__(self, cuda: FakeCuda, cache_bytes: int):
        super().__init__()
        self.cuda, self.cache_bytes = cuda, cache_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._overloadpacket.__name__
        if name == "zero_" and args[0].numel() == self.cache_bytes:
            self._issue("zero")
        elif name in ("neg", "mul", "exp"):
            self._issue("work")
        return func(*args, **(kwargs or {}))

    def _issue(self, what: str) -> None:
        if what == "zero" or self.cuda.queue[-1:] != ["work"]:
            self.cuda.queue.append(what)
            self.cuda.log.append(what)


def negation(size: int = 8, requires_grad: bool = True) -> Workload:
    spec = TensorSpec((size,), "float32", requires_grad)
    return Workload((("x", spec, "read"),), ((call("neg", Ref("x")), ("y",)),), None, ("y",), {})


def call(name: str, *args: Any) -> LocalCall:
    return LocalCall(f"aten.{name}.default", args, {})


def timed(work: Workload, cuda: FakeCuda, training: bool = True) -> dict[str, Any]:
    timer = EventTimer("cpu", cuda)
    with Issued(cuda, 2 * timer.cache_bytes):
        return time_workload(0, 1, work, training, timer)


def test_seconds_are_read_once_the_device_is_done():
    cuda = FakeCuda()
    timer = EventTimer("cpu", cuda)
    start = timer.mark()
    cuda.queue.append("work")
    end = timer.mark()
    with pytest.raises(AssertionError, match="before the device was done"):
        start.elapsed_time(end)
    assert timer.seconds([(start, end), (start, start)]) == [pytest.approx(WARM_MS / 1e3), 0.0]


def test_forward_and_backward_cold_and_warm():
    found = timed(negation(), cuda := FakeCuda())
    assert len(found["forward"]) == max(MIN_REPEATS, int(0.12 / (2 * COLD_MS / 1e3)))
    for way in ("forward", "backward"):
        assert found[way] == pytest.approx([COLD_MS / 1e3] * len(found[way]))
        assert found[f"{way}_warm"] == pytest.approx([WARM_MS / 1e3] * len(found[way]))
    assert cuda.log[4:12] == ["zero", "mark", "work", "mark"] * 2  # after the one that says how much it takes
    assert cuda.log.count("synchronize") == 4  # that one, the first lap, then all cold and all warm repeats


def test_inference_runs_no_backward():
    found = timed(negation(), cuda := FakeCuda(), training=False)
    assert set(found["backward"]) == set(found["backward_warm"]) == {0.0}
    assert cuda.log[:4] == ["mark", "work", "mark", "synchronize"]
    assert cuda.log[4:13] == [*["zero", "mark", "work", "mark"] * 2, "synchronize"]


def test_the_record_counts_cold_and_keeps_warm():
    record = joined([timed(negation(), FakeCuda()), timed(negation(), FakeCuda())])
    assert record["forward_s"] == record["backward_s"] == pytest.approx(COLD_MS / 1e3)
    assert record["forward_warm_s"] == record["backward_warm_s"] == pytest.approx(WARM_MS / 1e3)
    assert record["spread"] == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(("l2", "expected"), [(4096, 4096), (0, GPU_CACHE_BYTES), (None, GPU_CACHE_BYTES)])
def test_size_of_the_cache(l2, expected):
    assert EventTimer("cpu", FakeCuda(l2)).cache_bytes == expected


def test_too_little_memory_is_a_record_and_memory_is_given_back(monkeypatch):
    cuda = FakeCuda()

    def full(*_: object, **__: object) -> None:
        cuda.log.append("out of memory")
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nGPU 0 has ...")

    monkeypatch.setattr("tensoropt.profiling.workload_timing.run_workload", full)
    assert timed(negation(), cuda) == {
        "error": "out of memory: CUDA out of memory. Tried to allocate 2.00 GiB"
    }
    assert cuda.log[-2:] == ["out of memory", "empty"]


def test_a_lap_that_fails_frees_its_tensors_before_memory_is_given_back(monkeypatch):
    alive: list[bool] = []

    class Counting(FakeCuda):
        def empty_cache(self) -> None:
            alive.append(held() is not None)

    held: Any = None

    def full(work: Workload, tensors: dict[str, torch.Tensor], *_: object) -> None:
        nonlocal held
        held = weakref.ref(tensors["x"])
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr("tensoropt.profiling.workload_timing.run_workload", full)
    timed(negation(), Counting())
    assert alive == [False]


def test_a_rank_whose_device_is_lost_ends(monkeypatch, capsys):
    codes: list[int] = []
    monkeypatch.setattr("tensoropt.profiling.timers.os._exit", codes.append)
    end_if_lost(EventTimer("cpu", FakeCuda()), "fine")
    end_if_lost(WallTimer(), "fine")
    assert codes == []
    end_if_lost(EventTimer("cpu", FakeCuda(lost=True)), "neg(8): device-side assert")
    assert codes == [70]
    assert capsys.readouterr().err == "neg(8): device-side assert\n"


def test_the_rank_that_could_not_explains_why():
    told = {"error": "another rank could not run it"}
    assert joined([told, {"error": "CUDA out of memory"}, told]) == {"error": "CUDA out of memory"}


def test_what_makes_a_tensor_from_nothing():
    made = Workload((), ((call("full", [2], 1.0), ("y",)),), None, ("y",), {})
    assert makes_tensors(made)
    assert not makes_tensors(negation())

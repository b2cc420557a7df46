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
from tensoropt.profiling import timers, workload_timing
from tensoropt.profiling.timers import _GPU_CACHE_BYTES, EventTimer, WallTimer, end_if_lost
from tensoropt.profiling.workload import TensorSpec, Workload, makes_tensors
from tensoropt.profiling.workload_timing import MIN_REPEATS, joined, time_workload

COLD_MS, WARM_MS, ZEROING_MS = 3.0, 2.0, 100.0
HERTZ = 1e9


class FakeCuda:
    """``torch.cuda``'s part in timing: a host that issues, and a device that works through its queue, each in
    a time of its own (ms).

    Work takes :data:`COLD_MS` if the cache was zeroed just before. ``host_ms`` is what issuing it takes, and
    ``waits`` makes the host wait for the device with each.
    """

    def __init__(
        self, l2: int | None = 4096, lost: bool = False, host_ms: float = 0.0, waits: bool = False
    ) -> None:
        self.log: list[str] = []
        self.l2, self.lost, self.host_ms, self.waits = l2, lost, host_ms, waits
        self.host, self.device = 0.0, 0.0
        self.cold = False

    def get_device_properties(self, device: torch.device) -> Any:
        return SimpleNamespace() if self.l2 is None else SimpleNamespace(L2_cache_size=self.l2)

    def current_stream(self, device: torch.device) -> str:
        return f"stream of {device}"

    def Event(self, enable_timing: bool) -> FakeEvent:  # noqa: N802  # as PyTorch calls it
        assert enable_timing
        return FakeEvent(self)

    def _sleep(self, cycles: int) -> None:
        self.log.append("sleep")
        self._run(cycles / HERTZ * 1e3)

    def issue(self, what: str) -> None:
        """A kernel: what zeroes the cache, or work."""
        self.log.append(what)
        if what == "zero":
            self._run(ZEROING_MS)
        else:
            self.host += self.host_ms
            self._run(COLD_MS if self.cold else WARM_MS)
        self.cold = what == "zero"
        if what == "work" and self.waits:
            self.host = max(self.host, self.device)

    def _run(self, ms: float) -> None:
        self.device = max(self.device, self.host) + ms

    def synchronize(self, device: torch.device) -> None:
        if self.lost:
            raise RuntimeError("CUDA error: device-side assert triggered")
        self.host = max(self.host, self.device)

    def empty_cache(self) -> None:
        self.log.append("empty")


class FakeEvent:
    def __init__(self, cuda: FakeCuda):
        self.cuda, self.at = cuda, 0.0

    def record(self, stream: str) -> None:
        assert stream == "stream of cpu"
        self.at = max(self.cuda.device, self.cuda.host)
        self.cuda.log.append("mark")

    def query(self) -> bool:
        return self.at <= self.cuda.host

    def elapsed_time(self, end: FakeEvent) -> float:
        assert end.query(), "read before the device was done"
        return end.at - self.at


class Issued(TorchDispatchMode):
    """Puts what PyTorch computes into the fake's queue: what zeroes its cache, and any other kernel."""

    def __init__(self, cuda: FakeCuda, cache_bytes: int):
        super().__init__()
        self.cuda, self.cache_bytes = cuda, cache_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._overloadpacket.__name__
        if name == "zero_" and args[0].numel() == self.cache_bytes:
            self.cuda.issue("zero")
        elif name in ("neg", "mul", "exp"):
            self.cuda.issue("work")
        return func(*args, **(kwargs or {}))


def negation(size: int = 8, requires_grad: bool = True) -> Workload:
    spec = TensorSpec((size,), "float32", requires_grad)
    return Workload((("x", spec, "read"),), ((call("neg", Ref("x")), ("y",)),), None, ("y",), {})


def call(name: str, *args: Any) -> LocalCall:
    return LocalCall(f"aten.{name}.default", args, {})


@pytest.fixture(autouse=True)
def host_clock(monkeypatch) -> None:
    """The clock of the host is that of the fake whose work is timed; what PyTorch takes does not count."""
    monkeypatch.setattr(workload_timing, "_start_of_backward_s", lambda device: 0.0)


def timed(work: Workload, cuda: FakeCuda, training: bool = True) -> dict[str, Any]:
    timer = EventTimer("cpu", cuda)
    with Issued(cuda, 2 * timer.cache_bytes), pytest.MonkeyPatch.context() as patch:
        patch.setattr("tensoropt.profiling.timers.time.perf_counter", lambda: cuda.host / 1e3)
        return time_workload(0, 1, work, training, timer)


def test_seconds_are_read_once_the_device_is_done():
    cuda = FakeCuda()
    timer = EventTimer("cpu", cuda)
    begun = timer.begin()
    cuda.issue("work")
    span = timer.end(begun)
    with pytest.raises(AssertionError, match="before the device was done"):
        span.begin.elapsed_time(span.end)
    assert timer.seconds([span]) == [pytest.approx(WARM_MS / 1e3)]


@pytest.mark.parametrize("host_ms", [0.0, 5.0, 40.0])
def test_what_the_host_takes_is_not_in_the_seconds_of_the_device(host_ms):
    """Issuing takes the host longer than the device, which still has no gap: it starts when all is issued."""
    found = timed(negation(), FakeCuda(host_ms=host_ms))
    assert "waits" not in found
    for way in ("forward", "backward"):
        assert found[way] == pytest.approx([COLD_MS / 1e3] * len(found[way]))
        assert found[f"{way}_host"] == pytest.approx([host_ms / 1e3] * len(found[way]))


def test_a_span_for_which_the_host_was_not_ahead_is_known_and_the_next_gets_a_longer_lead(monkeypatch):
    cuda = FakeCuda(host_ms=1.0)
    timer = EventTimer("cpu", cuda)
    monkeypatch.setattr("tensoropt.profiling.timers.time.perf_counter", lambda: cuda.host / 1e3)
    spans = [timers.timed(timer, lambda: [cuda.issue("work") for _ in range(9)])[1] for _ in range(9)]
    ahead = [span.ahead for span in spans]
    assert ahead == sorted(ahead)  # none at first, then all
    assert not ahead[0]
    assert ahead[-1]
    # The device waits for what it has not got yet.
    assert timer.seconds(spans[:1])[0] > 9 * WARM_MS / 1e3
    assert timers.counted(timer, spans) == pytest.approx(9 * WARM_MS / 1e3)
    assert timers.counted(timer, spans[:1]) > 9 * WARM_MS / 1e3


def test_work_that_waits_for_the_device_is_said_to():
    found = timed(negation(), FakeCuda(waits=True))
    assert found["waits"] is True
    assert joined([found])["waits"] is True
    assert joined([timed(negation(), FakeCuda()), found])["waits"] is True


def test_the_lead_is_bounded():
    cuda = FakeCuda(waits=True)
    timer = EventTimer("cpu", cuda)
    for _ in range(40):
        timers.timed(timer, lambda: cuda.issue("work"))
    assert timer._lead_s == timers._MOST_LEAD_S


def test_forward_and_backward_are_cold():
    found = timed(negation(), cuda := FakeCuda())
    assert len(found["forward"]) == max(MIN_REPEATS, int(0.12 / (2 * COLD_MS / 1e3)))
    for way in ("forward", "backward"):
        assert found[way] == pytest.approx([COLD_MS / 1e3] * len(found[way]))
    # After the one that says how much it takes, with the clock by which the device waits.
    assert cuda.log[:8] == ["sleep", "mark", "sleep", "mark", "sleep", "mark", "work", "mark"]
    assert cuda.log[8:18] == ["zero", "sleep", "mark", "work", "mark"] * 2


def test_inference_runs_no_backward():
    found = timed(negation(), cuda := FakeCuda(), training=False)
    assert set(found["backward"]) == {0.0}
    assert cuda.log[8:18] == ["zero", "sleep", "mark", "work", "mark"] * 2


def test_the_record_counts_cold():
    record = joined([timed(negation(), FakeCuda(host_ms=1.0)), timed(negation(), FakeCuda(host_ms=1.0))])
    assert record["forward_s"] == record["backward_s"] == pytest.approx(COLD_MS / 1e3)
    assert (record["forward_host_s"], record["backward_host_s"]) == pytest.approx((1e-3, 1e-3))
    assert record["spread"] == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(("l2", "expected"), [(4096, 4096), (0, _GPU_CACHE_BYTES), (None, _GPU_CACHE_BYTES)])
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


def test_what_makes_a_tensor_from_nothing():
    made = Workload((), ((call("full", [2], 1.0), ("y",)),), None, ("y",), {})
    assert makes_tensors(made)
    assert not makes_tensors(negation())

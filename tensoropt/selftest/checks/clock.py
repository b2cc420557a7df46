"""The clock that times work, checked against PyTorch's profiler on the same run."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from tensoropt.selftest.models import device_of_check
from tensoropt.selftest.outcome import Bounded, CheckContext, Outcome
from tensoropt.selftest.timing import device_seconds

_BOUND = 0.05
"""The relative bound. Gaps between kernels count for the clock and not for the profiler; an assumption."""
_CALLS, ROUNDS = 24, 3
_LEAD = "spin_kernel"
"""What the name of ``torch.cuda._sleep``'s kernel contains."""
_WORKS = ("product", "sum of elements", "copy")


def run(context: CheckContext) -> Outcome:
    """Check long kernels in a row: products, which compute, and others, which move memory."""
    device = device_of_check(context)
    figures = []
    for name, work in zip(_WORKS, works(device), strict=True):
        work()
        # The best of a few: a process that interrupts this one affects only the clock.
        ratios = [ratio(work, device) for _ in range(ROUNDS)]
        figures.append(
            Bounded.share(f"{name}: clock against profiler", min(abs(one - 1) for one in ratios), _BOUND)
        )
    return Outcome.of(figures, f"the best of {ROUNDS} runs of {_CALLS} calls")


def works(device: torch.device) -> list[Callable[[], object]]:
    """Return works, each with some calls in a row, of which one takes milliseconds."""
    # Milliseconds on an H100 in float32, and on a core; assumptions.
    size, elements = (4096, 1 << 28) if device.type == "cuda" else (512, 1 << 23)
    a, b = (torch.randn(size, size, device=device) for _ in range(2))
    x, y = (torch.randn(elements, device=device) for _ in range(2))
    out = torch.empty_like(a)

    def repeated(call: Callable[[], object]) -> Callable[[], object]:
        return lambda: [call() for _ in range(_CALLS)]

    return [repeated(lambda: torch.mm(a, b, out=out)), repeated(x.sum), repeated(lambda: y.copy_(x))]


def ratio(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds by the clock over those that the profiler finds in kernels (on a CPU, in
    operators)."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities, acc_events=True) as seen:
        by_clock = device_seconds(work, device, ahead=True)
    return by_clock / profiled_s(seen, device)


def profiled_s(seen: profile, device: torch.device) -> float:
    """Return the seconds of all kernels that the profiler saw, without the timer's own."""
    averages = seen.key_averages()
    if device.type == "cuda":
        # Operators on the host include the seconds of their kernels, which must count once. The timer keeps
        # the device waiting while the host issues the work, before its first event.
        kernels = (
            e
            for e in averages
            if e.device_type == DeviceType.CUDA and not e.is_user_annotation and _LEAD not in e.key
        )
        return sum(event.self_device_time_total for event in kernels) / 1e6
    return sum(event.self_cpu_time_total for event in averages) / 1e6

"""The clock that times work, against PyTorch's profiler on the same run."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from tensoropt.selftest.models import device_of_check
from tensoropt.selftest.outcome import CheckContext, Figure, Outcome
from tensoropt.selftest.timing import device_seconds

BOUND = 0.05
"""Relative. Gaps between kernels count for the clock and not for the profiler; an assumption."""
CALLS, ROUNDS = 24, 3
WORKS = ("product", "sum of elements", "copy")


def run(context: CheckContext) -> Outcome:
    """Long kernels in a row: products, which compute, and others, which move memory."""
    device = device_of_check(context)
    figures = []
    for name, work in zip(WORKS, works(device), strict=True):
        work()
        # The best of a few: a process that interrupts this one counts for the clock only.
        ratios = [ratio(work, device) for _ in range(ROUNDS)]
        figures.append(
            Figure.share(f"{name}: clock against profiler", min(abs(one - 1) for one in ratios), BOUND)
        )
    return Outcome.of(figures, f"the best of {ROUNDS} runs of {CALLS} calls")


def works(device: torch.device) -> list[Callable[[], object]]:
    """Each some calls in a row, of which one takes milliseconds."""
    # Milliseconds on an H100 in float32, and on a core; assumptions.
    size, elements = (4096, 1 << 28) if device.type == "cuda" else (512, 1 << 23)
    a, b = (torch.randn(size, size, device=device) for _ in range(2))
    x, y = (torch.randn(elements, device=device) for _ in range(2))
    out = torch.empty_like(a)

    def repeated(call: Callable[[], object]) -> Callable[[], object]:
        return lambda: [call() for _ in range(CALLS)]

    return [repeated(lambda: torch.mm(a, b, out=out)), repeated(x.sum), repeated(lambda: y.copy_(x))]


def ratio(work: Callable[[], object], device: torch.device) -> float:
    """Seconds by the clock over those that the profiler finds in kernels (operators, of a CPU)."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities, acc_events=True) as seen:
        by_clock = device_seconds(work, device, ahead=True)
    return by_clock / profiled_s(seen, device)


def profiled_s(seen: profile, device: torch.device) -> float:
    """Seconds of all kernels that the profiler saw."""
    averages = seen.key_averages()
    if device.type == "cuda":
        # Operators of the host have the seconds of their kernels as well, which count once.
        kernels = (e for e in averages if e.device_type == DeviceType.CUDA and not e.is_user_annotation)
        return sum(event.self_device_time_total for event in kernels) / 1e6
    return sum(event.self_cpu_time_total for event in averages) / 1e6

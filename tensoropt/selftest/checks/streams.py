"""Streams of a GPU: the checks that a step in a stream of its own is right, and that a copy hides behind
computation."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from tensoropt.engine.models import load_model
from tensoropt.selftest.models import device_of_check, short_name, small_models, unsplit_engine
from tensoropt.selftest.outcome import Bounded, CheckContext, Outcome
from tensoropt.selftest.timing import device_seconds, in_turns
from tensoropt.verify.findings import GRADIENT_TOLERANCE, LOSS_TOLERANCE
from tensoropt.verify.reference import first_step, named_difference, outputs_difference

_BOUND = 0.3
"""The largest share of the shorter work that may come on top of the longer one when both run in streams of
their own; 1 if nothing overlaps. An assumption that has not been tried on a GPU."""
ROUNDS = 7
_SIZE, _PRODUCTS = 4096, 8
_COPIED_BYTES = 1 << 28


def run(context: CheckContext) -> Outcome:
    """Check the numbers of steps in a side stream, and the seconds of two streams at once."""
    if not context.on_gpu:
        return Outcome.skipped("CPU ranks have no streams; give --gpu on a machine that has one")
    device = device_of_check(context)
    figures: list[Bounded] = []
    for spec in small_models(context):
        loaded = load_model(spec)
        wanted = first_step(unsplit_engine(loaded), loaded)
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            got = first_step(unsplit_engine(loaded), loaded)
        torch.cuda.current_stream(device).wait_stream(side)
        torch.cuda.synchronize(device)
        name = short_name(spec)
        gradients = named_difference(got[1], wanted[1], 1e-3)
        figures += [
            Bounded(f"{name}: loss in a side stream", outputs_difference(got[0], wanted[0]), LOSS_TOLERANCE),
            Bounded(f"{name}: gradients in a side stream", gradients, GRADIENT_TOLERANCE),
        ]
    compute, copy = _works(device)
    alone, moved, both = map(
        statistics.median, in_turns([compute, copy, _together(compute, copy, device)], device, ROUNDS)
    )
    return Outcome.of(
        [
            *figures,
            Bounded.share(
                "share of a copy that computation does not hide", _exposed(alone, moved, both), _BOUND
            ),
            Bounded("computation alone", alone, unit="s"),
            Bounded("copy from the host alone", moved, unit="s"),
            Bounded("both in two streams", both, unit="s"),
        ]
    )


def _exposed(one_s: float, other_s: float, both_s: float) -> float:
    """Return the share of the shorter work that is not hidden behind the longer one."""
    return (both_s - max(one_s, other_s)) / min(one_s, other_s)


def _works(device: torch.device) -> tuple[Callable[[], object], Callable[[], object]]:
    a, b = (torch.randn(_SIZE, _SIZE, device=device) for _ in range(2))
    out = torch.empty_like(a)
    host = torch.empty(_COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device=device)

    def copy() -> None:
        there.copy_(host, non_blocking=True)

    # As many products as take about as long as the copy, so that hiding either shows.
    wanted_s = device_seconds(copy, device)
    torch.mm(a, b, out=out)
    one_s = device_seconds(lambda: torch.mm(a, b, out=out), device)
    count = max(_PRODUCTS, round(wanted_s / one_s))

    def compute() -> None:
        for _ in range(count):
            torch.mm(a, b, out=out)

    return compute, copy


def _together(
    compute: Callable[[], object], copy: Callable[[], object], device: torch.device
) -> Callable[[], object]:
    side = torch.cuda.Stream(device)

    def both() -> None:
        main = torch.cuda.current_stream(device)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            copy()
        compute()
        main.wait_stream(side)

    return both

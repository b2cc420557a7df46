"""Checks of the self-test that have faults, light to import: each runs in a process of its own."""

from __future__ import annotations

import os

from tensoropt.selftest.outcome import Bounded, CheckContext, Outcome


def passes(context: CheckContext) -> Outcome:
    """A check in order, which says much."""
    print("a model's own words")
    return Outcome.of([Bounded("of nothing", 0.0, 0), Bounded("step", 0.25, unit="s")], device=context.device)


def raises(context: CheckContext) -> Outcome:
    """A check that meets a file that it cannot read."""
    (context.folder / "deep" / "weights.bin").read_bytes()
    raise AssertionError


def dies(context: CheckContext) -> Outcome:
    """A check whose process ends at a kernel's fault."""
    os.write(2, b"an illegal memory access was encountered")
    os._exit(70)

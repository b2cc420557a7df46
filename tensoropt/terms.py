"""Explanations of terms, each in one sentence, that the dashboard shows where it uses the terms.

The terms of the code are explained in the glossary of ``tensoropt/README.md``.
"""

from __future__ import annotations

TERMS = {
    "proven": (
        "Whether the search, by its sums of costs, has proven a plan the best, or how much longer its "
        "step may be than the best one's; it does not cover the simulated figures."
    ),
    "planner": "The method that found a plan: this search, or a published method that ran beside it.",
    "mesh": "The devices as a grid, such as 2×4; each of its axes splits something, such as the batch.",
    "micro-batches": "The parts of a batch that are computed one after another, which takes less memory.",
    "recompute": (
        "Blocks whose activations are not kept but computed a second time in backward: less memory "
        "for more time."
    ),
    "on a device": "Whether the plan fits; tight: the difference is within the error of such predictions.",
    "compute": "How long a device computes in a step.",
    "communication": "How long a device's links are in use in a step; hidden: while it computes.",
    "throughput": "How many samples or tokens all devices read per second.",
    "MFU": "Model FLOPs utilisation: the share of the devices' peak speed that the model itself uses.",
    "figures": "Where the seconds come from: timed on a device, fits of timings, or data sheets.",
    "sent": "The most bytes that a device sends in a step.",
}
"""The explanations by term, as screens write it."""

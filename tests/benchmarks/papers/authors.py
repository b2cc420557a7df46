"""Figures that papers report of themselves, measured on their authors' machines.

They stand beside ours in columns that are marked as theirs, and are never mixed with ours.
"""

from __future__ import annotations

from typing import NamedTuple


class SearchSeconds(NamedTuple):
    """Seconds of a search in TensorOpt's Table 3: FT-LDP with all threads and with one, FT-Elimination."""

    ldp: float
    ldp_one_thread: float
    elimination: float


class StepSeconds(NamedTuple):
    """Seconds of an iteration in TensorOpt's Table 4: its fastest plan (mini-time), its own data parallelism,
    Horovod's."""

    plan: float
    data_parallel: float
    horovod: float


SEARCHES = {
    "RNN": SearchSeconds(0.28, 0.40, 1.78),
    "WideResNet": SearchSeconds(1_292, 17_432, 19_666),
    "Transformer": SearchSeconds(201, 1_535, 3_030),
}
"""TensorOpt, Table 3, of the whole models."""
ITERATIONS = {
    "VGG16": StepSeconds(0.10, 0.16, 0.15),
    "WideResNet": StepSeconds(1.99, 2.89, 2.80),
    "Transformer-S": StepSeconds(1.16, 1.18, 1.04),
}
"""TensorOpt, Table 4, on 16 GPUs."""

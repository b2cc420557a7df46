"""Execution of plans in running jobs.

In: a plan and a model. Out: the model, parallelized as the plan says, on the ranks of a ``torchrun`` job
(:func:`parallelize`), and checkpoints that move between plans. :mod:`tensoropt.verify` compares plans with
the unsplit model.
"""

from __future__ import annotations

from tensoropt.engine.parallel_model import original_shape
from tensoropt.execute.checkpoint import load_checkpoint, save_checkpoint
from tensoropt.execute.parallel import parallelize, shutdown
from tensoropt.execute.plain import save_pretrained, whole
from tensoropt.execute.sampling import sampler

__all__ = [
    "load_checkpoint",
    "original_shape",
    "parallelize",
    "sampler",
    "save_checkpoint",
    "save_pretrained",
    "shutdown",
    "whole",
]

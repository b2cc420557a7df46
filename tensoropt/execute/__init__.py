"""Plans -> running jobs.

In: a strategy and a model. Out: the model run by it on the ranks of a ``torchrun`` job
(:func:`parallelize`), checkpoints that outlive their plan, checks beside the unsplit model
(:mod:`tensoropt.verify.check`).
"""

from __future__ import annotations

from tensoropt.execute.checkpoint import load_checkpoint, save_checkpoint
from tensoropt.execute.parallel import parallelize, shutdown

__all__ = ["load_checkpoint", "parallelize", "save_checkpoint", "shutdown"]

"""Plans as people pass them, resolved once to what running them takes."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tensoropt.capture import Mode
from tensoropt.errors import PlanError
from tensoropt.execute.executable import AnyStrategy, Executable, executable_of, executable_of_plan
from tensoropt.plan import Plan, load_model, load_plan
from tensoropt.plan.call import example_call
from tensoropt.plan.made_for import device_words, made_for
from tensoropt.sharding.groups import GroupGraph


@dataclass(frozen=True)
class ResolvedPlan:
    """What running a plan takes, in whatever form it was passed.

    Attributes:
        mode: what the model has to be captured for.
        compute_dtype: the precision that it has to be captured in.
        bind: gives the executable for a grouped graph; raises :class:`PlanError` where the plan is for
            another model.
        plan: where all this comes from; None for a bare strategy, which says neither how the model is
            called nor what devices it is for.
    """

    mode: Mode
    compute_dtype: str
    bind: Callable[[GroupGraph], Executable]
    plan: Plan | None = None

    def example_call(self) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """(args, kwargs) of a call of the model at the global batch size.

        Raises:
            PlanError: the plan does not say.
        """
        if self.plan is None:
            raise PlanError("a strategy does not say how the model is called; pass args=... and kwargs=...")
        # The recorded call first: building the model once more only for its inputs takes time and memory.
        if self.plan.model.call is not None:
            return example_call(self.plan.model.call)
        if not self.plan.model_source:
            raise PlanError("the plan does not say how the model is called; pass args=... and kwargs=...")
        built = load_model(self.plan.model_source, seed=self.plan.seed, batch=self.plan.model.batch)
        return built.args, built.kwargs

    def warn_of_other_devices(self, device: torch.device) -> None:
        """Warn on rank 0 where the plan was made for GPUs and ``device`` is a CPU, or the other way round."""
        cluster = None if self.plan is None else made_for(self.plan.cluster)
        if cluster is None or device.type not in ("cpu", "cuda") or cluster.device_type == device.type:
            return
        # Plans are resolved before the job is joined, so that torchrun's variable may be all there is.
        rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
        if rank == 0:
            remedy = (
                "move the model to this rank's GPU first" if device.type == "cpu" else "leave it on the CPU"
            )
            warnings.warn(
                f"the plan was made for {device_words(cluster)} of cluster {cluster.name}, but the model is "
                f"on {device.type}: it runs, but the memory and time that the plan predicts are for other "
                f"devices; {remedy}, or explore again for the devices that run it",
                stacklevel=3,  # the script's call of parallelize
            )


def resolve_plan(plan: str | os.PathLike[str] | Plan | AnyStrategy) -> ResolvedPlan:
    """What running ``plan`` takes.

    Args:
        plan: a plan, its file, or a strategy of any kind.

    Raises:
        PlanError: the file is none of a plan.
    """
    if isinstance(plan, (str, os.PathLike)):
        plan = load_plan(plan)
    if isinstance(plan, Plan):
        bind = functools.partial(executable_of_plan, plan)
        return ResolvedPlan(plan.model.mode, plan.compute_dtype, bind, plan)
    executable = executable_of(plan)
    source = executable.graph.atoms.graph
    mode: Mode = "train" if source.training else "inference"
    # By names, as for a plan: the strategy belongs to another capture of the model than the script's.
    return ResolvedPlan(mode, source.compute_dtype, executable.for_graph)

"""Run a plan without a script: ``torchrun --nproc-per-node N -m tensoropt.execute plan.json --steps 20``.

The model comes from the plan's source, the data is its example batch at every step: this shows that a plan
runs, how fast, and that the loss falls. Training on real data is what ``parallelize`` is for.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, TextIO

import torch
import torch.distributed as dist

from tensoropt.console import json_text, reserved_stdout
from tensoropt.engine.engine import Engine
from tensoropt.engine.models import ModelSpec, forget_models, load_model
from tensoropt.engine.runtime import leave_job
from tensoropt.errors import PlanError, TensorOptError
from tensoropt.execute.executable import executable_of_plan
from tensoropt.plan import Plan, load_plan
from tensoropt.plan.files import write_text
from tensoropt.plan.made_for import device_words, made_for
from tensoropt.profiling.optimizer_timing import make_optimizer
from tensoropt.ranks.pinning import pin

RANKS = "CPU ranks"
"""What this command runs plans on."""
ALIKE_GRACE_S = 60.0
"""Seconds a rank waits where every rank refuses the same: rank 0 says it, however late it started."""
GRACE_S = 2.0
"""Seconds a rank waits before it repeats another one's failure; torchrun looks ten times a second."""
WARM_UP_STEPS = 1
"""Steps left out of the median: the first one fills caches and allocates the optimizer's state."""


class OtherDevicesError(PlanError):
    """The plan is for devices of a kind that this command does not run on."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code. Errors are one sentence on standard error, and code 2.

    Without arguments it takes those of this process, whose standard output it keeps for itself.
    """
    options = _parser().parse_args(arguments)
    with reserved_stdout(for_good=arguments is None) as answers:
        return _run(options, answers)


def _run(options: argparse.Namespace, answers: TextIO) -> int:
    rank = int(os.environ.get("RANK", "0"))
    try:
        if options.steps < 1:
            raise PlanError(f"{options.steps} steps train nothing; use --steps 1 or more")
        plan = load_plan(options.plan)
        check_trainable(plan)
        check_devices(plan, options.cpu)
        with job(plan, options.timeout):
            result = train(plan, options.steps, lr=options.lr, say=None if options.quiet else answers)
            if options.json and rank == 0:
                write_text(options.json, json_text(result, indent=1) + "\n")
    except TensorOptError as error:
        if options.debug:
            raise
        if rank:  # what rank 0 says too is said once: torchrun ends the others
            time.sleep(ALIKE_GRACE_S if isinstance(error, OtherDevicesError) else GRACE_S)
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Exception as error:
        line = lost_rank(error, rank, options.timeout) or out_of_memory(error, rank)
        if line is None or options.debug:
            raise
        # Not after running out of memory: this rank is the one whose words tell why.
        if "memory" not in line:
            time.sleep(GRACE_S)  # the rank that was lost reports first, and torchrun ends this one
        print(f"error: {line}", file=sys.stderr)
        return 1
    return 0


def check_trainable(plan: Plan) -> None:
    """Raises PlanError for a plan that cannot be trained without a script, however many ranks there are."""
    if plan.model.mode != "train":
        raise PlanError(
            "the plan is for inference, but this command trains; explore with --mode train, or run the plan "
            "in a script with tensoropt.parallelize"
        )
    if not plan.model_source:
        raise PlanError("the plan does not name the model's source; use tensoropt.parallelize in a script")


def check_devices(plan: Plan, cpu: bool) -> None:
    """Refuses a plan for GPUs unless it is to run on CPU ranks knowingly.

    Raises:
        OtherDevicesError: the plan's cluster has GPUs, and ``cpu`` is not given.
    """
    cluster = made_for(plan.cluster)
    if cluster is None or cluster.device_type == "cpu" or cpu:
        return
    raise OtherDevicesError(
        f"the plan is for {device_words(cluster)} of cluster {cluster.name}, but this command runs plans on "
        f"{RANKS}, which its predictions say nothing about; add --cpu to run it on {plan.devices} of them "
        f"all the same, or explore with --cluster local:{plan.devices}"
    )


def lost_rank(error: Exception, rank: int, timeout_s: float) -> str | None:
    """A sentence for an error that only says that another rank is gone, else None."""
    text = str(error)
    if "Timed out waiting" in text:
        return (
            f"rank {rank} waited {timeout_s:.0f} s for another rank, which hangs or is slower than --timeout "
            "allows; look at what the other ranks do"
        )
    signs = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused")
    if isinstance(error, RuntimeError) and any(sign in text for sign in signs):
        return f"rank {rank} lost another rank, whose own error says why"
    return None


def out_of_memory(error: Exception, rank: int) -> str | None:
    """A sentence for an allocation that failed, else None."""
    signs = ("not enough memory", "can't allocate memory", "out of memory")
    if isinstance(error, MemoryError) or any(sign in str(error) for sign in signs):
        first = (str(error) or "no memory left").splitlines()[0]
        return f"rank {rank} is out of memory ({first}); choose a leaner plan of the frontier"
    return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchrun --nproc-per-node N -m tensoropt.execute", description="Run a plan for some steps."
    )
    parser.add_argument("plan", help="plan file (JSON)")
    parser.add_argument("--steps", type=int, default=10, help="training steps (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate (default: %(default)s)")
    parser.add_argument(
        "--json", metavar="FILE", help="write losses and times to FILE; a loss that is not finite is null"
    )
    parser.add_argument(
        "--timeout", type=float, default=300.0, help="seconds to wait for another rank (default: %(default)s)"
    )
    parser.add_argument(
        "--cpu", action="store_true", help="run a plan for GPUs on CPU ranks; its prediction is not for them"
    )
    parser.add_argument("--quiet", action="store_true", help="print nothing per step")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


@contextlib.contextmanager
def job(plan: Plan, timeout_s: float) -> Iterator[None]:
    """The process group of this torchrun job, with its threads and cores set as under measurement."""
    world, local = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    if world != plan.devices:
        raise PlanError(
            f"the plan is for {plan.devices} devices, but this job has {world} "
            f"{'rank' if world == 1 else 'ranks'}; start it with torchrun --nproc-per-node {plan.devices} "
            "-m tensoropt.execute"
        )
    with contextlib.ExitStack() as stack:
        # Before gloo starts its threads, which take over the cores of the process.
        stack.callback(pin(local, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
        if world == 1:
            yield
            return
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
        stack.callback(leave_job)
        yield
        dist.barrier()  # nobody takes the group down while another still talks


def train(plan: Plan, steps: int, *, lr: float = 1e-3, say: TextIO | None = None) -> dict[str, Any]:
    """Train the model of a plan that :func:`check_trainable` lets pass, on its example batch.

    Args:
        steps: how many.
        lr: learning rate.
        say: where rank 0 writes a line per step, and what they took in the end; None for nowhere.

    Returns:
        ``losses``, ``times_s`` per step (the slowest rank's), ``time_s`` their median after warm-up, and
        what the plan predicted, for which type of device (``predicted_for``; None where the plan does not
        say) and on which it ran (``run_on``).
    """
    loaded = load_model(ModelSpec.of(plan))
    engine = executable_of_plan(plan, loaded.graph).engine(loaded.values, seed=plan.seed)
    inputs = loaded.inputs
    forget_models()  # the shards are copies; the whole parameters need not stay
    del loaded
    leaves = [leaf for leaf in engine.shards.leaves.values() if leaf.requires_grad]
    optimizer = make_optimizer(plan.optimizer, leaves, lr) if leaves else None  # a placed rank may have none
    losses, times = [], []
    for step in range(steps):
        if engine.runtime.distributed:
            # A step's time is that of the slowest rank from a common start, not of one that waited for the
            # others.
            dist.barrier()
        start = time.perf_counter()
        engine.shards.clear()
        loss = engine(*inputs)[0]
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        seconds = _slowest(time.perf_counter() - start, engine)
        losses.append(float(loss.detach()))
        times.append(seconds)
        if engine.runtime.rank == 0 and say is not None:
            print(f"step {step + 1:4d}  loss {losses[-1]:.6f}  {seconds * 1e3:.1f} ms", file=say, flush=True)
    # With `--steps 1` there is nothing behind the warm-up: a cold figure is better than none.
    kept = times[WARM_UP_STEPS:] or times
    median = statistics.median(kept)
    cluster = made_for(plan.cluster)
    result: dict[str, Any] = {
        "steps": steps,
        "losses": losses,
        "times_s": times,
        "time_s": median,
        "time_predicted_s": plan.predicted.time_s,
        "memory_predicted_bytes": plan.predicted.memory_bytes,
        "run_on": "cpu",
        "predicted_for": None if cluster is None else cluster.device_type,
    }
    if engine.runtime.rank == 0 and say is not None:
        print(f"median {median * 1e3:.1f} ms per step{beside_prediction(plan)}", file=say, flush=True)
    return result


def beside_prediction(plan: Plan) -> str:
    """What the plan predicts, after what was measured on CPU ranks; says so where it is for other devices."""
    predicted, cluster = f"{plan.predicted.time_s * 1e3:.1f} ms", made_for(plan.cluster)
    if cluster is None or cluster.device_type == "cpu":
        return f", predicted {predicted}"
    return f" on {plan.devices} {RANKS}; the prediction of {predicted} is for {device_words(cluster)}"


def _slowest(seconds: float, engine: Engine) -> float:
    """The seconds of the slowest rank, on every rank."""
    if not engine.runtime.distributed:
        return seconds
    value = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)

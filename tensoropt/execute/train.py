"""A command that runs a plan: ``torchrun --nproc-per-node N -m tensoropt.execute plan.json --steps 20``.

It needs no script: the model comes from the plan's source, and every step uses its example batch. This shows
that the plan runs, how fast, and that the loss falls. To train on real data, use ``parallelize``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from tensoropt.cluster import named_kind
from tensoropt.console import NUMBER, WHOLE, OptionParser, json_text, reserved_stdout
from tensoropt.engine.engine import Engine
from tensoropt.engine.models import ModelSpec
from tensoropt.engine.runtime import leave_job
from tensoropt.errors import PlanError, TensorOptError
from tensoropt.execute.executable import ONE_TYPE, engine_of, resolve_plan
from tensoropt.execute.parallel import rank_device, start_group
from tensoropt.execute.weights import WeightSource
from tensoropt.exploration.rates import device_words, made_for
from tensoropt.files import write_text
from tensoropt.plan.plan import Plan, load_plan
from tensoropt.profiling.optimizers import make_optimizer
from tensoropt.ranks.local_hardware import pin, why_no_gpu
from tensoropt.units import format_bytes

_ALIKE_GRACE_S = 60.0
"""Seconds that other ranks wait when all ranks raise the same error, so that rank 0 reports it."""
_GRACE_S = 2.0
"""Seconds that a rank waits before it repeats another rank's failure; torchrun checks 10 times a second."""
_WARM_UP_STEPS = 1
"""The number of steps left out of the median: they fill caches and allocate the optimizer's state."""


class OtherDevicesError(PlanError):
    """The plan is for devices that this machine lacks; every rank of a host raises this error."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code. Errors are one sentence on standard error, with code 2, or 1
    if a rank is lost or out of memory.

    Without ``arguments`` it reads the process's own, and sends what the model prints to standard error.
    """
    try:
        options = _parser().parse_args(arguments)
    except TensorOptError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with reserved_stdout(for_good=arguments is None) as answers:
        return _run(options, answers)


def _run(options: argparse.Namespace, answers: TextIO) -> int:
    rank = int(os.environ.get("RANK", "0"))
    try:
        if options.steps < 1:
            raise PlanError(f"--steps {options.steps} is below 1; use --steps 1 or more")
        plan = load_plan(options.plan)
        _check_trainable(plan)
        with _job(plan, device_type(plan, options.cpu), options.timeout) as device:
            say = None if options.quiet else answers
            result = _train(plan, options.steps, device=device, lr=options.lr, say=say)
            if options.json and rank == 0:
                write_text(options.json, json_text(result, indent=1) + "\n")
    except TensorOptError as error:
        if options.debug:
            raise
        if rank:  # only rank 0 reports it: torchrun ends the others
            time.sleep(_ALIKE_GRACE_S if isinstance(error, OtherDevicesError) else _GRACE_S)
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Exception as error:
        line = _lost_rank(error, rank, options.timeout) or _out_of_memory(error, rank)
        if line is None or options.debug:
            raise
        # Not after running out of memory: this rank's message is the one that explains.
        if "memory" not in line:
            time.sleep(_GRACE_S)  # the lost rank reports first, and torchrun ends this one
        print(f"error: {line}", file=sys.stderr)
        return 1
    return 0


def _check_trainable(plan: Plan) -> None:
    if plan.model.mode != "train":
        raise PlanError(
            "the plan is for inference, but this command trains; explore with --mode train, or run the plan "
            "in a script with tensoropt.parallelize"
        )
    if not plan.model.source:
        raise PlanError("the plan does not name the model's source; use tensoropt.parallelize in a script")


def device_type(plan: Plan, cpu: bool) -> str:
    """Return the device type to run a plan on: the plan's, or ``cpu`` if it has none or ``cpu`` is true.

    Raises:
        OtherDevicesError: the plan is for GPUs, and this host has fewer GPUs than ranks; or it mixes GPUs and
            CPU ranks.
    """
    cluster = made_for(plan.cluster)
    if cluster is None or cluster.device_type == "cpu" or cpu:
        return "cpu"
    reason, seen = ONE_TYPE if len(cluster.device_types) > 1 else why_no_gpu(), torch.cuda.device_count()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if not reason and ranks > seen:
        reason = f"PyTorch sees {seen} of them for the {ranks} ranks of this host; check CUDA_VISIBLE_DEVICES"
    if not reason:
        return "cuda"
    raise OtherDevicesError(
        f"the plan is for {device_words(cluster)} of cluster {cluster.name}, but {reason}, or add --cpu to "
        f"run it on {plan.devices} CPU ranks (its predictions do not apply there), or "
        f"explore with --cluster cpu:{plan.devices}"
    )


def _lost_rank(error: Exception, rank: int, timeout_s: float) -> str | None:
    """Return a sentence for an error that only shows that another rank is gone; None for other errors."""
    text = str(error)
    if "Timed out waiting" in text:
        return (
            f"rank {rank} waited {timeout_s:.0f} s for another rank, which hangs or is slower than --timeout "
            "allows; check the other ranks"
        )
    signs = (
        "Connection closed by peer",
        "Connection reset by peer",
        "Broken pipe",
        "Connection refused",
        # NCCL's words.
        "remote process exited or there was a network error",
    )
    if isinstance(error, RuntimeError) and any(sign in text for sign in signs):
        return f"rank {rank} lost its connection to another rank; see that rank's error"
    return None


def _out_of_memory(error: Exception, rank: int) -> str | None:
    """Return a sentence for a failed allocation; None for other errors."""
    signs = ("not enough memory", "can't allocate memory", "out of memory")
    if isinstance(error, MemoryError) or any(sign in str(error) for sign in signs):
        first = (str(error) or "no memory left").splitlines()[0]
        return f"rank {rank} is out of memory ({first}); choose a plan that needs less memory"
    return None


def _parser() -> argparse.ArgumentParser:
    parser = OptionParser(
        prog="torchrun --nproc-per-node N -m tensoropt.execute", description="Run a plan for some steps."
    )
    parser.add_argument("plan", help="plan file (JSON)")
    parser.add_argument("--steps", type=WHOLE, default=10, help="training steps (default: %(default)s)")
    parser.add_argument("--lr", type=NUMBER, default=1e-3, help="learning rate (default: %(default)s)")
    parser.add_argument(
        "--json", metavar="FILE", help="write losses and times to FILE; a loss that is not finite is null"
    )
    parser.add_argument(
        "--timeout",
        type=NUMBER,
        default=300.0,
        help="seconds to wait for another rank (default: %(default)s)",
    )
    parser.add_argument(
        "--cpu",
        action="store_true",
        help="run a plan for GPUs on CPU ranks; its prediction does not apply there",
    )
    parser.add_argument("--quiet", action="store_true", help="print nothing per step")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


@contextlib.contextmanager
def _job(plan: Plan, device_type: str, timeout_s: float) -> Iterator[torch.device]:
    """Join the torchrun job's group; yield this rank's device. CPU ranks get cores as in measurements."""
    world, local = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    if world != plan.devices:
        raise PlanError(
            f"the plan is for {plan.devices} devices, but this job has {world} "
            f"{'rank' if world == 1 else 'ranks'}; start it with torchrun --nproc-per-node {plan.devices} "
            "-m tensoropt.execute"
        )
    device = rank_device(device_type)
    with contextlib.ExitStack() as stack:
        if device.type == "cpu":  # before gloo starts threads, which inherit the process's cores
            stack.callback(pin(local, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
        if world == 1:
            yield device
            return
        start_group(device, timeout_s)
        stack.callback(leave_job)
        yield device
        dist.barrier()  # no rank leaves the group while another still communicates


def _start(plan: Plan, device: torch.device) -> tuple[Engine, tuple[torch.Tensor, ...]]:
    """Return this rank's engine, with its shards on the device, and example inputs there."""
    model, args, kwargs = ModelSpec.of(plan).build()
    prepared = resolve_plan(plan).prepare(WeightSource(model), args, kwargs)
    engine = engine_of(prepared.strategy, prepared.values, seed=plan.model.seed, device=device)
    leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    return engine, tuple(leaf.to(device) for leaf in leaves)


def _train(
    plan: Plan, steps: int, *, device: torch.device | None = None, lr: float = 1e-3, say: TextIO | None = None
) -> dict[str, Any]:
    """Train a plan's model on its example batch; :func:`_check_trainable` must accept the plan.

    Args:
        steps: the number of steps.
        device: this rank's device; the CPU by default.
        lr: the learning rate.
        say: the stream for rank 0's line per step and final times; None for none.

    Returns:
        The plan's predictions and: ``losses`` and ``times_s`` (the slowest rank's) of the steps; ``time_s``,
            the median time after warm-up; ``run_on``, the type of device, and ``predicted_for``, that of the
            prediction (None if unknown); ``run_on_kind``, the kind of GPU, and ``memory_allocated_bytes``,
            the allocator's peak on the fullest GPU (both None on CPU ranks).
    """
    device = device or torch.device("cpu")
    engine, inputs = _start(plan, device)
    leader = engine.runtime.rank == 0
    leaves = [leaf for leaf in engine.shards.leaves.values() if leaf.requires_grad]
    optimizer = make_optimizer(plan.optimizer, leaves, lr) if leaves else None  # a placed rank may have none
    losses, times = [], []
    for step in range(steps):
        if engine.runtime.distributed:
            # All ranks start a step together, so its time is the slowest rank's and not that of waiting for
            # others.
            dist.barrier()
        engine.runtime.synchronize()
        start_s = time.perf_counter()
        engine.shards.clear()
        loss = engine(*inputs)[0]
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        engine.runtime.synchronize()
        seconds = _largest(time.perf_counter() - start_s, engine)
        losses.append(float(loss.detach()))
        times.append(seconds)
        if leader and say is not None:
            print(f"step {step + 1:4d}  loss {losses[-1]:.6f}  {seconds * 1e3:.1f} ms", file=say, flush=True)
    # `--steps 1` leaves no step after the warm-up: a cold figure is better than none.
    kept = times[_WARM_UP_STEPS:] or times
    median = statistics.median(kept)
    cluster = made_for(plan.cluster)
    kind: str | None = None
    allocated: int | None = None
    if device.type == "cuda":
        kind = named_kind(torch.cuda.get_device_name(device))
        allocated = int(_largest(torch.cuda.max_memory_allocated(device), engine))
    result: dict[str, Any] = {
        "steps": steps,
        "losses": losses,
        "times_s": times,
        "time_s": median,
        "time_predicted_s": plan.predicted.time_s,
        "memory_predicted_bytes": plan.predicted.memory_bytes,
        "memory_allocated_bytes": allocated,
        "run_on": device.type,
        "run_on_kind": kind,
        "predicted_for": None if cluster is None else cluster.device_type,
    }
    if leader and say is not None:
        print(f"median {median * 1e3:.1f} ms per step{_beside_prediction(plan, kind)}", file=say, flush=True)
        if allocated is not None:
            predicted = format_bytes(plan.predicted.memory_bytes)
            print(
                f"memory {format_bytes(allocated)} allocated at most, predicted {predicted}",
                file=say,
                flush=True,
            )
    return result


def _beside_prediction(plan: Plan, kind: str | None = None) -> str:
    """Return the end of a line on a measured step time: the prediction, and the devices if it is for others.

    Args:
        kind: the kind of GPU that ran the plan; None for CPU ranks.
    """
    predicted, cluster = f"{plan.predicted.time_s * 1e3:.1f} ms", made_for(plan.cluster)
    same = cluster is not None and (
        cluster.device_type == "cpu" if kind is None else {k.name for k in cluster.device_kinds} == {kind}
    )
    if cluster is None or same:
        return f", predicted {predicted}"
    ran = f"{plan.devices} {'CPU ranks' if kind is None else f'x {kind}'}"
    return f" on {ran}; the prediction of {predicted} is for {device_words(cluster)}"


def _largest(value: float, engine: Engine) -> float:
    if not engine.runtime.distributed:
        return value
    largest = torch.tensor(value, dtype=torch.float64, device=engine.runtime.device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)

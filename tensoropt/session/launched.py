"""Functions that simulate a launcher's job (Megatron-LM, torchtitan, ...) beside an exploration's points."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

from tensoropt.cluster import Cluster
from tensoropt.console import shows_progress
from tensoropt.costs.source import CostSource
from tensoropt.errors import TensorOptError
from tensoropt.evaluation.evaluate import space_of
from tensoropt.evaluation.problem import Problem, prepare_graph
from tensoropt.exploration.exploration import Exploration
from tensoropt.exploration.rates import StepWork
from tensoropt.launchers import LaunchedJob, read_job
from tensoropt.pipeline.points import pipelined_space
from tensoropt.plan.plan_names import YOUR_JOB
from tensoropt.plan.point import Point
from tensoropt.plan.recorded import CostRecorder, Recorded
from tensoropt.plan.space import Space
from tensoropt.planners.pinned import simulate_pinned, simulate_pinned_pipeline
from tensoropt.profiling.store import ProfileStore
from tensoropt.question.settings import Settings
from tensoropt.report.detail import recorded_of
from tensoropt.report.rebuilt import strategy_on
from tensoropt.session.session import Session
from tensoropt.types import Progress, ProgressChoice, heard, silent
from tensoropt.units import counted


class PricedJob(NamedTuple):
    """A launcher's job with the simulated memory and time of its step.

    Attributes:
        point: the job's strategy with its figures.
        space: the job's mesh and micro-batch count, with the names of the choices to which ``point`` refers.
        record: adds the costs behind the figures to a :class:`CostRecorder`.
        notes: the parts of the job that the prediction leaves out.
    """

    job: LaunchedJob
    point: Point
    space: Space
    record: Callable[[CostRecorder], None]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class JobPrices:
    """The costs with which launchers' jobs are simulated on an exploration's model and cluster."""

    exploration: Exploration
    problem: Problem
    costs: CostSource
    settings: Settings

    def of(self, job: LaunchedJob) -> PricedJob:
        """Return a job with the simulated memory and time of its step.

        Raises:
            JobError: the job is for another number of devices, or its micro-batches do not divide the batch.
            UnsuitableError: the model cannot be split as the job demands.
        """
        problem, costs, cluster = self.problem, self.costs, self.costs.cluster
        space_number, planner = len(self.exploration.spaces), YOUR_JOB + job.launcher
        if job.places == 1:
            found = simulate_pinned(problem, costs, job)
            space = space_of(problem, found.mesh, found.tables, ())
            point, notes = found.point.changed(space=space_number, planner=planner), found.notes

            def record(recorder: CostRecorder) -> None:
                recorder.add_tables(found.tables, found.choice)

        else:
            staged = simulate_pinned_pipeline(problem, self.settings, costs, job)
            keys, sequence = problem.parameter_keys, problem.sequence
            micro_batches = staged.evaluation.strategy.micro_batches
            space = pipelined_space(staged.mesh, micro_batches, keys, (), sequence)
            point, notes = staged.point.changed(space=space_number, planner=planner), staged.notes
            plan = replace(self.exploration, spaces=(*self.exploration.spaces, space)).plan(point)

            def record(recorder: CostRecorder) -> None:
                strategy_on(plan, problem.graph, cluster).record(recorder)

        said = (*job.notes, *_other_settings(job, self.exploration, problem), *notes)
        return PricedJob(job.on(cluster.device_count), point, space, record, said)

    def recorded(self, priced: PricedJob) -> Recorded | None:
        """Return the costs behind the figures of a job, for saving; None if a file cannot hold them."""
        recorder = CostRecorder(self.problem.graph, self.costs)
        priced.record(recorder)
        return recorder.recorded()

    def name_of(self, priced: PricedJob) -> str:
        exploration = replace(
            self.exploration, spaces=(*self.exploration.spaces, priced.space), others=(priced.point,)
        )
        return exploration.names[-1]


@contextmanager
def job_prices(
    exploration: Exploration, store: ProfileStore | None = None, progress: Progress = silent
) -> Iterator[JobPrices]:
    """Yield the costs of an exploration's model and cluster, with which launchers' jobs can be simulated.

    Raises:
        TensorOptError: the exploration was saved without its operator graph.
    """
    recorded = recorded_of(exploration)
    settings = replace(Settings.from_dict(exploration.settings), memory_bytes=None, recompute="auto")
    session = Session(Cluster.from_dict(exploration.cluster), settings, store, progress)
    problem = prepare_graph(recorded.graph, kept=recorded)
    with ExitStack() as stack:
        opened, ranks = stack.enter_context(session.open_store()), stack.enter_context(session.open_ranks())
        costs = CostSource(session.cluster, opened, settings, ranks, session.progress)
        yield JobPrices(exploration, problem, costs, settings)


@shows_progress
def with_jobs(
    exploration: Exploration,
    jobs: Sequence[LaunchedJob | str],
    *,
    store: ProfileStore | None = None,
    progress: ProgressChoice = None,
) -> Exploration:
    """Return the exploration with launchers' jobs simulated, as points beside the frontier.

    Its report has a list ``jobs`` with the notes on each job, or with why the model cannot be run that way.

    Args:
        jobs: a launcher and its config or arguments: ``torchtitan:job.toml``, ``megatron:"--bf16 ..."``,
            ``deepspeed:ds.json`` or ``accelerate:config.yaml``; or jobs already read from these.
        store, progress: as in :func:`tensoropt.explore`.

    Raises:
        JobError: a config cannot be read, or the job is for another number of devices.
        TensorOptError: the exploration was saved without its operator graph.
    """
    read = [read_job(job) if isinstance(job, str) else job for job in jobs]
    for job in read:
        job.on(len(exploration.cluster["devices"]))
    with job_prices(exploration, store, heard(progress)) as prices:
        for job in read:
            told = {"launcher": job.launcher, "notes": list(job.notes), "refusal": ""}
            try:
                priced = replace(prices, exploration=exploration).of(job)
            except TensorOptError as refusal:
                told["refusal"] = str(refusal)
            else:
                told["notes"] = list(priced.notes)
                recorded, own = recorded_of(exploration), prices.recorded(priced)
                exploration = replace(
                    exploration,
                    spaces=(*exploration.spaces, priced.space),
                    others=(*exploration.others, priced.point),
                    costs=recorded if own is None else recorded.joined(own),
                )
            exploration = exploration.noted((), jobs=[*exploration.report.get("jobs", ()), told])
    return exploration


def _other_settings(job: LaunchedJob, exploration: Exploration, problem: Problem) -> Iterator[str]:
    computed, work = problem.graph.atoms.graph.compute_dtype or "float32", StepWork.of(exploration)
    if job.dtype and job.dtype != computed:
        yield f"the job computes in {job.dtype}, the prediction is for {computed}; set --dtype"
    optimizer = str(exploration.settings["optimizer"])
    if job.optimizer and job.optimizer != optimizer:
        yield f"the job's optimizer is {job.optimizer}, the prediction is for {optimizer}; set --optimizer"
    if job.batch is not None and job.batch != problem.batch:
        samples = counted(job.batch, "sample")
        yield f"the job's step has {samples}, the prediction is for {problem.batch}; set --batch"
    if job.sequence and work.tokens and work.samples and work.tokens != job.sequence * work.samples:
        length = work.tokens // work.samples
        yield f"the job's samples have {job.sequence} tokens, the prediction is for {length}; set --sequence"

"""The plans that a launcher can be told, all of them priced: an exploration without a search.

A config has few degrees, and what it says is said of all operators alike, so there are some hundreds of such
plans. Each is priced as :mod:`tensoropt.session.launched` prices a job that somebody runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from math import prod

from tensoropt.errors import InfeasibleError, TensorOptError
from tensoropt.evaluation.problem import micro_batch_counts
from tensoropt.exploration.exploration import Exploration
from tensoropt.launchers.job import NOTHING, LaunchedJob
from tensoropt.launchers.registry import LAUNCHERS, Launcher
from tensoropt.pipeline.costs import degrees_of
from tensoropt.pipeline.stages import Cutter
from tensoropt.plan.plan import ModelInfo
from tensoropt.plan.point import FRONTIER, reduce_points
from tensoropt.session.evaluation import open_costs
from tensoropt.session.launched import JobPrices, PricedJob
from tensoropt.session.pipelines import MOST_PLACES, MULTIPLES
from tensoropt.session.run_report import run_report, versions
from tensoropt.session.searched import Searched
from tensoropt.session.session import Session
from tensoropt.units import counted

_EVERY_RECIPE = "every recipe"
"""No recipe that a launcher knows, so that its variants have all of them."""
_STAGES = (3, 2, 1, 0)
"""ZeRO's stages."""
_MOST_COUNTS = 2
"""How many numbers of micro-batches are tried of a pipeline, those with the smallest bubbles; an
assumption."""
_NAMED = 3
"""The most reasons for refusals that a note has."""


def evaluate_launcher(session: Session, searched: Searched, model: ModelInfo) -> Exploration:
    """Return the exploration of all plans that the settings' launcher can be told: those that none beats.

    Raises:
        TensorOptError: the model is one that it cannot be told of.
        InfeasibleError: it can be told none for this model on these devices; the message says why.
    """
    launcher = LAUNCHERS[session.settings.space]
    _check(searched, launcher, model)
    # A budget only says which points fit; which blocks are recomputed is for the launcher's recipes.
    settings = replace(session.settings, memory_bytes=None, recompute="auto")
    exploration = Exploration(
        points=(),
        spaces=(),
        model=model,
        cluster=session.cluster.to_dict(),
        settings=session.settings.to_dict(),
        versions=versions(),
        report=run_report(searched, session.clock.seconds, 0, 0),
    )
    jobs = [job for job in _jobs(session, searched, launcher) if not launcher.refusal(job)]
    kept: tuple[PricedJob, ...] = ()
    refusals = Counter[str]()
    with session.clock.stage("plans"), ExitStack() as stack:
        prices = JobPrices(exploration, searched.problem, open_costs(session, searched, stack), settings)
        for number, job in enumerate(jobs):
            session.progress(f"plans of {launcher.name}", number, len(jobs), _words(job))
            try:
                priced = prices.of(job)
            except TensorOptError as refusal:
                refusals[str(refusal)] += 1
                continue
            kept = reduce_points([*kept, priced], lambda one: (one.point.memory_bytes, one.point.time_s))
        session.progress(f"plans of {launcher.name}", len(jobs), len(jobs), "priced")
        if not kept:
            why = "; ".join(reason for reason, _ in refusals.most_common(_NAMED)) or (
                f"no degrees that make {session.cluster.device_count} devices leave each data-parallel rank "
                f"samples of a batch of {searched.problem.batch} in the micro-batches asked for"
            )
            raise InfeasibleError(
                f"{launcher.name} can be told no plan of this model on {session.cluster.name}: {why}; "
                "explore without --space"
            )
        recorded = prices.recorded(kept)
    priced_count = len(jobs) - refusals.total()
    notes = [
        f"only plans that {launcher.name} can be told: {priced_count:,} were priced, {len(kept)} of them are "
        "beaten by none; tensor and context parallelism inside a node, 1F1B, two numbers of micro-batches "
        "for each pipeline",
        *(
            f"{counted(number, 'configuration')} left out: {reason}"
            for reason, number in refusals.most_common(_NAMED)
        ),
        *dict.fromkeys(note for one in kept for note in one.notes),
    ]
    return replace(
        exploration.noted(notes, seconds=session.seconds_with(exploration.report, "plans")),
        points=tuple(one.point.changed(space=n, planner=FRONTIER) for n, one in enumerate(kept)),
        spaces=tuple(one.space for one in kept),
        recorded=recorded,
    )


def _check(searched: Searched, launcher: Launcher, model: ModelInfo) -> None:
    """Refuse a model that no plan of a launcher can run."""
    if model.adapters:
        raise TensorOptError(
            f"{launcher.name} is not told of adapters ({model.adapters}); explore without --space "
            f"{launcher.name}"
        )
    if searched.refusal:
        raise InfeasibleError(f"{launcher.name} can be told no plan: {searched.refusal}")


def _words(job: LaunchedJob) -> str:
    """Return the degrees of a job, as progress shows them."""
    degrees = {"DP": job.data or 1, "TP": job.tensor, "CP": job.context, "PP": job.places}
    named = " ".join(f"{name}{degree}" for name, degree in degrees.items() if degree > 1)
    return f"{named or 'one device'}, ZeRO-{job.stage}, {counted(job.micro_batches or 1, 'micro-batch')}"


def _jobs(session: Session, searched: Searched, launcher: Launcher) -> Iterator[LaunchedJob]:
    """Yield all jobs on the devices that a launcher may be told, each once."""
    again = session.settings.recompute != "never"
    seen: set[LaunchedJob] = set()
    for degrees in _degrees(session, searched):
        for stage, along in product(_STAGES, (True, False)):
            like = replace(degrees, stage=stage, sequence_parallel=along, recompute=_EVERY_RECIPE)
            for job in launcher.variants(like):
                # What other degrees were turned into would be tried twice, under other names.
                alike = (job.data, job.tensor, job.context, job.places) == (
                    degrees.data, degrees.tensor, degrees.context, degrees.places,
                )  # fmt: skip
                whole = not job.stage and job.replicas > 1  # without shards there is one group of replicas
                if alike and not whole and job not in seen and (again or job.recompute == NOTHING):
                    seen.add(job)
                    yield job


def _degrees(session: Session, searched: Searched) -> Iterator[LaunchedJob]:
    """Yield jobs with all degrees that make the devices of the cluster, and numbers of micro-batches."""
    cluster, problem, settings = session.cluster, searched.problem, session.settings
    devices, batch = cluster.device_count, problem.batch
    inside = cluster.levels[-1].size
    nodes = prod(level.size for level in cluster.levels[:-1])
    places = [1]
    if settings.pipelines != "never" and not problem.refusal:
        most = min(MOST_PLACES, len(Cutter(problem.graph).cuts) + 1)
        places += [degree for degree in degrees_of(cluster) if degree <= most]
    counts = micro_batch_counts(problem, settings)
    parts = [degree for degree in range(1, inside + 1) if inside % degree == 0]
    contexts = parts if problem.sequence else [1]
    for degree, tensor, context in product(places, parts, contexts):
        if tensor * context > inside or devices % (degree * tensor * context):
            continue
        data = devices // (degree * tensor * context)
        of_step = counts if degree == 1 else _of_pipeline(degree, batch, settings.micro_batches, counts)
        replicas = [1, *([nodes] if 1 < nodes < data and data % nodes == 0 else [])]
        for micro_batches, groups in product(of_step, replicas):
            if batch % (micro_batches * data) == 0:
                yield LaunchedJob(
                    launcher="", data=data, replicas=groups, tensor=tensor, context=context, places=degree,
                    batch=batch, micro_batches=micro_batches, optimizer=settings.optimizer,
                    dtype=problem.graph.atoms.graph.compute_dtype,
                )  # fmt: skip


def _of_pipeline(places: int, batch: int, asked: str | Sequence[int], counts: Sequence[int]) -> list[int]:
    """Return the numbers of micro-batches of a pipeline: those asked for, or as many as keep it busy."""
    if asked != "auto":
        return [count for count in counts if count >= places]
    return [places * m for m in MULTIPLES if batch % (places * m) == 0][:_MOST_COUNTS]

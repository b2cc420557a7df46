"""The verb ``explore``, which finds the cost frontier of a model on a cluster."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tensoropt.cli import arguments
from tensoropt.cli.offers import offers_answer
from tensoropt.console import ProgressDisplay
from tensoropt.errors import TensorOptError


def _add_arguments(verb: argparse.ArgumentParser) -> None:
    arguments.add_question(verb)
    verb.add_argument("--out", required=True, metavar="DIR", help="folder for the result")
    arguments.add_headroom(verb)
    verb.add_argument(
        "--devices",
        metavar="auto|1,2,4",
        help="profiling mode: explore on these numbers of devices, a folder in DIR for each; auto: "
        "1, 2, 4, ... up to all of them",
    )
    arguments.add_repeated(
        verb,
        "--beside",
        "LAUNCHER:JOB",
        "a job that you run today, as a point beside the frontier: torchtitan:job.toml, "
        "megatron:'--tensor-model-parallel-size 8 ...', deepspeed:ds.json or accelerate:config.yaml; sets "
        "the batch and the sequence unless --batch and --sequence do; may be given several times",
    )
    verb.add_argument(
        "--planners",
        metavar="all|a,b",
        help="published planners to run too, all evaluated by one simulator: a row each (see: tensoropt list "
        "planners); --memory then takes several limits, 8GiB,24GiB",
    )
    said = "a setting of a planner, such as netsplit.seconds=600; may be given several times"
    arguments.add_repeated(verb, "--planner-option", "PLANNER.OPTION=VALUE", said)
    verb.add_argument(
        "--also-on",
        metavar="CLUSTER,...",
        help="explore on these clusters too, a folder in DIR for each, and compare",
    )
    arguments.add_amount(verb)


def _answer(options: argparse.Namespace, progress: ProgressDisplay) -> arguments.Answer:
    from tensoropt.exploration.rates import CLUSTERS_OWN

    amount, tariff = arguments.amount_option(options), arguments.tariff_option(options)
    asked = {} if amount is None else {"amount": amount}
    asked |= {} if tariff == CLUSTERS_OWN else {"tariff": tariff}
    return explore(arguments.question_option(options), progress, options.out, asked)


def explore(
    question: Any, progress: ProgressDisplay, out: str, asked: Mapping[str, Any] | None = None
) -> arguments.Answer:
    """Return the result for one question about a model, after saving the exploration in ``out``.

    Args:
        asked: ``amount``, the length of a training, and ``tariff``, the prices of devices, if given.
    """
    asked = asked or {}
    if question.planners:
        return _compare(question, progress, out)
    if "tariff" in asked:
        clusters = _clusters(question).values()
        asked["tariff"].check(kind.name for cluster in clusters for kind in cluster.device_kinds)
    if question.batches:
        return _over_batches(question, progress, out, asked)
    if question.also_on or question.devices:
        return _over_clusters(question, progress, out, asked)
    if any(Path(out).glob("batch-*/exploration.json")):
        raise TensorOptError(f"{out} holds explorations of several batches; choose another --out")
    exploration, folder = arguments.explored(question, progress, out), Path(out)
    from tensoropt.exploration.answer import answer as answer_within
    from tensoropt.exploration.figure_rows import points_data
    from tensoropt.exploration.frontier_table import frontier_text
    from tensoropt.exploration.your_jobs import your_jobs
    from tensoropt.report.table import summary_lines

    data = {
        "out": str(folder),
        "files": ["exploration.json", "points.npz", "strategies.json.gz", "frontier.csv"],
        "model": exploration.model.model_dump(mode="json"),
        "settings": dict(exploration.settings),
        "points": points_data(exploration),
        "report": dict(exploration.report),
    }
    within = answer_within(exploration, exploration.settings.get("memory_bytes"))
    jobs = your_jobs(exploration)
    data["answer"], data["jobs"] = within.to_data(), [job.to_data() for job in jobs]
    text = "\n".join(
        [
            within.sentence(),
            *_rates(exploration, within.row, asked),
            *(line for job in jobs for line in job.sentences()),
            "",
            frontier_text(exploration),
            "",
            *summary_lines(exploration),
            f"saved: {folder}/frontier.csv and the files for `tensoropt choose {folder} --memory ...`",
        ]
    )
    return arguments.Answer(data, text)


def _compare(question: Any, progress: ProgressDisplay, out: str) -> arguments.Answer:
    """Run planners beside the search, save the exploration, and return for each memory limit a row for the
    frontier and one per planner."""
    from tensoropt.planners.compare import requested_planners

    # An unknown name is refused before anything is computed.
    requested_planners(question.planners, question.planner_options)
    exploration = arguments.explored(question, progress, out)
    from tensoropt.exploration.export import compared, limits_asked
    from tensoropt.report.table import comparison_text

    saved = f"saved: {out} (exploration, frontier.csv)"
    rows = [asdict(row) for limit in limits_asked(exploration) for row in compared(exploration, limit)]
    data = {"comparison": rows, "points": len(exploration.points)}
    return arguments.Answer(data, f"{comparison_text(exploration)}\n{saved}")


def _rates(exploration: Any, row: int | None, asked: Mapping[str, Any]) -> list[str]:
    from tensoropt.exploration.facts import rate_facts
    from tensoropt.exploration.figure_rows import FigureRow
    from tensoropt.exploration.rates import CLUSTERS_OWN
    from tensoropt.plan.facts_table import fact_lines

    if not asked or row is None:
        return []
    priced = FigureRow.of(exploration, row, asked.get("tariff", CLUSTERS_OWN))
    return fact_lines(rate_facts(priced, asked.get("amount")))


def _clusters(question: Any) -> dict[str, Any]:
    from tensoropt.cluster import load_cluster

    whole = load_cluster(question.cluster)
    if question.devices:
        # The cluster refuses named sizes that are no parts of it.
        named = not isinstance(question.devices, str)
        sizes = sorted(set(question.devices)) if named else whole.part_sizes
        parts = [whole.subset(size) for size in sizes]
        return {f"{part.device_count}-devices": part for part in parts}
    first = question.cluster if isinstance(question.cluster, str) else whole.name
    return {first: whole, **{name: load_cluster(name) for name in question.also_on}}


def _over_clusters(
    question: Any, progress: ProgressDisplay, out: str, asked: Mapping[str, Any]
) -> arguments.Answer:
    from tensoropt.sweeps import over_clusters

    clusters = _clusters(question)
    question = arguments.computing_on(question, tuple(clusters.values()), progress)
    _check_for_several(out)
    # A budget only selects points: without it, points that do not fit are saved too, with their needs.
    limits = {"memory_bytes": question.settings.memory_bytes, **asked}
    question = question.model_copy(update={"settings": replace(question.settings, memory_bytes=None)})
    with arguments.writable_folder(out) as folder:

        def on(cluster: Any, sibling: Any) -> Any:
            return arguments.explored(question, progress, None, cluster, sibling, within=out)

        sweep = over_clusters(clusters, on, out=folder, progress=progress)
    return offers_answer(sweep, limits, folder)


def _over_batches(
    question: Any, progress: ProgressDisplay, out: str, asked: Mapping[str, Any]
) -> arguments.Answer:
    """Explore at several batch sizes, for each of which the model is captured anew, as shapes differ."""
    from tensoropt.cluster import load_cluster
    from tensoropt.question.model_source import default_batch
    from tensoropt.sweeps import over_batches

    # A model that brings its own inputs is refused before anything is made.
    default_batch(question.model)
    cluster = load_cluster(question.cluster)
    question = arguments.computing_on(question, [cluster], progress)
    memory = question.settings_on(cluster).memory_bytes
    _check_for_several(out)
    with arguments.writable_folder(out) as folder:

        def at(batch: int) -> Any:
            return arguments.explored(question.at(batch), progress, None, within=out)

        sweep = over_batches(
            question.batches, question.model, at, memory_bytes=memory, out=folder, progress=progress
        )
    more = f" batch; `tensoropt choose {folder} --batch auto --memory ...` picks a plan"
    return offers_answer(sweep, {"memory_bytes": memory, **asked}, folder, more)


def _check_for_several(out: str) -> None:
    if (Path(out) / "exploration.json").exists():
        raise TensorOptError(
            f"{out} holds one exploration, and several would lie in folders inside it; choose another --out"
        )


VERB = arguments.Verb(
    "explore", "find the cost frontier of a model on a cluster", _add_arguments, _answer, measures=True
)

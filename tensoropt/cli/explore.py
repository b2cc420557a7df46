"""``explore``: the cost frontier of a model on a cluster."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tensoropt.cli.arguments import add_headroom, writable_folder
from tensoropt.cli.device_profile import profile_answer
from tensoropt.cli.question import add_question, explored, question_option
from tensoropt.cli.shop import shop_answer
from tensoropt.cli.verb import Answer, Verb
from tensoropt.console import ProgressDisplay
from tensoropt.errors import InfeasibleError, TensorOptError


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """What the verb takes."""
    add_question(verb)
    verb.add_argument("--out", required=True, metavar="DIR", help="folder for the result")
    add_headroom(verb)
    verb.add_argument(
        "--devices",
        metavar="auto|1,2,4",
        help="profiling mode: explore on so many of the cluster's devices, a folder in DIR for each; auto: "
        "1, 2, 4, ... up to all of them",
    )
    verb.add_argument(
        "--also-on",
        metavar="CLUSTER,...",
        help="explore on these clusters too, a folder in DIR for each, and compare; presets: all of them",
    )


def answer(options: argparse.Namespace, progress: ProgressDisplay) -> Answer:
    """The frontier of a model on a cluster, or on several parts of it."""
    return explore(question_option(options), progress, options.out)


def explore(question: Any, progress: ProgressDisplay, out: str) -> Answer:
    """The answer to a question about a model; the result is saved in ``out``."""
    if question.also_on:
        if question.devices:
            raise TensorOptError(
                "--devices is for parts of one cluster, --also-on for several clusters; name parts of "
                "these as in --also-on 'dgx-h100[4],dgx-a100[4]'"
            )
        return over_clusters(question, progress, out)
    if question.devices:
        return sweep(question, progress, out)
    found, folder = explored(question, progress, out), Path(out)
    from tensoropt.plan.figure_rows import points_data
    from tensoropt.plan.frontier_table import frontier_text
    from tensoropt.report.table import summary_lines

    data = {
        "out": str(folder),
        "files": ["exploration.json", "points.npz", "strategies.json.gz", "frontier.csv"],
        "model": found.model.model_dump(mode="json"),
        "settings": dict(found.settings),
        "points": points_data(found),
        "report": dict(found.report),
    }
    text = "\n".join(
        [
            frontier_text(found),
            "",
            *summary_lines(found),
            f"saved: {folder}/frontier.csv and all that `tensoropt choose {folder} --memory ...` needs",
        ]
    )
    return Answer(data, text)


def over_clusters(question: Any, progress: ProgressDisplay, out: str) -> Answer:
    """The same question on several clusters; the model is captured once."""
    from tensoropt.shopping import named_clusters
    from tensoropt.shopping import over_clusters as explore_each

    first = question.cluster if isinstance(question.cluster, str) else question.loaded_cluster()
    names = named_clusters([first, *question.also_on])
    with writable_folder(out) as folder:

        def anew(cluster: Any) -> Any:
            return explored(question, progress, None, cluster)

        def again(cluster: Any, known: Any) -> Any:
            return explored(question, progress, None, cluster, known)

        found = explore_each(names, anew, again, out=folder, progress=progress)
    answer = shop_answer(found, {})
    data = {"out": str(folder), **answer.data}
    saved = f"saved: {folder}, one exploration for each cluster; `tensoropt shop {folder} --time ...` asks on"
    return Answer(data, "\n".join([answer.text, saved]))


def sweep(question: Any, progress: ProgressDisplay, out: str) -> Answer:
    """The same question on several numbers of devices, which the paper calls profiling mode."""
    cluster = question.loaded_cluster()
    sizes = part_sizes(question.devices, cluster)
    found, refused = [], []
    with writable_folder(out) as folder:
        for number, size in enumerate(sizes):
            progress("devices", number, len(sizes), str(size))
            try:
                part = str(folder / f"{size}-devices")
                found.append(explored(question, progress, part, cluster.subset(size)))
            # Too few devices for the model are part of the answer: the sweep goes on.
            except InfeasibleError as error:
                refused.append(f"{size} devices: {error}")
        progress("devices", len(sizes), len(sizes), "")
        if not found:
            raise InfeasibleError("; ".join(refused))
    data, text = profile_answer(found)
    data = {"out": str(folder), "refused": refused, **data}
    return Answer(data, "\n".join([text, *refused, f"saved: {folder}/N-devices, one exploration each"]))


def part_sizes(devices: str | tuple[int, ...], cluster: Any) -> tuple[int, ...]:
    """The numbers of devices that ``auto`` or a list mean; each is a part of the cluster."""
    if isinstance(devices, str):
        return tuple(cluster.part_sizes)
    return tuple(cluster.subset(size).device_count for size in sorted(set(devices)))


VERB = Verb("explore", "find the cost frontier of a model on a cluster", add_arguments, answer)

"""``explore``: the cost frontier of a model on a cluster."""

from __future__ import annotations

import argparse
from typing import Any

from tensoropt.cli.arguments import add_headroom, budget, writable_folder
from tensoropt.cli.device_profile import profile_answer
from tensoropt.cli.question import add_question, asked_cluster, explored, explored_again
from tensoropt.cli.shop import shop_answer
from tensoropt.cli.verb import Answer, Verb
from tensoropt.console import ProgressDisplay
from tensoropt.errors import InfeasibleError, TensorOptError


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """What the verb takes."""
    add_question(verb)
    verb.add_argument("--out", required=True, metavar="DIR", help="folder for the result")
    verb.add_argument("--memory", metavar="24GiB", help="fail if no plan fits this much per device")
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
    if options.also_on:
        if options.devices:
            raise TensorOptError(
                "--devices is for parts of one cluster, --also-on for several clusters; name parts of "
                "these as in --also-on 'dgx-h100[4],dgx-a100[4]'"
            )
        return over_clusters(options, progress)
    if options.devices:
        return sweep(options, progress)
    folder, found = explored(options, progress, _budget(options))
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


def _budget(options: argparse.Namespace) -> float | None:
    def device_bytes() -> float:
        return asked_cluster(options).memory_bytes

    return budget(options, device_bytes)


def over_clusters(options: argparse.Namespace, progress: ProgressDisplay) -> Answer:
    """The same question on several clusters; the model is captured once."""
    from tensoropt.shopping import named_clusters
    from tensoropt.shopping import over_clusters as explore_each

    names = named_clusters([options.cluster, *options.also_on.split(",")])
    with writable_folder(options.out) as folder:

        def part(cluster: Any) -> argparse.Namespace:
            # A copy: every cluster gets the same question; it is saved by the one who goes over them.
            one = argparse.Namespace(**vars(options))
            one.cluster, one.out = str(cluster.name), None
            one.cluster_itself = cluster
            return one

        def anew(cluster: Any) -> Any:
            one = part(cluster)
            return explored(one, progress, _budget(one))[1]

        def again(cluster: Any, first: Any) -> Any:
            one = part(cluster)
            return explored_again(one, progress, first, _budget(one))

        found = explore_each(names, anew, again, out=folder, progress=progress)
    answer = shop_answer(found, {})
    data = {"out": str(folder), **answer.data}
    saved = f"saved: {folder}, one exploration for each cluster; `tensoropt shop {folder} --time ...` asks on"
    return Answer(data, "\n".join([answer.text, saved]))


def sweep(options: argparse.Namespace, progress: ProgressDisplay) -> Answer:
    """The same question on several numbers of devices, which the paper calls profiling mode."""
    from tensoropt.cluster import load_cluster

    sizes = part_sizes(options.devices, load_cluster(options.cluster))
    memory_bytes = _budget(options)
    found, refused = [], []
    with writable_folder(options.out) as folder:
        for number, size in enumerate(sizes):
            progress("devices", number, len(sizes), str(size))
            # A copy: every part asks the same question but for cluster and folder.
            part = argparse.Namespace(**vars(options))
            part.cluster, part.out = f"{options.cluster}[{size}]", str(folder / f"{size}-devices")
            try:
                found.append(explored(part, progress, memory_bytes)[1])
            # Too few devices for the model are part of the answer: the sweep goes on.
            except InfeasibleError as error:
                refused.append(f"{size} devices: {error}")
        progress("devices", len(sizes), len(sizes), "")
        if not found:
            raise InfeasibleError("; ".join(refused))
    data, text = profile_answer(found)
    data = {"out": str(folder), "refused": refused, **data}
    return Answer(data, "\n".join([text, *refused, f"saved: {folder}/N-devices, one exploration each"]))


def part_sizes(text: str, cluster: Any) -> tuple[int, ...]:
    """The numbers of devices that ``auto`` or ``1,2,4`` mean; each is a part of the cluster."""
    if text == "auto":
        return tuple(cluster.part_sizes)
    try:
        wanted = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise TensorOptError(f"--devices '{text}' is neither auto nor a list such as 1,2,4") from None
    return tuple(cluster.subset(size).device_count for size in wanted)


VERB = Verb("explore", "find the cost frontier of a model on a cluster", add_arguments, answer)

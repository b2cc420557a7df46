"""The verb ``list``, which shows the names of models, clusters and planners."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from tensoropt.cli.arguments import Answer, Verb
from tensoropt.console import ProgressDisplay, columns
from tensoropt.question.zoo_table import figures, listed
from tensoropt.units import format_bytes

_Rows = list[list[str]]


def _add_arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("what", choices=("models", "clusters", "planners"))


def _answer(options: argparse.Namespace, progress: ProgressDisplay) -> Answer:
    data, rows, left = {"models": _models, "clusters": _clusters, "planners": _planners}[options.what]()
    return Answer({options.what: data}, columns(rows, left=left))


def _models() -> tuple[list[dict[str, Any]], _Rows, tuple[int, ...]]:
    data: list[dict[str, Any]] = []
    rows = [["name", "size", "batch", "parameters", "operators", "groups", "treewidth", "GFLOPs",
             "with a rule", "what it is", "options"]]  # fmt: skip
    for name, model in sorted(listed().items()):
        of = figures()[name]
        data.append({**asdict(of), **asdict(model), "name": f"zoo:{name}"})
        cells = [f"{of.parameters / 1e6:,.2f} M", str(of.operators), str(of.groups),
                 f"<= {of.treewidth}", f"{of.flop / 1e9:,.4g}", f"{100 * of.rule_share:.1f} %"]  # fmt: skip
        options = "&".join(f"{option}={value}" for option, value in model.options.items())
        about = f"zoo:{name}", model.size, str(model.batch)
        rows.append([*about, *cells, model.description, options])
    return data, rows, (0, 1, 9, 10)


_FAMILIES = {
    "local:N": ("local", "N of this machine's GPUs, or N CPU ranks where it has none"),
    "cpu:N": ("cpu:2", "N CPU ranks of this machine"),
}
"""An example and a description of each form of a local cluster's name."""


def _clusters() -> tuple[list[dict[str, Any]], _Rows, tuple[int, ...]]:
    from tensoropt.cluster import list_clusters, load_cluster

    data: list[dict[str, Any]] = []
    rows = [["name", "devices", "kind", "memory each", "source"]]
    for name in ("local", *_FAMILIES, *list_clusters()):
        member, source = _FAMILIES.get(name, (name.removesuffix("xN"), ""))
        cluster = load_cluster(member)
        count = None if name.endswith("N") else cluster.device_count
        memory = None if name in _FAMILIES else cluster.memory_bytes
        source = source or cluster.source
        entry = {"name": name, "devices": count, "device": cluster.device.name, "memory_bytes": memory}
        data.append({**entry, "source": source})
        devices = str(count) if count else ("N" if name.endswith(":N") else "N nodes")
        each = format_bytes(memory) if memory else "a share"
        rows.append([name, devices, cluster.device.name, each, source])
    return data, rows, (0, 2, 4)


def _planners() -> tuple[list[dict[str, Any]], _Rows, tuple[int, ...]]:
    from tensoropt.planners import PLANNERS

    data = [{"name": name, "description": about} for name, about in PLANNERS.items()]
    return data, [["name", "what it does"], *([*one.values()] for one in data)], (0, 1)


VERB = Verb("list", "list models, clusters or planners by name", _add_arguments, _answer)

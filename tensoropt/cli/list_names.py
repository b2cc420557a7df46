"""``list``: the names of models, clusters and planners."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from tensoropt.cli.arguments import Answer, Verb
from tensoropt.console import ProgressDisplay, columns
from tensoropt.units import format_bytes

_Rows = list[list[str]]


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    verb.add_argument("what", choices=("models", "clusters", "planners"))


def answer(options: argparse.Namespace, progress: ProgressDisplay) -> Answer:
    """Return the names of the requested kind."""
    data, rows, left = {"models": _models, "clusters": _clusters, "planners": _planners}[options.what]()
    return Answer({options.what: data}, columns(rows, left=left))


def _models() -> tuple[list[dict[str, Any]], _Rows, tuple[int, ...]]:
    from tensoropt.catalogue import list_models
    from tensoropt.zoo.figures import Figures

    data: list[dict[str, Any]] = []
    rows = [["name", "size", "batch", "parameters", "operators", "groups", "treewidth", "GFLOPs",
             "with a rule", "what it is", "options"]]  # fmt: skip
    for model in list_models():
        figures = model.figures
        counted = asdict(figures) if figures else dict.fromkeys(Figures.__dataclass_fields__)
        named = {name: value for name, value in vars(model).items() if name != "figures"}
        data.append({**counted, **named})
        cells = (
            [f"{figures.parameters / 1e6:,.2f} M", str(figures.operators), str(figures.groups),
             f"<= {figures.treewidth}", f"{figures.flop / 1e9:,.4g}", f"{100 * figures.rule_share:.1f} %"]
            if figures
            else ["-"] * 6
        )  # fmt: skip
        options = "&".join(f"{name}={value}" for name, value in model.options.items())
        rows.append([model.name, model.size, str(model.batch), *cells, model.description, options])
    return data, rows, (0, 1, 9, 10)


def _clusters() -> tuple[list[dict[str, Any]], _Rows, tuple[int, ...]]:
    from tensoropt.catalogue import list_clusters

    clusters = list_clusters()
    rows = [["name", "devices", "kind", "memory each", "source"]]
    for c in clusters:
        devices = str(c.devices) if c.devices else ("N" if c.name.endswith(":N") else "N nodes")
        memory = format_bytes(c.memory_bytes) if c.memory_bytes else "a share"
        rows.append([c.name, devices, c.device, memory, c.source])
    return [dict(vars(c)) for c in clusters], rows, (0, 2, 4)


def _planners() -> tuple[list[dict[str, Any]], _Rows, tuple[int, ...]]:
    from tensoropt.catalogue import list_planners

    planners = list_planners()
    rows = [["name", "what it does"], *([planner.name, planner.description] for planner in planners)]
    return [dict(vars(planner)) for planner in planners], rows, (0, 1)


VERB = Verb("list", "list models, clusters or planners by name", add_arguments, answer)

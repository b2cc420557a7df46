"""``list``: what there is by name."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from tensoropt.cli.arguments import Answer, Verb
from tensoropt.console import ProgressDisplay, columns
from tensoropt.units import format_bytes

_Rows = list[list[str]]


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """What the verb takes."""
    verb.add_argument("what", choices=("models", "clusters", "planners"))


def answer(options: argparse.Namespace, progress: ProgressDisplay) -> Answer:
    """What there is of the kind asked for."""
    data, rows, left = {"models": _models, "clusters": _clusters, "planners": _planners}[options.what]()
    return Answer({options.what: data}, columns(rows, left=left))


def _models() -> tuple[list[dict[str, Any]], _Rows, tuple[int, ...]]:
    """Every model with the figures of one training step at its batch, where they are known."""
    from tensoropt.catalogue import list_models
    from tensoropt.zoo.figures import Figures

    data: list[dict[str, Any]] = []
    rows = [["name", "size", "batch", "parameters", "operators", "groups", "treewidth", "GFLOPs",
             "with a rule", "what it is"]]  # fmt: skip
    for model in list_models():
        of = model.figures
        counted = asdict(of) if of else dict.fromkeys(Figures.__dataclass_fields__)
        named = {name: value for name, value in vars(model).items() if name != "figures"}
        data.append({**counted, **named})
        cells = (
            [f"{of.parameters / 1e6:,.2f} M", str(of.operators), str(of.groups), f"<= {of.treewidth}",
             f"{of.flop / 1e9:,.4g}", f"{100 * of.rule_share:.1f} %"]
            if of
            else ["-"] * 6
        )  # fmt: skip
        rows.append([model.name, model.size, str(model.batch), *cells, model.description])
    return data, rows, (0, 1, 9)


def _clusters() -> tuple[list[dict[str, Any]], _Rows, tuple[int, ...]]:
    from tensoropt.catalogue import list_clusters

    found = list_clusters()
    rows = [["name", "devices", "kind", "memory each", "source"]]
    for one in found:
        devices = str(one.devices) if one.devices else ("N" if one.name.endswith(":N") else "N nodes")
        memory = format_bytes(one.memory_bytes) if one.memory_bytes else "a share"
        rows.append([one.name, devices, one.device, memory, one.source])
    return [dict(vars(one)) for one in found], rows, (0, 2, 4)


def _planners() -> tuple[list[dict[str, Any]], _Rows, tuple[int, ...]]:
    from tensoropt.catalogue import list_planners

    found = list_planners()
    rows = [["name", "what it does"], *([one.name, one.description] for one in found)]
    return [dict(vars(one)) for one in found], rows, (0, 1)


VERB = Verb("list", "name what there is", add_arguments, answer)

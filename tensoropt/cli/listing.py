"""``list``: what there is by name."""

from __future__ import annotations

import argparse
from typing import Any

from tensoropt.cli.answer import Answer
from tensoropt.console import Progress, columns
from tensoropt.units import format_bytes


def listing(options: argparse.Namespace, progress: Progress) -> Answer:
    data: list[dict[str, Any]]
    rows: list[list[str]]
    left: tuple[int, ...]
    if options.what == "models":
        data, rows, left = _models()
    elif options.what == "clusters":
        data, rows, left = _clusters()
    else:
        from tensoropt.planners import PLANNERS

        data = [{"name": name, "description": text} for name, text in PLANNERS.items()]
        rows, left = [["name", "what it does"], *([d["name"], d["description"]] for d in data)], (0, 1)
    return {options.what: data}, columns(rows, left=left), 0


def _models() -> tuple[list[dict[str, Any]], list[list[str]], tuple[int, ...]]:
    """Every model with the figures of one training step at its batch, where they are known."""
    from dataclasses import asdict

    from tensoropt.zoo import list_models
    from tensoropt.zoo.figures import Figures, figures

    known = figures()
    data: list[dict[str, Any]] = []
    rows = [["name", "size", "batch", "parameters", "operators", "groups", "treewidth", "GFLOPs",
             "with a rule", "what it is"]]  # fmt: skip
    for e in list_models():
        of = known.get(e.name)
        data.append(
            {**(asdict(of) if of else dict.fromkeys(Figures.__dataclass_fields__)),
             "name": f"zoo:{e.name}", "size": e.size, "batch": e.batch, "description": e.description,
             "paper": e.paper, "requires": e.requires}
        )  # fmt: skip
        cells = (
            [f"{of.parameters / 1e6:,.2f} M", str(of.operators), str(of.groups), f"<= {of.treewidth}",
             f"{of.flop / 1e9:,.4g}", f"{100 * of.rule_share:.1f} %"]
            if of
            else ["-"] * 6
        )  # fmt: skip
        rows.append([f"zoo:{e.name}", e.size, str(e.batch), *cells, e.description])
    return data, rows, (0, 1, 9)


def _clusters() -> tuple[list[dict[str, Any]], list[list[str]], tuple[int, ...]]:
    from tensoropt.cluster import list_clusters, load_cluster

    data: list[dict[str, Any]] = []
    for name in ("local", "local:N", *list_clusters()):
        one = load_cluster(name.replace(":N", ":2").removesuffix("xN"))
        open_ended = name.endswith("N")
        data.append(
            {
                "name": name,
                "devices": None if open_ended else one.device_count,
                "device": one.device.name,
                "memory_bytes": None if name == "local:N" else one.memory_bytes,
                "source": {"local:N": "N CPU ranks of this machine"}.get(name, one.source),
            }
        )
    rows = [["name", "devices", "kind", "memory each", "source"]]
    for d in data:
        devices = str(d["devices"]) if d["devices"] else ("N" if d["name"] == "local:N" else "N nodes")
        memory = format_bytes(d["memory_bytes"]) if d["memory_bytes"] else "a share"
        rows.append([d["name"], devices, d["device"], memory, d["source"]])
    return data, rows, (0, 2, 4)

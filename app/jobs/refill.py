"""The form's fields from what a job or an exploration was asked, so that one of them can be changed.

Both are a command line: a job's own words, or the line that the export page offers for an exploration. It is
read by the command line's own parser. What the form has no field for is said, never dropped silently.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensoropt.cli.parser import parser
from tensoropt.cluster import Cluster, list_clusters, load_cluster
from tensoropt.errors import TensorOptError
from tensoropt.planners import ENTRIES

from .clusters import ClusterFile
from .fields import RequestError
from .request import CHOICES, MOST_RANKS, Hardware
from .uploads import Uploads

VERBS = ("explore", "compare")
"""Whose command lines the form stands for."""
HANDLED = {
    *CHOICES, "verb", "json", "debug", "csv", "out", "model", "cluster", "micro_batches", "epsilon",
    "max_points", "batch", "constraints", "seed", "dim", "output", "loss", "devices", "planners", "memory",
    "also_on",
}  # fmt: skip


@dataclass(frozen=True)
class Refill:
    """A form, filled.

    Attributes:
        fields: by the form's names, as a person would have typed them.
        said: what the form has no field for, as words of a command line.
    """

    fields: Mapping[str, Any]
    said: tuple[str, ...] = ()


def can_refill(words: Sequence[str]) -> bool:
    """Whether a job's command line is one that the form stands for."""
    return bool(words) and words[0] in VERBS


def refill(
    words: Sequence[str],
    uploads: Uploads,
    *,
    cluster: Mapping[str, Any] | None = None,
    constraints: Mapping[str, Any] | None = None,
) -> Refill:
    """The form that makes a command line again.

    Args:
        words: those after ``tensoropt``.
        cluster, constraints: what the words name as files, where those do not lie there.

    Raises:
        RequestError, ClusterError: the form cannot express it; says why, and what to do.
    """
    options = _parsed(words)
    model = _model(options.model, words, uploads)
    found = load_cluster(options.cluster) if cluster is None else Cluster.from_dict(dict(cluster))
    named = str(options.cluster) if cluster is None else str(found.name)
    if constraints is None and options.constraints:
        constraints = _read(Path(options.constraints))
    planners = _planners(getattr(options, "planners", None))
    fields = {
        "model": model,
        "batch": _text(options.batch),
        "dims": ", ".join(options.dim),
        "outputs": ", ".join(options.output),
        "loss": options.loss or "auto",
        **{name: getattr(options, name) for name in CHOICES},
        "micro": options.micro_batches,
        "epsilon": f"{100 * options.epsilon:.6g}",
        "max_points": _text(options.max_points),
        "devices": getattr(options, "devices", None) or "",
        "also_on": _further(getattr(options, "also_on", None)),
        "memory": options.memory or "",
        "seed": _text(options.seed or None),
        "planners": planners,
        "constraints": json.dumps(constraints, indent=1) if constraints else "",
        **_hardware(named, found, uploads),
    }
    return Refill(fields, _left_out(options))


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    if not can_refill(words):
        raise RequestError("the form explores; what this job did is started where its result is shown")
    try:
        with contextlib.redirect_stderr(io.StringIO()) as said:
            return parser().parse_args(list(words))
    except SystemExit:
        reason = said.getvalue().strip().splitlines()[-1:] or ["its words are not understood"]
        raise RequestError(
            f"this was made by another version ({reason[0][:200]}); fill the form by hand"
        ) from None


def _model(source: str, words: Sequence[str], uploads: Uploads) -> str:
    if source.startswith("zoo:"):
        return source
    for token, (path, _) in uploads.known().items():
        if str(path) == source:
            return token
    if source.lower().endswith(".onnx"):
        raise RequestError(
            f"the file {Path(source).name} is not among the uploads; upload it, and fill in the rest"
        )
    line = shlex.join(["tensoropt", *words])
    raise RequestError(f"a Python model is named on the command line only; change it there: {line[:600]}")


def _further(given: str | None) -> list[str]:
    names = given.split(",") if given else []
    if unknown := [name for name in names if name not in list_clusters()]:
        raise RequestError(
            f"it was explored on {', '.join(unknown)[:200]}, too, which the form has no name for; change it "
            "on the command line (--also-on)"
        )
    return names


def _hardware(named: str, cluster: Cluster, uploads: Uploads) -> dict[str, Any]:
    """The fields of a cluster: this machine's ranks, a preset as it is or edited, else a file of its own."""
    if re.match(r"(local|cpu)\b", named) and not Path(named).is_file():
        if cluster.device.type != "cpu" or cluster.device_count > MOST_RANKS:
            raise RequestError(
                f"its cluster is {cluster.device_count} × {cluster.device.name} of this machine, which the "
                "form has no name for; change it on the command line (--cluster local)"
            )
        ranks = Hardware("local", "CPU", cluster.device_count, 1, "", "")
        return {"cluster": "local", **hardware_fields(ranks)}
    found = edited_preset(cluster, named)
    if found is not None:
        return {"cluster": found.name, **hardware_fields(found)}
    label = re.sub(r"[^\w.\- ]", "_", str(cluster.name))[:60] or "cluster"
    token = uploads.keep_description(cluster.to_dict(), f"{label}.json")
    return {"cluster": token, **hardware_fields(uploads.clusters()[token])}


def edited_preset(cluster: Cluster, named: str) -> Hardware | None:
    """The preset and the changes to it that amount to ``cluster``; None where the form cannot express it."""
    nodes = next((level.size for level in cluster.levels if level.name == "node"), 1)
    links = {level.name: level.link.name for level in cluster.levels}
    between = links.pop("node", "")
    base = re.sub(r"(x\d+)?(\[\d+\])?$", "", named)
    presets = [Hardware.of(name) for name in list_clusters() if not name.endswith("xN")]
    if named in {preset.name for preset in presets}:
        return Hardware.of(named) if _same(load_cluster(named), cluster) else None
    # The nearest one first: that is what the job's title will name.
    presets.sort(key=lambda preset: (preset.name != base, preset.kind != cluster.device.name))
    nearest = presets[0]
    wanted = Hardware(
        name=nearest.name,
        kind=cluster.device.name,
        per_node=cluster.device_count // nodes,
        nodes=nodes,
        inside=next(reversed(links.values()), ""),
        between=between,
        price=cluster.device.price_per_hour,
    )
    # Whether the form can express it is asked of what the form makes of it.
    with tempfile.TemporaryDirectory() as folder:
        try:
            made = load_cluster(wanted.argument(Path(folder)))
        except TensorOptError:
            return None
    return wanted if _same(made, cluster) else None


def _same(one: Cluster, other: Cluster) -> bool:
    return (one.fingerprint, one.price_per_hour) == (other.fingerprint, other.price_per_hour)


def hardware_fields(found: Hardware | ClusterFile) -> dict[str, Any]:
    """What stands in the form's fields beside the choice of a cluster."""
    return {
        "kind": found.kind if isinstance(found, Hardware) and not found.is_local else None,
        "per_node": str(found.per_node),
        "nodes": str(found.nodes),
        "inside": (found.inside or None) if isinstance(found, Hardware) else None,
        "between": (found.between or None) if isinstance(found, Hardware) else None,
        "price": "" if found.price is None else f"{found.price:g}",
    }


def _planners(text: str | None) -> list[str]:
    if not text:
        return []
    return list(ENTRIES) if text == "all" else [name for name in text.split(",") if name in ENTRIES]


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(f"its constraints cannot be read any more ({type(error).__name__})") from error


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _left_out(options: argparse.Namespace) -> tuple[str, ...]:
    """Options that are not at their default and have no field."""
    more = ["--planners", options.planners] if options.verb == "compare" else []
    plain = vars(_parsed([options.verb, options.model, "--cluster", options.cluster, "--out", "x", *more]))
    found = []
    for name, value in vars(options).items():
        if name not in HANDLED and value != plain[name]:
            option = f"--{name.replace('_', '-')}"
            found.append(option if value is True else f"{option} {value}")
    return tuple(found)

"""The form's fields filled from the question of a job or of an exploration, so that one of them can be
changed.

Everything that the form has no field for is reported, never dropped silently.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensoropt.cli.arguments import question_option
from tensoropt.cli.parser import parser
from tensoropt.cluster import Cluster, list_clusters, load_cluster
from tensoropt.errors import TensorOptError
from tensoropt.planners import ENTRIES
from tensoropt.question.question import Question
from tensoropt.question.settings import settings_fields
from tensoropt.units import write_counts, write_size

from .fields import RequestError
from .record import Job
from .request import MOST_RANKS, Hardware
from .uploads import ClusterFile, Uploads


@dataclass(frozen=True)
class Refill:
    """A filled form.

    Attributes:
        fields: values by the form's names, as a person would have typed them.
        said: what the form has no field for, as command-line arguments.
    """

    fields: Mapping[str, Any]
    said: tuple[str, ...] = ()


def can_refill(job: Job) -> bool:
    """Return whether the form can express a job."""
    return job.question is not None or job.arguments[:1] == ("explore",)


def question_of_job(job: Job) -> Question:
    """Return the question of a job.

    Raises:
        RequestError: it is not an exploration, or its arguments are unknown to this version.
    """
    return Question.of(job.question) if job.question is not None else question_of_words(job.arguments)


def question_of_words(words: Sequence[str]) -> Question:
    """Return the question in a command line, which is all that an earlier version's jobs keep; errors as in
    :func:`question_of_job`."""
    if list(words[:1]) != ["explore"]:
        raise RequestError("the form starts explorations; start this job again where its result is shown")
    try:
        question: Question = question_option(parser().parse_args(list(words)))
        if isinstance(question.cluster, str) and Path(question.cluster).is_file():
            # The file may go with the job that it lies beside.
            question = question.model_copy(update={"cluster": load_cluster(question.cluster).to_dict()})
        return question.model_copy(update={"constraints_file": ""})
    except TensorOptError as error:
        raise RequestError(
            f"this was made by another version ({str(error)[:200]}); fill the form by hand"
        ) from None


def refill(question: Question, uploads: Uploads, line: str = "") -> Refill:
    """Return the form filled with a question.

    Args:
        line: the command that asks it, for what only the command line can.

    Raises:
        RequestError, ClusterError: the form cannot express it; the message says why, and what to do.
    """
    model, _, options = _model(question, uploads, line).partition("?")
    *others, last = options.split("&")
    # A length that is not the last option stays one of these: the source is the same text again.
    name, _, sequence = last.partition("=") if re.match(r"(sequence|steps)=", last) else ("", "", "")
    options = "&".join(others) if name else options
    cluster = load_cluster(question.cluster)
    named = question.cluster if isinstance(question.cluster, str) else str(cluster.name)
    limits = [limit for limit in question.limits if limit is not None]
    settings = question.settings
    shown = {setting.key: setting.in_form(getattr(settings, setting.name)) for setting in settings_fields()}
    if settings.constraints is not None:
        shown["constraints"] = json.dumps(settings.to_dict()["constraints"], indent=1)
    if len(limits) == 1:
        shown["memory"] = write_size(limits[0])
    fields = {
        "model": model,
        "batch": write_counts(question.batches) if question.batch is None else str(question.batch),
        "options": options,
        "sequence": sequence,
        "dims": ", ".join(f"{name}={size}" for name, size in question.dims.items()),
        "outputs": ", ".join(question.outputs),
        "loss": question.loss or "auto",
        "devices": write_counts(question.devices),
        "also_on": _further(question.also_on),
        "seed": _text(question.seed or None),
        "planners": list(ENTRIES) if "all" in question.planners else list(question.planners),
        **shown,
        **_hardware(named, cluster, uploads),
    }
    left_out = {"--anew": question.anew, f"--headroom {question.headroom}": question.headroom}
    left_out["--memory " + ",".join(map(write_size, limits))] = len(limits) > 1
    return Refill(fields, tuple(words for words, there in left_out.items() if there))


def _model(question: Question, uploads: Uploads, line: str) -> str:
    source = question.model
    if source.startswith("zoo:"):
        return source
    for token, (path, _) in uploads.known().items():
        if str(path) == source:
            return token
    if source.lower().endswith(".onnx"):
        raise RequestError(
            f"the file {Path(source).name} is not among the uploads; upload it, and fill in the rest"
        )
    raise RequestError(f"a Python model is named on the command line only; change it there: {line}")


def _further(names: Sequence[str]) -> list[str]:
    if unknown := [name for name in names if name not in list_clusters()]:
        raise RequestError(
            f"it was explored on {', '.join(unknown)[:200]}, too, which the form has no name for; change it "
            "on the command line (--also-on)"
        )
    return list(names)


def _hardware(named: str, cluster: Cluster, uploads: Uploads) -> dict[str, Any]:
    """Return the fields of a cluster: this machine's ranks, a preset as it is or edited, otherwise a file."""
    if re.match(r"(local|cpu)\b", named) and not Path(named).is_file():
        if cluster.device.type != "cpu" or cluster.device_count > MOST_RANKS:
            raise RequestError(
                f"its cluster is {cluster.device_count} × {cluster.device.name} of this machine, which the "
                "form has no name for; change it on the command line (--cluster local)"
            )
        ranks = Hardware("local", "CPU", cluster.device_count, 1, "", "")
        return {"cluster": "local", **hardware_fields(ranks)}
    edited = edited_preset(cluster, named)
    if edited is not None:
        return {"cluster": edited.name, **hardware_fields(edited)}
    label = re.sub(r"[^\w.\- ]", "_", str(cluster.name))[:60] or "cluster"
    token = uploads.keep_description(cluster.to_dict(), f"{label}.json")
    return {"cluster": token, **hardware_fields(uploads.clusters()[token])}


def edited_preset(cluster: Cluster, named: str) -> Hardware | None:
    """Return the preset with the changes that make it ``cluster``; None if the form cannot express it."""
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
    try:
        made = load_cluster(wanted.asked())
    except TensorOptError:
        return None
    return wanted if _same(made, cluster) else None


def _same(first: Cluster, second: Cluster) -> bool:
    return (first.fingerprint, first.price_per_hour) == (second.fingerprint, second.price_per_hour)


def hardware_fields(hardware: Hardware | ClusterFile) -> dict[str, Any]:
    """Return the values of the form's fields that follow from the choice of a cluster."""
    return {
        "kind": hardware.kind if isinstance(hardware, Hardware) and not hardware.is_local else None,
        "per_node": str(hardware.per_node),
        "nodes": str(hardware.nodes),
        "inside": (hardware.inside or None) if isinstance(hardware, Hardware) else None,
        "between": (hardware.between or None) if isinstance(hardware, Hardware) else None,
        "price": "" if hardware.price is None else f"{hardware.price:g}",
    }


def _text(value: Any) -> str:
    return "" if value is None else str(value)

"""A page's request, checked, as a question."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from tensoropt.cluster import list_clusters, list_devices, list_links, load_cluster
from tensoropt.cluster.files import cluster_from
from tensoropt.errors import TensorOptError
from tensoropt.planners import ENTRIES
from tensoropt.question.model_source import with_sequence
from tensoropt.question.question import Question
from tensoropt.question.settings import settings_fields
from tensoropt.units import write_counts, write_size
from tensoropt.zoo import list_models

from . import fields
from .fields import RequestError
from .uploads import ClusterFile

MOST_RANKS = 64
_CLUSTER_FILE, _CONSTRAINTS_FILE = "cluster.json", "asked-constraints.json"
"""The files in a job's folder with a cluster and constraints that have no name, for its command line."""
_NO_CLUSTERS: Mapping[str, ClusterFile] = {}


@dataclass(frozen=True)
class Hardware:
    """A cluster as the form shows it.

    Attributes:
        name: the preset or ``local``; the other fields may have been edited.
        kind, per_node, nodes: the devices.
        inside, between: the links by name; "" if there is nothing to link.
        price: the price of a device-hour; None if unknown.
    """

    name: str
    kind: str
    per_node: int
    nodes: int
    inside: str
    between: str
    price: float | None = None

    @classmethod
    def of(cls, name: str) -> Hardware:
        """Return a preset as it is."""
        cluster = load_cluster(name)
        nodes = next((level.size for level in cluster.levels if level.name == "node"), 1)
        links = {level.name: level.link.name for level in cluster.levels}
        between = links.pop("node", "")
        return cls(
            name=name,
            kind=cluster.device.name,
            per_node=cluster.device_count // nodes,
            nodes=nodes,
            inside=next(reversed(links.values()), ""),
            between=between,
            price=cluster.device.price_per_hour,
        )

    @property
    def is_local(self) -> bool:
        """Whether it is ranks of this machine, which are measured."""
        return self.name == "local"

    @property
    def title(self) -> str:
        """The request's title: the preset, and what was changed about it."""
        if self.is_local:
            return f"cpu:{self.per_node}"
        plain = Hardware.of(self.name)
        parts = [self.name]
        if (self.kind, self.per_node) != (plain.kind, plain.per_node):
            parts.append(f"{self.per_node} × {self.kind}")
        if self.nodes != plain.nodes:
            parts.append(f"{self.nodes} nodes")
        links = {"inside": (self.inside, plain.inside), "between nodes": (self.between, plain.between)}
        parts += [f"{link} {where}" for where, (link, usual) in links.items() if link and link != usual]
        if self.price != plain.price and self.price is not None:
            parts.append(f"at {self.price:g} per device-hour")
        return ", ".join(parts)

    def asked(self) -> str | dict[str, Any]:
        """Return the cluster of a question: its name, or the description of an edited one.

        Raises:
            RequestError, ClusterError: the edited cluster is invalid.
        """
        if self.is_local:
            return f"cpu:{self.per_node}"
        plain = Hardware.of(self.name)
        if self == plain:
            return self.name
        # A preset of one node may have a form for several (`dgx-h100x4`): a name is better than a file.
        scaled = f"{self.name}x{self.nodes}"
        alike = (self.kind, self.per_node, self.inside, self.price) == (
            plain.kind, plain.per_node, plain.inside, plain.price,
        )  # fmt: skip
        if alike and f"{self.name}xN" in list_clusters() and plain.nodes == 1:
            whole = Hardware.of(scaled)
            if self.between in ("", whole.between):
                return scaled
        return self.described()

    def described(self) -> dict[str, Any]:
        """Return its description in the format of a cluster file."""
        if self.nodes * self.per_node > fields.MOST_DEVICES:
            raise RequestError(
                f"{self.nodes} nodes of {self.per_node} are more than {fields.MOST_DEVICES} devices; "
                "take fewer"
            )
        device: dict[str, Any] = {"kind": self.kind, "count": self.per_node}
        if self.price is not None:
            device["price_per_hour"] = self.price
        links = {"intra_node": self.inside, "inter_node": self.between}
        described = {
            "name": f"{self.nodes * self.per_node} x {self.kind}",
            "devices": [device],
            "nodes": self.nodes,
            "links": {name: link for name, link in links.items() if link},
        }
        cluster_from(described, name="edited")
        return described


class Wanted(Protocol):
    """Something a job can do: its title, whether it times this machine, its command line."""

    @property
    def title(self) -> str: ...

    @property
    def measures(self) -> bool: ...

    def arguments(self, folder: Path) -> list[str]:
        """Return the arguments of ``tensoropt``; the result is written to ``folder``."""
        ...


@dataclass(frozen=True)
class Request:
    """One exploration to run.

    Attributes:
        label: people's name for the model.
        place: people's name for the cluster.
        measures: whether this machine's own ranks are timed, so that nothing else should run meanwhile.
    """

    question: Question
    label: str
    place: str
    measures: bool = False

    @property
    def title(self) -> str:
        """The job's title: the model, the cluster, and every setting that is not at its default."""
        question = self.question
        parts = [f"{self.label} on {self.place}"]
        if question.devices:
            parts.append(f"on {write_counts(question.devices)} devices")
        if question.also_on:
            parts.append(f"also on {', '.join(question.also_on)}")
        parts += [f"{name}={size}" for name, size in question.dims.items()]
        parts += [f"up to {tensor}" for tensor in question.outputs]
        batch = question.batch or write_counts(question.batches)
        named = {"batch": batch, "loss": question.loss, "seed": question.seed}
        parts += [f"{name} {value}" for name, value in named.items() if value]
        for setting in settings_fields():
            value = getattr(question.settings, setting.name)
            parts += [setting.in_title(value)] if value != setting.default else []
        parts += [f"memory {write_size(limit)}" for limit in question.limits if limit is not None]
        if question.planners:
            parts.append(f"beside {', '.join(question.planners)}")
        return " · ".join(parts)

    def arguments(self, folder: Path) -> list[str]:
        """Return the arguments of the command line that does the same; the result is written to
        ``folder``."""
        return written(self.question, folder)


def written(question: Question, folder: Path) -> list[str]:
    """Return the arguments of a question's command line; parts without a name are written to ``folder``,
    where the result is written too."""
    cluster, constraints = folder / _CLUSTER_FILE, folder / _CONSTRAINTS_FILE
    if not isinstance(question.cluster, str):
        cluster.write_text(json.dumps(question.cluster, indent=1) + "\n", encoding="utf-8")
    if question.settings.constraints is not None:
        data = question.settings.to_dict()["constraints"]
        constraints.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return question.words(str(folder), str(cluster), str(constraints))


def planners_from(value: Any) -> tuple[str, ...]:
    """Return the names of planners.

    Raises:
        RequestError: a name is not on the list.
    """
    names = list(value or ()) if isinstance(value, (list, tuple, type(None))) else [value]
    unknown = [str(name)[:40] for name in names if not isinstance(name, str) or name not in ENTRIES]
    if unknown:
        raise RequestError(f"there is no planner called {', '.join(unknown)}; choose from the list")
    return tuple(dict.fromkeys(names))


def hardware_from(
    form: Mapping[str, Any], clusters: Mapping[str, ClusterFile] = _NO_CLUSTERS
) -> Hardware | ClusterFile:
    """Return the cluster in the form; ``clusters``: uploaded ones by token.

    Raises:
        RequestError: a field is missing or impossible.
    """
    name = form.get("cluster")
    if isinstance(name, str) and name in clusters:
        return clusters[name]
    if name == "local":
        return Hardware("local", "CPU", fields.count(form.get("per_node"), "ranks", MOST_RANKS), 1, "", "")
    if name not in list_clusters():
        raise RequestError("choose a cluster from the list")
    kind = form.get("kind")
    if kind not in list_devices() and kind != Hardware.of(str(name)).kind:
        raise RequestError("choose a device kind from the list")
    for field in ("inside", "between"):
        if form.get(field) and form[field] not in list_links():
            raise RequestError("choose links from the list")
    return Hardware(
        name=str(name),
        kind=str(kind),
        per_node=fields.count(form.get("per_node"), "devices per node", fields.MOST_DEVICES),
        nodes=fields.count(form.get("nodes"), "nodes", fields.MOST_DEVICES),
        inside=str(form.get("inside") or ""),
        between=str(form.get("between") or ""),
        price=fields.price_from(form.get("price")),
    )


def request_from(
    form: Mapping[str, Any],
    uploads: Mapping[str, tuple[Path, str]],
    clusters: Mapping[str, ClusterFile] = _NO_CLUSTERS,
) -> Request:
    """Return the request in the form's fields.

    Args:
        uploads: token -> (file, name for people) of uploaded models.
        clusters: token -> uploaded cluster.

    Raises:
        RequestError: a field is missing or impossible; the message says which.
    """
    hardware = hardware_from(form, clusters)
    settings = fields.settings(form)
    values: dict[str, Any] = {"seed": fields.seed(form.get("seed")) or 0}
    model = form.get("model")
    if isinstance(model, str) and model in uploads:
        path, label = uploads[model]
        source = str(path)
        values |= _of_file(form, training=settings.mode == "train")
    else:
        name = str(model).removeprefix("zoo:")
        usual = {m.name: m.batch for m in list_models()}
        if name not in usual:
            raise RequestError("choose a model from the list, or upload an ONNX file")
        source = f"zoo:{fields.options(name, form.get('options'))}"
        if (length := fields.sequence(form.get("sequence"))) is not None:
            try:
                source = with_sequence(source, length)
            except TensorOptError as error:
                raise RequestError(f"the sequence: {error}") from error
        label = source.removeprefix("zoo:")
        values |= fields.batches(form.get("batch"))
        if "batches" not in values:  # of several those that are not divided are refused one by one
            fields.divides(settings.micro_batches, values.get("batch") or usual[name])
    planners, devices = planners_from(form.get("planners")), fields.device_counts(form.get("devices"))
    if planners and devices:
        raise RequestError(
            "planners run beside one number of devices; leave either them or the numbers of devices empty"
        )
    also_on = _clusters_from(form.get("also_on"), but=str(form.get("cluster") or ""))
    if values.get("batches") and (planners or devices or also_on):
        raise RequestError(
            "several batches are explored on one cluster with all its devices and without planners; leave "
            "these empty, or give one batch"
        )
    if also_on and (planners or devices):
        raise RequestError(
            "several clusters are explored without planners and with all their devices; leave the further "
            "clusters, or these, empty"
        )
    if planners and settings.memory_bytes is not None:
        values["limits"], settings = (settings.memory_bytes,), replace(settings, memory_bytes=None)
    question = Question(
        model=source, cluster=hardware.asked(), settings=settings, planners=planners, devices=devices,
        also_on=also_on, **values,
    )  # fmt: skip
    return Request(question, label, hardware.title, hardware.is_local)


def _clusters_from(value: Any, but: str = "") -> tuple[str, ...]:
    """Return the names of presets, without the one that is explored anyway.

    Raises:
        RequestError: a name is not on the list.
    """
    names = list(value or ()) if isinstance(value, (list, tuple, type(None))) else [value]
    unknown = [str(name)[:40] for name in names if not isinstance(name, str) or name not in list_clusters()]
    if unknown:
        raise RequestError(f"there is no cluster called {', '.join(unknown)}; choose from the list")
    return tuple(dict.fromkeys(name for name in names if name != but))


LOSSES = ("auto", "cross_entropy", "mean", "mse")


def _of_file(form: Mapping[str, Any], *, training: bool) -> dict[str, Any]:
    """Return the options for what an uploaded file leaves open."""
    dims = dict(dim.rsplit("=", 1) for dim in fields.dims(form.get("dims")))
    outputs = fields.words(form.get("outputs"))
    for tensor in outputs:
        if not re.fullmatch(r"[\w./:]{1,120}", tensor) or tensor.startswith("-"):
            raise RequestError(f"'{tensor[:80]}' is not the name of a tensor of the file")
    loss = form.get("loss") or "auto"
    if loss not in LOSSES:
        raise RequestError(f"the loss is one of {', '.join(LOSSES)}")
    sizes = {name: int(size) for name, size in dims.items()}
    return {"dims": sizes, "outputs": outputs, "loss": loss if training and loss != "auto" else None}

"""What a page asks for, checked, and the command line it stands for."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tensoropt.cluster import list_clusters, list_devices, list_links, load_cluster
from tensoropt.cluster.files import cluster_from
from tensoropt.planners import ENTRIES
from tensoropt.zoo import list_models

from . import fields
from .clusters import CLUSTER_FILE, ClusterFile
from .fields import RequestError

CONSTRAINTS_FILE = "asked-constraints.json"
MOST_RANKS = 64
NO_CLUSTERS: Mapping[str, ClusterFile] = {}


@dataclass(frozen=True)
class Hardware:
    """A cluster as the form shows it.

    Attributes:
        name: the preset or ``local``; what is below may have been edited.
        kind, per_node, nodes: devices; links by name, "" where there is nothing to link.
        price: of one device-hour, None where unknown.
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
        """A preset as it is."""
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
        """What people read: the preset, and what was changed of it."""
        if self.is_local:
            return f"cpu:{self.per_node}"
        plain = Hardware.of(self.name)
        found = [self.name]
        if (self.kind, self.per_node) != (plain.kind, plain.per_node):
            found.append(f"{self.per_node} × {self.kind}")
        if self.nodes != plain.nodes:
            found.append(f"{self.nodes} nodes")
        links = {"inside": (self.inside, plain.inside), "between nodes": (self.between, plain.between)}
        found += [f"{link} {where}" for where, (link, usual) in links.items() if link and link != usual]
        if self.price != plain.price and self.price is not None:
            found.append(f"at {self.price:g} per device-hour")
        return ", ".join(found)

    def argument(self, folder: Path) -> str:
        """What follows ``--cluster``; an edited cluster is written into ``folder`` first.

        Raises:
            RequestError, ClusterError: the edited cluster is none.
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
        described = self.described()
        (folder / CLUSTER_FILE).write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
        return str(folder / CLUSTER_FILE)

    def described(self) -> dict[str, Any]:
        """In the format of a cluster file."""
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
    """Something a job can run: what people call it, whether it times this machine, its command line."""

    @property
    def title(self) -> str: ...

    @property
    def measures(self) -> bool: ...

    def arguments(self, folder: Path) -> list[str]:
        """The words after ``tensoropt``; the result lands in ``folder``."""
        ...


IN_TITLE = {
    "--mode": "{}", "--optimizer": "{}", "--dtype": "{}", "--dim": "{}", "--output": "up to {}",
    "--micro-batches": "{} micro-batches", "--epsilon": "gap {}", "--max-points": "{} points kept",
}  # fmt: skip
"""How an option reads in a title, where its own name would say less."""
USUAL_GAP = ("--epsilon", "0.001")


@dataclass(frozen=True)
class Request:
    """One exploration to run.

    Attributes:
        model: ``zoo:NAME``, or the path of an uploaded file.
        label: what people call the model.
        options: further arguments of ``tensoropt explore``.
        planners: published ones to run beside it.
        devices: numbers of devices to explore on, as ``--devices`` takes them; "" for all at once.
        constraints: as in a file of them; None for none.
        also_on: further clusters by name.
    """

    model: str
    label: str
    hardware: Hardware | ClusterFile
    options: tuple[str, ...] = ()
    planners: tuple[str, ...] = ()
    devices: str = ""
    constraints: Mapping[str, Any] | None = None
    also_on: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """What people read: the model, where, and all that is not at its default."""
        found = [f"{self.label} on {self.hardware.title}"]
        if self.devices:
            found.append(f"on {self.devices} devices")
        if self.also_on:
            found.append(f"also on {', '.join(self.also_on)}")
        for name, value in zip(self.options[::2], self.options[1::2], strict=True):
            if (name, value) == USUAL_GAP:
                continue
            found.append(IN_TITLE.get(name, f"{name.removeprefix('--')} {{}}").format(value))
        if self.constraints is not None:
            found.append("with constraints")
        if self.planners:
            found.append(f"beside {', '.join(self.planners)}")
        return " · ".join(found)

    @property
    def measures(self) -> bool:
        """This machine's own ranks are timed, so nothing else should run beside it."""
        return self.hardware.is_local

    def arguments(self, folder: Path) -> list[str]:
        """The words after ``tensoropt``; the result lands in ``folder``."""
        cluster = self.hardware.argument(folder)
        verb = "compare" if self.planners else "explore"
        words = [verb, self.model, "--cluster", cluster, "--out", str(folder), *self.options]
        if self.planners:
            words += ["--planners", ",".join(self.planners)]
        if self.devices:
            words += ["--devices", self.devices]
        if self.also_on:
            words += ["--also-on", ",".join(self.also_on)]
        if self.constraints is not None:
            file = folder / CONSTRAINTS_FILE
            file.write_text(json.dumps(self.constraints, indent=1) + "\n", encoding="utf-8")
            words += ["--constraints", str(file)]
        return words


def planners_from(value: Any) -> tuple[str, ...]:
    """Names of planners.

    Raises:
        RequestError: one is not on the list.
    """
    names = list(value or ()) if isinstance(value, (list, tuple, type(None))) else [value]
    unknown = [str(name)[:40] for name in names if not isinstance(name, str) or name not in ENTRIES]
    if unknown:
        raise RequestError(f"there is no planner called {', '.join(unknown)}; choose from the list")
    return tuple(dict.fromkeys(names))


def hardware_from(
    form: Mapping[str, Any], clusters: Mapping[str, ClusterFile] = NO_CLUSTERS
) -> Hardware | ClusterFile:
    """The cluster part of the form; ``clusters``: uploaded ones by token.

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
    clusters: Mapping[str, ClusterFile] = NO_CLUSTERS,
) -> Request:
    """A request from the form's fields.

    Args:
        uploads: token -> (file, name for people) of what was uploaded.
        clusters: token -> uploaded cluster.

    Raises:
        RequestError: a field is missing or impossible; says which.
    """
    hardware = hardware_from(form, clusters)
    training = form.get("mode") != "inference"
    model = form.get("model")
    if isinstance(model, str) and model in uploads:
        path, label = uploads[model]
        source, options = str(path), _onnx_options(form, training)
    else:
        source = str(model)
        label = source.removeprefix("zoo:")
        usual = {m.name: m.batch for m in list_models()}
        if label not in usual:
            raise RequestError("choose a model from the list, or upload an ONNX file")
        batch = fields.batch(form.get("batch"))
        options = [] if batch is None else ["--batch", str(batch)]
        fields.divides(fields.micro_batches(form.get("micro")), batch or usual[label])
    planners, devices = planners_from(form.get("planners")), fields.device_counts(form.get("devices"))
    if planners and devices:
        raise RequestError(
            "planners run beside one number of devices; leave either them or the numbers of devices empty"
        )
    also_on = clusters_from(form.get("also_on"), but=str(form.get("cluster") or ""))
    if also_on and (planners or devices):
        raise RequestError(
            "several clusters are compared without planners and with all their devices; leave the further "
            "clusters, or these, empty"
        )
    options += _search_options(form)
    pins = fields.constraints(form.get("constraints"))
    return Request(source, label, hardware, tuple(options), planners, devices, pins, also_on)


def clusters_from(value: Any, but: str = "") -> tuple[str, ...]:
    """Names of presets, without the one that is explored anyway.

    Raises:
        RequestError: one is not on the list.
    """
    names = list(value or ()) if isinstance(value, (list, tuple, type(None))) else [value]
    unknown = [str(name)[:40] for name in names if not isinstance(name, str) or name not in list_clusters()]
    if unknown:
        raise RequestError(f"there is no cluster called {', '.join(unknown)}; choose from the list")
    return tuple(dict.fromkeys(name for name in names if name != but))


CHOICES = {
    "mode": ("train", "inference"),
    "optimizer": ("adam", "adam_fused", "momentum", "sgd"),
    "dtype": ("float32", "bfloat16"),
    "recompute": ("auto", "never"),
    "measure": ("all", "never"),
}
"""Options with a fixed set of values, the command line's default first."""
LOSSES = ("auto", "cross_entropy", "mean", "mse")


def _onnx_options(form: Mapping[str, Any], training: bool) -> list[str]:
    """``--dim``, ``--output`` and ``--loss`` of an uploaded file."""
    options = []
    for dim in fields.dims(form.get("dims")):
        options += ["--dim", dim]
    for tensor in fields.words(form.get("outputs")):
        if not re.fullmatch(r"[\w./:]{1,120}", tensor) or tensor.startswith("-"):
            raise RequestError(f"'{tensor[:80]}' is not the name of a tensor of the file")
        options += ["--output", tensor]
    loss = form.get("loss") or "auto"
    if loss not in LOSSES:
        raise RequestError(f"the loss is one of {', '.join(LOSSES)}")
    return options + (["--loss", loss] if training and loss != "auto" else [])


def _search_options(form: Mapping[str, Any]) -> list[str]:
    """What is searched, with what is left at its default left out."""
    options = []
    for name, values in CHOICES.items():
        value = form.get(name) or values[0]
        if value not in values:
            raise RequestError(f"{name}: one of {', '.join(values)}")
        # Defaults are left out, so that the command that people copy stays short.
        if value != values[0]:
            options += [f"--{name}", value]
    micro = fields.micro_batches(form.get("micro"))
    if micro != "auto":
        options += ["--micro-batches", micro]
    epsilon = fields.epsilon(form.get("epsilon"))
    if epsilon is not None:
        options += ["--epsilon", f"{epsilon / 100:.6g}"]
    points = fields.max_points(form.get("max_points"))
    if points is not None:
        options += ["--max-points", str(points)]
    if budget := fields.memory(form.get("memory")):
        options += ["--memory", budget]
    seed = fields.seed(form.get("seed"))
    if seed is not None:
        options += ["--seed", str(seed)]
    return options

"""The record of how an exploration's points came about: the operator graph and the costs used.

With it a saved exploration explains any of its points (:mod:`tensoropt.report.detail`) and can be costed
again (:func:`tensoropt.api.recost`) without the model. One gzip'd JSON file, ``recorded.json.gz``.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tensoropt.cluster import Cluster, Mesh
from tensoropt.costs.communication import CommunicationModel
from tensoropt.costs.prices import Prices
from tensoropt.costs.process_memory import process_memory
from tensoropt.costs.tables import CostTables
from tensoropt.errors import TensorOptError
from tensoropt.files import check_size, unpacked
from tensoropt.graph import OperatorGraph
from tensoropt.graph.ir import graph_from_dict, graph_to_dict
from tensoropt.profiling.facts import Facts
from tensoropt.profiling.link_fits import LinkFit, Transition
from tensoropt.profiling.links import LinkFits
from tensoropt.profiling.overheads import Overheads
from tensoropt.profiling.workload import Workload
from tensoropt.sharding.atoms import refine_graph
from tensoropt.sharding.configurations import AxisSizes
from tensoropt.sharding.discovery.discover import signature
from tensoropt.sharding.groups import GroupGraph, group_operators

SCHEMA = "tensoropt.recorded/1"


@dataclass(frozen=True)
class RecordedWork:
    """The facts and seconds of one workload, for one micro-batch.

    Attributes:
        forward_host_s, backward_host_s: the seconds of issuing it on the host; 0 if the host is the device,
            and in explorations that were saved before the host's seconds were separate.
        weight_gradient_s: the seconds of one product of its backward, see
            :meth:`~tensoropt.costs.prices.ComputeCosts.weight_gradient_s`; likewise 0 in older explorations.
    """

    facts: Facts
    forward_s: float
    backward_s: float
    source: str
    forward_host_s: float = 0.0
    backward_host_s: float = 0.0
    weight_gradient_s: float = 0.0


@dataclass(frozen=True)
class RecordedCompute:
    """The seconds that were saved with an exploration; a :class:`~tensoropt.costs.prices.ComputeCosts`."""

    works: Mapping[str, RecordedWork]
    optimizer_s_per_element: float
    source: str

    def of(self, work: Workload) -> RecordedWork:
        """Return the facts and seconds of a workload.

        Raises:
            TensorOptError: they were not saved.
        """
        try:
            return self.works[work.key]
        except KeyError:
            raise TensorOptError(
                f"the costs of {work.describe()} were not saved, or are of another version; explore again"
            ) from None

    def seconds(self, work: Workload, facts: Facts) -> tuple[float, float]:
        """Return the saved (forward, backward) seconds of one micro-batch."""
        found = self.of(work)
        return found.forward_s, found.backward_s

    def host_seconds(self, work: Workload) -> tuple[float, float]:
        """Return the saved (forward, backward) seconds of issuing one micro-batch."""
        found = self.of(work)
        return found.forward_host_s, found.backward_host_s

    def weight_gradient_s(self, work: Workload, facts: Facts) -> float:
        """Return the saved seconds of the product of a weight's gradient."""
        return self.of(work).weight_gradient_s

    def source_of(self, work: Workload) -> str:
        """Return the source of a workload's saved seconds."""
        return self.of(work).source


@dataclass(frozen=True)
class Recorded:
    """The operator graph and the costs of the points kept.

    Attributes:
        links: the fits of collectives, by the label of the mesh.
        discovered: the discoveries about operators without a rule, by signature; some are the model's own.
    """

    graph: OperatorGraph
    compute: RecordedCompute
    overheads: Overheads
    links: Mapping[str, LinkFits]
    discovered: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def grouped(self) -> GroupGraph:
        """The operator graph, factored into atoms and grouped as it was when it was explored."""
        return group_operators(refine_graph(self.graph, self))

    def get(self, key: str, kind: str) -> Any:
        """Return what was discovered about an operator; see
        :class:`tensoropt.sharding.discovery.discover.Kept`.
        """
        return self.discovered.get(key)

    def put(self, key: str, record: Any, kind: str) -> None:
        """Do nothing: a recorded exploration stays as it is."""

    def prices(
        self, cluster: Cluster, mesh: Mesh, sizes: AxisSizes, optimizer: str, *, with_process: bool = False
    ) -> Prices:
        """Return the prices on one mesh of the cluster.

        Args:
            sizes: micro-batches, then the real axes.
            with_process: whether to count the GPU memory that a process takes in addition to tensors.
        """
        communication = CommunicationModel(cluster, mesh, self.links.get(mesh.label))
        process = process_memory(cluster, self.graph, counted=with_process)
        return Prices(
            self.grouped,
            sizes,
            self.compute,
            communication,
            optimizer,
            self.overheads,
            process,
            packs=cluster.device_type == "cpu",
        )

    def save(self, path: Path) -> None:
        """Write everything into one gzip'd JSON file, read back by :func:`load_recorded`."""
        data = {
            "schema": SCHEMA,
            "graph": graph_to_dict(self.graph),
            "works": {key: _work_to_list(work) for key, work in sorted(self.compute.works.items())},
            "optimizer_s_per_element": self.compute.optimizer_s_per_element,
            "source": self.compute.source,
            # The name in saved files is older than that of the class, and stays.
            "upkeep": asdict(self.overheads),
            "links": {label: _fits_to_dict(fits) for label, fits in self.links.items()},
        }
        if self.discovered:
            data["discovered"] = dict(self.discovered)
        text = json.dumps(data, separators=(",", ":")).encode()
        # Without name and time in the header, the same exploration gives the same bytes.
        with open(path, "wb") as file, gzip.GzipFile("", "wb", mtime=0, fileobj=file) as packed:
            packed.write(text)


def load_recorded(path: Path) -> Recorded:
    """Read what :meth:`Recorded.save` wrote.

    Raises:
        TensorOptError: it is of another version, or damaged.
    """
    try:
        check_size(path)
        data = json.loads(unpacked(path.read_bytes(), path))
        if data.get("schema") != SCHEMA:
            raise TensorOptError(f"{path} has schema {data.get('schema')!r}, not '{SCHEMA}'; explore again")
        if _is_old(data):
            raise TensorOptError(f"{path} was saved by an older version of tensoropt; explore again")
        works = {key: _work_from_list(work) for key, work in data["works"].items()}
        return Recorded(
            graph_from_dict(data["graph"]),
            RecordedCompute(works, data["optimizer_s_per_element"], data["source"]),
            Overheads.from_record(data["upkeep"]),
            {label: _fits_from_dict(fits) for label, fits in data["links"].items()},
            data.get("discovered", {}),
        )
    except TensorOptError:
        raise
    except Exception as error:
        raise TensorOptError(f"{path} is damaged ({type(error).__name__}: {error}); explore again") from error


def _is_old(data: Mapping[str, Any]) -> bool:
    """Return whether the links were timed in a form that versions before 0.1 had under the same schema.

    They knew one extra time after work whatever the size of the message (``arrivals``), or whatever the
    amount of work (a flat ``leaving_s``).
    """
    return any(
        "transitions" not in fits
        or any(not isinstance(each["leaving_s"][0], list) for _, each in fits["transitions"])
        for fits in data["links"].values()
    )


def record(graph: OperatorGraph, used: Iterable[tuple[CostTables, Mapping[str, int]]]) -> Recorded | None:
    """Return the record of some strategies, each given as (the tables it is from, its choice).

    None without any strategy, or where an operator has an argument that no file can hold.
    """
    try:
        graph_to_dict(graph)
    except TypeError:
        return None
    works: dict[str, RecordedWork] = {}
    links: dict[str, LinkFits] = {}
    seen: set[tuple[int, int]] = set()
    discovered: dict[str, Any] = {}
    prices: Prices | None = None
    for tables, choice in used:
        prices = tables.prices
        atoms = tables.graph.atoms
        discovered |= {
            signature(atoms.graph.by_name[name], atoms.graph): found.to_record()
            for name, found in atoms.discovered.items()
        }
        model = prices.communication
        if isinstance(model, CommunicationModel) and model.fits is not None:
            links[model.mesh.label] = model.fits
        for group in tables.graph.groups:
            template = tables.templates[group.name]
            index = tables.position(group.name, choice[group.name])
            # Layers that look alike share a template, so that each workload is priced and kept once.
            if (id(template), index) in seen:
                continue
            seen.add((id(template), index))
            work, facts = template.works[index], template.facts[index]
            forward, backward = prices.compute.seconds(work, facts)
            source, host = prices.compute.source_of(work), prices.compute.host_seconds(work)
            product_s = prices.compute.weight_gradient_s(work, facts)
            works[work.key] = RecordedWork(facts, forward, backward, source, *host, product_s)
    if prices is None:
        return None
    compute = RecordedCompute(works, prices.compute.optimizer_s_per_element, prices.compute.source)
    return Recorded(graph, compute, prices.overheads, links, discovered)


def _work_to_list(work: RecordedWork) -> list[Any]:
    more = [work.forward_host_s, work.backward_host_s, work.weight_gradient_s]
    return [
        work.forward_s,
        work.backward_s,
        work.source,
        work.facts.to_record(),
        *(more if any(more) else ()),
    ]


def _work_from_list(data: list[Any]) -> RecordedWork:
    forward, backward, source, facts, *more = data
    return RecordedWork(Facts.from_record(facts), forward, backward, source, *more)


def _fits_to_dict(fits: LinkFits) -> dict[str, Any]:
    return {
        "collectives": [
            [kind, list(axes), [fit.to_dict() for fit in group]]
            for (kind, axes), group in fits.collectives.items()
        ],
        "pairs": [[list(pair), fit.kind, fit.to_dict()] for pair, fit in fits.pairs.items()],
        "transitions": [[list(axes), each.to_dict()] for axes, each in fits.transitions.items()],
    }


def _fits_from_dict(data: Mapping[str, Any]) -> LinkFits:
    return LinkFits(
        collectives={
            (kind, tuple(axes)): tuple(LinkFit.from_dict(kind, fit) for fit in group)
            for kind, axes, group in data["collectives"]
        },
        pairs={(pair[0], pair[1]): LinkFit.from_dict(kind, fit) for pair, kind, fit in data["pairs"]},
        transitions={tuple(axes): Transition.from_dict(each) for axes, each in data["transitions"]},
    )


def mesh_of(cluster: Cluster, shape: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
    """Return the cluster's mesh that a space was searched on; one device has a mesh of one axis."""
    if math.prod(shape) == 1:
        return cluster.meshes(1)[0]
    return Mesh(shape=shape, names=names)

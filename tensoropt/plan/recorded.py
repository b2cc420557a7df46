"""The operator graph and the costs that are saved with an exploration.

From them, any point can be explained (:mod:`tensoropt.report.detail`) or costed again
(:func:`tensoropt.api.recost`) without the model. The file is ``recorded.json.gz``, gzip'd JSON.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tensoropt.cluster import Cluster, DeviceKind, Mesh
from tensoropt.costs.communication import CommunicationModel
from tensoropt.costs.prices import ClusterCosts, ComputeCosts, LinkCosts, runs_beside
from tensoropt.costs.process_memory import ProcessMemory, process_memory
from tensoropt.costs.tables import CostTables
from tensoropt.errors import TensorOptError
from tensoropt.files import unpacked
from tensoropt.graph import OperatorGraph
from tensoropt.graph.ir import graph_from_dict, graph_to_dict
from tensoropt.profiling.facts import Facts
from tensoropt.profiling.link_fits import LinkFit
from tensoropt.profiling.links import LinkFits
from tensoropt.profiling.overheads import Overheads
from tensoropt.profiling.workload import Workload
from tensoropt.question.settings import Settings
from tensoropt.sharding.atoms import refine_graph
from tensoropt.sharding.discovery.discover import signature
from tensoropt.sharding.groups import GroupGraph, group_operators

_SCHEMA = "tensoropt.recorded/1"


@dataclass(frozen=True)
class _RecordedWork:
    """The costs of one workload (one rank's computation for one group of operators), for one micro-batch.

    Attributes:
        facts: FLOP, memory traffic and tensor sizes.
        forward_host_s, backward_host_s: the host's seconds to issue it; 0 if the host itself computes.
        weight_gradient_s: seconds of the weight-gradient product in its backward
            (:meth:`~tensoropt.costs.prices.ComputeCosts.weight_gradient_s`).
    """

    facts: Facts
    forward_s: float
    backward_s: float
    source: str
    forward_host_s: float = 0.0
    backward_host_s: float = 0.0
    weight_gradient_s: float = 0.0


@dataclass(frozen=True)
class _RecordedCompute:
    """The saved costs of computation on some devices, for use as a
    :class:`~tensoropt.costs.prices.ComputeCosts`."""

    works: Mapping[str, _RecordedWork]
    optimizer_s_per_element: float
    source: str
    overheads: Overheads

    def of(self, work: Workload) -> _RecordedWork:
        """Return the saved costs of a workload (one rank's computation for a group of operators).

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
        """Return the saved (forward, backward) duration of one micro-batch in seconds."""
        found = self.of(work)
        return found.forward_s, found.backward_s

    def host_seconds(self, work: Workload) -> tuple[float, float]:
        """Return the saved seconds in which the host issues (forward, backward) of one micro-batch."""
        found = self.of(work)
        return found.forward_host_s, found.backward_host_s

    def weight_gradient_s(self, work: Workload, facts: Facts) -> float:
        return self.of(work).weight_gradient_s

    def source_of(self, work: Workload) -> str:
        return self.of(work).source


@dataclass(frozen=True)
class Recorded:
    """The operator graph of a model, and the costs behind an exploration's points.

    Attributes:
        whole: costs of workloads that all devices run.
        links: fitted costs of collectives by mesh label. Fits that also cover messages between ranks have the
            key :func:`_with_pairs` instead.
        discovered: how operators without a rule can be split, found by running small copies, by signature.
        parts: costs on a part of the devices, by the key of a pipeline rank (:func:`_place_key`) or of a
            device kind (:func:`_device_key`).
    """

    graph: OperatorGraph
    whole: _RecordedCompute
    links: Mapping[str, LinkFits]
    discovered: Mapping[str, Any] = field(default_factory=dict)
    parts: Mapping[str, _RecordedCompute] = field(default_factory=dict)

    @cached_property
    def grouped(self) -> GroupGraph:
        """The operator graph, with operators joined to groups as when it was explored."""
        return group_operators(refine_graph(self.graph, self))

    def get(self, key: str, kind: str) -> Any:
        """Return how the operator with signature ``key`` can be split; None if unknown."""
        return self.discovered.get(key)

    def put(self, key: str, record: Any, kind: str) -> None:
        """Do nothing: recorded costs do not change."""

    def joined(self, other: Recorded) -> Recorded:
        """Return a copy to which the saved costs of further strategies of this model are added."""

        def with_works(part: _RecordedCompute, more: _RecordedCompute) -> _RecordedCompute:
            return replace(part, works={**more.works, **part.works})

        parts = {key: with_works(self.parts.get(key, part), part) for key, part in other.parts.items()}
        return replace(
            self,
            whole=with_works(self.whole, other.whole),
            links={**other.links, **self.links},
            parts={**self.parts, **parts},
        )

    def changed(
        self,
        work: Callable[[str, _RecordedWork], _RecordedWork],
        overheads: Callable[[Overheads], Overheads] = lambda unchanged: unchanged,
    ) -> Recorded:
        """Return a copy in which the costs of workloads and the overheads of a step are changed everywhere.

        Args:
            work: returns the new costs of a workload, given its key and old costs.
            overheads: returns the new overheads, given the old ones.
        """

        def of_part(part: _RecordedCompute) -> _RecordedCompute:
            works = {key: work(key, recorded) for key, recorded in part.works.items()}
            return replace(part, works=works, overheads=overheads(part.overheads))

        parts = {key: of_part(part) for key, part in self.parts.items()}
        return replace(self, whole=of_part(self.whole), parts=parts)

    def save(self, path: Path) -> None:
        data = {
            "schema": _SCHEMA,
            "graph": graph_to_dict(self.graph),
            **_part_to_dict(self.whole),
            "links": {label: _fits_to_dict(fits) for label, fits in self.links.items()},
        }
        if self.discovered:
            data["discovered"] = dict(self.discovered)
        if self.parts:
            data["parts"] = {key: _part_to_dict(part) for key, part in sorted(self.parts.items())}
        text = json.dumps(data, separators=(",", ":")).encode()
        # No name or time in the header: the same exploration gives the same bytes.
        with open(path, "wb") as file, gzip.GzipFile("", "wb", mtime=0, fileobj=file) as packed:
            packed.write(text)


def read_recorded(content: bytes, path: Path) -> Recorded:
    """Return the object that :meth:`Recorded.save` wrote into a file.

    Raises:
        TensorOptError: the file is of another version, or damaged.
    """
    try:
        data = json.loads(unpacked(content, path))
        if data.get("schema") != _SCHEMA:
            raise TensorOptError(f"{path} has schema {data.get('schema')!r}, not '{_SCHEMA}'; explore again")
        return Recorded(
            graph_from_dict(data["graph"]),
            _part_from_dict(data),
            {label: _fits_from_dict(fits) for label, fits in data["links"].items()},
            data.get("discovered", {}),
            {key: _part_from_dict(part) for key, part in data.get("parts", {}).items()},
        )
    except TensorOptError:
        raise
    except Exception as error:
        raise TensorOptError(f"{path} is damaged ({type(error).__name__}: {error}); explore again") from error


class RecordedCosts:
    """The saved or changed costs of an exploration, as a :class:`~tensoropt.costs.prices.ClusterCosts`.

    Args:
        cluster: the exploration's, or one with the same devices and other links.
        settings: the exploration's settings.
        part: the costs of computation on a part of the devices, instead of on the whole cluster.
    """

    def __init__(
        self, recorded: Recorded, cluster: Cluster, settings: Settings, part: _RecordedCompute | None = None
    ):
        self.recorded, self.cluster, self.settings = recorded, cluster, settings
        self.part = part or recorded.whole
        self.optimizer, self.training = settings.optimizer, settings.mode == "train"
        self.beside = runs_beside(cluster.device_type, settings.overlap)
        # Facts of single-device work equal the whole's, and are saved with the seconds.
        parts = [recorded.parts.get(_device_key(kind)) for kind in cluster.device_kinds]
        works = [part.works for part in (*parts, self.part) if part is not None]
        known = {key: work for of_part in works for key, work in of_part.items()}
        self.facts = self.timings = _Saved(replace(self.part, works=known))

    def on(self, kinds: Sequence[DeviceKind]) -> RecordedCosts:
        """Return the costs on devices of these kinds only; ``self`` if the cluster has no other kinds."""
        if len(kinds) == len(self.cluster.device_kinds):
            return self
        names = {kind.name for kind in kinds}
        ordered = [kind for kind in self.cluster.device_kinds if kind.name in names]
        devices = tuple(ordered[rank % len(ordered)] for rank in range(self.cluster.device_count))
        cluster, part = replace(self.cluster, devices=devices), self._part(_place_key(kinds))
        return RecordedCosts(self.recorded, cluster, self.settings, part)

    def compute(self) -> _RecordedCompute:
        """Return the costs of workloads that all devices run at once, each on its own shard."""
        return self.part

    def compute_on(self, kind: DeviceKind) -> _RecordedCompute:
        """Return the costs of workloads on one kind of devices."""
        return self._part(_device_key(kind))

    def overheads(self) -> Overheads:
        """Return the times of a step's small items, such as copies, on the slowest device kind."""
        return self.part.overheads

    def overheads_on(self, kind: DeviceKind) -> Overheads:
        """Return the times of a step's small items, such as copies, on one device kind."""
        return self._part(_device_key(kind)).overheads

    def _part(self, key: str) -> _RecordedCompute:
        """Return the costs on a part of the devices (on the whole cluster if it has one device kind), or
        raise TensorOptError if they were not saved."""
        part = self.recorded.parts.get(key)
        if part is None and len(self.cluster.device_kinds) > 1:
            raise TensorOptError(f"the costs of {key} were not saved; explore again")
        return part or self.recorded.whole

    def process_memory(self, graph: OperatorGraph) -> ProcessMemory:
        """Return the memory of a process beside the step's tensors. On CPU ranks, or if the settings leave it
        out, this is only the size of the graph's constants."""
        return process_memory(self.cluster, graph, counted=self.settings.process_memory)

    def communication(self, mesh: Mesh, *, pairs: bool = False) -> LinkCosts:
        """Return the costs of a mesh's collectives; with ``pairs`` also of messages between ranks."""
        label = _with_pairs(mesh) if pairs else mesh.label
        if pairs and self.recorded.links and label not in self.recorded.links:
            raise TensorOptError(
                f"link timings of mesh {mesh.label} were saved without messages between ranks; explore again"
            )
        return CommunicationModel(self.cluster, mesh, self.recorded.links.get(label))


@dataclass(frozen=True)
class _Saved:
    compute: _RecordedCompute

    def of(self, work: Workload) -> Facts:
        return self.compute.of(work).facts

    def measure(self, works: Mapping[str, Workload]) -> None:
        """Do nothing: saved workloads were measured."""


def _with_pairs(mesh: Mesh) -> str:
    return f"{mesh.label}, messages"


def _place_key(kinds: Sequence[DeviceKind]) -> str:
    return f"a place of {' + '.join(kind.name for kind in kinds)}"


def _device_key(kind: DeviceKind) -> str:
    return f"a device {kind.name}"


class CostRecorder:
    """A collector of the costs that strategies of one model use, to be saved with an exploration.

    Args:
        costs: the source of costs that are in no cost tables, as for pipelines and placed plans.
    """

    def __init__(self, graph: GroupGraph, costs: ClusterCosts):
        self.graph, self.costs = graph, costs
        self._works: dict[str, dict[str, _RecordedWork]] = {"": {}}
        self._priced: dict[str, tuple[ComputeCosts, Overheads]] = {}
        self._links: dict[str, LinkFits] = {}
        self._seen: set[tuple[int, int]] = set()

    def add_tables(self, tables: CostTables, choice: Mapping[str, int]) -> None:
        """Record the costs of a strategy, given as the index of each group's choice in its cost table."""
        prices = tables.prices
        self._priced[""] = prices.compute, prices.overheads
        if isinstance(prices.communication, CommunicationModel):
            self._add_fits(prices.communication.mesh.label, prices.communication)
        for group in tables.graph.groups:
            template = tables.templates[group.name]
            index = tables.position(group.name, choice[group.name])
            # Layers that look alike share a template, so each workload is priced and stored once.
            if (id(template), index) not in self._seen:
                self._seen.add((id(template), index))
                self._add("", template.works[index], template.facts[index])

    def add_links(self, mesh: Mesh) -> None:
        """Record the fitted costs of collectives and messages on a mesh's links."""
        label = _with_pairs(mesh)
        if label not in self._links:
            self._add_fits(label, self.costs.communication(mesh, pairs=True))

    def add_at_place(self, kinds: Sequence[DeviceKind], works: Iterable[Workload]) -> None:
        """Record the costs of workloads on a pipeline rank with devices of these kinds."""
        source = self.costs.on(kinds)
        key = "" if len(kinds) == len(self.costs.cluster.device_kinds) else _place_key(kinds)
        if new := self._new(key, works):
            source.timings.measure(new)
            self._priced[key] = source.compute(), source.overheads()
            for work in new.values():
                self._add(key, work, source.facts.of(work))

    def add_on_devices(self, works: Iterable[Workload]) -> None:
        """Record the costs of workloads on each device kind."""
        works, costs, kinds = list(works), self.costs, self.costs.cluster.device_kinds
        whole = self._priced[""][1] if "" in self._priced else costs.overheads()
        costs.timings.measure({work.key: work for work in works})
        for kind in kinds:
            overheads = costs.overheads_on(kind)
            key = "" if len(kinds) == 1 and overheads == whole else _device_key(kind)
            if new := self._new(key, works):
                self._priced[key] = costs.compute_on(kind), overheads
                for work in new.values():
                    self._add(key, work, costs.facts.of(work))

    def recorded(self) -> Recorded | None:
        """Return the recorded costs; None if there are none, or if JSON cannot hold an operator's
        argument."""
        atoms = self.graph.atoms
        try:
            graph_to_dict(atoms.graph)
        except TypeError:
            return None
        if not self._priced:
            return None
        parts = {key: self._part(key) for key in self._priced}
        whole = parts.pop("", None) or _RecordedCompute(
            {}, 0.0, self.costs.compute().source, self.costs.overheads()
        )
        discovered = {
            signature(atoms.graph.by_name[name], atoms.graph): discovery.to_record()
            for name, discovery in atoms.discovered.items()
        }
        return Recorded(atoms.graph, whole, self._links, discovered, parts)

    def _new(self, key: str, works: Iterable[Workload]) -> dict[str, Workload]:
        known = self._works.setdefault(key, {})
        return {work.key: work for work in works if work.key not in known}

    def _add_fits(self, label: str, model: object) -> None:
        if isinstance(model, CommunicationModel) and model.fits is not None:
            self._links[label] = model.fits

    def _add(self, key: str, work: Workload, facts: Facts) -> None:
        compute, _ = self._priced[key]
        seconds, host = compute.seconds(work, facts), compute.host_seconds(work)
        product_s = compute.weight_gradient_s(work, facts)
        self._works[key][work.key] = _RecordedWork(facts, *seconds, compute.source_of(work), *host, product_s)

    def _part(self, key: str) -> _RecordedCompute:
        compute, overheads = self._priced[key]
        return _RecordedCompute(self._works[key], compute.optimizer_s_per_element, compute.source, overheads)


def _part_to_dict(part: _RecordedCompute) -> dict[str, Any]:
    return {
        "works": {key: _work_to_list(work) for key, work in sorted(part.works.items())},
        "optimizer_s_per_element": part.optimizer_s_per_element,
        "source": part.source,
        # Saved files use an older name than the class.
        "upkeep": asdict(part.overheads),
    }


def _part_from_dict(data: Mapping[str, Any]) -> _RecordedCompute:
    works = {key: _work_from_list(work) for key, work in data["works"].items()}
    overheads = Overheads.from_record(data["upkeep"])
    return _RecordedCompute(works, data["optimizer_s_per_element"], data["source"], overheads)


def _work_to_list(work: _RecordedWork) -> list[Any]:
    more = [work.forward_host_s, work.backward_host_s, work.weight_gradient_s]
    known = [work.forward_s, work.backward_s, work.source, work.facts.to_record()]
    return known + more if any(more) else known


def _work_from_list(data: list[Any]) -> _RecordedWork:
    forward, backward, source, facts, *more = data
    return _RecordedWork(Facts.from_record(facts), forward, backward, source, *more)


def _fits_to_dict(fits: LinkFits) -> dict[str, Any]:
    return {
        "collectives": [
            [kind, list(axes), [fit.to_dict() for fit in group]]
            for (kind, axes), group in fits.collectives.items()
        ],
        "pairs": [[list(pair), fit.kind, fit.to_dict()] for pair, fit in fits.pairs.items()],
    }


def _fits_from_dict(data: Mapping[str, Any]) -> LinkFits:
    return LinkFits(
        collectives={
            (kind, tuple(axes)): tuple(LinkFit.from_dict(kind, fit) for fit in group)
            for kind, axes, group in data["collectives"]
        },
        pairs={(pair[0], pair[1]): LinkFit.from_dict(kind, fit) for pair, kind, fit in data["pairs"]},
    )


def mesh_of(cluster: Cluster, shape: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
    """Return the mesh of this shape; for a single device, the one-axis mesh that the cluster defines."""
    if math.prod(shape) == 1:
        return cluster.meshes(1)[0]
    return Mesh(shape=shape, names=names)

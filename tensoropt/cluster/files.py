"""Functions that make a :class:`Cluster` from a name, a file or ``local``, and write one to a file."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from tensoropt.cluster.catalog import (
    LINK_FIELDS,
    check_fields,
    cluster_preset,
    device_from,
    link_from,
    list_clusters,
)
from tensoropt.cluster.hardware import Cluster, DeviceKind, Level, Link
from tensoropt.cluster.local import available_cores, cpu_cluster, local_cluster
from tensoropt.cluster.nvml import all_pairs, levels_from_pairs
from tensoropt.cluster.quantities import MEMORY, count, positive
from tensoropt.errors import ClusterError, suggest
from tensoropt.files import read_document, write_text

_FILE_FIELDS = ("name", "devices", "nodes", "links", "source", "scalable")
_NODE_ENTRY_FIELDS = ("count", "devices")
_DEVICE_ENTRY_FIELDS = ("kind", "count", "memory", "price_per_hour")
_LINK_ENTRY_FIELDS = ("intra_node", "inter_node", "pairs")
_PAIR_FIELDS = ("between", "link", *LINK_FIELDS)
_FILE_ENDINGS = (".yaml", ".yml", ".json")


def load_cluster(description: str | os.PathLike[str] | Mapping[str, Any] | Cluster) -> Cluster:
    """Return the cluster with this name, in this file, or described by this data.

    Args:
        description: ``local`` (the GPUs that NVML sees, or one CPU rank per core if there are none),
            ``local:N`` (N of them), ``cpu`` and ``cpu:N`` (CPU ranks, even on a machine with GPUs), a preset
            (see :func:`list_clusters`), or the path of a YAML or JSON file. Such a file may also hold the
            output of :meth:`Cluster.to_dict`, or be the ``exploration.json`` that contains it. ``[N]`` after
            any of these selects its first N devices. The parsed content of such a file is accepted, too.

    Raises:
        ClusterError: no cluster has this name, or the file does not describe one; the message states the
            rule, the value and the remedy.
    """
    if isinstance(description, Cluster):
        return description
    if isinstance(description, Mapping):
        return cluster_from(description, name="cluster")
    if not isinstance(description, (str, os.PathLike)):
        raise ClusterError(
            "a cluster is a text such as 'local:2' or 'dgx-h100', a file, or a Cluster; this is "
            f"{description!r}"
        )
    text = os.fspath(description).strip()
    if part := re.fullmatch(r"(.+)\[(\d{1,9})\]", text):
        return load_cluster(part.group(1)).subset(int(part.group(2)))
    # Anything after the colon must be a number; it must not fall through to "unknown cluster".
    if match := re.fullmatch(r"(local|cpu)(?::(.*))?", text):
        where, number = match.groups()
        if number is not None and not re.fullmatch(r"[1-9]\d*", number):
            raise ClusterError(
                f"'{text}': '{where}:' must be followed by the number of ranks, at least 1, e.g. {where}:2"
            )
        ranks = None if number is None else int(number)
        if where == "local":
            return local_cluster(ranks)
        return cpu_cluster(ranks or len(available_cores()), name=text)
    if preset := cluster_preset(text):
        entry, nodes = preset
        return cluster_from(entry, name=text, nodes=nodes)
    path = Path(text)
    if not path.is_file():
        if path.suffix.lower() in _FILE_ENDINGS or os.sep in text:
            raise ClusterError(f"cluster file '{text}' does not exist; correct the path")
        raise ClusterError(
            f"unknown cluster '{text}'; {suggest(text, ('local', 'local:N', 'cpu:N', *list_clusters()))};"
            " or give the path of a YAML or JSON file"
        )
    data = read_document(path, "cluster", ClusterError)
    if isinstance(data, dict) and isinstance(data.get("cluster"), dict) and "kinds" in data["cluster"]:
        data = data["cluster"]  # an exploration's file contains the cluster that it was made for
    try:
        return cluster_from(data, name=path.stem)
    except ClusterError as error:
        raise ClusterError(f"cluster file '{path}': {error}") from None


def save_cluster(cluster: Cluster, file: str | os.PathLike[str]) -> None:
    """Write a cluster as a file that :func:`load_cluster` reads: JSON in ``.json``, YAML in ``.yaml``.

    Raises:
        ClusterError: the name ends in neither.
        TensorOptError: the file cannot be written; the previous file is kept.
    """
    path = Path(file)
    if path.suffix.lower() not in _FILE_ENDINGS:
        raise ClusterError(
            f"'{path}' is not the name of a cluster file; end it in {' or '.join(_FILE_ENDINGS)}"
        )
    data = cluster.to_dict()
    is_json = path.suffix.lower() == ".json"
    write_text(path, json.dumps(data, indent=1) + "\n" if is_json else yaml.safe_dump(data, sort_keys=False))


def cluster_from(data: object, *, name: str, nodes: int | None = None) -> Cluster:
    """Return a cluster from the parsed content of a cluster file, or from :meth:`Cluster.to_dict`.

    Args:
        name: the cluster's name, if the data give none.
        nodes: the number of nodes; None for that of the data.
    """
    # Only Cluster.to_dict writes ``kinds``; a cluster file has ``devices`` with kinds in them.
    if isinstance(data, Mapping) and "kinds" in data:
        return Cluster.from_dict(data)
    entry = check_fields(data, _FILE_FIELDS, "a cluster")
    of_nodes = _nodes(entry, nodes)
    per_node, node_count = of_nodes[0], len(of_nodes)
    count(
        len(per_node) * node_count, f"the product of {node_count} nodes and {len(per_node)} devices in each"
    )
    devices = tuple(device for node in of_nodes for device in node)
    links = check_fields(entry.get("links", {}), _LINK_ENTRY_FIELDS, "links")
    pairs = _pairs(links["pairs"], len(per_node)) if "pairs" in links else {}
    levels = []
    if node_count > 1:
        outer, cards = _level_link(links, "inter_node", f"{node_count} nodes")
        levels.append(Level(name="node", size=node_count, link=outer, link_count=cards))
    if len(per_node) > 1:
        if "intra_node" not in links and pairs:
            levels += levels_from_pairs(pairs, len(per_node), _level_name(per_node))
        else:
            inner, wires = _level_link(links, "intra_node", f"{len(per_node)} devices per node")
            levels.append(Level(name=_level_name(per_node), size=len(per_node), link=inner, link_count=wires))
    return Cluster(
        name=str(entry.get("name", name)),
        devices=devices,
        levels=tuple(levels),
        pairs={
            (low + base, high + base): value
            for base in range(0, len(devices), len(per_node))
            for (low, high), value in pairs.items()
        },
        source=str(entry.get("source", "cluster file")),
    )


def _level_name(devices: list[DeviceKind]) -> str:
    return "gpu" if devices[0].type == "cuda" else "cpu"


def _nodes(entry: Mapping[str, Any], nodes: int | None) -> list[list[DeviceKind]]:
    if "devices" in entry:
        if isinstance(entry.get("nodes"), list):
            raise ClusterError(
                "nodes is a list of nodes, each with its devices; leave out the separate devices beside it"
            )
        node_count = count(entry.get("nodes", 1) if nodes is None else nodes, "nodes")
        return [_devices(entry["devices"], "devices")] * node_count
    entries = entry.get("nodes")
    if not isinstance(entries, list) or not entries:
        raise ClusterError("a cluster needs devices, for example devices: [{kind: H100-80GB, count: 8}]")
    node_devices: list[list[DeviceKind]] = []
    for position, item in enumerate(entries):
        where = f"nodes[{position}]"
        node = check_fields(item, _NODE_ENTRY_FIELDS, where)
        if "devices" not in node:
            raise ClusterError(
                f"{where} has no devices; add for example devices: [{{kind: H100-80GB, count: 8}}]"
            )
        devices = _devices(node["devices"], f"{where}.devices")
        if node_devices and len(devices) != len(node_devices[0]):
            raise ClusterError(
                f"{where} has {len(devices)} devices and the nodes before it {len(node_devices[0])}; nodes "
                "of one cluster need equally many; list fewer devices of the larger ones"
            )
        _check_namesakes([device for earlier in node_devices for device in earlier], devices, where)
        node_devices += [devices] * count(node.get("count", 1), f"count of {where}")
    return node_devices


def _check_namesakes(before: list[DeviceKind], devices: list[DeviceKind], where: str) -> None:
    """Raise ClusterError if device kinds share a name but differ, as a cluster tells kinds apart by name."""
    for kind in devices:
        if any(earlier.name == kind.name and earlier != kind for earlier in before):
            raise ClusterError(f"{where}: device kinds named '{kind.name}' differ; rename one of them")


def _devices(value: object, label: str) -> list[DeviceKind]:
    if not isinstance(value, list) or not value:
        raise ClusterError(
            f"{label} is {value!r}, but must list at least one device,"
            " for example devices: [{kind: H100-80GB, count: 8}]"
        )
    devices: list[DeviceKind] = []
    for position, item in enumerate(value):
        where = f"{label}[{position}]"
        entry = {"kind": item} if isinstance(item, str) else check_fields(item, _DEVICE_ENTRY_FIELDS, where)
        if "kind" not in entry:
            raise ClusterError(f"{where} has no kind; add for example kind: H100-80GB")
        kind = device_from(entry["kind"], f"{where}.kind")
        if "memory" in entry:
            memory = MEMORY.read_written(entry["memory"], f"memory of {where}")
            kind = replace(kind, memory_bytes=int(memory))
        if entry.get("price_per_hour") is not None:
            kind = replace(
                kind, price_per_hour=positive(entry["price_per_hour"], f"price_per_hour of {where}")
            )
        _check_namesakes(devices, [kind], where)
        devices += [kind] * count(entry.get("count", 1), f"count of {where}")
    return devices


def _level_link(links: dict[str, Any], key: str, why: str) -> tuple[Link, int]:
    """Return the link of a level (``key``), and how many such links each child of the level has. ``why`` is
    the reason for an error message: what the cluster has that needs this link."""
    if key not in links:
        raise ClusterError(
            f"links lacks {key}, needed for {why}; add for example {key}: "
            + ("NVLink4" if key == "intra_node" else "IB-400G")
        )
    value = links[key]
    if not isinstance(value, dict):
        return link_from(value, f"links.{key}"), 1
    inner = dict(value)
    cards = count(inner.pop("count", 1), f"count of links.{key}")
    return _own_link(inner, f"links.{key}", key), cards


def _own_link(entry: Mapping[str, Any], where: str, name: str) -> Link:
    if "link" not in entry:
        return link_from({"name": name, **entry}, where)
    if len(entry) > 1:
        raise ClusterError(f"{where} names a link of the catalogue and gives figures as well; keep either")
    return link_from(entry["link"], where)


def _pairs(value: object, devices: int) -> dict[tuple[int, int], Link]:
    """Return the links of one node by pair of its devices; all nodes have the same links."""
    if not isinstance(value, list) or not value:
        raise ClusterError("links.pairs must be a list such as [{between: [0, 1], alpha: 5us, beta: 25GB/s}]")
    links: dict[tuple[int, int], Link] = {}
    for position, item in enumerate(value):
        where = f"links.pairs[{position}]"
        entry = dict(check_fields(item, _PAIR_FIELDS, where))
        pair = _ends(entry.pop("between", None), where, devices)
        if pair in links:
            raise ClusterError(f"{where}: the pair {pair} is given twice: a link serves both ways; keep one")
        links[pair] = _own_link(entry, where, f"{pair[0]}-{pair[1]}")
    expected = all_pairs(devices)
    missing = [pair for pair in expected if pair not in links]
    if missing:
        shown = ", ".join(str(pair) for pair in missing[:5]) + (", …" if len(missing) > 5 else "")
        raise ClusterError(f"links.pairs lacks {len(missing)} of {len(expected)} pairs: {shown}; add them")
    return links


def _ends(ends: Any, where: str, total: int) -> tuple[int, int]:
    good = (
        isinstance(ends, list)
        and len(ends) == 2
        # ``type is int``, because YAML's true and false pass isinstance(value, int).
        and all(type(end) is int and 0 <= end < total for end in ends)
        and ends[0] != ends[1]
    )
    if not good:
        raise ClusterError(
            f"{where} is between {ends!r}, but must name two different devices of a node, numbered "
            f"0 to {total - 1}: between: [0, 1]; for pairs across nodes describe all devices in one node"
        )
    return min(ends), max(ends)

"""Cluster files that a person uploads: read as data, checked at once, and bounded."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from tensoropt.cluster import load_cluster
from tensoropt.errors import TensorOptError

from . import fields
from .fields import RequestError

ENDINGS = (".yaml", ".yml", ".json")
MOST_BYTES = 64 * 2**10
"""Of a cluster file; what is larger is named on the command line."""


@dataclass(frozen=True)
class ClusterFile:
    """A cluster from a file, as the form shows it; its fields cannot be edited there.

    Attributes:
        label: what its owner called the file.
        description: the content of the file.
        kinds: the names of its devices, one each.
    """

    label: str
    description: Mapping[str, Any]
    kinds: tuple[str, ...]
    per_node: int
    nodes: int
    price: float | None = None

    @property
    def is_local(self) -> bool:
        """Whether it is ranks of this machine: a file never is."""
        return False

    @property
    def title(self) -> str:
        """What people read."""
        return self.label

    @property
    def words(self) -> str:
        """What the file amounts to."""
        return f"{self.per_node * self.nodes} × {' and '.join(self.kinds)}, as {self.label} describes them."

    def asked(self) -> dict[str, Any]:
        """The cluster of a question."""
        return dict(self.description)


def read_description(data: bytes, label: str) -> dict[str, Any]:
    """The values in a cluster file.

    Raises:
        RequestError: it is no YAML or JSON, or uses what could make a small file large.
    """
    try:
        text = data.decode("utf-8-sig")
        # Not as YAML, to which 5e-06 is a word.
        if label.lower().endswith(".json"):
            found = json.loads(text)
        # Written out, a file says no more than its size; a dozen nested aliases would stand for gigabytes.
        elif any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text)):
            raise RequestError(f"'{label}': aliases (*name) are not taken here; write the values out")
        else:
            found = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise RequestError(f"'{label}' is not valid YAML or JSON ({reason}); correct that line") from None
    if not isinstance(found, dict):
        raise RequestError(
            f"'{label}' describes no cluster; write for example devices: [{{kind: H100-80GB, count: 8}}]"
        )
    return found


def cluster_file(description: Mapping[str, Any], label: str) -> ClusterFile:
    """The cluster that the content of a file describes.

    Raises:
        RequestError: it describes none; says what is wrong.
    """
    if any(number > fields.MOST_DEVICES for number in _counts(description)):
        raise RequestError(f"'{label}' has more than {fields.MOST_DEVICES:,} devices; take fewer")
    content = dict(description)
    try:
        # In its own folder every job's file has the same name; people know the cluster by theirs.
        content.setdefault("name", label.rpartition(".")[0] or label)
        cluster = load_cluster(content)
    except TensorOptError as error:
        raise RequestError(f"'{label}': {str(error)[:400]}") from None
    # A nesting that none of the checks above foresees is still only a wrong file.
    except (TypeError, KeyError, ValueError, AttributeError, RecursionError) as error:
        raise RequestError(f"'{label}' describes no cluster ({type(error).__name__})") from None
    if cluster.device_count > fields.MOST_DEVICES:
        raise RequestError(
            f"'{label}' has {cluster.device_count:,} devices; at most {fields.MOST_DEVICES:,} are taken"
        )
    nodes = next((level.size for level in cluster.levels if level.name == "node"), 1)
    kinds = tuple(dict.fromkeys(device.name for device in cluster.devices))
    price = cluster.device.price_per_hour if len(kinds) == 1 else None
    return ClusterFile(label, content, kinds, cluster.device_count // nodes, nodes, price)


def _counts(value: Any) -> Iterator[int]:
    """Whole numbers that a file multiplies devices by."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key in ("count", "nodes") and isinstance(inner, int):
                yield inner
            yield from _counts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _counts(inner)

"""A cache of explorations in the profile store, so that a repeated question is answered at once.

The key of an exploration is a hash of all that determines its points: the operator graph, the cluster, the
settings, the profile store's measurements, and this package's own code. A memory budget is not part of the
key, as it only decides which points fit. Captured operator graphs are cached too. Their key (a zoo model's
name, a file's content) is known without the capture, so that a model is captured only once.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from tensoropt.cluster import Cluster
from tensoropt.errors import TensorOptError
from tensoropt.exploration.exploration import Exploration, load_exploration
from tensoropt.exploration.exploration_files import DESCRIBED, LISTED, POINTS, RECORDED, STRATEGIES
from tensoropt.graph import OperatorGraph
from tensoropt.graph.ir import graph_from_dict, graph_to_dict
from tensoropt.plan.plan import ModelInfo
from tensoropt.profiling.store import ProfileStore
from tensoropt.question.question import Question
from tensoropt.question.settings import Settings
from tensoropt.ranks.kernel_settings import KernelSettings
from tensoropt.version import __version__

_FILES = {DESCRIBED, POINTS, LISTED, STRATEGIES, RECORDED}
"""The files of an exploration that are cached; files with other names in the cache are ignored."""


@dataclass(frozen=True)
class KeptCapture:
    """The captured operator graph of a model, with which the model can be explored without being built.

    Attributes:
        model: the model's description in plans.
        notes: remarks on the import of an ONNX file.
    """

    model: ModelInfo
    graph: OperatorGraph
    notes: tuple[str, ...] = ()


class KeptExplorations:
    """The explorations cached in a profile store.

    Args:
        store: the profile store, whose measurements are part of every key. Nothing is cached in a store in
            memory.
    """

    def __init__(self, store: ProfileStore):
        self.store = store

    def find(self, question: str, cluster: Cluster, settings: Settings) -> Exploration | None:
        """Return the cached exploration of a model; None if there is none at these settings and measurements.

        Args:
            question: the key of the model, from :func:`question_of`.

        Raises:
            InfeasibleError: none of its points fits the memory budget of the settings.
        """
        data = self.store.get(self._key(question, cluster, settings), "explorations")
        try:
            with TemporaryDirectory() as folder:
                for name in _FILES & data["files"].keys():
                    (Path(folder) / name).write_bytes(data["files"][name])
                found = load_exploration(folder)
        # Not there, or damaged in whatever way: as if it were not there.
        except Exception:
            return None
        made = data["made"]
        note = f"result kept from {made.replace('T', ' ')}, as nothing has changed; --anew explores again"
        kept = replace(found.noted([note], kept=made), settings=settings.to_dict())
        kept.check_budget()
        return kept

    def keep(self, question: str, cluster: Cluster, settings: Settings, found: Exploration) -> str:
        """Cache an exploration, unless the store is in memory; return why that failed, else ""."""
        if not self.store.persistent:
            return ""  # a store in memory says so itself
        try:
            with TemporaryDirectory() as folder:
                found.save(folder)
                files = {path.name: np.fromfile(path, np.uint8) for path in Path(folder).iterdir()}
            key = self._key(question, cluster, settings)
            made = datetime.now().isoformat(timespec="minutes")
            self.store.put(key, {"made": made, "files": files}, "explorations")
        except (OSError, TensorOptError) as error:
            return f"the result was not kept for reuse: {error}"
        return ""

    def keep_capture(self, source: str, found: KeptCapture) -> None:
        """Cache a captured model under the key of its source (:func:`source_key`)."""
        data = {
            "model": found.model.model_dump(mode="json"),
            "graph": graph_to_dict(found.graph),
            "notes": list(found.notes),
        }
        # What cannot be kept is captured once more the next time.
        with contextlib.suppress(TensorOptError):
            self.store.put(_hash(source, code()), data, "captures")

    def capture_of(self, source: str) -> KeptCapture | None:
        """Return the captured model cached under a key (:func:`source_key`); None if there is none."""
        data = self.store.get(_hash(source, code()), "captures")
        try:
            return KeptCapture(
                ModelInfo.model_validate(data["model"]), graph_from_dict(data["graph"]), tuple(data["notes"])
            )
        except (ValueError, KeyError, TypeError):
            return None  # not there, or damaged: as if it were not there

    def _key(self, question: str, cluster: Cluster, settings: Settings) -> str:
        asked = {**settings.to_dict(), "memory_bytes": None, "epsilon": float(settings.epsilon)}
        told = json.dumps(
            [cluster.to_dict(), asked, KernelSettings.now().of(cluster.device_type).words], sort_keys=True
        )
        return _hash(question, code(), told, self.store.digest())


class Known(NamedTuple):
    """The cached results for a question, which can be read without PyTorch and without building the model.

    Attributes:
        source: the key of the model's captured graph in the cache; None if it cannot be cached.
        captured: the cached operator graph of the model, if there is one.
        exploration: the cached exploration that answers the question, if there is one; its last note says
            that it is cached.
    """

    source: str | None = None
    captured: KeptCapture | None = None
    exploration: Exploration | None = None


def known_of(question: Question, cluster: Cluster, settings: Settings) -> Known:
    """Return the cached results for a question; none if it asks to ignore the cache, or has planners.

    Args:
        cluster, settings: the cluster and the settings to explore with, which may differ from the question's.

    Raises:
        InfeasibleError: no point of the cached exploration fits the memory budget of the settings.
    """
    if question.anew or question.planners:
        return Known()
    source = source_key(question.model, question.capture_facts)
    if source is None:
        return Known()
    with ProfileStore() as store:
        kept = KeptExplorations(store)
        captured = kept.capture_of(source)
        found = kept.find(question_of(captured.model), cluster, settings) if captured is not None else None
    return Known(source, captured, found)


def question_of(model: ModelInfo) -> str:
    """Return the cache key of a model: a hash of its description, with the fingerprint of its operators."""
    return _hash(model.model_dump_json())


@cache
def code() -> str:
    """Return a hash of this package's files and of the versions of PyTorch and NumPy."""
    root = Path(__file__).parent.parent
    # The versions as installed: importing PyTorch to ask it would take longer than all else here.
    versions = (importlib.metadata.version(name) for name in ("torch", "numpy"))
    digest = hashlib.sha256(" ".join((__version__, *versions)).encode())
    for path in sorted((*root.rglob("*.py"), *root.rglob("*.yaml"), *root.rglob("*.json"))):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def source_key(source: str, facts: Mapping[str, Any]) -> str | None:
    """Return a cache key for the captured graph of a model source. None for sources such as Python functions,
    which may read anything, so that only building the model shows what it depends on.

    Args:
        source: as on the command line: ``zoo:NAME``, or the path of an ONNX file.
        facts: the arguments of the capture, by name: sizes, seed, mode and the like.
    """
    told = json.dumps(facts, sort_keys=True, default=str)
    if source.startswith("zoo:"):
        return f"{source} {_installed('transformers')} {_installed('peft')} {told}"
    if source.endswith(".onnx") and Path(source).is_file():
        content = Path(source).read_bytes()
        # Weights in other files could change without the file.
        return None if b"external_data" in content or b"location" in content else _hash(source, told, content)
    return None


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _hash(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part if isinstance(part, bytes) else part.encode())
        digest.update(b"\0")
    return digest.hexdigest()

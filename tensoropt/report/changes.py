"""Changes to an exploration, one at a time: links, dtype, micro-batches or devices, with all else as it was.

A changed exploration starts from the saved operator graph (:func:`tensoropt.api.explore_changed`), so no
model is needed; bfloat16 is a pass over that graph, the same one that ends capturing. Changes are named by
what they do to an exploration, not to a point, so that one answer serves all points.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, replace

from tensoropt.capture.precision import with_compute_dtype
from tensoropt.cluster import Cluster, Link, load_cluster
from tensoropt.errors import ClusterError, TensorOptError
from tensoropt.evaluation.problem import Problem, micro_batch_counts
from tensoropt.exploration.exploration import Exploration
from tensoropt.graph import OperatorGraph
from tensoropt.plan.plan import ModelInfo
from tensoropt.question.settings import Settings
from tensoropt.ranks.local_hardware import has_local_links
from tensoropt.report.detail import recorded_of

_BANDWIDTH, _DTYPE, _MICRO_BATCHES, _DEVICES = "bandwidth", "bfloat16", "micro-batches", "devices"
ALL = "all"
_SEARCHED = "it was searched already"


@dataclass(frozen=True)
class Change:
    """A change that can be explored, or the reason why it cannot.

    Attributes:
        key: as ``--deep`` takes it: ``bandwidth:gpu``, ``bfloat16``, ``micro-batches:8``, ``devices:16``.
        title: the change in words.
        remark: what it stands for, if the title does not say so.
        refusal: why it cannot be explored; "" if it can.
    """

    key: str
    title: str
    remark: str = ""
    refusal: str = ""


@dataclass(frozen=True)
class _ChangedQuestion:
    """The question to explore for a change: everything that defines an exploration."""

    graph: OperatorGraph
    model: ModelInfo
    cluster: Cluster
    settings: Settings


def changes(exploration: Exploration, index: int) -> tuple[Change, ...]:
    """Return the changes to an exploration that may make point ``index`` of ``all_points`` faster."""
    cluster = Cluster.from_dict(exploration.cluster)
    return (
        *_bandwidths(cluster),
        _dtype(exploration),
        _micro_batches(exploration, index),
        _devices(cluster),
    )


def change_named(exploration: Exploration, key: str) -> Change:
    """Return the change with a key, for any point.

    Raises:
        TensorOptError: there is none; the message says which there are.
    """
    cluster = Cluster.from_dict(exploration.cluster)
    kind, _, value = key.partition(":")
    if kind == _MICRO_BATCHES and value.isascii() and value.isdecimal() and 0 < int(value) < 2**31:
        return _with_count(exploration, int(value))
    listed = (*_bandwidths(cluster), _dtype(exploration), _devices(cluster))
    for change in listed:
        if change.key == key:
            return change
    keys = [*(change.key for change in listed), f"{_MICRO_BATCHES}:N"]
    raise TensorOptError(f"there is no change '{key}' of this exploration; there are {', '.join(keys)}")


def question_of_change(exploration: Exploration, key: str) -> _ChangedQuestion:
    """Return the question to explore for a change. A memory budget is left out: it only says which points
    fit.

    Raises:
        TensorOptError: there is no such change, it is refused, or the operator graph was not saved.
    """
    change = change_named(exploration, key)
    if change.refusal:
        raise TensorOptError(f"{change.title} cannot be explored: {change.refusal}")
    graph, model = recorded_of(exploration).graph, exploration.model
    cluster = Cluster.from_dict(exploration.cluster)
    settings = replace(Settings.from_dict(exploration.settings), memory_bytes=None)
    kind, _, value = key.partition(":")
    if kind == _BANDWIDTH:
        cluster = with_faster_links(cluster, None if value == ALL else value)
    elif kind == _DTYPE:
        graph = with_compute_dtype(graph, _DTYPE)
        settings = replace(settings, dtype=_DTYPE)
        model = model.model_copy(update={"fingerprint": graph.fingerprint})
    elif kind == _DEVICES:
        cluster = twice_the_devices(cluster)
    else:
        counts = {*searched_counts(exploration), int(value)}
        settings = replace(settings, micro_batches=tuple(sorted(counts)))
    return _ChangedQuestion(graph, model, cluster, settings)


# -- links ----------------------------------------------------------------------------------------------


def link_titles(cluster: Cluster) -> dict[str, str]:
    """Return what the links of each level of the cluster are, in words: ``gpu links (NVLink4)``."""
    return {level.name: f"{level.name} links ({level.link.name})" for level in cluster.levels}


def with_faster_links(cluster: Cluster, level: str | None, factor: float = 2.0) -> Cluster:
    """Return the cluster with ``factor`` times the bandwidth of a level's links, or of all; latencies stay.

    Links of single pairs count as links of the innermost level.
    """
    inner = cluster.levels[-1].name if cluster.levels else ""
    levels = tuple(
        replace(own, link=_faster(own.link, factor)) if level in (None, own.name) else own
        for own in cluster.levels
    )
    pairs = {
        pair: _faster(link, factor) if level in (None, inner) else link
        for pair, link in cluster.pairs.items()
    }
    where = "all" if level is None else level
    return replace(cluster, name=f"{cluster.name}, {where} links {factor:g}x", levels=levels, pairs=pairs)


def _faster(link: Link, factor: float) -> Link:
    return replace(
        link,
        name=f"{factor:g}x {link.name}",
        bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * factor,
        source=f"{factor:g} times: {link.source}",
    )


def _bandwidths(cluster: Cluster) -> tuple[Change, ...]:
    refusal = ""
    if has_local_links(cluster):
        refusal = (
            "this machine's links are timed, and it has no faster ones to time; describe a cluster with "
            "faster ones in a file, and explore with --cluster FILE"
        )
    listed = [
        Change(f"{_BANDWIDTH}:{name}", f"twice the bandwidth of the {words}", "latencies stay", refusal)
        for name, words in link_titles(cluster).items()
    ]
    if len(listed) > 1:
        listed.append(
            Change(f"{_BANDWIDTH}:{ALL}", "twice the bandwidth of all links", "latencies stay", refusal)
        )
    return tuple(listed)


# -- dtype ----------------------------------------------------------------------------------------------


def _dtype(exploration: Exploration) -> Change:
    dtype = str(exploration.settings.get("dtype", "float32"))
    refusal = f"it computes in {dtype} already" if dtype == _DTYPE else ""
    return Change(_DTYPE, "computing in bfloat16", "float32 master weights and optimizer state", refusal)


# -- micro-batches --------------------------------------------------------------------------------------


def searched_counts(exploration: Exploration) -> tuple[int, ...]:
    """Return the micro-batch counts that were searched; for a pipeline, the counts for each of its places."""
    settings = Settings.from_dict(exploration.settings)
    return _counts(exploration, settings)


def _counts(exploration: Exploration, settings: Settings) -> tuple[int, ...]:
    refusal = str(exploration.report.get("micro_batches_refused") or "")
    return micro_batch_counts(Problem(None, recorded_of(exploration).grouped, {}, refusal), settings)


def _micro_batches(exploration: Exploration, index: int) -> Change:
    """Return the change to twice the micro-batches of a point."""
    space = exploration.spaces[exploration.all_points[index].space]
    count = 2 * space.micro_batches
    # An exploration takes counts for each place, see session/pipelines.py.
    places = 1 if _pinned(exploration) else space.mesh.places
    if count % places:
        return Change(
            _MICRO_BATCHES,
            f"{count} micro-batches",
            refusal=f"a pipeline on {places} groups of devices takes multiples of {places}",
        )
    return _with_count(exploration, count // places, places)


def _pinned(exploration: Exploration) -> bool:
    constraints = Settings.from_dict(exploration.settings).constraints
    return constraints is not None and constraints.pipeline is not None


def _with_count(exploration: Exploration, count: int, places: int = 1) -> Change:
    """Return the change that adds so many micro-batches (for each place of a pipeline) to the searched
    counts."""
    key, title = f"{_MICRO_BATCHES}:{count}", f"{count * places} micro-batches"
    remark = "" if places == 1 else f"{count} for each of {places} groups of devices"
    try:
        if places > 1:
            # That the count for each place was searched does not mean that the total was.
            _counts(exploration, _with_micro_batches(exploration, count * places))
        if count in searched_counts(exploration):
            return Change(key, title, remark, _SEARCHED)
        if exploration.settings.get("mode") == "inference":
            return Change(key, title, remark, "inference has one micro-batch")
        _counts(exploration, _with_micro_batches(exploration, count))
    except TensorOptError as error:
        return Change(key, title, remark, str(error))
    return Change(key, title, remark or f"beside {', '.join(map(str, searched_counts(exploration)))}")


def _with_micro_batches(exploration: Exploration, count: int) -> Settings:
    return replace(Settings.from_dict(exploration.settings), micro_batches=(count,))


def was_searched(change: Change) -> bool:
    """Return whether a change is refused because the frontier already has its answer."""
    return change.key.startswith(_MICRO_BATCHES) and change.refusal == _SEARCHED


# -- devices --------------------------------------------------------------------------------------------


def _devices(cluster: Cluster) -> Change:
    key, title = f"{_DEVICES}:{2 * cluster.device_count}", f"{2 * cluster.device_count} devices"
    if has_local_links(cluster):
        return Change(key, title, refusal="the devices are this machine's, which has no more to time")
    try:
        larger = twice_the_devices(cluster)
    except ClusterError as error:
        return Change(key, title, refusal=str(error))
    outer = larger.levels[0]
    return Change(
        key,
        title,
        f"the same global batch on {larger.name}: {outer.name} x{outer.size} over {outer.link.name}",
    )


def twice_the_devices(cluster: Cluster) -> Cluster:
    """Return a cluster of twice as many devices: a larger part of the preset, twice the nodes, or a wider
    level.

    Raises:
        ClusterError: nothing says how more devices would be connected.
    """
    wanted = 2 * cluster.device_count
    base, _, _ = cluster.name.partition("[")
    family = re.fullmatch(r"(.+)x([0-9]{1,4})", base)
    wider = f"{family[1]}x{2 * int(family[2])}" if family else f"{base}x2"
    for name in (base, wider):
        with suppress(ClusterError):
            whole = load_cluster(name)
            if whole.subset(cluster.device_count).fingerprint == cluster.fingerprint:
                return whole.subset(wanted)
    if not cluster.levels or cluster.pairs or len(cluster.device_kinds) > 1:
        raise ClusterError(
            "it is unknown how twice as many devices would be connected in a cluster with "
            + (
                "a single device"
                if not cluster.levels
                else "links of single pairs"
                if cluster.pairs
                else "several kinds of devices"
            )
            + "; describe it in a file, and explore with --cluster FILE"
        )
    outer, *inner = cluster.levels
    return replace(
        cluster,
        name=f"{wanted} x {cluster.device.name}",
        devices=cluster.devices * 2,
        levels=(replace(outer, size=2 * outer.size), *inner),
    )

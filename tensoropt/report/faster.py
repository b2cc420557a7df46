"""Changes that would make a plan faster, found by simulating the plan again with one changed cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tensoropt.cluster import Cluster, Link
from tensoropt.exploration.exploration import Exploration
from tensoropt.profiling.link_fits import LinkFit
from tensoropt.profiling.links import LinkFits
from tensoropt.report.detail import recorded_of
from tensoropt.report.rebuilt import Rebuilt, rebuilt

_LEAST = 0.005
"""The least gain, as a share of the step, that is mentioned."""


@dataclass(frozen=True)
class Faster:
    """The step time of a plan if one cost were lower.

    Attributes:
        title: the change in words.
        time_s: duration of the same plan's step in seconds; a new search might find a better plan.
    """

    title: str
    time_s: float


def what_is_faster(exploration: Exploration, index: int) -> tuple[Faster, ...]:
    """Return the step times of point ``index`` of ``all_points`` at lower costs, the shortest first.

    The costs are links of twice the bandwidth, kernels of half the duration, and a host that launches kernels
    at once. Changes that shorten the step by less than 0.5 % are left out.

    Raises:
        TensorOptError: the exploration was saved without its costs.
    """
    plan = rebuilt(exploration, index, recorded_of(exploration))
    before_s = exploration.all_points[index].time_s
    gains = (one for one in _changed(plan) if one.time_s < before_s * (1 - _LEAST))
    return tuple(sorted(gains, key=lambda one: one.time_s))


def _changed(plan: Rebuilt) -> Iterator[Faster]:
    if any(fits.collectives or fits.pairs for fits in plan.recorded.links.values()):
        links = {mesh: _timed_twice_as_fast(fits) for mesh, fits in plan.recorded.links.items()}
        seconds = plan.simulated(recorded=replace(plan.recorded, links=links)).time_s
        yield Faster("links of twice the bandwidth", seconds)
    elif plan.cluster.levels or plan.cluster.pairs:
        seconds = plan.simulated(cluster=_with_faster_links(plan.cluster)).time_s
        yield Faster("links of twice the bandwidth", seconds)
    halved = plan.recorded.changed(
        lambda _, work: replace(
            work, forward_s=work.forward_s / 2, backward_s=work.backward_s / 2,
            weight_gradient_s=work.weight_gradient_s / 2,
        )
    )  # fmt: skip
    yield Faster("kernels of half the duration", plan.simulated(recorded=halved).time_s)
    at_once = plan.recorded.changed(
        lambda _, work: replace(work, forward_host_s=0.0, backward_host_s=0.0),
        lambda overheads: replace(overheads, of_host=None),
    )
    title = "a host that launches kernels at once (CUDA graphs, fewer and larger operators)"
    yield Faster(title, plan.simulated(recorded=at_once).time_s)


def _timed_twice_as_fast(fits: LinkFits) -> LinkFits:
    def faster(fit: LinkFit) -> LinkFit:
        halved = (replace(s, seconds_per_byte=s.seconds_per_byte / 2) for s in fit.segments)
        return replace(fit, segments=tuple(halved))

    collectives = {key: tuple(map(faster, group)) for key, group in fits.collectives.items()}
    return replace(fits, collectives=collectives, pairs={key: faster(fit) for key, fit in fits.pairs.items()})


def _with_faster_links(cluster: Cluster) -> Cluster:
    def faster(link: Link) -> Link:
        return replace(link, bandwidth_bytes_per_s=2 * link.bandwidth_bytes_per_s)

    return replace(
        cluster,
        levels=tuple(replace(level, link=faster(level.link)) for level in cluster.levels),
        pairs={pair: faster(link) for pair, link in cluster.pairs.items()},
    )

"""The gains from changes of a plan: looked up on the frontier, or the same plan simulated under changed
costs."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from typing import Any

from tensoropt.cluster import slowest
from tensoropt.costs.compute import call_class, peak_flops
from tensoropt.costs.prices import FREE_COMMUNICATION
from tensoropt.exploration.exploration import Exploration
from tensoropt.plan.recorded import Recorded, RecordedWork
from tensoropt.profiling.link_fits import LinkFit
from tensoropt.profiling.links import LinkFits
from tensoropt.ranks.kernel_settings import KernelSettings
from tensoropt.report.changes import ALL, link_titles, with_faster_links
from tensoropt.report.detail import recorded_of
from tensoropt.report.rebuilt import Rebuilt, rebuilt
from tensoropt.report.step_parts import Computed, kind_of, summed, titles
from tensoropt.units import format_bytes, format_seconds

GIB = 2.0**30
_SMALL = 4 * GIB
"""The memory below which the gain from a tenth of a plan's memory is shown, too: 1 GiB is its whole
frontier."""
LOOKED_UP, SIMULATED, BOUND, EXPLORED = "looked up", "simulated", "bound", "explored"
TO_EXPLORE, IMPOSSIBLE = "to explore", "not possible"
OF_SIMULATED = (
    "simulated: the same plan under changed prices; a search under these prices may find a better one"
)
"""The remark that applies to all simulated levers."""


@dataclass(frozen=True)
class Lever:
    """A change and what it gains.

    Attributes:
        key: the name of the change.
        title: the change in words.
        how: where the answer comes from: one of ``looked up``, ``simulated``, ``bound``, ``explored``, ``to
            explore``, ``not possible``.
        time_s, memory_bytes: those of the plan that answers, and what it needs; None if there is none.
        index: that plan's place in ``points`` of the exploration that has it (another exploration if ``how``
            is ``explored``); None if it is this very plan, or a bound.
        words: what was kept fixed, what was computed, or why there is no answer.
        command: the command that explores it, if that is still to be done.
    """

    key: str
    title: str
    how: str
    time_s: float | None = None
    memory_bytes: float | None = None
    index: int | None = None
    words: str = ""
    command: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain data, the plan by its point's number."""
        fields = asdict(self)
        index = fields.pop("index")
        return {**fields, "point": None if index is None else index + 1}


# -- looked up ------------------------------------------------------------------------------------------


def memory_levers(exploration: Exploration, memory_bytes: float) -> tuple[Lever, ...]:
    """Return what more memory than a budget gains, and what less of it costs: points of the frontier."""
    steps = [GIB]
    if memory_bytes < _SMALL:
        steps.insert(0, 0.1 * memory_bytes)
    levers = []
    for step in steps:
        words = "10 %" if step != GIB else "1 GiB"
        for sign, size in (("+", step), ("−", -step)):
            levers.append(_with_memory(exploration, f"{sign}{words} of memory", memory_bytes, size))
    return tuple(levers)


def _with_memory(exploration: Exploration, title: str, memory_bytes: float, more: float) -> Lever:
    points, budget = exploration.points, memory_bytes + more
    key = f"memory:{more:+.0f}"
    fastest = exploration.fastest_within(budget)
    if fastest is None:
        leanest = format_bytes(float(exploration.needs[: len(points)].min()))
        words = f"no plan needs so little: the leanest takes {leanest}"
        return Lever(key, title, LOOKED_UP, words=words)
    best, needs = points[fastest], float(exploration.needs[fastest])
    words = f"the frontier's fastest within {format_bytes(budget)}"
    if needs <= memory_bytes and more > 0:
        words = "no faster plan needs only that much more"
        if best is points[-1]:
            words = "the frontier has no faster plan, whatever its memory"
    if needs > exploration.device_bytes:
        words += f", more than the {format_bytes(exploration.device_bytes)} of a device"
    return Lever(key, title, LOOKED_UP, best.time_s, needs, fastest, words)


def unlimited_memory(exploration: Exploration) -> Lever:
    """Return the frontier's fastest point: the time if memory were unlimited."""
    last = len(exploration.points) - 1
    point = exploration.points[last]
    words = "the frontier's fastest: no plan that was searched and simulated takes less, whatever it needs"
    needs = float(exploration.needs[last])
    return Lever("memory:unlimited", "memory unlimited", BOUND, point.time_s, needs, last, words)


def without_waiting(exploration: Exploration, index: int) -> Lever:
    """Return the computation of the busiest device of a placed plan or a pipeline: no schedule takes less."""
    point = exploration.all_points[index]
    return Lever("waiting:none", "no waiting, no idle time", BOUND, point.compute_s, words=point.kind.bound)


def searched_micro_batches(exploration: Exploration, count: int, memory_bytes: float, title: str) -> Lever:
    """Return the frontier's fastest point with so many micro-batches within a budget, if they were
    searched."""
    key = f"micro-batches:{count}"
    fitting = [
        i
        for i in exploration.within(memory_bytes).tolist()
        if exploration.spaces[exploration.points[i].space].micro_batches == count
    ]
    if not fitting:
        words = "already searched: none of the frontier's plans within the budget has so many"
        return Lever(key, title, LOOKED_UP, words=words)
    best, needs = exploration.points[fitting[-1]], float(exploration.needs[fitting[-1]])
    words = f"searched already: the frontier's fastest with so many within {format_bytes(memory_bytes)}"
    return Lever(key, title, LOOKED_UP, best.time_s, needs, fitting[-1], words)


_LEAST_GAIN = 1e-6
"""A smaller gain, as a share of a step, is none: sums of seconds round."""


# -- simulated again ------------------------------------------------------------------------------------


def simulated_levers(exploration: Exploration, index: int) -> tuple[tuple[Lever, ...], tuple[Lever, ...]]:
    """Return (bounds, gains) of a point, by simulating its very plan under changed costs.

    Raises:
        TensorOptError: its costs were not saved; the message says what to do.
    """
    point = exploration.all_points[index]
    plan = rebuilt(exploration, index, recorded_of(exploration))
    bounds = (_without_communication(plan), _at_the_peak(plan))
    return bounds, (*_faster_links(plan), *_faster_kernels(plan), *_faster_host(plan, point.time_s))


def _without_communication(plan: Rebuilt) -> Lever:
    time_s = plan.simulated(communication=FREE_COMMUNICATION).time_s
    words = (
        "the same plan, simulated with collectives and messages that take no time; copies around them are "
        "counted"
    )
    return Lever("communication:free", "communication free", BOUND, time_s, words=words)


def plan_flops(plan: Rebuilt) -> dict[int, dict[tuple[str, Any], float]]:
    """Return the FLOP of one device of each place and one step by (dtype, class of operator), recomputation
    included."""
    flops: dict[int, dict[tuple[str, Any], float]] = defaultdict(lambda: defaultdict(float))
    strategy = plan.plan.strategy
    micro, training = strategy.micro_batches, strategy.graph.atoms.graph.training
    for each in plan.works():
        facts = plan.recorded_work(each).facts
        backward_flops = facts.backward_flops if training else 0.0
        total = micro * (each.forwards * facts.forward_flops + backward_flops)
        # A group is its anchor and what goes with it, which is negligible beside it.
        flops[each.place][each.work.dtype, call_class(each.work.calls[0][0])] += total
    return {place: dict(of_place) for place, of_place in flops.items()}


def _at_the_peak(plan: Rebuilt) -> Lever:
    """Return the bound by the plan's FLOP at the peak of the slowest device of the busiest place."""
    kernels = KernelSettings.now().of(plan.cluster.device_type)
    kinds = {each.place: each.kinds for each in plan.works()}
    bounds = []
    for place, flops in plan_flops(plan).items():
        device = slowest(kinds[place])
        peaks: dict[str, float] = {}
        for (dtype, cls), number in flops.items():
            if number:
                # The largest peak of a dtype for all of its operators: a bound must not exceed what is
                # reached.
                peaks[dtype] = max(peaks.get(dtype, 0.0), peak_flops(device, kernels, dtype, cls))
        # Without FLOP nothing has a peak.
        counted = [(dtype, number) for (dtype, _), number in flops.items() if number]
        seconds = sum(number / peaks[dtype] for dtype, number in counted)
        bounds.append((seconds, sum(number for _, number in counted), device, peaks))
    seconds, total, device, peaks = max(bounds, key=lambda bound: bound[0])
    rates = ", ".join(f"{_flop_words(peak)}/s in {dtype}" for dtype, peak in peaks.items())
    which = "one device" if len(bounds) == 1 else "the device that computes most"
    words = f"the {_flop_words(total)} of {which}, recomputation included, at {device.name}'s {rates}"
    return Lever("compute:peak", "computation at the peak", BOUND, seconds, words=words)


def _flop_words(number: float) -> str:
    for unit, factor in (("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6)):
        if number >= factor:
            return f"{number / factor:.3g} {unit}"
    return f"{number:,.0f} FLOP"


def _faster_links(plan: Rebuilt) -> list[Lever]:
    """Return the levers of twice the bandwidth for each level's links, and for all."""
    titles = link_titles(plan.cluster)
    timed = any(fits.collectives or fits.pairs for fits in plan.recorded.links.values())
    levels: list[str | None] = [None] if timed else [*titles, *([None] if len(titles) > 1 else [])]
    if not titles:
        return []
    levers = []
    for level in levels:
        which = "all links" if level is None and len(titles) > 1 else f"the {titles[level or min(titles)]}"
        words = ""
        if timed:
            recorded = replace(
                plan.recorded,
                links={mesh: _twice_as_fast(fits) for mesh, fits in plan.recorded.links.items()},
            )
            time_s = plan.simulated(recorded=recorded).time_s
            words = "the seconds per byte of timed links are halved; latencies stay"
        else:
            time_s = plan.simulated(cluster=with_faster_links(plan.cluster, level)).time_s
        key = f"bandwidth:{level or ALL}"
        levers.append(Lever(key, f"twice the bandwidth of {which}", SIMULATED, time_s, words=words))
    return levers


def _twice_as_fast(fits: LinkFits) -> LinkFits:
    def faster(fit: LinkFit) -> LinkFit:
        halved = (replace(s, seconds_per_byte=s.seconds_per_byte / 2) for s in fit.segments)
        return replace(fit, segments=tuple(halved))

    return replace(
        fits,
        collectives={key: tuple(map(faster, group)) for key, group in fits.collectives.items()},
        pairs={key: faster(fit) for key, fit in fits.pairs.items()},
    )


def _faster_kernels(plan: Rebuilt) -> list[Lever]:
    """Return the levers of twice the speed for the operators that take longest on the busiest device, by
    module and kind, and for all of them."""
    works, computed = plan.works(), dict[int, list[tuple[str, Computed]]]()
    for each in works:
        seconds, anchor = plan.recorded_work(each), each.group.anchor
        seconds_of_both = each.forwards * seconds.forward_s + seconds.backward_s
        took = Computed(anchor.module, kind_of(anchor.target), seconds_of_both)
        computed.setdefault(each.place, []).append((each.work.key, took))
    # Named as among the parts of the step, which are those of the busiest device.
    busiest = max(computed.values(), key=lambda at: sum(took.seconds for _, took in at), default=[])
    if not (parts := summed(took for _, took in busiest)):
        return []
    title, rows, _ = parts[0]
    timed = [(key, took) for key, took in busiest if took.seconds > 0]
    named = zip(timed, titles([took for _, took in timed]), strict=True)
    own = [key for (key, _), its in named if its == title]
    # Groups that compute the very same elsewhere run the same kernels.
    others = sum(each.work.key in own for each in works) - len(rows)
    title += f" and {others} alike" if others > 0 else ""
    top = plan.recorded.changed(lambda key, work: _halved(work, key in own))
    every = plan.recorded.changed(lambda _, work: _halved(work, True))
    words = "the optimizer and copies as they are"
    return [
        _simulated("kernel:top", f"kernels twice as fast for {title}", plan, top),
        _simulated("kernel:all", "all kernels twice as fast", plan, every, words),
    ]


def _simulated(key: str, title: str, plan: Rebuilt, recorded: Recorded, words: str = "") -> Lever:
    return Lever(key, title, SIMULATED, plan.simulated(recorded=recorded).time_s, words=words)


def _halved(work: RecordedWork, halve: bool) -> RecordedWork:
    if not halve:
        return work
    return replace(
        work,
        forward_s=work.forward_s / 2,
        backward_s=work.backward_s / 2,
        weight_gradient_s=work.weight_gradient_s / 2,
    )


def _faster_host(plan: Rebuilt, time_s: float) -> list[Lever]:
    """Return the lever of a host that issues at once, if the plan gains from it."""
    quick = plan.recorded.changed(
        lambda _, work: replace(work, forward_host_s=0.0, backward_host_s=0.0),
        lambda overheads: replace(overheads, of_host=None),
    )
    words = "as with CUDA graphs, or with fewer and larger operators"
    lever = _simulated("host:free", "a host that issues at once", plan, quick, words)
    assert lever.time_s is not None
    return [lever] if lever.time_s < time_s * (1 - _LEAST_GAIN) else []


# -- explored -------------------------------------------------------------------------------------------


def explored_lever(
    key: str, title: str, changed: Exploration, memory_bytes: float, unchanged_s: float | None = None
) -> Lever:
    """Return what an exploration with a change found within a budget.

    Args:
        unchanged_s: seconds of the fastest plan within the budget without the change, if that is not the plan
            in question.
    """
    fastest = changed.fastest_within(memory_bytes)
    if fastest is None:
        words = (
            f"searched again: no plan fits {format_bytes(memory_bytes)}, the leanest needs "
            f"{format_bytes(float(changed.needs.min()))}"
        )
        return Lever(key, title, EXPLORED, words=words)
    best = changed.points[fastest]
    words = f"searched again: the fastest within {format_bytes(memory_bytes)}, all else as it was"
    if unchanged_s is not None:
        words += f"; without the change another plan takes {format_seconds(unchanged_s)} within it"
    needs = float(changed.needs[fastest])
    return Lever(key, title, EXPLORED, best.time_s, needs, fastest, words)


_MOVED = 0.01
"""The median change of seconds from which two explorations count as priced differently."""


def moved_words(before: Exploration, after: Exploration) -> str:
    """Say that pieces of work which both explorations know are priced differently in the second; "" if
    not."""
    if before.recorded is None or after.recorded is None:
        return ""
    old, new = before.recorded.compute.works, after.recorded.compute.works
    ratios = sorted(
        (new[key].forward_s + new[key].backward_s) / (work.forward_s + work.backward_s)
        for key, work in old.items()
        if key in new and work.forward_s + work.backward_s > 0
    )
    if not ratios or abs(ratios[len(ratios) // 2] - 1) < _MOVED:
        return ""
    return (
        f"computation is priced {100 * (ratios[len(ratios) // 2] - 1):+.0f} % today, in the median of "
        f"{len(ratios)} pieces of work that both know: part of the difference is that; `tensoropt recost` "
        "makes the exploration anew at the costs of now"
    )


def gain_words(before_s: float, lever: Lever) -> str:
    """Format a gain: ``−16 % (295 ms)``; "" without an answer."""
    if lever.time_s is None:
        return ""
    change = 100 * (lever.time_s / before_s - 1) if before_s else 0.0
    sign = "±0" if abs(change) < 0.05 else f"{change:+.1f}" if abs(change) < 9.95 else f"{change:+.0f}"
    return f"{sign.replace('-', '−')} %, {format_seconds(lever.time_s)}"

"""What a change would buy: looked up on the frontier, simulated, and explored."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tensoropt.cluster import load_cluster
from tensoropt.errors import TensorOptError
from tensoropt.plan.kinds import PIPELINED, PLACED, PlanKind
from tensoropt.plan.recorded import RecordedWork
from tensoropt.profiling.facts import Facts
from tensoropt.profiling.link_fits import LinkFit, Segment
from tensoropt.profiling.links import LinkFits
from tensoropt.report.detail import recorded_of
from tensoropt.report.levers import (
    GIB,
    Lever,
    explored_lever,
    gain_words,
    memory_levers,
    moved_words,
    plan_flops,
    searched_micro_batches,
    simulated_levers,
    unlimited_memory,
)
from tensoropt.report.rebuilt import rebuilt
from tests.plan.explorations import MIB, needing, small_exploration


def on_gpus(points: Any = None) -> Any:
    """The small exploration, or other points, on devices of 24 GiB."""
    found = replace(small_exploration(), cluster=load_cluster("rtx-4090[2]").to_dict())
    return found if points is None else replace(found, points=tuple(points))


def by_key(levers: tuple[Lever, ...]) -> dict[str, Lever]:
    return {lever.key: lever for lever in levers}


# -- looked up ------------------------------------------------------------------------------------


def test_memory_is_looked_up_on_the_frontier() -> None:
    found = on_gpus([needing(size * GIB, 1.0 / size, 24 * GIB) for size in (4, 5, 6, 30)])
    levers = by_key(memory_levers(found, 5 * GIB))
    assert len(levers) == 2
    more, less = levers[f"memory:{GIB:+.0f}"], levers[f"memory:{-GIB:+.0f}"]
    assert (more.index, more.time_s, more.memory_bytes) == (2, 1 / 6, 6 * GIB)
    assert (less.index, less.time_s) == (0, 0.25)
    beyond = memory_levers(found, 29.5 * GIB)[0]
    assert beyond.index == 3
    assert "more than the 24 GiB of a device" in beyond.words
    none = memory_levers(found, 4 * GIB)[1]
    assert (none.index, none.time_s) == (None, None)
    assert "the leanest takes 4 GiB" in none.words
    assert "no faster plan needs only that much more" in memory_levers(found, 6 * GIB)[0].words
    assert "whatever its memory" in memory_levers(found, 31 * GIB)[0].words


def test_small_plans_are_told_of_a_tenth_too() -> None:
    found = small_exploration()
    titles = [lever.title for lever in memory_levers(found, 20 * MIB)]
    assert titles == ["+10 % of memory", "−10 % of memory", "+1 GiB of memory", "−1 GiB of memory"]
    tenth = memory_levers(found, 11 * MIB)[0]
    assert tenth.index == 1  # 12 MiB, within 12.1


def test_unlimited_memory_is_the_fastest() -> None:
    lever = unlimited_memory(on_gpus())
    assert (lever.index, lever.time_s) == (3, 0.14)


def test_micro_batches_that_were_searched_are_looked_up() -> None:
    found = small_exploration()  # space 0 has 4 micro-batches, space 1 has 1
    assert searched_micro_batches(found, 4, 25 * MIB, "4").index == 2
    assert searched_micro_batches(found, 4, 15 * MIB, "4").index == 0
    assert searched_micro_batches(found, 1, 25 * MIB, "1").index == 1
    none = searched_micro_batches(found, 1, 11 * MIB, "1")
    assert none.time_s is None
    assert "none of the frontier's plans" in none.words


# -- simulated ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def communicating(gpus: Any) -> int:
    """The point that waits longest."""
    points = gpus.found.points
    return max(range(len(points)), key=lambda i: points[i].exposed_s)


def test_a_plan_at_other_prices(gpus: Any, communicating: int) -> None:
    one = gpus.found.points[communicating]
    bounds, levers = map(by_key, simulated_levers(gpus.found, communicating))
    free, peak = bounds["communication:free"], bounds["compute:peak"]
    assert free.time_s is not None
    assert peak.time_s is not None
    assert peak.time_s < one.compute_s
    assert free.time_s <= one.time_s
    # Without communication a step is its computation, or what the host takes to issue it.
    assert free.time_s >= max(one.compute_s * (1 - 0.2), one.host_s) * (1 - 1e-9)
    for lever in levers.values():
        assert lever.time_s is not None
        assert lever.time_s <= one.time_s * (1 + 1e-9), lever
    assert levers["kernel:all"].time_s <= levers["kernel:top"].time_s  # type: ignore[operator]
    if one.host_bound:
        assert levers["host:free"].time_s < one.time_s  # type: ignore[operator]


def test_faster_links_halve_the_part_of_a_collective_that_its_bytes_take(gpus: Any) -> None:
    found = rebuilt(gpus.found, 0, recorded_of(gpus.found))
    level = found.cluster.levels[-1].name
    from tensoropt.report.changes import with_faster_links

    mesh = found.plan.mesh
    plain, faster = (
        costs.communication(mesh)
        for costs in (found.costs(), found.costs(cluster=with_faster_links(found.cluster, level)))
    )
    axes, size = tuple(range(mesh.axis_count)), 1e9
    of = [links.time_s("all_gather", axes, size) for links in (plain, faster)]
    start = plain.time_s("all_gather", axes, 1e-9)
    assert of[1] - start == pytest.approx((of[0] - start) / 2)


def test_links_that_were_timed_are_halved_per_byte(gpus: Any, communicating: int) -> None:
    found, index = gpus.found, communicating
    recorded = recorded_of(found)
    space = found.spaces[found.points[index].space]
    mesh = rebuilt(found, index, recorded).plan.mesh
    from itertools import combinations

    kinds = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
    fits = {
        (kind, axes): tuple(
            LinkFit(kind=kind, group=group, residual=0.0,
                    segments=(Segment(alpha_s=0.0, seconds_per_byte=1e-6),))
            for group in mesh.groups(axes)
        )
        for kind in kinds
        for size in range(1, mesh.axis_count + 1)
        for axes in combinations(range(mesh.axis_count), size)
    }  # fmt: skip
    timed = replace(found, recorded=replace(recorded, links={space.mesh.label: LinkFits(collectives=fits)}))
    slow_s = rebuilt(timed, index, timed.recorded).simulated().time_s
    bounds, levers = map(by_key, simulated_levers(timed, index))
    faster = levers["bandwidth:all"]
    assert "seconds per byte of timed links are halved" in faster.words
    free_s = bounds["communication:free"].time_s
    assert free_s is not None
    assert slow_s > 10 * free_s  # communication is all that counts now
    assert faster.time_s == pytest.approx(slow_s / 2, rel=0.05)


def test_flops_count_what_is_computed_again(gpus: Any) -> None:
    found = gpus.found
    sums = {}
    for index, one in enumerate(found.points):
        again = bool(found.spaces[one.space].recomputed(one.choice))
        (of_place,) = plan_flops(rebuilt(found, index, recorded_of(found))).values()
        flops = sum(of_place.values())
        sums.setdefault(again, []).append(flops)
    assert all(flops > 0 for of in sums.values() for flops in of)
    if len(sums) == 2:
        assert max(sums[True]) > min(sums[False])


@pytest.mark.parametrize("kind", [PIPELINED, PLACED], ids=lambda kind: kind.name)
def test_every_kind_of_plan_is_simulated_at_other_prices(staged: Any, kind: PlanKind) -> None:
    found = staged[kind.name]
    for index, one in enumerate(found.points):
        if one.kind is not kind:
            continue
        bounds, levers = map(by_key, simulated_levers(found, index))
        free, peak = bounds["communication:free"], bounds["compute:peak"]
        assert 0 < peak.time_s < one.compute_s
        assert one.compute_s * 0.8 <= free.time_s <= one.time_s
        assert levers["bandwidth:gpu"].time_s <= one.time_s
        # A host that holds the step up does not issue it any sooner.
        for lever in (free, levers["bandwidth:gpu"]):
            assert one.host_bound or lever.time_s < one.time_s
        assert levers.keys() >= {"bandwidth:gpu", "kernel:top", "kernel:all", "host:free"}
        assert levers["host:free"].time_s < one.time_s
        assert "of the device that computes most" in peak.words


def test_without_saved_costs_nothing_is_simulated(staged: Any) -> None:
    with pytest.raises(TensorOptError, match="saved without its operator graph"):
        simulated_levers(on_gpus(), 0)
    found = staged[PLACED.name]
    recorded = recorded_of(found)
    older = recorded.changed(lambda key, work: work)
    whole = replace(older.whole, compute=replace(older.compute, works={}))
    with pytest.raises(TensorOptError, match="were not saved, or are of another version; explore again"):
        simulated_levers(replace(found, recorded=replace(older, whole=whole)), len(found.points) - 1)


# -- explored -------------------------------------------------------------------------------------


def test_an_exploration_answers_within_the_budget() -> None:
    found = small_exploration()
    lever = explored_lever("bfloat16", "t", found, 15 * MIB)
    assert (lever.how, lever.index, lever.time_s) == ("explored", 1, 0.2)
    assert "without the change" not in lever.words
    assert "another plan takes 300 ms" in explored_lever("k", "t", found, 15 * MIB, 0.3).words
    none = explored_lever("bfloat16", "t", found, 5 * MIB)
    assert none.time_s is None
    assert "no plan fits 5 MiB, the leanest needs 10 MiB" in none.words


def test_other_prices_than_then_are_said(gpus: Any) -> None:
    found = gpus.found
    recorded = recorded_of(found)
    works = recorded.compute.works
    assert moved_words(found, found) == ""

    def slower(share: float) -> Any:
        changed = {
            key: replace(work, forward_s=work.forward_s * share, backward_s=work.backward_s * share)
            for key, work in works.items()
        }
        return with_works(changed)

    def with_works(changed: Any) -> Any:
        whole = replace(recorded.whole, compute=replace(recorded.compute, works=changed))
        return replace(found, recorded=replace(recorded, whole=whole))

    assert "priced +10 % today" in moved_words(found, slower(1.1))
    assert moved_words(found, slower(1.005)) == ""
    other = {"another": RecordedWork(next(iter(works.values())).facts, 1.0, 1.0, "measured")}
    assert moved_words(found, with_works(other)) == ""
    assert moved_words(found, replace(found, recorded=None)) == ""
    assert isinstance(next(iter(works.values())).facts, Facts)


@pytest.mark.parametrize(
    ("time_s", "words"),
    [(0.5, "−50 %, 500 ms"), (1.0, "±0 %, 1 s"), (0.95, "−5.0 %, 950 ms"), (1.2, "+20 %, 1.2 s"), (None, "")],
)
def test_gains_in_words(time_s: float | None, words: str) -> None:
    assert gain_words(1.0, Lever("k", "t", "looked up", time_s)) == words

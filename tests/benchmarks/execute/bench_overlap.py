"""Whether gloo hides collectives behind computation on CPU ranks. Not a test.

    python -m tests.benchmarks.execute.bench_overlap [--quick]

Two CPU ranks of this machine over gloo, one thread each, each pinned to a core, as plans are run here. Four
ways in turn, for every collective, size and amount of work: matrix products alone, the collective alone, the
collective and then the products, the collective begun (``async_op``), the products, and then the wait for it.
A round's figure is its slower rank's. Of each round the *hidden share* is what beginning first saved of what
it could have saved at most: (one after the other - begun first) / min(products, collective). It is 1 where
the shorter of the two costs nothing, 0 where nothing is hidden, and below 0 where the two disturb each other.
Results: tests/benchmarks/results/execute/DATE-overlap.{json,md}; ``--quick``: two sizes, into out/execute.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tensoropt.ranks.pool import RankPool
from tests.benchmarks.execute.bench_step import in_turns, slower
from tests.benchmarks.machine import Results, described, rows_described

RANKS = 2
ROUNDS = 31
SIZES = (2**16, 2**20, 2**23, 2**25)
"""Bytes of what is reduced or gathered, whole."""
QUICK_SIZES = SIZES[:2]
WORKS = (1, 4)
"""So many times as long as the collective alone the products are to take, as in a calibration before."""
SIDE = 192
"""Of the matrices; three of them fit into a core's second cache, as the blocks of larger products do."""
CALIBRATIONS = 7

Issue = Callable[[], Any]
"""Begins a collective; what it gives is waited for."""


def collectives(count: int, world: int) -> dict[str, Issue]:
    """Each kind over ``count`` floats, whole."""
    # Zeros that were written: values that are summed up a hundred times stay what they are.
    whole, part = torch.full((count,), 0.0), torch.full((count // world,), 0.0)
    return {
        "all_reduce": lambda: dist.all_reduce(whole, async_op=True),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part, async_op=True),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, async_op=True),
    }


def on_ranks(rank: int, world: int, size: int, rounds: int) -> dict[tuple[str, int], dict[str, list[float]]]:
    """Seconds per round of the four ways, by kind of collective and amount of work."""
    found = {}
    for kind, issue in collectives(size // 4, world).items():
        collective_s, product_s = _seconds(lambda issue=issue: issue().wait()), _seconds(products(1))
        for work in WORKS:
            compute = products(max(1, round(work * collective_s / product_s)))
            found[kind, work] = in_turns(ways(issue, compute), rounds, slower)
    return found


def products(count: int) -> Callable[[], None]:
    """So many products, one after the other."""
    left, right, result = (torch.rand(SIDE, SIDE) for _ in range(3))

    def compute() -> None:
        for _ in range(count):
            torch.mm(left, right, out=result)

    return compute


def ways(issue: Issue, compute: Callable[[], None]) -> dict[str, Callable[[], None]]:
    def collective() -> None:
        issue().wait()

    def one_after_the_other() -> None:
        issue().wait()
        compute()

    def begun_first() -> None:
        under_way = issue()
        compute()
        under_way.wait()

    return {
        "products": compute,
        "collective": collective,
        "one after the other": one_after_the_other,
        "begun first": begun_first,
    }


def _seconds(work: Callable[[], None]) -> float:
    """The median of a few runs, on the slower rank: the same on both."""
    times = []
    for _ in range(CALIBRATIONS):
        dist.barrier()
        start = time.perf_counter()
        work()
        times.append(slower(time.perf_counter() - start))
    return statistics.median(times)


def row(kind: str, size: int, work: int, times: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Medians in seconds, and the hidden share with its quartiles."""
    shares = [
        (after - first) / min(compute, collective)
        for compute, collective, after, first in zip(*times.values(), strict=True)
    ]
    return {
        "case": f"{kind} of {size / 2**20:g} MiB, work {work}",
        "kind": kind,
        "bytes": size,
        "work": work,
        "seconds": {way: statistics.median(taken) for way, taken in times.items()},
        "quartiles_s": {way: statistics.quantiles(taken, n=4) for way, taken in times.items()},
        "hidden_share": statistics.median(shares),
        "hidden_share_quartiles": statistics.quantiles(shares, n=4),
        "rounds": len(shares),
    }


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Over all rows: the hidden shares' median, least and most, and in how many of them the lower quartile
    is above 0, so that something is hidden for certain."""
    shares = [one["hidden_share"] for one in rows]
    return {
        "median": statistics.median(shares),
        "least": min(shares),
        "most": max(shares),
        "certain": sum(one["hidden_share_quartiles"][0] > 0 for one in rows),
        "disturbed": sum(one["hidden_share_quartiles"][2] < 0 for one in rows),
    }


def sentence(rows: Sequence[Mapping[str, Any]]) -> str:
    """What was found, of large and of small collectives."""
    parts = []
    for words, of in (
        ("of at least 1 MiB", [one for one in rows if one["bytes"] >= 2**20]),
        ("smaller than that", [one for one in rows if one["bytes"] < 2**20]),
    ):
        if of:
            found = summary(of)
            parts.append(
                f"of collectives {words}, the median of the hidden shares is {found['median']:.2f} (from "
                f"{found['least']:.2f} to {found['most']:.2f}; of {len(of)} cases the lower quartile is above"
                f" 0 in {found['certain']:.0f}, the upper one below 0 in {found['disturbed']:.0f})"
            )
    return f"On {RANKS} CPU ranks with a core each, {'; '.join(parts)}."


def markdown(results: dict[str, Any]) -> str:
    rows = results["rows"]
    head = [
        "collective",
        "MiB",
        "products",
        "collective",
        "one after the other",
        "begun first",
        "hidden share",
    ]
    lines = [
        f"# Collectives beside computation on {RANKS} CPU ranks, {results['date']}",
        "",
        f"Taken from {described(results)}.",
        "",
        sentence(rows),
        "",
        "Milliseconds (medians). Hidden share: (one after the other - begun first) / min(products, "
        "collective) of each round, the median and in brackets the quartiles.",
        "",
        "| " + " | ".join(head) + " |",
        "|" + " --- |" * len(head),
    ]
    for one in rows:
        low, _, high = one["hidden_share_quartiles"]
        cells = [one["kind"], f"{one['bytes'] / 2**20:g}"]
        cells += [f"{1e3 * seconds:.2f}" for seconds in one["seconds"].values()]
        cells.append(f"{one['hidden_share']:.2f} ({low:.2f} to {high:.2f})")
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "Each row was taken from:", "", *rows_described(rows, "case")]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two sizes, few rounds, results in out/execute")
    quick = parser.parse_args().quick
    results = Results("execute", "overlap", {}, quick=quick)
    with RankPool(RANKS, timeout_s=400.0) as pool:
        assert pool.pinned, "on fewer cores than ranks nothing could be said"
        for size in QUICK_SIZES if quick else SIZES:
            for (kind, work), times in pool.run(on_ranks, size, 3 if quick else ROUNDS)[0].items():
                results.add("case", row(kind, size, work, times))
            results.write(markdown(results.data))
    print(markdown(results.data))


if __name__ == "__main__":
    main()

"""What the search costs, against the published methods. Not a test.

    python -m tests.benchmarks.search.bench_search [--quick]

All methods run in this process on the same cost tables, after a warm-up
(:mod:`tests.benchmarks.search.published`). Results: tests/benchmarks/results/search/DATE-search.{json,md},
those of ``--quick`` in out/search.
"""

from __future__ import annotations

from tensoropt.search import track_frontier
from tests.benchmarks.machine import Taking, dated, described, part_described, write
from tests.benchmarks.program import arguments, page
from tests.benchmarks.search.graphs import rnn
from tests.benchmarks.search.published import PLAIN_MESH, published, told


def main() -> None:
    options = arguments(__doc__, "tiny sizes, to see that it works").parse_args()
    stem, taking = dated("search", "search", quick=options.quick), Taking()
    track_frontier(rnn(2, PLAIN_MESH))  # compile or load the kernels
    rows = published(options.quick)
    data = {**taking.about, "published": rows, "taken": {"published": taking.part()}}
    taken = f"Taken: {part_described(data['taken']['published'])}."
    write(stem, data, page(f"# Search, {data['date']}", f"Taken from {described(data)}.", taken, told(rows)))
    print(f"written to {stem}.json and .md", flush=True)


if __name__ == "__main__":
    main()

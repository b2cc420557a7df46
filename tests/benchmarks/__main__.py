"""Every benchmark, one after the other, each in a process of its own: what ``make bench`` runs.

    python -m tests.benchmarks [--quick] [NAME ...]

What fails is said at the end; the others run all the same. All results of one call are of one commit: where
the working tree changes meanwhile, what is left is not run. They measure into a profile store of their own:
what a person's store knows may have been timed while the machine was busy. Then the pages' figures are
written anew from the newest results, unless ``--quick`` keeps results apart.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence

from tests.benchmarks.machine import commit, named

PROGRAMS = {
    "demo": "tests.benchmarks.demo.bench_demo",
    "search": "tests.benchmarks.search.bench_search",
    "fidelity": "tests.benchmarks.fidelity.bench_fidelity",
    "step": "tests.benchmarks.execute.bench_step",
    "figure6": "tests.benchmarks.papers.figure6",
    "scale": "tests.benchmarks.papers.scale",
    "placing": "tests.benchmarks.papers.placing",
    "netsplit": "tests.benchmarks.papers.netsplit",
}
"""In this order; each takes --quick. What each shows: tests/benchmarks/README.md."""
BY_NAME = {
    "memory": "tests.benchmarks.fidelity.bench_memory",
    "explore": "tests.benchmarks.explore.bench_explore",
}
"""Run only when named: it times nothing, or takes hours."""


def main() -> int:
    programs = PROGRAMS | BY_NAME
    known = ", ".join(programs)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {known}; default: all but {', '.join(BY_NAME)}")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that they work")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in programs]:
        parser.error(f"unknown benchmark {unknown[0]!r}; choose from {known}")
    with tempfile.TemporaryDirectory() as store:
        failed = _run(options.names or list(PROGRAMS), programs, options.quick, store)
    if not options.quick:
        subprocess.run([sys.executable, "-m", "tests.docs.figures"], check=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _run(names: Sequence[str], programs: Mapping[str, str], quick: bool, store: str) -> list[str]:
    """What failed of the programs of these names, or was not run; ``store``: the profile store's folder."""
    failed, at_start = [], commit()
    for name in names:
        if commit() != at_start:
            failed.append(f"{name} and what comes after it, as {named(at_start)} became {named(commit())}")
            break
        print(f"== {name}", flush=True)
        begun = time.perf_counter()
        command = [sys.executable, "-m", programs[name], *(["--quick"] if quick else [])]
        if subprocess.run(command, check=False, env={**os.environ, "TENSOROPT_CACHE": store}).returncode:
            failed.append(name)
        print(f"== {name}: {time.perf_counter() - begun:.0f} s", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())

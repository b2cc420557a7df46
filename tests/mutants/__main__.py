"""``python -m tests.mutants``: change the source in one place at a time and see whether a test notices."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tests.benchmarks.machine import Taking
from tests.mutants.mutant import Mutant
from tests.mutants.report import decisions, write_report
from tests.mutants.sample import generated, handmade, sampled
from tests.mutants.sweep import STATE, Known, Record, sweep
from tests.mutants.targets import TARGETS, Target

QUICK = 5


def main(arguments: Sequence[str] | None = None) -> int:
    asked = _parser().parse_args(arguments)
    targets = [t for t in TARGETS if not asked.only or t.name in asked.only]
    by_hand, complaints = handmade()
    print(*complaints, sep="\n", end="\n" if complaints else "")
    if asked.mutant:
        return _one(asked.mutant, by_hand)
    about = Taking().about
    known, results = Known(STATE, resume=asked.resume), {}
    for target in targets:
        mutants = _chosen(target, by_hand, quick=0 if asked.hand else asked.quick)
        print(f"{target.name}: {len(mutants)} mutants", flush=True)
        records = sweep(target, mutants, known, workers=asked.workers, told=_tell)
        results[target.name] = [(m, records[m.id]) for m in mutants]
    whole = not (asked.only or asked.hand) and asked.quick is None
    print(write_report(results, complaints, about, quick=not whole))
    decided = decisions()
    survivors = [m.id for found in results.values() for m, record in found if record["outcome"] == "survived"]
    return 1 if complaints or any(name not in decided for name in survivors) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="TARGET",
        choices=[t.name for t in TARGETS],
        help="these targets; the report goes to out/",
    )
    parser.add_argument(
        "--quick",
        nargs="?",
        type=int,
        const=QUICK,
        metavar="N",
        help=f"about N mutants (default: {QUICK}) of each target and none by hand; the report goes to out/",
    )
    parser.add_argument(
        "--hand", action="store_true", help="only those made by hand; the report goes to out/"
    )
    parser.add_argument("--resume", action="store_true", help="keep what an earlier run found out")
    parser.add_argument("--mutant", metavar="ID", help="show one mutant, by the end of its id, and try it")
    parser.add_argument("--workers", type=int, default=2, help="how many are tried at a time (default: 2)")
    return parser  # fmt: skip


def _chosen(target: Target, by_hand: list[Mutant], *, quick: int | None) -> list[Mutant]:
    """The target's mutants, those made by hand first, none twice."""
    if quick:
        return sampled(target, quick)
    hand = [m for m in by_hand if m.file in target.sources]
    if quick == 0:
        return hand
    sources = {m.source for m in hand}
    return [*hand, *(m for m in sampled(target) if m.source not in sources)]


def _one(wanted: str, by_hand: list[Mutant]) -> int:
    for target in TARGETS:
        mutants = [m for m in by_hand if m.file in target.sources]
        mutants += [m for file in target.sources for m in generated(file)]
        for mutant in mutants:
            if mutant.id.endswith(wanted):
                print(mutant.id, mutant.diff(), sep="\n", flush=True)
                sweep(target, [mutant], Known(STATE / "one", resume=False), workers=1, told=_tell)
                return 0
    print(f"no target has a mutant {wanted}", file=sys.stderr)
    return 2


def _tell(mutant: Mutant, record: Record) -> None:
    by = f" by {record['by']}" if record["by"] else ""
    print(f"  {record['outcome']:9} {record['seconds']:6.1f} s  {mutant.id}{by}", flush=True)
    if record["outcome"] == "survived":
        print(f"            {mutant.file}:{mutant.line}  {mutant.before!r} -> {mutant.after!r}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

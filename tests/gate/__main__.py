"""The gate: thirty fixed questions answered today, beside the answers that were accepted last.

    python -m tests.gate                 # answer, and print what moved: `make gate`
    python -m tests.gate --keep          # the same, and accept today's answers
    python -m tests.gate --keep --anew   # the same, and find all facts anew

A figure that moved fails nothing; a question that is no longer answered does. Answers come from the command
line (``explore``, ``choose --json``, ``frontier.csv``), so that an older package can be asked, too.
"""

from __future__ import annotations

import argparse
import multiprocessing
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from pathlib import Path

import yaml

from tests.gate.answers import Answers, moved, read_answers, table, write_answers
from tests.gate.questions import HERE, answered, facts_in, pack_facts, tasks, unpack_facts

QUESTIONS, ANSWERS = HERE.parent / "gate.yaml", HERE / "answers.json"
WORKERS = 2


def main() -> int:
    """Answer all questions, print what moved and return the exit code."""
    parser = argparse.ArgumentParser(description="Answer thirty fixed questions, and say what moved.")
    parser.add_argument("--keep", action="store_true", help="accept today's answers")
    parser.add_argument("--anew", action="store_true", help="find all facts anew; with --keep, keep them")
    options = parser.parse_args()
    begin = time.perf_counter()
    now: Answers = {}
    errors = []
    with tempfile.TemporaryDirectory() as temporary:
        kept, known = Path(temporary) / "kept", 0
        if not options.anew:
            unpack_facts(kept)
            known = facts_in(kept)
        asked = list(tasks(yaml.safe_load(QUESTIONS.read_text()), Path(temporary)))
        # What an exploration leaves in a process must not depend on those before it: each has its own.
        spawned = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(WORKERS, spawned, max_tasks_per_child=1) as pool:
            for task, (answers, error, seconds) in zip(asked, pool.map(answered, asked), strict=True):
                print(f"gate: {task.name} {seconds:.0f} s {error}", flush=True)
                now |= answers
                errors += [error] * bool(error)
        found = facts_in(kept) - known
        if options.anew and options.keep and not errors:
            pack_facts(kept)
    print(f"gate: {len(now)} questions answered in {time.perf_counter() - begin:.0f} s")
    if known and found:
        print(f"gate: {found} facts were not kept, which costs time: make gate ARGS='--keep --anew'")
    if ANSWERS.exists() or not options.keep:
        before = read_answers(ANSWERS)
        errors += [] if options.keep else before.unlike(now)
        print(table(before, moved(before.answers, now)))
    if options.keep and not errors:
        write_answers(ANSWERS, now, _commit(), date.today())
    for error in errors:
        print(f"gate: {error}", file=sys.stderr)
    return 1 if errors else 0


def _commit() -> str:
    """Return the commit of the package that answers."""
    import tensoropt

    command = ["git", "-C", str(Path(tensoropt.__file__).parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())

"""``profiles``: the contents of the profile store."""

from __future__ import annotations

import argparse
from typing import Any

from tensoropt.cli.arguments import Answer, Verb
from tensoropt.console import ProgressDisplay


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    files = verb.add_mutually_exclusive_group()
    files.add_argument("--export", metavar="FILE", help="write all records, for another machine")
    files.add_argument("--import", dest="import_", metavar="FILE", help="add the records of such a file")
    files.add_argument(
        "--forget-failed",
        action="store_true",
        help="forget what failed, hung or ran out of memory, so that it is tried again",
    )


def answer(options: argparse.Namespace, progress: ProgressDisplay) -> Answer:
    """Export, import or forget records as requested; return the contents of the profile store."""
    from tensoropt.machine import profiles
    from tensoropt.report.table import fit_lines

    store = profiles(export=options.export, import_=options.import_, forget_failed=options.forget_failed)
    data: dict[str, Any] = {"path": str(store.path)}
    lines: list[str] = []
    if store.exported is not None:
        lines.append(f"{store.exported} records written to {options.export}")
    if store.imported is not None:
        lines.append(f"{store.imported} records added from {options.import_}")
    if store.forgotten is not None:
        data["forgotten"] = store.forgotten
        lines.append(f"{store.forgotten} records of what failed forgotten; it is tried again when needed")
    lines.append(f"{store.path}: " + ", ".join(f"{n} {kind}" for kind, n in store.records.items()))
    lines += [f"fitted to {store.sample_words}"] if store.sample_words else []
    for (device, mode), errors in store.fits.items():
        lines += [f"{device}, {mode}:", *fit_lines(errors)]
    data["records"] = dict(store.records)
    data["fit"] = [{"device_type": d, "mode": m, "errors": errors} for (d, m), errors in store.fits.items()]
    data["fitted_to"] = {"records": store.sampled, "of": store.of}
    return Answer(data, "\n".join(lines))


VERB = Verb(
    "profiles", "show what the profile store contains, and how well it can be fitted", add_arguments, answer
)

"""``profiles``: what the profile store knows."""

from __future__ import annotations

import argparse
from typing import Any

from tensoropt.cli.arguments import Answer, Verb
from tensoropt.console import ProgressDisplay


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """What the verb takes."""
    files = verb.add_mutually_exclusive_group()
    files.add_argument("--export", metavar="FILE", help="write all records, for another machine")
    files.add_argument("--import", dest="import_", metavar="FILE", help="add the records of such a file")
    files.add_argument(
        "--forget-failed",
        action="store_true",
        help="forget what failed, hung or ran out of memory, so that it is tried again",
    )


def answer(options: argparse.Namespace, progress: ProgressDisplay) -> Answer:
    """What the profile store knows, after what was asked of it."""
    from tensoropt.machine import profiles
    from tensoropt.report.table import fit_lines

    found = profiles(export=options.export, import_=options.import_, forget_failed=options.forget_failed)
    data: dict[str, Any] = {"path": str(found.path)}
    lines: list[str] = []
    if found.exported is not None:
        lines.append(f"{found.exported} records written to {options.export}")
    if found.imported is not None:
        lines.append(f"{found.imported} records added from {options.import_}")
    if found.forgotten is not None:
        data["forgotten"] = found.forgotten
        lines.append(f"{found.forgotten} records of what failed forgotten; it is tried again when needed")
    lines.append(f"{found.path}: " + ", ".join(f"{n} {kind}" for kind, n in found.records.items()))
    lines += [f"fitted to {found.sample_words}"] if found.sample_words else []
    for (device, mode), errors in found.fits.items():
        lines += [f"{device}, {mode}:", *fit_lines(errors)]
    data["records"] = dict(found.records)
    data["fit"] = [{"device_type": d, "mode": m, "errors": errors} for (d, m), errors in found.fits.items()]
    data["fitted_to"] = {"records": found.sampled, "of": found.of}
    return Answer(data, "\n".join(lines))


VERB = Verb("profiles", "what the profile store knows, and how well it can be fitted", add_arguments, answer)

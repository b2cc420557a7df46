"""``detect``: a cluster file of this host, or of all hosts of a job."""

from __future__ import annotations

import argparse
import os

from tensoropt.cli.arguments import Answer, Verb
from tensoropt.console import ProgressDisplay


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    verb.add_argument(
        "--hosts",
        default="",
        metavar="N|slurm|FILE",
        help="how many hosts like this one: a number, SLURM's job or a hostfile; under torchrun, with one "
        "process per host, each says what it has",
    )
    verb.add_argument(
        "--network", default="", metavar="8xIB-400G", help="cards between hosts; default: those of this host"
    )
    verb.add_argument("--out", metavar="FILE", help="cluster file to write, .yaml or .json")


def answer(options: argparse.Namespace, progress: ProgressDisplay) -> Answer:
    """Return the cluster that was found; the first process of a job writes and shows it."""
    from tensoropt.cluster.files import save_cluster
    from tensoropt.cluster.nvml import gpu_notes
    from tensoropt.machine import detect

    found = detect(options.hosts, options.network)
    if os.environ.get("RANK", "0") != "0":
        return Answer(found.to_dict(), "")
    lines = [found.describe(), f"source: {found.source}", *gpu_notes()]
    if options.out:
        save_cluster(found, options.out)
        lines.append(f"saved: {options.out}; explore with --cluster {options.out}")
    return Answer(found.to_dict(), "\n".join(lines))


VERB = Verb("detect", "describe this host, or all hosts of a job, as a cluster", add_arguments, answer)

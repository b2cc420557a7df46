"""``fit``: will a model fit on some devices? What the usual strategies need, by arithmetic."""

from __future__ import annotations

import argparse

from tensoropt.cli.arguments import Answer, Verb
from tensoropt.console import WHOLE, ProgressDisplay, columns
from tensoropt.profiling.optimizers import OPTIMIZERS


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    verb.add_argument(
        "model",
        metavar="MODEL",
        help="zoo:NAME, ORGANISATION/MODEL on the Hugging Face Hub, or the path of a config.json",
    )
    verb.add_argument(
        "--cluster",
        required=True,
        help="as for explore, or devices by kind or memory: 8xH100-80GB, 8x24GiB",
    )
    verb.add_argument("--batch", type=WHOLE, metavar="N", help="samples of all devices in a step")
    verb.add_argument("--sequence", type=WHOLE, metavar="N", help="tokens of a sample")
    verb.add_argument(
        "--micro-batches", type=WHOLE, default=1, metavar="N", help="gradients of so many parts are added up"
    )
    verb.add_argument("--optimizer", choices=tuple(OPTIMIZERS), default="adam")
    verb.add_argument("--dtype", choices=("bfloat16", "float32"), help="default: bfloat16 on GPUs")


def answer(options: argparse.Namespace, progress: ProgressDisplay) -> Answer:
    """Return what each strategy needs of a device, which fits, and what was assumed."""
    from tensoropt.estimate.fit import fit

    found = fit(
        options.model, options.cluster, batch=options.batch, sequence=options.sequence,
        micro_batches=options.micro_batches, optimizer=options.optimizer, dtype=options.dtype,
    )  # fmt: skip
    words = [found.question, found.sentence(), "", columns(found.table(), left=(0, 1, 9)), ""]
    words += [f"- {said}" for said in found.assumptions()]
    if command := found.explore_command():
        words += ["", f"The search, which finds more than these: {command}"]
    return Answer(found.to_data(), "\n".join(words))


VERB = Verb(
    "fit",
    "say before any search whether a model fits on some devices, and with which usual strategy",
    add_arguments,
    answer,
)

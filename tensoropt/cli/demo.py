"""``demo``: the whole loop on one model."""

from __future__ import annotations

import argparse

from tensoropt.cli.arguments import Answer, Verb, writable_folder
from tensoropt.console import WHOLE, ProgressDisplay
from tensoropt.errors import TensorOptError


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    verb.add_argument("--out", default="out/demo", metavar="DIR", help="default: %(default)s")
    verb.add_argument("--model", default="zoo:gpt2-demo", help="default: %(default)s")
    verb.add_argument("--cluster", default="cpu", help="default: %(default)s")
    verb.add_argument("--steps", type=WHOLE, default=4, help="training steps to run; default: %(default)s")


def answer(options: argparse.Namespace, progress: ProgressDisplay) -> Answer:
    """Return predictions next to measurements for both ends of a frontier; exit code 1 if a run differs."""
    if options.steps < 1:
        raise TensorOptError(f"--steps {options.steps} runs nothing; give at least 1")
    from tensoropt.demo import run_demo

    def say(text: str) -> None:
        if not options.json:
            progress.say(text)

    with writable_folder(options.out) as folder:
        result = run_demo(
            options.model, options.cluster, folder, steps=options.steps, progress=progress, say=say
        )
    return Answer(result.data, result.text, 0 if result.ok else 1)


VERB = Verb(
    "demo", "the whole loop on a GPT-2-style model: explore, choose, run, compare", add_arguments, answer
)

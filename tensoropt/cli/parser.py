"""The ``tensoropt`` command, which parses a command line, calls its verb and prints the answer.

Only results go to stdout (as JSON with ``--json``); progress, remarks and the output of a user's model go to
stderr. Exit codes: 0 done, 1 a check failed, 2 the input cannot be used (one sentence says why), 130
interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import traceback
from collections.abc import Sequence

from tensoropt import __version__
from tensoropt.cli import choose, dashboard, explore, export, list_names, measure, tune, verify
from tensoropt.cli.arguments import Verb
from tensoropt.console import OptionParser, ProgressDisplay, json_text, reserved_stdout
from tensoropt.errors import TensorOptError

_IN_ORDER = (explore, choose, export, verify, tune, dashboard, list_names, measure)
VERBS: dict[str, Verb] = {module.VERB.name: module.VERB for module in _IN_ORDER}
"""The verbs of the command line, in the order in which ``--help`` lists them."""
_EXAMPLES = {
    "explore": "zoo:gpt2 --cluster dgx-h100 --out out/gpt2|net.py:net --cluster local:2 --out out/net",
    "choose": "out/gpt2 --memory 24GiB --out plan.json|out/gpt2 --point 12 --why",
    "export": "out/gpt2 --csv frontier.csv|out/gpt2 --point 12 --as accelerate --to fsdp.yaml",
    "verify": "plan.json|zoo:gpt2-tiny --random 10 --json",
    "tune": "out/mlp --memory 1GiB|plan.json --job 'torchrun --nproc-per-node 2 train.py {plan}'",
    "dashboard": "out/gpt2|out --port 8060",
    "list": "models|planners",
    "measure": "links --cluster local:2|host --out me.yaml",
}
"""Two examples of each verb, as ``--help`` shows them."""
_EXIT_OK, _EXIT_CHECK, _EXIT_INPUT, _EXIT_INTERRUPTED = 0, 1, 2, 130


def parser() -> argparse.ArgumentParser:
    common = OptionParser(add_help=False)
    common.add_argument("--json", action="store_true", help="write the result as JSON to stdout")
    common.add_argument("--debug", action="store_true", help="show the traceback of an error")
    top = OptionParser(
        prog="tensoropt",
        description="Every worthwhile way to spread a model over a cluster, and running the one you pick.",
        epilog="tensoropt VERB --help explains a verb.",
    )
    top.add_argument("--version", action="version", version=f"tensoropt {__version__}")
    below = top.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb in VERBS.values():
        description = verb.help[0].upper() + verb.help[1:] + "."
        examples = "".join(f"\n  tensoropt {verb.name} {words}" for words in _EXAMPLES[verb.name].split("|"))
        added = below.add_parser(
            verb.name,
            help=verb.help,
            description=description,
            epilog=f"examples:{examples}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            parents=[common],
        )
        verb.add_arguments(added)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (by default that of this process) and return its exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        options = parser().parse_args(words)
    except TensorOptError as error:
        asked = argparse.Namespace(json="--json" in words, debug="--debug" in words)
        return _failed(asked, ProgressDisplay(), sentence(error), _EXIT_INPUT)
    with reserved_stdout(for_good=arguments is None) as answers:
        return _on_all_hosts(options, ProgressDisplay(answers=answers))


def _on_all_hosts(options: argparse.Namespace, progress: ProgressDisplay) -> int:
    """Run a verb. If it may measure on all hosts of a torchrun job, only the first process runs it, and the
    others measure for it."""
    # `measure host` runs on all hosts at once, as each detects its own devices.
    together = VERBS[options.verb].measures and getattr(options, "what", "") != "host"
    if together and "WORLD_SIZE" in os.environ:
        from tensoropt.ranks.hosts import run_in_job

        try:
            return run_in_job(lambda: _run(options, progress))
        except TensorOptError as error:
            return _failed(options, progress, sentence(error), _EXIT_INPUT)
    return _run(options, progress)


def _run(options: argparse.Namespace, progress: ProgressDisplay) -> int:
    try:
        data, text, code = VERBS[options.verb].answer(options, progress)
        progress.say(json_text(data, indent=1) if options.json else text)
        return code
    except BrokenPipeError:  # the reader (head, less) has seen enough
        return _EXIT_OK
    except KeyboardInterrupt as stop:
        words = str(stop) or "interrupted; saved results and timings are kept"
        return _failed(options, progress, words, _EXIT_INTERRUPTED)
    except TensorOptError as error:
        return _failed(options, progress, sentence(error), _EXIT_INPUT)
    except OSError as error:
        name = f" {error.filename}" if error.filename else ""
        text = f"{error.strerror or error}:{name}; nothing saved was changed"
        return _failed(options, progress, text, _EXIT_INPUT)
    except MemoryError:
        text = "this machine has no memory left; use a smaller --batch"
        return _failed(options, progress, text, _EXIT_INPUT)
    except Exception as error:
        text = (
            f"TensorOpt itself failed with {type(error).__name__}: {sentence(error)}; please report it with "
            "what --debug prints"
        )
        return _failed(options, progress, text, _EXIT_INPUT)


def _failed(options: argparse.Namespace, progress: ProgressDisplay, text: str, code: int) -> int:
    progress.close()
    if options.debug:
        traceback.print_exc()
    print(f"tensoropt: error: {text}", file=sys.stderr)
    if options.json:
        with contextlib.suppress(OSError):  # stdout may be what failed
            progress.say(json_text({"error": text}))
    return code


def sentence(error: BaseException) -> str:
    return " ".join(str(error).split("\n\n")[0].split()) or "no message"

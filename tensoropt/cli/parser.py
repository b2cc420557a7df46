"""The ``tensoropt`` command: parse, call, print. What it does is in ``api``, ``plan`` and ``verify``.

Results go to stdout (JSON with ``--json``) and nothing else does: progress, remarks and what a user's model
prints go to stderr. Exit codes: 0 done, 1 a check failed, 2 the input cannot be used (one sentence says why),
130 interrupted. Heavy imports are the verbs' own.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from tensoropt import __version__
from tensoropt.console import Progress, json_text, reserved_stdout
from tensoropt.errors import TensorOptError

Answer = tuple[dict[str, Any], str, int]
"""What a verb gives: data for ``--json``, text for a person, exit code."""
EXIT_OK, EXIT_CHECK, EXIT_INPUT, EXIT_INTERRUPTED = 0, 1, 2, 130

MODEL_HELP = "zoo:NAME, FILE.onnx, package.module:function or path/file.py:function"
CLUSTER_HELP = "local, local:N (N CPU ranks), a preset (see: tensoropt list clusters) or a YAML/JSON file"


def parser() -> argparse.ArgumentParser:
    """The command line; the verbs and their words are fixed."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="write the result as JSON to stdout")
    common.add_argument("--debug", action="store_true", help="show the traceback of an error")
    top = argparse.ArgumentParser(
        prog="tensoropt",
        description="Every worthwhile way to spread a model over a cluster, and running the one you pick.",
        epilog="tensoropt VERB --help explains a verb.",
    )
    top.add_argument("--version", action="version", version=f"tensoropt {__version__}")
    verbs = top.add_subparsers(dest="verb", metavar="VERB", required=True)

    def verb(name: str, what: str) -> argparse.ArgumentParser:
        return verbs.add_parser(
            name, help=what, description=what[0].upper() + what[1:] + ".", parents=[common]
        )

    explore = verb("explore", "find the cost frontier of a model on a cluster")
    _question_arguments(explore)
    explore.add_argument("--out", required=True, metavar="DIR", help="folder for the result")
    explore.add_argument("--memory", metavar="24GiB", help="fail if no plan fits this much per device")
    explore.add_argument(
        "--devices",
        metavar="auto|1,2,4",
        help="profiling mode: explore on so many of the cluster's devices, a folder in DIR for each; auto: "
        "1, 2, 4, ... up to all of them",
    )
    explore.set_defaults(run="explore")

    compare = verb("compare", "run published planners beside the frontier, under one judge")
    _question_arguments(compare)
    compare.add_argument(
        "--planners",
        default="all",
        metavar="all|a,b",
        help="see: tensoropt list planners; default: %(default)s",
    )
    compare.add_argument(
        "--memory", metavar="8GiB,24GiB", help="limits per device; default: all trade-offs a planner knows"
    )
    compare.add_argument("--out", metavar="DIR", help="save the exploration with all points, and the table")
    compare.add_argument("--csv", metavar="FILE", help="write the table as CSV")
    compare.set_defaults(run="compare")

    choose = verb("choose", "turn a point of a saved frontier into a plan")
    choose.add_argument("dir", metavar="DIR", help="the folder given to explore --out")
    choose.add_argument(
        "--devices",
        metavar="auto|N",
        help="of a folder made with explore --devices: the plans for N, or for the fewest that will do",
    )
    which = choose.add_mutually_exclusive_group(required=True)
    which.add_argument("--profile", action="store_true", help="the table devices x memory -> time, no plan")
    which.add_argument("--memory", metavar="24GiB", help="the fastest plan within this much per device")
    which.add_argument(
        "--time", metavar="0.5", help="the leanest plan within this time per step (seconds, 500ms)"
    )
    which.add_argument("--knee", action="store_true", help="the point from which both directions cost most")
    choose.add_argument("--out", metavar="plan.json", help="where to write the plan")
    choose.set_defaults(run="choose")

    show = verb("show", "say why a point of a saved frontier costs what it costs")
    show.add_argument("dir", metavar="DIR", help="the folder given to explore --out")
    point = show.add_mutually_exclusive_group()
    point.add_argument("--point", type=int, metavar="N", help="its number; default: the fastest")
    point.add_argument("--memory", metavar="24GiB", help="the fastest within this much per device")
    point.add_argument("--time", metavar="0.5", help="the leanest within this time per step (seconds, 500ms)")
    point.add_argument("--knee", action="store_true", help="the point from which both directions cost most")
    show.add_argument(
        "--trace", metavar="FILE", help="write its timeline for ui.perfetto.dev, chrome://tracing"
    )
    show.add_argument(
        "--top", type=int, default=10, metavar="N", help="operators and edges listed; default: %(default)s"
    )
    show.set_defaults(run="show")

    recost = verb("recost", "search a saved exploration again with the costs of now, without its model")
    recost.add_argument("dir", metavar="DIR", help="the folder given to explore --out")
    recost.add_argument("--out", required=True, metavar="DIR", help="folder for the result")
    recost.add_argument("--cluster", help="another one; default: the saved one. " + CLUSTER_HELP)
    recost.add_argument(
        "--planners", metavar="all|a,b", help="published planners beside it; see: tensoropt list planners"
    )
    recost.set_defaults(run="recost")

    export = verb("export", "write a saved frontier as CSV")
    export.add_argument("dir", metavar="DIR", help="the folder given to explore --out")
    export.add_argument("--csv", required=True, metavar="FILE", help="one row per point")
    export.add_argument("--strategies", metavar="FILE", help="one row per point and operator")
    export.set_defaults(run="export")

    verify = verb("verify", "run a plan, or random strategies, beside the unsplit model and compare")
    verify.add_argument(
        "target", metavar="PLAN|MODEL", help="a plan file; with --random a model: " + MODEL_HELP
    )
    verify.add_argument("--cluster", help="with --random, default local:2: " + CLUSTER_HELP)
    verify.add_argument("--random", type=int, metavar="N", help="verify N random legal strategies of MODEL")
    verify.add_argument(
        "--placed", action="store_true",
        help="with --random: random placements, every operator or piece of one on one device",
    )  # fmt: skip
    verify.add_argument("--seed", type=int, default=0, help="of weights and strategies; default: %(default)s")
    verify.add_argument("--batch", type=int, metavar="N", help="with --random: global batch of a zoo model")
    verify.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="with --random: what operators compute in"
    )
    verify.add_argument(
        "--save", metavar="DIR", help="keep what was found beside the exploration that the plan is from"
    )
    _onnx_arguments(verify)
    where = verify.add_mutually_exclusive_group()
    where.add_argument(
        "--fake", dest="where", action="store_const", const="fake",
        help="check what is sent and kept on fake ranks, without numbers; default where devices are not here",
    )  # fmt: skip
    where.add_argument(
        "--ranks", dest="where", action="store_const", const="ranks",
        help="run on CPU ranks of this machine, whatever cluster the plan is for",
    )  # fmt: skip
    verify.set_defaults(run="verify", where="auto")

    listing = verb("list", "name what there is")
    listing.add_argument("what", choices=("models", "clusters", "planners"))
    listing.set_defaults(run="list")

    links = verb("measure-links", "time point-to-point messages and collectives of this machine's ranks")
    links.add_argument("--cluster", required=True, help="local or local:N")
    links.add_argument("--refresh", action="store_true", help="measure again what is known already")
    links.set_defaults(run="measure-links")

    profiles = verb("profiles", "what the profile store knows, and how well it can be fitted")
    files = profiles.add_mutually_exclusive_group()
    files.add_argument("--export", metavar="FILE", help="write all records, for another machine")
    files.add_argument("--import", dest="import_", metavar="FILE", help="add the records of such a file")
    files.add_argument(
        "--forget-failed",
        action="store_true",
        help="forget what failed, hung or ran out of memory, so that it is tried again",
    )
    profiles.set_defaults(run="profiles")

    dashboard = verb("dashboard", "look at frontiers, pick and export plans in a browser")
    dashboard.add_argument(
        "dir", nargs="?", metavar="DIR", help="a folder given to explore --out, or one that holds several"
    )
    dashboard.add_argument("--host", default="127.0.0.1", help="address to listen on; default: %(default)s")
    dashboard.add_argument("--port", type=int, default=8050, help="0 for any free one; default: %(default)s")
    dashboard.set_defaults(run="dashboard")

    demo = verb("demo", "the whole loop on a GPT-2-style model: explore, choose, run, compare")
    demo.add_argument("--out", default="out/demo", metavar="DIR", help="default: %(default)s")
    demo.add_argument("--model", default="zoo:gpt2-demo", help="default: %(default)s")
    demo.add_argument("--cluster", default="local", help="default: %(default)s")
    demo.add_argument("--steps", type=int, default=4, help="training steps to run; default: %(default)s")
    demo.set_defaults(run="demo")
    return top


def _question_arguments(verb: argparse.ArgumentParser) -> None:
    """Which model on which cluster, and what may be chosen."""
    verb.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    verb.add_argument("--cluster", required=True, help=CLUSTER_HELP)
    verb.add_argument("--mode", choices=("train", "inference"), default="train", help="default: %(default)s")
    verb.add_argument(
        "--optimizer", choices=("sgd", "momentum", "adam"), default="adam", help="default: %(default)s"
    )
    verb.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="what operators compute in; bfloat16 keeps float32 master weights; default: %(default)s",
    )
    verb.add_argument(
        "--micro-batches",
        default="auto",
        metavar="auto|1,2,4",
        help="counts to search; auto: 1,2,4,8 that divide",
    )
    verb.add_argument(
        "--recompute",
        choices=("auto", "never"),
        default="auto",
        help="whether repeated blocks may be computed again in backward; default: %(default)s",
    )
    verb.add_argument(
        "--epsilon",
        type=float,
        default=1e-3,
        metavar="E",
        help="allowed gap, 0 for exact; default: %(default)s",
    )
    verb.add_argument(
        "--max-points", type=int, metavar="N", help="keep at most N points per table while searching"
    )
    verb.add_argument(
        "--batch", type=int, metavar="N", help="global batch of a zoo model; default: the model's"
    )
    verb.add_argument(
        "--constraints",
        metavar="FILE",
        help="YAML or JSON: pins of operators and parameters, what belongs together, device kinds",
    )
    verb.add_argument(
        "--measure",
        choices=("all", "never"),
        default="all",
        help="never: price from the profile store and a fit to it instead of timing; default: %(default)s",
    )
    verb.add_argument("--seed", type=int, default=0, help="of weights and random walks; default: %(default)s")
    _onnx_arguments(verb)


def _onnx_arguments(verb: argparse.ArgumentParser) -> None:
    group = verb.add_argument_group("ONNX files")
    group.add_argument(
        "--dim",
        action="append",
        default=[],
        metavar="NAME=SIZE",
        help="size of a dim the file leaves open (batch=8), or of one it fixes (x[0]=8)",
    )
    group.add_argument(
        "--output",
        action="append",
        default=[],
        metavar="TENSOR",
        help="import only what this tensor of the file depends on",
    )
    group.add_argument(
        "--loss",
        metavar="auto|cross_entropy|mean|mse",
        help="what is trained, since a file has no loss; default: auto",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and give its exit code; without arguments the one that this process was given."""
    options = parser().parse_args(arguments)
    with reserved_stdout(for_good=arguments is None) as answers:
        return _run(options, Progress(answers=answers))


def _run(options: argparse.Namespace, progress: Progress) -> int:
    try:
        data, text, code = _verb(options.run)(options, progress)
        progress.say(json_text(data, indent=1) if options.json else text)
        return code
    except BrokenPipeError:  # the reader (head, less) has seen enough
        return EXIT_OK
    except KeyboardInterrupt:
        return _failed(options, progress, "interrupted; what was saved or timed is kept", EXIT_INTERRUPTED)
    except TensorOptError as error:
        return _failed(options, progress, sentence(error), EXIT_INPUT)
    except OSError as error:
        name = f" {error.filename}" if error.filename else ""
        return _failed(
            options, progress, f"{error.strerror or error}:{name}; nothing saved was changed", EXIT_INPUT
        )
    except MemoryError:
        return _failed(
            options, progress, "this machine's memory is used up; take a smaller --batch", EXIT_INPUT
        )
    except Exception as error:
        text = (
            f"unexpected {type(error).__name__}: {sentence(error)}; run again with --debug for the traceback"
        )
        return _failed(options, progress, text, EXIT_INPUT)


def _failed(options: argparse.Namespace, progress: Progress, text: str, code: int) -> int:
    progress.close()
    if options.debug:
        traceback.print_exc()
    print(f"tensoropt: error: {text}", file=sys.stderr)
    if options.json:
        with contextlib.suppress(OSError):  # stdout may be what failed
            progress.say(json_text({"error": text}))
    return code


def sentence(error: BaseException) -> str:
    """The first paragraph of an error's message on one line."""
    return " ".join(str(error).split("\n\n")[0].split()) or "no message"


def _verb(name: str) -> Callable[[argparse.Namespace, Progress], Answer]:
    from tensoropt.cli import verbs

    return verbs.VERBS[name]

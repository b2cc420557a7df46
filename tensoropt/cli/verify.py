"""The verb ``verify``, which runs plans, or random strategies, and compares them with the unsplit model."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from tensoropt.cli.arguments import CLUSTER_HELP, MODEL_HELP, Answer, Verb, add_onnx, dims_option
from tensoropt.console import WHOLE, ProgressDisplay, columns
from tensoropt.errors import TensorOptError
from tensoropt.units import format_bytes, format_seconds

_RANDOM_CLUSTER = "cpu:2"
"""The default cluster of ``verify --random``: the fewest ranks that can split anything, on any machine."""


def _add_arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "target", metavar="PLAN|MODEL", help="a plan file; with --random a model: " + MODEL_HELP
    )
    verb.add_argument("--cluster", help="with --random, default cpu:2: " + CLUSTER_HELP)
    verb.add_argument("--random", type=WHOLE, metavar="N", help="verify N random legal strategies of MODEL")
    verb.add_argument(
        "--placed", action="store_true",
        help="with --random: random placements, each operator or piece of one on one device",
    )  # fmt: skip
    verb.add_argument(
        "--pipeline", type=WHOLE, metavar="P", help="with --random: pipelines over P equal groups of devices"
    )
    verb.add_argument(
        "--seed", type=WHOLE, default=0, help="for weights and strategies; default: %(default)s"
    )
    verb.add_argument("--batch", type=WHOLE, metavar="N", help="with --random: global batch of a zoo model")
    verb.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="with --random: the dtype of computation"
    )
    verb.add_argument(
        "--save", metavar="DIR", help="save the findings with the exploration that the plan is from"
    )
    add_onnx(verb)
    where = verb.add_mutually_exclusive_group()
    where.add_argument(
        "--fake", dest="where", action="store_const", const="fake",
        help="check messages and memory on fake ranks, without numbers; default if devices are not here",
    )  # fmt: skip
    where.add_argument(
        "--ranks", dest="where", action="store_const", const="ranks",
        help="run on CPU ranks of this machine, whatever cluster the plan is for",
    )  # fmt: skip
    where.add_argument(
        "--share-gpu", dest="where", action="store_const", const="share-gpu",
        help="run all ranks on the first GPU, over gloo: checks CUDA kernels with one card, without times",
    )  # fmt: skip
    verb.set_defaults(where="auto")


def _answer(options: argparse.Namespace, progress: ProgressDisplay) -> Answer:
    data = _verify_plan(options, progress) if options.random is None else _verify_random(options, progress)
    return Answer(data, verify_text(data), 0 if data["ok"] else 1)


def _verify_plan(options: argparse.Namespace, progress: ProgressDisplay) -> dict[str, Any]:
    given = (options.cluster, options.batch, options.dtype, options.loss, options.pipeline)
    if any(option is not None for option in given) or options.dim or options.output or options.placed:
        raise TensorOptError(
            "--cluster, --batch, --dtype, --dim, --output, --loss, --placed and --pipeline belong to "
            "--random N; a plan names its own"
        )
    # A colon suggests a model source (zoo:NAME), but a file's name may contain one, too.
    if ":" in options.target and not Path(options.target).exists():
        raise TensorOptError(f"there is no plan file {options.target}; to verify a model add --random 20")
    from tensoropt.plan.plan import load_plan

    plan = load_plan(options.target)
    from tensoropt.verify import verify_plan

    data = verify_plan(plan, where=options.where, progress=progress)
    if options.save:
        from tensoropt.exploration.verified import save_verified

        save_verified(options.save, plan, data)
    return data


_COMPARED = ("loss", "gradient", "buffer")


def _verify_random(options: argparse.Namespace, progress: ProgressDisplay) -> dict[str, Any]:
    if options.save:
        raise TensorOptError("--save is for a plan; random strategies are not points of an exploration")
    from tensoropt.question.question import onnx_options
    from tensoropt.verify import verify_random

    cluster = options.cluster or _RANDOM_CLUSTER
    if options.placed and options.pipeline is not None:
        raise TensorOptError("--placed and --pipeline are two kinds of plans; give one of them")
    kind = "placements" if options.placed else "pipelines" if options.pipeline is not None else "strategies"
    progress.note(
        f"verifying {options.random} random {kind} of {options.target} on cluster {cluster}"
        + ("" if options.cluster else " (the default; another: --cluster)")
    )
    data = verify_random(
        options.target,
        cluster,
        options.random,
        seed=options.seed,
        batch=options.batch,
        dtype=options.dtype or "float32",
        onnx=onnx_options(options.target, dims_option(options), options.output, options.loss, training=True),
        where=options.where,
        placed=options.placed,
        pipeline=options.pipeline,
        progress=progress,
    )
    data["cluster"] = cluster
    return data


def verify_text(data: dict[str, Any]) -> str:
    """Return a table of predictions beside measurements, one row per plan, with remarks; a dash stands for a
    value that was not checked."""
    rows = [
        ["", "mesh", "micro", "loss diff.", "gradient diff.", "replicas", "collectives", "memory pred.",
         "tracked", "time pred.", "measured", "verdict"]
    ]  # fmt: skip
    remarks = []
    for i, p in enumerate(data["plans"]):
        predicted, issued = (sum(c["count"] for c in p[f"collectives_{k}"]) for k in ("predicted", "issued"))
        agree = {True: "agree", False: "DIFFER", None: "-"}[p["replicas_agree"]]
        in_order = {True: " in order", False: " RANKS DIFFER", None: ""}[p["collectives_in_order"]]
        rows.append(
            [
                str(i), p["mesh"], str(p["micro_batches"]), _difference(p["loss_difference"]),
                _difference(p["gradient_difference"]), agree,
                f"{predicted} {'!=' if p['collectives_unlike'] else '='} {issued}{in_order}",
                format_bytes(p["memory_predicted_bytes"]), format_bytes(p["memory_tracked_bytes"]),
                format_seconds(p["time_predicted_s"]),
                "-" if p["time_measured_s"] is None else format_seconds(p["time_measured_s"]),
                "ok" if p["ok"] else "FAILED",
            ]
        )  # fmt: skip
        remarks += [f"plan {i}: {line}" for line in _remarks(p)]
    if data["module"] is not None:
        found = {kind: _difference(data["module"][f"{kind}_difference"]) for kind in _COMPARED}
        remarks.append(
            f"unsplit graph against the model itself: loss differs by {found['loss']}, gradients by "
            f"{found['gradient']}, buffers after two calls by {found['buffer']} "
            f"(in {data['module']['compared_in']})"
        )
    elif all(p["compared_in"] is not None for p in data["plans"]):
        remarks.append(
            "the unsplit graph is not compared with the model itself: its dropout draws other numbers"
        )
    if file := data.get("file"):
        remarks.append(_file_remark(file))
    passed = sum(p["ok"] for p in data["plans"])
    count = f"{passed} of {len(data['plans'])} plans"
    faithful = data["module"] is None or data["module"]["ok"]
    verdict = (
        f"{count} ok" if faithful else f"not ok: {_unfaithful(data['module'])}; {count} agree with the graph"
    )
    return "\n".join([columns(rows), *remarks, data["checked_on"], verdict])


def _unfaithful(module: dict[str, Any]) -> str:
    if not module["buffers_ok"]:
        return (
            "the captured graph, which every plan computes, is not the model itself: the buffer "
            f"{module['worst_buffer']} has another value after two calls, and rounding does not explain it; "
            "in forward, update registered buffers by PyTorch's operators"
        )
    loss, gradient = (
        math.inf if module[f"{kind}_difference"] is None else module[f"{kind}_difference"]
        for kind in ("loss", "gradient")
    )
    of_gradient = module["worst_gradient"] and gradient >= loss
    subject = f"the gradient of {module['worst_gradient']}" if of_gradient else "the loss of two calls"
    return (
        f"the captured graph, which every plan computes, is not the model itself: {subject} differs, and "
        "rounding does not explain it; look in forward for gradients that are changed outside of operators "
        "(hooks on grad_fn), for numbers that it counts itself from call to call, and for values that leave "
        "PyTorch"
    )


def _file_remark(file: dict[str, Any]) -> str:
    if file["difference"] is None:
        return f"the import is not compared with onnx's own evaluation of the file: {file['why']}"
    verdict = "" if file["ok"] else ", which is NOT rounding: the import is wrong"
    differ = f"outputs differ by {_difference(file['difference'])}{verdict}"
    return f"the import against onnx's own evaluation of the file: {differ}"


def _difference(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def _remarks(plan: dict[str, Any]) -> list[str]:
    unlike = *plan["collectives_unlike"], *plan["order_unlike"], *(plan["memory_unlike"] or ())
    lines = [*([plan["error"]] if plan["error"] else []), *unlike]
    if not plan["ok"] and not lines:
        lines.append(
            f"differs most in the gradient of {plan['worst_gradient']} ({plan['gradient_difference']:.1e}), "
            f"after the optimizer's steps in {plan['worst_parameter']} ({plan['parameter_difference']:.1e})"
        )
    if counts := plan["not_finite"]:
        shown = ", ".join(f"{name} ({count})" for name, count in list(counts.items())[:3])
        more = f" and {len(counts) - 3} more" if len(counts) > 3 else ""
        lines.append(
            "the unsplit model itself gives NaN or infinite values, which are compared by position only: "
            f"{shown}{more}"
        )
    if plan["narrow"]:
        worst = max(v for v in plan["narrow"].values() if v is not None)
        lines.append(
            "compared in float64, as rounding in the model's own precision crossed a kink (such as ReLU's at "
            f"0), which changed results by {worst:.1e}"
        )
    if plan["compared_in"] is None and plan["ranks_checked"]:
        lines.append(f"fake ranks checked: {', '.join(map(str, plan['ranks_checked']))}")
    return lines


VERB = Verb(
    "verify",
    "run a plan, or random strategies, beside the unsplit model and compare",
    _add_arguments,
    _answer,
)

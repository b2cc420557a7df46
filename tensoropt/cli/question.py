"""The flags of ``explore`` and ``compare``, and the question that they are parsed into."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from tensoropt.cli.arguments import CLUSTER_HELP, MODEL_HELP, add_onnx, dims_option, writable_folder
from tensoropt.console import ProgressDisplay
from tensoropt.errors import TensorOptError
from tensoropt.plan.settings import Setting, settings_fields
from tensoropt.units import read_number, read_whole

NUMBERS: dict[Any, type] = {read_number: float, read_whole: int}
"""What the parser itself reads."""


def add_question(verb: argparse.ArgumentParser, but: Collection[str] = ()) -> None:
    """Which model on which cluster, and what may be chosen.

    Args:
        but: settings that the verb has no flag for.
    """
    verb.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    verb.add_argument("--cluster", required=True, help=CLUSTER_HELP)
    verb.add_argument(
        "--batch", type=int, metavar="N", help="global batch of a zoo model; default: the model's"
    )
    verb.add_argument("--seed", type=int, default=0, help="of weights and random walks; default: %(default)s")
    verb.add_argument(
        "--anew",
        action="store_true",
        help="explore although the same exploration was kept and nothing has changed since",
    )
    groups: dict[str, Any] = {}
    for setting in settings_fields():
        if setting.name not in but:
            group = groups.get(setting.group) or verb.add_argument_group(setting.group)
            groups[setting.group] = group
            group.add_argument(f"--{setting.flag}", **_flag(setting))
    add_onnx(verb)


def _flag(setting: Setting) -> dict[str, Any]:
    """What the parser is told of a setting's flag."""
    if isinstance(setting.default, bool):
        return {"action": "store_true", "help": setting.help}
    shown = "" if setting.default is None else f"; default: {setting.text(setting.default)}"
    told: dict[str, Any] = {"default": setting.default, "help": f"{setting.help}{shown}"}
    if setting.choices:
        return {**told, "choices": setting.choices}
    number = NUMBERS.get(setting.read)
    return {**told, **({"type": number} if number else {}), "metavar": setting.metavar}


def settings_option(options: argparse.Namespace) -> Any:
    """What the command line chooses, as :class:`~tensoropt.plan.settings.Settings`."""
    from tensoropt.plan.settings import Settings

    chosen = {}
    for setting in settings_fields():
        value = getattr(options, setting.key, setting.default)
        if isinstance(value, str) and not setting.choices:
            try:
                value = setting.read(value)
            except TensorOptError as error:
                raise TensorOptError(f"--{setting.flag} {error}") from None
        chosen[setting.name] = value
    return Settings(**chosen)


def question_option(options: argparse.Namespace) -> Any:
    """What the command line asks, as :class:`~tensoropt.plan.question.Question`."""
    from tensoropt.plan.question import Question
    from tensoropt.units import parse_bytes, read_counts

    comparing = options.verb == "compare"
    limits = options.memory.split(",") if comparing and options.memory else []
    if comparing:
        options = argparse.Namespace(**{**vars(options), "memory": None})
    devices = getattr(options, "devices", None) or ""
    try:
        devices = read_counts(devices) if devices else ""
    except TensorOptError as error:
        raise TensorOptError(f"--devices {error}") from None
    return Question(
        model=options.model,
        cluster=options.cluster,
        batch=options.batch,
        seed=options.seed,
        dims=dims_option(options),
        outputs=options.output,
        loss=options.loss,
        settings=settings_option(options),
        constraints_file=options.constraints or "",
        headroom=getattr(options, "headroom", None) or "",
        planners=_names(getattr(options, "planners", None)),
        limits=[parse_bytes(limit) for limit in limits] or [None],
        devices=devices,
        also_on=_names(getattr(options, "also_on", None)),
        anew=options.anew,
    )


def _names(text: str | None) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name.strip()) if text else ()


def explored(
    question: Any, progress: ProgressDisplay, out: str | None, cluster: Any = None, known: Any = None
) -> Any:
    """The exploration that answers a question, saved in ``out`` if that is given; no folder is left empty.

    Args:
        cluster: where, if not on the question's cluster.
        known: an exploration of the same model elsewhere, whose operators are taken.
    """
    from tensoropt.cluster import load_cluster

    # Before the folder: a wrong option is refused before anything is made.
    cluster = load_cluster(question.cluster if cluster is None else cluster)
    settings = question.settings_on(cluster)
    with writable_folder(out) if out else contextlib.nullcontext() as folder:
        progress.note(question.in_effect(cluster, settings, out))
        from tensoropt.api import answer  # PyTorch is imported after it is said what is explored

        found = answer(question, cluster, settings, known, progress=progress, note=progress.note)
        if folder is not None:
            found.save(Path(folder))
        return found

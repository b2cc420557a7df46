"""Command-line options that several verbs share, and the functions that read them.

- ``Verb`` is the description of a verb, and ``Answer`` the result of running it.
- The options of ``explore`` become a ``Question``.
- ``--tokens``, ``--price``, ... give the length of a training and the price of its devices.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tensoropt.console import WHOLE, ProgressDisplay, option_type
from tensoropt.errors import TensorOptError
from tensoropt.question.settings import Setting, settings_fields
from tensoropt.units import parse_bytes, parse_count, read_number, read_whole


def add_amount(verb: argparse.ArgumentParser) -> None:
    """Add the options for the length of a training and for device prices."""
    group = verb.add_argument_group("time and cost of a training")
    length = group.add_mutually_exclusive_group()
    length.add_argument("--tokens", metavar="1e9", help="length of the training in tokens (300B, 1.5T, ...)")
    length.add_argument("--samples", metavar="N", help="its length in samples")
    length.add_argument("--steps", metavar="N", help="its length in steps; default: 1000")
    add_repeated(
        group,
        "--price",
        "2.5|KIND=2.5",
        "price per device-hour, of all devices or of one kind (repeat it, or separate by commas); default: "
        "the cluster's prices, if it has any",
    )


def add_repeated(group: Any, flag: str, metavar: str, said: str) -> None:
    group.add_argument(flag, action="append", default=[], metavar=metavar, help=said)


def amount_option(options: argparse.Namespace) -> Any:
    """Return the length of a training that the options give; None if they give none.

    Raises:
        TensorOptError: the text is not a positive number with an optional suffix, such as 1.5T.
    """
    from tensoropt.exploration.rates import AMOUNTS, Amount

    for unit in AMOUNTS:
        text = getattr(options, unit)
        if text is not None:
            return Amount(_read(unit, parse_count, text), unit)
    return None


def tariff_option(options: argparse.Namespace) -> Any:
    """Return the device prices that ``--price`` gives.

    Raises:
        TensorOptError: a price is not a number, or a device kind, or all devices, have two prices.
    """
    from tensoropt.exploration.rates import Tariff, prices_of

    price, by_kind = prices_of(",".join(options.price))
    return Tariff(price, by_kind)


class Answer(NamedTuple):
    """The result of a verb.

    Attributes:
        data: what ``--json`` writes.
        text: what a person reads.
        code: the exit code.
    """

    data: dict[str, Any]
    text: str
    code: int = 0


@dataclass(frozen=True)
class Verb:
    """One verb of the command line, such as ``explore``; each has its own file.

    Attributes:
        help: a description in a few words without a full stop.
        add_arguments: adds the verb's arguments to a parser.
        answer: runs the verb. It imports heavy modules itself, so that ``--help`` stays quick.
        measures: whether the verb may measure on all hosts if ``torchrun`` started a process on each.
    """

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    answer: Callable[[argparse.Namespace, ProgressDisplay], Answer]
    measures: bool = False


MODEL_HELP = (
    "zoo:NAME, hf:ID, a folder with a config.json, FILE.onnx, package.module:function or "
    "path/file.py:function; options behind a name: 'zoo:NAME?OPTION=VALUE&...'"
)
CLUSTER_HELP = (
    "local, local:N (N of its GPUs, else CPU ranks), cpu:N, a preset (see: tensoropt list clusters) or a "
    "YAML/JSON file"
)


def add_onnx(verb: argparse.ArgumentParser) -> None:
    """Add the options for an ONNX file: sizes of open dims, outputs to keep, loss."""
    group = verb.add_argument_group("ONNX files")
    said = "size of a dim the file leaves open (batch=8), or of one it fixes (x[0]=8)"
    add_repeated(group, "--dim", "NAME=SIZE", said)
    add_repeated(group, "--output", "TENSOR", "import only the operators that this tensor depends on")
    group.add_argument(
        "--loss",
        metavar="auto|cross_entropy|mean|mse",
        help="the training loss, since a file has none; default: auto",
    )


def dims_option(options: argparse.Namespace) -> dict[str, int]:
    """Return the sizes of an ONNX file's dims given by ``--dim``, by the dim's name."""
    dims: dict[str, int] = {}
    for text in options.dim:
        name, _, size = text.rpartition("=")
        if not name or not size.isdecimal():
            raise TensorOptError(f"--dim '{text}' is not NAME=SIZE, for example --dim batch=8")
        dims[name] = int(size)
    return dims


def add_headroom(verb: argparse.ArgumentParser) -> None:
    """Add the option for how much of a device's memory to keep free."""
    verb.add_argument(
        "--headroom",
        metavar="5%|2GiB",
        help="keep this much of a device's memory free; a budget is at most the rest",
    )


@contextlib.contextmanager
def writable_folder(path: str) -> Iterator[Path]:
    """Yield the folder, created if necessary; remove it again if the block fails and leaves it empty.

    A folder that cannot be written raises an error before the block runs for hours, not after.
    """
    folder = Path(path)
    # The innermost first, which is the order in which they can be removed again.
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # os.access does not detect read-only file systems and full disks; writing does.
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".probe"):
            pass
    except OSError as error:
        raise TensorOptError(
            f"cannot write into {folder} ({error.strerror or error}); choose another --out"
        ) from error
    try:
        yield folder
    except BaseException:
        with contextlib.suppress(OSError):  # not empty: something was saved
            for place in made:
                place.rmdir()
        raise


def add_question(verb: argparse.ArgumentParser) -> None:
    """Add the options for the model, the cluster and all settings."""
    verb.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    verb.add_argument("--cluster", required=True, help=CLUSTER_HELP)
    verb.add_argument(
        "--batch",
        metavar="N|auto|8,16",
        help="global batch; default: the model's. explore takes several, a folder in DIR for each; auto: "
        "doubles it up to the largest that fits",
    )
    verb.add_argument(
        "--sequence",
        type=WHOLE,
        metavar="N",
        help="tokens of a sequence, for language models; default: the model's",
    )
    verb.add_argument(
        "--lora",
        metavar="r=16",
        help="train LoRA adapters of this rank on linear layers, all else frozen; as in "
        "r=16,alpha=32,dropout=0.05,targets=q_proj+v_proj,base=nf4; default: peft's for the architecture, on "
        "unquantized weights",
    )
    verb.add_argument(
        "--seed", type=WHOLE, default=0, help="for weights and randomised planners; default: %(default)s"
    )
    verb.add_argument(
        "--anew",
        action="store_true",
        help="explore again even if the same exploration was kept and nothing has changed since",
    )
    groups: dict[str, Any] = {}
    for setting in settings_fields():
        group = groups.get(setting.group) or verb.add_argument_group(setting.group)
        groups[setting.group] = group
        group.add_argument(f"--{setting.flag}", **_flag(setting))
    add_onnx(verb)


def _flag(setting: Setting) -> dict[str, Any]:
    if setting.default is True:
        said = f"{setting.help}; default: {setting.text(True)}"
        return {"action": argparse.BooleanOptionalAction, "default": True, "help": said}
    if setting.default is False:
        return {"action": "store_true", "help": setting.help}
    shown = "" if setting.default is None else f"; default: {setting.text(setting.default)}"
    arguments: dict[str, Any] = {"default": setting.default, "help": f"{setting.help}{shown}"}
    if setting.others:
        return {**arguments, "metavar": "|".join((*setting.choices, setting.others))}
    if setting.choices:
        return {**arguments, "choices": setting.choices}
    number = {"type": option_type(setting.read)} if setting.read in (read_number, read_whole) else {}
    return {**arguments, **number, "metavar": setting.metavar}


def _settings_option(options: argparse.Namespace) -> Any:
    from tensoropt.question.settings import Settings

    chosen = {}
    for setting in settings_fields():
        value = getattr(options, setting.key, setting.default)
        text = isinstance(value, str) and not setting.choices
        chosen[setting.name] = _read(setting.flag, setting.read, value) if text else value
    return Settings(**chosen)


def _read(flag: str, read: Callable[[str], Any], text: str) -> Any:
    try:
        return read(text)
    except TensorOptError as error:
        raise TensorOptError(f"--{flag} {error}") from None


def question_option(options: argparse.Namespace) -> Any:
    """Return the model, cluster and settings that a parsed command line asks for."""
    from tensoropt.question.model_source import with_lora, with_sequence
    from tensoropt.question.question import Question, read_batches
    from tensoropt.units import read_counts

    comparing = bool(getattr(options, "planners", None))
    limits = options.memory.split(",") if comparing and options.memory else []
    if comparing:
        options = argparse.Namespace(**{**vars(options), "memory": None})
    devices = getattr(options, "devices", None)
    batches = {} if options.batch is None else _read("batch", read_batches, options.batch)
    several = {
        "--planners": comparing,
        "--devices": devices,
        "--also-on": getattr(options, "also_on", None),
        f"--batch {options.batch}": "batches" in batches,
        "--beside": getattr(options, "beside", ()) and not comparing,
    }
    if len(given := [flag for flag, asked in several.items() if asked]) > 1:
        raise TensorOptError(f"{' and '.join(given)} ask for different kinds of tables; give one of them")
    model = options.model if options.lora is None else with_lora(options.model, options.lora)
    return Question(
        model=model if options.sequence is None else with_sequence(model, options.sequence),
        cluster=options.cluster,
        **batches,
        seed=options.seed,
        dims=dims_option(options),
        outputs=options.output,
        loss=options.loss,
        settings=_settings_option(options),
        constraints_file=options.constraints or "",
        headroom=getattr(options, "headroom", None) or "",
        planners=_names(getattr(options, "planners", None)),
        planner_options=getattr(options, "planner_option", ()),
        limits=[parse_bytes(limit) for limit in limits] or [None],
        devices=_read("devices", read_counts, devices) if devices else "",
        also_on=_names(getattr(options, "also_on", None)),
        beside=tuple(getattr(options, "beside", ())),
        anew=options.anew,
    )


def _names(text: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip()) if text else ()


def computing_on(question: Any, clusters: Collection[Any], progress: ProgressDisplay) -> Any:
    """Return the question with a dtype in which all these clusters can compute; show the reason for it."""
    from tensoropt.question.compute_dtype import AUTO, dtype_of

    if question.settings.dtype == AUTO and (why := dtype_of(question.model, clusters)[1]):
        progress.note(why)
    return question.computing_on(clusters)


def explored(
    question: Any,
    progress: ProgressDisplay,
    out: str | None,
    cluster: Any = None,
    sibling: Any = None,
    *,
    within: str = "",
) -> Any:
    """Return the exploration that answers a question, after saving it in ``out`` if that is given.

    Args:
        cluster: a cluster instead of the question's.
        sibling: an exploration of the same model on another cluster, whose operator graph is reused.
        within: the folder of the sweep to which the exploration belongs, if any.
    """
    from tensoropt.cluster import load_cluster
    from tensoropt.launchers import read_job

    # Before the folder: a wrong option is refused before anything is made.
    cluster = load_cluster(question.cluster if cluster is None else cluster)
    jobs = [read_job(text) for text in question.beside]
    question, taken = question.as_run_by(jobs, cluster.device_count)
    if taken:
        progress.note(taken)
    question = computing_on(question, [cluster], progress)
    settings = question.settings_on(cluster)
    with writable_folder(out) if out else contextlib.nullcontext() as folder:
        where = f"a folder of {within}" if within else out
        progress.note(question.in_effect(cluster, settings, where))
        from tensoropt.exploration.exploration import InterruptedExplorationError, NothingFitsError
        from tensoropt.session.kept import KeptCapture, Known, known_of

        refusal = stop = None
        try:
            if sibling is not None and sibling.costs is not None:
                imported = tuple(sibling.report.get("imported", ()))
                known = Known(captured=KeptCapture(sibling.model, sibling.recorded.graph, imported))
            else:
                known = known_of(question, cluster, settings)
            exploration = known.exploration
            if exploration is not None:
                progress.note(exploration.report["notes"][-1])
            else:
                from tensoropt import api  # imports PyTorch: only after the settings in effect are printed

                exploration = api.answer(
                    question, cluster, settings, known, progress=progress, note=progress.note
                )
        except NothingFitsError as error:
            exploration, refusal = error.exploration, error
        except InterruptedExplorationError as error:
            exploration, stop = error.exploration, error
        if jobs and stop is None:
            from tensoropt.session.launched import with_jobs

            exploration = with_jobs(exploration, jobs, progress=progress)
        if folder is not None:
            exploration.save(Path(folder))
        if stop is not None:
            saved = f"; the points are in {out}: tensoropt choose {out}" if out else ""
            raise KeyboardInterrupt(f"{stop}{saved}")
        if refusal is not None:
            raise _nothing_fits(exploration, str(refusal), out)
        return exploration


def _nothing_fits(exploration: Any, refusal: str, out: str | None) -> TensorOptError:
    from tensoropt.errors import InfeasibleError
    from tensoropt.plan.plan_names import brief_name
    from tensoropt.units import format_seconds

    least = int(exploration.needs.argmin())
    step = format_seconds(exploration.all_points[least].time_s)
    would = f"{brief_name(exploration.names[least])}, {step} a step"
    choose = f"tensoropt choose {out} --point {least + 1}, or export --csv"
    saved = f"; the points are in {out}: {choose}" if out else ""
    return InfeasibleError(f"{refusal} ({would}){saved}")

"""Arguments that several verbs have, and what they say.

Arguments that say how long a training is and what its devices cost: ``--tokens``, ``--price``, ...

What a verb of the command line is: its name, its arguments, the call, and the words of its answer.

The flags of ``explore`` and ``compare``, and the question that they are parsed into.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tensoropt.console import ProgressDisplay
from tensoropt.errors import TensorOptError
from tensoropt.question.settings import Setting, settings_fields
from tensoropt.units import parse_bytes, parse_count, parse_seconds, read_number, read_whole

OF_AMOUNT = ("tokens", "samples", "epochs", "steps", "samples_per_epoch", "price", "currency")
"""What :func:`add_amount` adds."""


def add_amount(verb: argparse.ArgumentParser) -> None:
    """How long the training is, and prices."""
    group = verb.add_argument_group("what a training takes and costs")
    length = group.add_mutually_exclusive_group()
    length.add_argument("--tokens", metavar="1e9", help="a training of so many tokens (300B, 1.5T, ...)")
    length.add_argument("--samples", metavar="N", help="of so many samples")
    length.add_argument("--epochs", metavar="N", help="of so many epochs; with --samples-per-epoch")
    length.add_argument("--steps", metavar="N", help="of so many steps; default: 1000")
    group.add_argument("--samples-per-epoch", metavar="M", help="the size of the data set, with --epochs")
    group.add_argument(
        "--price",
        action="append",
        default=[],
        metavar="2.5|KIND=2.5",
        help="money per device-hour, of all devices or of a kind (repeat it, or separate by commas); "
        "default: what the cluster says, if anything",
    )
    group.add_argument(
        "--currency", default="", metavar="EUR", help="what the money is called; default: nothing"
    )


def amount_option(options: argparse.Namespace) -> Any:
    """The :class:`~tensoropt.exploration.rates.Amount` that is asked for; None where nothing is.

    Raises:
        TensorOptError: it is no amount, or an epoch's size is missing.
    """
    from tensoropt.exploration.rates import AMOUNTS, Amount

    size = options.samples_per_epoch
    of_epoch = None if size is None else parse_count(size, "--samples-per-epoch")
    for unit in AMOUNTS:
        text = getattr(options, unit)
        if text is not None:
            return Amount(parse_count(text, f"--{unit}"), unit, of_epoch)
    if of_epoch is not None:
        raise TensorOptError("--samples-per-epoch says what an epoch is; give --epochs with it")
    return None


def tariff_option(options: argparse.Namespace) -> Any:
    """The :class:`~tensoropt.exploration.rates.Tariff` that ``--price`` and ``--currency`` say.

    Raises:
        TensorOptError: a price is none, or there are several for the same devices.
    """
    from tensoropt.exploration.rates import Tariff, prices_of

    price, by_kind = prices_of(",".join(options.price))
    return Tariff(price, by_kind, options.currency.strip())


def rated_point(options: argparse.Namespace, found: Any, index: int) -> tuple[list[str], dict[str, Any]]:
    """Return the facts of a point as lines, what the training that is asked for takes and costs among them,
    and the latter as data.

    Raises:
        TensorOptError: an amount or a price is none, or is of devices that the cluster does not have.
    """
    from tensoropt.exploration.facts import rate_facts
    from tensoropt.exploration.figure_rows import FigureRow, rates_data
    from tensoropt.exploration.rates import kinds_of
    from tensoropt.plan.facts_table import fact_lines
    from tensoropt.report.table import point_lines

    amount, tariff = amount_option(options), tariff_option(options)
    tariff.check(kinds_of(found))
    row = FigureRow.of(found, index, tariff)
    return [*point_lines(row), *fact_lines(rate_facts(row, amount))], rates_data(row, amount)


class Answer(NamedTuple):
    """What a verb gives back.

    Attributes:
        data: what ``--json`` writes.
        text: what is written for a person.
        code: the exit code.
    """

    data: dict[str, Any]
    text: str
    code: int = 0


@dataclass(frozen=True)
class Verb:
    """One verb; each has a file of its own.

    Attributes:
        help: what it does, in a few words without a full stop.
        add_arguments: tells a parser what the verb takes.
        answer: calls what the verb stands for. What is heavy to import, it imports itself, so that
            ``--help`` stays quick.
    """

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    answer: Callable[[argparse.Namespace, ProgressDisplay], Answer]


MODEL_HELP = "zoo:NAME, FILE.onnx, package.module:function or path/file.py:function"
CLUSTER_HELP = (
    "local, local:N (N of its GPUs, else CPU ranks), cpu:N, a preset (see: tensoropt list clusters) or a "
    "YAML/JSON file"
)


def add_folder(verb: argparse.ArgumentParser) -> None:
    """The folder of a saved exploration."""
    verb.add_argument("dir", metavar="DIR", help="the folder given to explore --out")


def add_onnx(verb: argparse.ArgumentParser) -> None:
    """What an ONNX file leaves open."""
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


def dims_option(options: argparse.Namespace) -> dict[str, int]:
    """The sizes that ``--dim`` gives, by name."""
    dims: dict[str, int] = {}
    for text in options.dim:
        name, _, size = text.rpartition("=")
        if not name or not size.isdecimal():
            raise TensorOptError(f"--dim '{text}' is not NAME=SIZE, for example --dim batch=8")
        dims[name] = int(size)
    return dims


def add_headroom(verb: argparse.ArgumentParser) -> None:
    """How much of a device is kept free."""
    verb.add_argument(
        "--headroom",
        metavar="5%|2GiB",
        help="keep so much of a device's memory free: a budget is at most the rest",
    )


def budget(options: argparse.Namespace, device_bytes: Callable[[], float]) -> float | None:
    """Bytes per device that ``--memory`` and ``--headroom`` leave together; None where neither is given.

    Args:
        device_bytes: what the smallest device has; called only where headroom is asked for.

    Raises:
        TensorOptError: headroom that is no share and no size, or that leaves nothing.
    """
    from tensoropt.question.question import headroom_bytes

    memory = parse_bytes(options.memory) if options.memory is not None else None
    if options.headroom is None:
        return memory
    whole = device_bytes()
    usable = whole - headroom_bytes(options.headroom, whole)
    return usable if memory is None else min(memory, usable)


def add_point(which: Any, default: str = "; default: the fastest", *, memory: bool = True) -> None:
    """Which point of a saved frontier.

    Args:
        which: a group of arguments that exclude each other.
        default: what is taken without any of them, in words.
        memory: whether a budget alone says so, too.
    """
    which.add_argument(
        "--point", type=int, metavar="N",
        help=f"its number, from 1; after the frontier's those of other planners{default}",
    )  # fmt: skip
    if memory:
        which.add_argument("--memory", metavar="24GiB", help="the fastest within this much per device")
    which.add_argument("--time", metavar="0.5", help="the leanest within this time per step (seconds, 500ms)")
    which.add_argument("--knee", action="store_true", help="the point from which both directions cost most")


def point_index(number: int, found: Any) -> int:
    """The index in ``all_points`` of the point that people call by a number from 1.

    Raises:
        TensorOptError: there is none of that number; says which there are.
    """
    count, whole = len(found.points), len(found.all_points)
    if not 1 <= number <= whole:
        others = f", plans of other planners are {count + 1} to {whole}" if whole > count else ""
        raise TensorOptError(f"there is no point {number}; the frontier has points 1 to {count}{others}")
    return number - 1


def point_option(options: argparse.Namespace, found: Any) -> int | None:
    """``--point`` as :func:`point_index` has it, None where it was not given."""
    return None if options.point is None else point_index(options.point, found)


def limits(options: argparse.Namespace) -> dict[str, Any]:
    """``--memory``, ``--time`` and ``--knee`` as the functions that choose a point take them."""
    return {
        "memory_bytes": parse_bytes(options.memory) if options.memory is not None else None,
        "time_s": parse_seconds(options.time) if options.time is not None else None,
        "knee": options.knee,
    }


@contextlib.contextmanager
def writable_folder(path: str) -> Iterator[Path]:
    """The folder, made if need be; made in vain, it is removed again.

    A folder that cannot be written is refused before hours are spent, not after.
    """
    folder = Path(path)
    # The innermost first, which is the order in which they can be removed again.
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # os.access says nothing of read-only file systems and full disks; writing does.
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


_NUMBERS: dict[Any, type] = {read_number: float, read_whole: int}
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
    number = _NUMBERS.get(setting.read)
    return {**told, **({"type": number} if number else {}), "metavar": setting.metavar}


def _settings_option(options: argparse.Namespace) -> Any:
    """What the command line chooses, as :class:`~tensoropt.question.settings.Settings`."""
    from tensoropt.question.settings import Settings

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
    """What the command line asks, as :class:`~tensoropt.question.question.Question`."""
    from tensoropt.question.question import Question
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
        settings=_settings_option(options),
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

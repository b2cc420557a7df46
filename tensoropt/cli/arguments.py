"""Arguments that several verbs have, and what they say."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tensoropt.errors import TensorOptError
from tensoropt.units import parse_bytes, parse_seconds

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
    from tensoropt.plan.question import headroom_bytes

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

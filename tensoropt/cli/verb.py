"""What a verb of the command line is: its name, its arguments, the call, and the words of its answer."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from tensoropt.console import ProgressDisplay


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

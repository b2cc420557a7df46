"""The launchers by name, and their configs: read from a file or from words, and written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tensoropt.errors import suggest
from tensoropt.launchers import accelerate, deepspeed, megatron, torchtitan
from tensoropt.launchers.job import JobError, LaunchedJob


@dataclass(frozen=True)
class Launcher:
    """A launcher whose jobs are read and written.

    Attributes:
        about: what is given behind its name and a colon.
        read: returns the job of a config's text.
        write: returns the config of a job that the launcher can be told.
        refusal: returns what of a job the launcher cannot be told; "" if everything can be.
        variants: returns the jobs with the same degrees that it can be told, the likest first.
        names_blocks: whether its config names the classes of the model's blocks.
    """

    name: str
    about: str
    read: Callable[[str], LaunchedJob]
    write: Callable[[LaunchedJob], str]
    refusal: Callable[[LaunchedJob], str]
    variants: Callable[[LaunchedJob], list[LaunchedJob]]
    names_blocks: bool


LAUNCHERS = {
    one.NAME: Launcher(one.NAME, one.ABOUT, one.read, one.write, one.refusal, one.variants, one is accelerate)
    for one in (torchtitan, megatron, deepspeed, accelerate)
}


def launcher_named(name: str) -> Launcher:
    """Return the launcher whose configs are written under a name.

    Raises:
        JobError: there is none.
    """
    if name not in LAUNCHERS:
        raise JobError(f"no config of '{name}' is written; give one of {', '.join(LAUNCHERS)}")
    return LAUNCHERS[name]


def read_job(text: str) -> LaunchedJob:
    """Return the job that ``torchtitan:job.toml``, ``megatron:"--bf16 ..."``, ``deepspeed:ds.json`` or
    ``accelerate:config.yaml`` names.

    Raises:
        JobError: there is no such launcher or file, or its config cannot be read; the message says what
            should be given.
    """
    name, colon, given = text.partition(":")
    forms = ", ".join(f"{n}:{launcher.about}" for n, launcher in LAUNCHERS.items())
    if name not in LAUNCHERS or not colon or not given.strip():
        hint = f" ({suggest(name, LAUNCHERS)})" if name and name not in LAUNCHERS else ""
        raise JobError(f"'{text[:40]}' names no job{hint}; give {forms}")
    return LAUNCHERS[name].read(_content(name, given))


def _content(name: str, given: str) -> str:
    """Return what a file holds, or words that are given themselves."""
    if given.lstrip().startswith("-"):
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise JobError(f"{name}:{given}: cannot read the file ({reason}); give a file that exists") from None


def write_job(job: LaunchedJob) -> str:
    """Return the config of a job as its launcher reads it.

    Raises:
        JobError: the launcher cannot be told everything; the message says what.
    """
    launcher = LAUNCHERS[job.launcher]
    if reason := launcher.refusal(job):
        raise JobError(f"{job.launcher} cannot be told {reason}")
    return launcher.write(job)

"""The launchers by name, and their configs: read from a file or from words, and written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tensoropt.errors import suggest
from tensoropt.launchers import accelerate, deepspeed, fsdp2, megatron, torchtitan
from tensoropt.launchers.fsdp2 import ModelParts
from tensoropt.launchers.job import JobError, LaunchedJob


@dataclass(frozen=True)
class Launcher:
    """A launcher whose jobs can be read, and of some also written.

    Attributes:
        about: what is given behind its name and a colon.
        read: returns the job of a config's text.
        write: returns the config of a job that the launcher can be told; a script also needs the parts of the
            model.
        refusal: returns what of a job the launcher cannot be told; "" if everything can be.
        variants: returns the jobs with the same degrees that it can be told, the likest first.
    """

    name: str
    about: str
    read: Callable[[str], LaunchedJob] | None = None
    write: Callable[..., str] | None = None
    refusal: Callable[[LaunchedJob], str] | None = None
    variants: Callable[[LaunchedJob], list[LaunchedJob]] | None = None


def _both(module: object) -> Launcher:
    names = ("read", "write", "refusal", "variants")
    parts = {name: getattr(module, name, None) for name in names}
    return Launcher(module.NAME, module.ABOUT, **parts)  # type: ignore[attr-defined]


LAUNCHERS = {
    launcher.name: launcher for launcher in map(_both, (torchtitan, megatron, deepspeed, accelerate, fsdp2))
}


def read_job(text: str) -> LaunchedJob:
    """Return the job that ``torchtitan:job.toml``, ``megatron:"--bf16 ..."``, ``deepspeed:ds.json`` or
    ``accelerate:config.yaml`` names.

    Raises:
        JobError: there is no such launcher or file, or its config cannot be read; the message says what
            should be given.
    """
    name, colon, given = text.partition(":")
    readable = {n: launcher for n, launcher in LAUNCHERS.items() if launcher.read is not None}
    forms = ", ".join(f"{n}:{launcher.about}" for n, launcher in readable.items())
    if name not in readable or not colon or not given.strip():
        hint = f" ({suggest(name, readable)})" if name and name not in readable else ""
        raise JobError(f"'{text[:40]}' names no job{hint}; give {forms}")
    return readable[name].read(_content(name, given))  # type: ignore[misc]


def _content(name: str, given: str) -> str:
    """Return what a file holds, or words that are given themselves."""
    if given.lstrip().startswith("-"):
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise JobError(f"{name}:{given}: cannot read the file ({reason}); give a file that exists") from None


def write_job(job: LaunchedJob, parts: ModelParts | None = None) -> str:
    """Return the config of a job as its launcher reads it, or a script that runs it.

    Args:
        parts: of the model, for a script.

    Raises:
        JobError: the launcher has no config, or cannot be told everything; the message says what.
    """
    launcher = LAUNCHERS[job.launcher]
    if launcher.write is None or launcher.refusal is None:
        raise JobError(f"{job.launcher} has no config that is written; give one of {_written()}")
    assert job.launcher != fsdp2.NAME or parts is not None, "a script is of a model"
    if reason := launcher.refusal(job) or (parts.refusal if parts is not None else ""):
        raise JobError(f"{job.launcher} cannot be told {reason}")
    return launcher.write(job) if parts is None else launcher.write(job, parts)


def _written() -> str:
    return ", ".join(name for name, launcher in LAUNCHERS.items() if launcher.write is not None)

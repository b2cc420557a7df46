"""The launchers by name, and functions that read and write their configs."""

from __future__ import annotations

from pathlib import Path

from tensoropt.errors import suggest
from tensoropt.launchers import accelerate, deepspeed, megatron, torchtitan
from tensoropt.launchers.job import JobError, LaunchedJob, Launcher

LAUNCHERS = {one.LAUNCHER.name: one.LAUNCHER for one in (torchtitan, megatron, deepspeed, accelerate)}


def launcher_named(name: str) -> Launcher:
    if name not in LAUNCHERS:
        raise JobError(f"cannot write a config for '{name}'; give one of {', '.join(LAUNCHERS)}")
    return LAUNCHERS[name]


def read_job(text: str) -> LaunchedJob:
    """Return the job given by ``torchtitan:job.toml``, ``megatron:"--bf16 ..."``, ``deepspeed:ds.json`` or
    ``accelerate:config.yaml``.

    Raises:
        JobError: the launcher or file does not exist, or the config cannot be read; the message names the
            valid forms.
    """
    name, colon, given = text.partition(":")
    forms = ", ".join(f"{n}:{launcher.about}" for n, launcher in LAUNCHERS.items())
    if name not in LAUNCHERS or not colon or not given.strip():
        hint = f" ({suggest(name, LAUNCHERS)})" if name and name not in LAUNCHERS else ""
        raise JobError(f"'{text[:40]}' is not a job{hint}; give {forms}")
    return LAUNCHERS[name].read(_content(name, given))


def _content(name: str, given: str) -> str:
    """Return a file's content, or the given text itself if it is arguments."""
    if given.lstrip().startswith("-"):
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise JobError(f"{name}:{given}: cannot read the file ({reason}); give a file that exists") from None


def write_job(job: LaunchedJob) -> str:
    """Return the config with which the job's launcher runs it.

    Raises:
        JobError: the launcher cannot express the job; the message names the part.
    """
    launcher = LAUNCHERS[job.launcher]
    if reason := launcher.refusal(job):
        raise JobError(f"{job.launcher} cannot express {reason}")
    return launcher.write(job)

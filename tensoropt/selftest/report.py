"""The results of the self-test, as text, as data, and as two files that can be sent to somebody."""

from __future__ import annotations

import contextlib
import getpass
import os
import platform
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensoropt.console import columns, json_text
from tensoropt.selftest.outcome import Outcome
from tensoropt.units import format_bytes

SCHEMA = "tensoropt.selftest/1"
_PATH = re.compile(r"(?<![\w./:])~?(?:/[^\s/:'\"(),;]+){2,}/?")
_PRIVATE = "…"


@dataclass(frozen=True)
class CheckResult:
    """A check, what it shows, and its outcome.

    Attributes:
        seconds: the seconds that it took; 0 if it did not run.
    """

    name: str
    what: str
    outcome: Outcome
    seconds: float


@dataclass(frozen=True)
class SelftestReport:
    """The results of the self-test on a machine; its text is for people.

    Attributes:
        machine: the facts from :func:`tensoropt.selftest.machine.machine`.
        minutes: the minutes that were allowed.
        seconds: the seconds that the test took.
    """

    machine: Mapping[str, Any]
    results: tuple[CheckResult, ...]
    minutes: float
    seconds: float

    @property
    def failed(self) -> tuple[CheckResult, ...]:
        """The checks that failed."""
        return tuple(result for result in self.results if result.outcome.state == "failed")

    @property
    def ok(self) -> bool:
        """Whether no check failed; those that were skipped or left out do not count."""
        return not self.failed

    def to_dict(self) -> dict[str, Any]:
        """Return plain data without names of users, hosts and folders."""
        data = {
            "schema": SCHEMA,
            "ok": self.ok,
            "minutes": self.minutes,
            "seconds": round(self.seconds, 1),
            "machine": dict(self.machine),
            "checks": [
                {
                    "name": result.name,
                    "what": result.what,
                    "seconds": round(result.seconds, 1),
                    **result.outcome.to_dict(),
                }
                for result in self.results
            ],
        }
        cleaned: dict[str, Any] = without_private(data)
        return cleaned

    def save(self, stem: Path) -> tuple[Path, Path]:
        """Write ``STEM.json`` and ``STEM.txt``, both whole or neither, and return their paths.

        Raises:
            TensorOptError: they cannot be written.
        """
        from tensoropt.files import written_together

        # Not with_suffix, as a name such as h100.first has no suffix to replace.
        paths = (stem.with_name(stem.name + ".json"), stem.with_name(stem.name + ".txt"))
        with written_together(paths) as (data, text):
            data.write_text(json_text(self.to_dict(), indent=1) + "\n", encoding="utf-8")
            text.write_text(str(self) + "\n", encoding="utf-8")
        return paths

    def __str__(self) -> str:
        parts = [_machine_text(self.machine), self._table(), *map(_check_text, self.results), self.summary]
        cleaned: str = without_private("\n\n".join(parts))
        return cleaned

    @property
    def summary(self) -> str:
        """The last lines: how many passed, what failed, and what that leaves open."""
        counts = Counter(result.outcome.state for result in self.results)
        of = ", ".join(f"{count} {state}" for state, count in counts.items())
        lines = [f"{len(self.results)} checks in {self.seconds:.0f} s: {of}"]
        for state, words in (("failed", "failed"), ("left out", "left out for want of time, not checked")):
            names = [result.name for result in self.results if result.outcome.state == state]
            if names:
                lines.append(f"{words}: {', '.join(names)}")
        if not counts["passed"]:
            lines.append("no check passed, so this says nothing about the machine")
        return "\n".join(lines)

    def _table(self) -> str:
        rows = [["check", "result", "took", "what it shows, or why not"]]
        for result in self.results:
            outcome = result.outcome
            why = result.what if outcome.state == "passed" else outcome.reason
            took = f"{result.seconds:.0f} s" if result.seconds else "-"
            rows.append([result.name, _shown_state(outcome), took, why])
        return columns(rows, left=(0, 1, 3))


def _shown_state(outcome: Outcome) -> str:
    return "FAILED" if outcome.state == "failed" else outcome.state


def _machine_text(machine: Mapping[str, Any]) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    lines = [
        f"TensorOpt {machine['tensoropt']}, self-test on "
        + ("a GPU" if machine["device"] == "cuda" else "CPU ranks"),
        f"{machine['processor']}, {machine['cores']} cores, {format_bytes(machine['memory_bytes'])}, "
        f"load {machine['load']} at the start, {machine['system']}",
        f"Python {machine['python']}, {packages}, CUDA {machine['torch_cuda'] or 'none'}",
    ]
    if gpu := machine.get("gpu"):
        shown = [_gpu_words(key, value) for key, value in gpu.items() if value is not None]
        lines.append("GPU: " + ", ".join(shown))
    settings = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in machine["precision"].items())
    return "\n".join([*lines, f"precision: {settings}"])


_UNITS: Mapping[str, Callable[[Any], str]] = {
    "bytes": format_bytes,
    "hz": lambda value: f"{value / 1e6:.0f} MHz",
    "w": lambda value: f"{value:.0f} W",
    "c": lambda value: f"{value} °C",
    "percent": lambda value: f"{value} %",
}
"""Formatters by the ending of a key."""


def _gpu_words(key: str, value: Any) -> str:
    name, _, ending = key.rpartition("_")
    words = f"{name} {_UNITS[ending](value)}" if ending in _UNITS else f"{key} {value}"
    return words.replace("_", " ")


def _check_text(result: CheckResult) -> str:
    outcome = result.outcome
    lines = [f"{result.name} ({_shown_state(outcome)}): {result.what}"]
    if outcome.reason:
        lines.append(f"  {outcome.reason}")
    if outcome.figures:
        rows = [["", "found", "at most", ""]]
        rows += [
            [
                figure.what,
                figure.text,
                figure.bound_text,
                "" if figure.ok else "TOO MUCH",
            ]
            for figure in outcome.figures
        ]
        lines += [f"  {line}" for line in columns(rows, left=(0, 3)).splitlines()]
    lines += [f"  ({note})" for note in outcome.notes]
    lines += [f"  {key.replace('_', ' ')}: {value}" for key, value in outcome.details.items() if value]
    return "\n".join(lines)


def without_private(value: Any) -> Any:
    """Return the data with paths, and names of the user and the host, removed from all texts; a path keeps
    its last part."""
    if isinstance(value, str):
        return _cleaned(value)
    if isinstance(value, Mapping):
        return {_cleaned(str(key)): without_private(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_private(part) for part in value]
    return value


def _cleaned(text: str) -> str:
    text = _PATH.sub(lambda match: f"{_PRIVATE}/{Path(match.group()).name}", text)
    for name in _names():
        text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", _PRIVATE, text)
    return text


def _names() -> list[str]:
    """Return the names of the user and of the host, except those that are ordinary words of a report."""
    names = {platform.node(), platform.node().split(".")[0], Path.home().name, os.environ.get("USER", "")}
    with contextlib.suppress(OSError, KeyError):  # a container may have no entry for its user
        names.add(getpass.getuser())
    return sorted((name for name in names if len(name) > 2 and name not in _ORDINARY), key=len, reverse=True)


_ORDINARY = frozenset({"root", "user", "localhost", "home", "ubuntu", "torch", "cuda", "gpu", "cpu", "Linux"})
"""Names that say nothing about anybody and that occur in a report's texts."""

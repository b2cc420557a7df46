"""Jobs that run published planners on a saved exploration.

The result of such a job is the exploration with the planners' plans added. If the search gave the same
frontier, the result is shown in place of the original exploration, so that no second entry with nearly the
same name appears; forgetting the job removes the planners again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensoropt.errors import TensorOptError
from tensoropt.exploration.exploration_files import DESCRIBED, read_described
from tensoropt.plan.findings import Findings
from tensoropt.plan.point import FRONTIER, Point

_RECOST, _ONLY_BESIDE = "recost", "--only-beside"
SAME = "same_frontier"
"""The name in a result's report of whether the search found the same as before."""


@dataclass(frozen=True)
class Beside:
    """Planners to run on a saved exploration, whose operators suffice: no model is opened.

    Attributes:
        folder: the exploration's folder.
        label: people's name for it.
        planners: the planners to run.
        local: whether its cluster is this machine's ranks.
        there: planners that it already has; they run again so that they stay.
    """

    folder: Path
    label: str
    planners: tuple[str, ...]
    local: bool
    there: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The job's title: the exploration, and the planners to run."""
        return f"{self.label}: {', '.join(self.planners)} beside it"

    @property
    def measures(self) -> bool:
        """Whether this machine's own ranks are timed."""
        return self.local

    def arguments(self, folder: Path) -> list[str]:
        """Return what :func:`run_planners` reads; the result is written to ``folder``."""
        planners = ",".join(dict.fromkeys((*self.there, *self.planners)))
        return [_RECOST, str(self.folder), "--planners", planners, _ONLY_BESIDE, "--out", str(folder)]


def beside_of(arguments: Sequence[str]) -> Path | None:
    """Return the folder of the exploration on which a job runs planners; None for other jobs."""
    if len(arguments) > 1 and arguments[0] == _RECOST and _ONLY_BESIDE in arguments:
        return Path(arguments[1])
    return None


def run_planners(arguments: Sequence[str], progress: Any) -> str:
    """Run the planners of a job of :class:`Beside`, save the result, and return its table; tables and
    facts that were kept are reused if nothing has changed since."""
    from tensoropt.api import recost
    from tensoropt.exploration.exploration import load_exploration
    from tensoropt.report.table import comparison_text

    _, folder, _, planners, _, _, out = arguments
    before = load_exploration(folder)
    after, _ = recost(before, progress=progress, planners=planners, keep=True, old_points=False)
    after.noted([], **{SAME: only_planners_differ(before, after)}).save(out)
    return comparison_text(after)


def only_planners_differ(before: Findings, after: Findings) -> bool:
    """Return whether the search found the same in both; points that a planner's plan beats may be missing."""

    def own(of: Findings) -> dict[tuple[str, float, float], Point]:
        rows = zip(of.keys, of.points, strict=False)
        return {(key, p.memory_bytes, p.time_s): p for key, p in rows if p.planner == FRONTIER}

    def beaten(point: Point, of: Findings) -> bool:
        return any(p.memory_bytes <= point.memory_bytes and p.time_s <= point.time_s for p in of.points)

    first, second = own(before), own(after)
    return all(beaten(first[known], after) for known in first.keys() - second.keys()) and all(
        beaten(second[known], before) for known in second.keys() - first.keys()
    )


def shown_instead(results: Iterable[tuple[Sequence[str], Path]]) -> Mapping[Path, Path]:
    """Return, for each exploration's folder, the newest result with planners that has the same frontier.

    Args:
        results: (arguments, folder) of finished jobs, newest first.
    """
    newest: dict[Path, Path] = {}
    for arguments, folder in results:
        before = beside_of(arguments)
        if before is not None and before not in newest and _is_the_same(before, folder):
            newest[before] = folder
    return newest


def _is_the_same(before: Path, folder: Path) -> bool:
    try:
        same = read_described(folder)["report"].get(SAME)
        # One that was explored again since is another one.
        newer = (before / DESCRIBED).stat().st_mtime <= (folder / DESCRIBED).stat().st_mtime
    except (OSError, ValueError, TensorOptError):
        return False
    return newer and bool(same)

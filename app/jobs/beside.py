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
from tensoropt.exploration.exploration_files import DESCRIBED
from tensoropt.exploration.verified import PLANNERS, load_changed

_RECOST, _ONLY_BESIDE = "recost", "--only-beside"


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
    tables that were kept are reused if nothing has changed since."""
    from tensoropt.api import recost
    from tensoropt.exploration.exploration import load_exploration
    from tensoropt.exploration.verified import (
        COSTS,
        Changed,
        fingerprint,
        only_planners_differ,
        save_changed,
    )
    from tensoropt.report.table import comparison_text

    _, folder, _, planners, _, _, out = arguments
    before = load_exploration(folder)
    after, _ = recost(before, progress=progress, planners=planners, keep=True, old_points=False)
    after.save(out)
    same = only_planners_differ(before, after)
    words = "published planners beside it" if same else "the costs of now, and planners beside it"
    save_changed(out, Changed(fingerprint(before), PLANNERS if same else COSTS, words))
    return comparison_text(after)


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
        changed = load_changed(folder)
        # One that was explored again since is another one.
        newer = (before / DESCRIBED).stat().st_mtime <= (folder / DESCRIBED).stat().st_mtime
    except (OSError, TensorOptError):
        return False
    return newer and changed is not None and changed.key == PLANNERS

"""Published planners beside a saved exploration as a job: the command line's ``recost --only-beside``.

What such a job leaves is the exploration once more with the planners' plans. Where the search found the same
again, it is shown in the place of the one that was asked of, and no second entry of nearly the same name
appears; forgetting the job takes the planners away again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tensoropt.errors import TensorOptError
from tensoropt.exploration.exploration_files import DESCRIBED
from tensoropt.exploration.verified import PLANNERS, load_changed

VERB, _ONLY_BESIDE = "recost", "--only-beside"


@dataclass(frozen=True)
class Beside:
    """Planners to run; the exploration's operators are enough, no model is opened.

    Attributes:
        folder: of the exploration.
        label: what people call it.
        planners: to run.
        local: whether its cluster is this machine's ranks.
        there: planners that are beside it already, and run again to stay there.
    """

    folder: Path
    label: str
    planners: tuple[str, ...]
    local: bool
    there: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """What people read: the exploration, and the planners beside it."""
        return f"{self.label}: {', '.join(self.planners)} beside it"

    @property
    def measures(self) -> bool:
        """Whether this machine's own ranks are timed."""
        return self.local

    def arguments(self, folder: Path) -> list[str]:
        """The words after ``tensoropt``; the result lands in ``folder``."""
        planners = ",".join(dict.fromkeys((*self.there, *self.planners)))
        return [VERB, str(self.folder), "--planners", planners, _ONLY_BESIDE, "--out", str(folder)]


def beside_of(arguments: Sequence[str]) -> Path | None:
    """The folder of the exploration that a job runs planners beside; None for other jobs."""
    if len(arguments) > 1 and arguments[0] == VERB and _ONLY_BESIDE in arguments:
        return Path(arguments[1])
    return None


def shown_instead(results: Iterable[tuple[Sequence[str], Path]]) -> Mapping[Path, Path]:
    """Per folder of an exploration the newest result that has the same frontier, with planners beside it.

    Args:
        results: (arguments, folder) of jobs that came to their end, newest first.
    """
    found: dict[Path, Path] = {}
    for arguments, folder in results:
        before = beside_of(arguments)
        if before is not None and before not in found and _is_the_same(before, folder):
            found[before] = folder
    return found


def _is_the_same(before: Path, folder: Path) -> bool:
    try:
        changed = load_changed(folder)
        # One that was explored again since is another one.
        newer = (before / DESCRIBED).stat().st_mtime <= (folder / DESCRIBED).stat().st_mtime
    except (OSError, TensorOptError):
        return False
    return newer and changed is not None and changed.key == PLANNERS

"""Explorations in several folders, for one table of all their points.

A folder may be an exploration, a sweep over clusters or numbers of devices, or hold such folders.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tensoropt.errors import TensorOptError
from tensoropt.exploration.exploration import Exploration, load_exploration
from tensoropt.exploration.exploration_files import DESCRIBED, LISTED

REFUSED = "refused.json"
"""The file, in a folder of explorations on several clusters or at several batches, with those that failed and
the reasons."""
_DEEPEST = 3
"""How many folders deep explorations are looked for: more are hardly a batch, and links may go in circles."""


@dataclass(frozen=True)
class ExplorationBatch:
    """Explorations by their folders, in the order of the folders' names.

    Attributes:
        left_out: the reasons why there is no exploration at other paths in the folders, by path.
    """

    explorations: Mapping[str, Exploration]
    left_out: Mapping[str, str]

    @property
    def points(self) -> int:
        """The number of points of all frontiers."""
        return sum(len(exploration.points) for exploration in self.explorations.values())


def load_batch(folders: Sequence[str | os.PathLike[str]]) -> ExplorationBatch:
    """Return the explorations in some folders, each once, and what else is there.

    Raises:
        TensorOptError: one of the folders is a damaged exploration, or holds none that can be read.
    """
    explorations: dict[str, Exploration] = {}
    left_out: dict[str, str] = {}
    known: set[Path] = set()
    for folder in map(Path, folders):
        if (folder / DESCRIBED).is_file() or not folder.is_dir():
            found = {str(folder): load_exploration(folder)}
        else:
            found = {}
            for path, reason in _inside(folder, _DEEPEST):
                if not reason:
                    try:
                        found[str(path)] = load_exploration(path)
                        continue
                    except TensorOptError as error:
                        reason = str(error)
                left_out[str(path)] = " ".join(reason.split())
        if not found:
            reasons = "; ".join(f"{path}: {reason}" for path, reason in list(left_out.items())[:5])
            raise TensorOptError(
                f"{folder} holds no exploration that can be read ({reasons or 'it is empty'}); give folders "
                "of `tensoropt explore --out`, or folders of such folders"
            )
        explorations |= {name: one for name, one in found.items() if Path(name).resolve() not in known}
        known |= {Path(name).resolve() for name in found}
    return ExplorationBatch(explorations, left_out)


def _inside(folder: Path, deepest: int) -> Iterator[tuple[Path, str]]:
    """Yield what a folder holds: explorations with "", everything else with the reason why it is none."""
    for child in sorted(folder.iterdir()):
        if (child / DESCRIBED).is_file():
            yield child, ""
        elif child.name == REFUSED:
            yield from ((folder / name, reason) for name, reason in refused_in(folder).items())
        elif child.name == LISTED:
            continue  # the frontier of a sweep over batches, whose explorations have all of its points
        elif not child.is_dir():
            yield child, "a file, not the folder of an exploration"
        elif deepest == 1:
            yield child, f"more than {_DEEPEST} folders deep; name it, or a folder nearer to it"
        else:
            yield from list(_inside(child, deepest - 1)) or [(child, "an empty folder")]


def refused_in(folder: Path) -> dict[str, str]:
    """Return the reasons why a model could not be explored on some clusters, by name, from a folder's
    file."""
    try:
        data = json.loads((folder / REFUSED).read_text(encoding="utf-8"))
        return {str(name): str(why) for name, why in data.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError) as error:
        return {REFUSED: f"cannot be read ({error}); what could not be explored is not known"}

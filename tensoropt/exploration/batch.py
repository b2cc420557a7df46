"""Loading explorations from several folders, for one table of all their points."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from tensoropt.errors import TensorOptError
from tensoropt.exploration.exploration import Exploration, load_exploration
from tensoropt.exploration.exploration_files import DESCRIBED

REFUSED = "refused.json"
"""The file in a sweep's folder that lists failed clusters or batches, with reasons."""


def load_batch(folders: Sequence[str | os.PathLike[str]]) -> tuple[dict[str, Exploration], dict[str, str]]:
    """Return explorations from folders and folders of folders, each once, by folder; and the reasons for
    those missing or unreadable, by path.

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
            for path in sorted(file.parent for file in folder.rglob(DESCRIBED)):
                try:
                    found[str(path)] = load_exploration(path)
                except TensorOptError as error:
                    left_out[str(path)] = " ".join(str(error).split())
            for file in sorted(folder.rglob(REFUSED)):
                left_out |= {str(file.parent / name): why for name, why in _refused_in(file.parent).items()}
        if not found:
            reasons = "; ".join(f"{path}: {reason}" for path, reason in list(left_out.items())[:5])
            raise TensorOptError(
                f"{folder} holds no exploration that can be read ({reasons or 'it is empty'}); give folders "
                "of `tensoropt explore --out`, or folders of such folders"
            )
        explorations |= {name: one for name, one in found.items() if Path(name).resolve() not in known}
        known |= {Path(name).resolve() for name in found}
    return explorations, left_out


def _refused_in(folder: Path) -> dict[str, str]:
    """Return, by cluster, why a sweep could not explore the model there, as saved in its folder."""
    try:
        data = json.loads((folder / REFUSED).read_text(encoding="utf-8"))
        return {str(name): str(why) for name, why in data.items()}
    except (OSError, ValueError, AttributeError) as error:
        return {REFUSED: f"cannot be read ({error}); its list of failed explorations is lost"}

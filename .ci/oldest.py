"""Print the lower bounds of pyproject.toml as pins for pip: ``numpy>=1.26`` as ``numpy==1.26``.

    python .ci/oldest.py > oldest.txt && pip install --constraint oldest.txt ".[all]"

Tools of the ``test`` extra are left as they are: they are no part of what a user installs.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def pins(project: dict) -> list[str]:
    """``name==lowest`` for each dependency; each must have a lower bound."""
    lists = {"dependencies": project["dependencies"], **project["optional-dependencies"]}
    found = []
    for name, requirements in lists.items():
        for requirement in requirements if name not in ("test", "all") else ():
            match = re.fullmatch(r"([A-Za-z0-9-]+)>=([0-9.]+)(,<.*)?", requirement)
            if match is None:
                raise SystemExit(f"'{requirement}' of {name} has no lower bound of the form name>=1.2")
            found.append(f"{match[1]}=={match[2]}")
    return found


if __name__ == "__main__":
    print("\n".join(pins(tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"])))

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
    """``name==lowest`` for each dependency, which must have a lower bound; of two extras that need the same
    package, the higher bound, which both accept."""
    lists = {"dependencies": project["dependencies"], **project["optional-dependencies"]}
    found: dict[str, str] = {}
    for name, requirements in lists.items():
        for requirement in requirements if name not in ("test", "all") else ():
            match = re.fullmatch(r"([A-Za-z0-9-]+)>=([0-9.]+)(,<.*)?", requirement)
            if match is None:
                raise SystemExit(f"'{requirement}' of {name} has no lower bound of the form name>=1.2")
            found[match[1]] = max(found.get(match[1], "0"), match[2], key=numbers)
    return [f"{name}=={version}" for name, version in found.items()]


def numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


if __name__ == "__main__":
    print("\n".join(pins(tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"])))

"""``python -m tests.mutants.toy FOLDER``: the runner on the toy; prints each mutant's outcome as JSON."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from tests.mutants import sweep
from tests.mutants.sample import generated
from tests.mutants.targets import Target

TOY = Target(
    name="toy", files=["*.py"], tests=["mutants/toy/check_sums.py"], sample=99, below="tests/mutants/toy"
)


def main(folder: Path) -> None:
    for name in ("tensoropt.ranks.pool", "hypothesis", "pytest", "coverage"):  # what tests/conftest.py needs
        importlib.import_module(name)
    sweep.GRACE_S = 2.0
    mutants = generated("tests/mutants/toy/sums.py")
    tried = []
    for _ in range(2):  # the second time all is known
        told: list[str] = []
        records = sweep.sweep(
            TOY,
            mutants,
            sweep.Known(folder, resume=True),
            workers=2,
            state=folder,
            told=lambda mutant, record, told=told: told.append(mutant.id),
        )
        tried.append(len(told))
    rows = [[m.before, m.after, records[m.id]["outcome"], records[m.id]["by"]] for m in mutants]
    print(json.dumps({"tried": tried, "rows": rows}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

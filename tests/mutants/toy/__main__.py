"""``python -m tests.mutants.toy FOLDER``: the runner on the toy; prints each mutant's outcome as JSON."""

from __future__ import annotations

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
    sweep.GRACE_S, told = 5.0, []
    mutants = generated("tests/mutants/toy/sums.py")
    for _ in range(2):  # the second time all is known
        known = sweep.Known(folder, resume=True)
        tell = lambda mutant, record: told.append(mutant.id)  # noqa: E731
        records = sweep.sweep(TOY, mutants, known, workers=2, state=folder, told=tell)
    rows = [[m.before, m.after, records[m.id]["outcome"], records[m.id]["by"]] for m in mutants]
    print(json.dumps({"tried": len(told), "rows": rows}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

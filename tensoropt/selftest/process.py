"""One check in a process of its own: a kernel's fault or a hang ends this process and not the work of the
others.

``python -m tensoropt.selftest.process FUNCTION DEVICE FOLDER`` writes ``FOLDER/outcome.json``.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from pathlib import Path

from tensoropt.console import json_text
from tensoropt.selftest.outcome import RESULT, CheckContext, Outcome

_FRAMES = 6


def main(function: str, device: str, folder: Path) -> None:
    """Run a check (``module:function``) and write its outcome; an error of any kind is an outcome, too."""
    module, _, name = function.partition(":")
    try:
        outcome = getattr(importlib.import_module(module), name)(CheckContext(device, folder))
    except Exception as error:
        words = " ".join(str(error).split()) or "no message"
        frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
        where = [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames]
        outcome = Outcome.failed(f"{type(error).__name__}: {words}", raised_in=where)
    (folder / RESULT).write_text(json_text(outcome.to_dict()), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))

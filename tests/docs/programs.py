"""The programs that the documentation calls."""

from __future__ import annotations

import sys

CHECKED_ELSEWHERE = {"make", "pip", ".", ".ci/run", ".venv/bin/pre-commit", "git", "cd", "jupyter"}
PROGRAMS = {
    "tensoropt": [sys.executable, "-m", "tensoropt"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone"],
    "python": [sys.executable],
}

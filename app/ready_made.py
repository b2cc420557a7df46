"""Make the explorations that ship with the dashboard: ``make ready-made``."""

from __future__ import annotations

import sys

from tensoropt import cli

from .library import READY_MADE

OPTIONS = "--batch 64 --micro-batches 1,4 --epsilon 0.01 --max-points 24"
"""Thinned, so that the files stay small."""
EXPLORATIONS = {"gpt2-dgx-h100": ("zoo:gpt2", "dgx-h100", *OPTIONS.split())}
"""Folder -> model, cluster and options. Data sheets only: measured ones would be of one person's machine."""


def main() -> int:
    """Explore each; the first exit code that isn't 0."""
    for name, (model, cluster, *options) in EXPLORATIONS.items():
        out = READY_MADE / name
        code = cli.main(["explore", model, "--cluster", cluster, *options, "--out", str(out)])
        if code:
            return code
        (out / "frontier.csv").unlink()  # the dashboard makes it when asked
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Makes the explorations that ship with the dashboard: ``make ready-made``."""

from __future__ import annotations

import sys

from tensoropt_app.library import READY_MADE

from tensoropt import cli

MODEL = "zoo:gpt2"
OPTIONS = "--batch 64 --micro-batches 1,4 --epsilon 0.01 --max-points 24"
"""Options that thin the explorations, so that the files stay small."""
PLANNERS = "--planners data_parallel,zero,megatron"
EXPLORATIONS = {
    "gpt2-dgx-h100": ("compare", "dgx-h100", *PLANNERS.split()),
    "gpt2-dgx-h100-half": ("explore", "dgx-h100[4]"),
}
"""Folder -> verb, cluster, more options. Only data sheets: measured figures would be those of one person's
machine."""


def main() -> int:
    """Explore each, and return the first exit code that isn't 0."""
    for name, (verb, cluster, *more) in EXPLORATIONS.items():
        out = READY_MADE / name
        code = cli.main([verb, MODEL, "--cluster", cluster, *OPTIONS.split(), *more, "--out", str(out)])
        if code:
            return code
        for made in ("frontier.csv", "comparison.csv"):  # the dashboard makes them when asked
            (out / made).unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

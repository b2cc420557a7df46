"""Makes the explorations that ship with the dashboard: ``make ready-made``."""

from __future__ import annotations

import sys

from tensoropt_app.library import READY_MADE

from tensoropt import cli

THINNED = "--measure never --epsilon 0.01 --max-points 24"
"""Options that thin the explorations, so that the files stay small. Only data sheets: measured figures would
be those of one person's machine."""
LANGUAGE = "--dtype bfloat16 --optimizer adam_fused"
GPT2 = "zoo:gpt2 --batch 64 --dtype float32 --micro-batches 1,4"
EXPLORATIONS = {
    # Nothing that people make by hand fits: the state of 8 billion parameters is 120 GiB.
    "llama3-8b-8x24gib": f"explore zoo:llama3-8b {LANGUAGE} --cluster rtx-4090x2 --batch 16 --sequence 2048 "
    "--micro-batches 1,2 --memory 24GiB",
    "llama3-8b-4x80gib": f"explore zoo:llama3-8b {LANGUAGE} --cluster dgx-a100[4] --batch 16 --sequence 4096 "
    "--micro-batches 1,2,4 --memory 80GiB",
    # Two nodes: a pipeline between them.
    "llama3-70b-two-nodes": f"explore zoo:llama3-70b {LANGUAGE} --cluster dgx-h100x2 --batch 32 "
    "--sequence 4096 --micro-batches 1,2,4 --memory 80GiB --no-process-memory",
    # Two cards without NVLink, and a model with branches, whose placed plans need more than is there.
    "inception-v3-two-cards": "explore zoo:inception-v3 --cluster rtx-4090[2] --batch 64 --dtype bfloat16 "
    "--memory 2.75GiB --no-process-memory --placements always",
    # Of tensors alone: of so small a model NCCL's buffers leave 8 plans on 8 cards, all of data parallelism.
    "gpt2-dgx-h100": f"explore {GPT2} --cluster dgx-h100 --planners data_parallel,zero,megatron "
    "--no-process-memory",
    "gpt2-dgx-h100-half": f"explore {GPT2} --cluster dgx-h100[4]",
}  # fmt: skip
"""Folder -> the command that makes it."""


def main() -> int:
    """Explore those that are named, by default all, and return the first exit code that isn't 0."""
    for name in sys.argv[1:] or EXPLORATIONS:
        out = READY_MADE / name
        code = cli.main([*EXPLORATIONS[name].split(), *THINNED.split(), "--out", str(out)])
        if code:
            return code
        (out / "frontier.csv").unlink(missing_ok=True)  # the dashboard makes it when asked
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What FastT reports of itself, beside what our judge makes of its algorithms.

Yi et al., Fast Training of Deep Learning Models over Multiple GPUs, Middleware 2020, section 6.3: what its
text says of its tables 1 and 2 and its figure 2. The tables' other rows were not at hand: none is quoted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]


def beside(scaling: Sequence[Row], order: Sequence[Row]) -> list[str]:
    """Lines of Markdown: the paper's largest gains, marked as theirs, and ours of the same kind."""
    strong, weak = (
        {_name(row): gain for row in scaling if row["scaling"] == kind and (gain := _gain(row)) is not None}
        for kind in ("strong", "weak")
    )
    vgg = {name: gain for name, gain in strong.items() if name == "vgg19, 4 GPUs"}
    ordered = {
        f"{row['model']}, {row['planner']}": 1 - row["enforced_s"] / row["first_ready_s"]
        for row in order
        if row["devices"] == 2
    }
    rows = [
        ("strong scaling, VGG on 4 GPUs: OS-DPOS over data parallelism", "+59.4 % (table 1)", vgg),
        ("strong scaling, the most of all models", "+59.4 % (section 8: 63.6 %)", strong),
        ("weak scaling, the most of all models", "+19.2 %, VGG on 16 GPUs (table 2)", weak),
        ("order enforcement on 2 GPUs: what the step loses at most", "26.9 % (figure 2)", ordered),
    ]
    return [
        "| FastT's largest gains | theirs, measured on V100s | ours, under the judge |",
        "| --- | --- | --- |",
        *(f"| {what} | {theirs} | {_most(ours)} |" for what, theirs, ours in rows if ours),
        "",
        "Theirs are from the paper's text, its tables were not at hand: gains over TensorFlow 1.14, the data",
        "parallelism of its slim library and an executor that takes operators first in, first out. Ours are",
        "over a data parallelism that reduces gradients along rings beside backward, and over devices that",
        "take what became ready first; what an executor costs is in no data sheet. That leaves less to gain",
        "(a guess: nothing was run on a machine like theirs).",
    ]


def _name(row: Row) -> str:
    return f"{row['model']}, {row['devices']} GPUs" + (f" in {row['servers']} servers" * (row["servers"] > 1))


def _gain(row: Row) -> float | None:
    rates = row["samples_per_s"]
    if "os_dpos" not in rates or "data_parallel" not in rates:
        return None
    return float(rates["os_dpos"] / rates["data_parallel"] - 1)


def _most(gains: dict[str, float]) -> str:
    best = max(gains, key=gains.__getitem__)
    return f"{100 * gains[best]:+.1f} % ({best})"

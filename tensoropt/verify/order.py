"""The order in which a rank issues its collectives, in a short form, compared with the predicted order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from tensoropt.simulate.collectives import Collective
from tensoropt.verify.recorder import between, shown_axes


def rows_in_order(collectives: Sequence[Collective]) -> list[int]:
    """Return, for each collective in the order given, the number of its row in
    :func:`tensoropt.verify.recorder.summarise`."""
    # A step issues thousands of collectives, of which few differ.
    rows = {one: number for number, one in enumerate(sorted(set(collectives)))}
    return [rows[one] for one in collectives]


def in_order(rows: Sequence[Mapping[str, Any]], order: Sequence[int]) -> list[Collective]:
    """Return the collectives of a summary one by one, axes from 0; inverse of :func:`rows_in_order`."""
    known = [Collective(row["kind"], tuple(shown_axes(row)), row["bytes"]) for row in rows]
    return [known[number] for number in order]


def compare_order(predicted: Sequence[Collective], issued: Sequence[Collective]) -> list[str]:
    """Return the first difference between two orders, in one readable line; empty if they are the same."""
    most = max(len(predicted), len(issued))
    for position, (one, other) in enumerate(zip_longest(predicted, issued)):
        if one != other:
            # Only the first: if one is missing, all that follow it differ.
            return [f"collective {position} of {most}: predicted {_words(one)}, issued {_words(other)}"]
    return []


def _words(one: Collective | None) -> str:
    return "none" if one is None else f"{one.kind} of {one.bytes} bytes {between(one)}"

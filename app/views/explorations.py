"""Explorations as entries of a list, and several explorations compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tensoropt.errors import TensorOptError

from ..library import Entry, Library
from ..state import View
from .frontier import FrontierData
from .result import pace, rates_of, two_digits
from .units import plural

_GROUPS = {"opened": "Opened", "job": "Jobs", "ready-made": "Ready-made"}


def title_of(library: Library, entry: Entry) -> str:
    """Return ``gpt2 on 8 × H100-80GB, batch 64``; the folder's name if its file cannot be read."""
    head = library.head_of(entry)
    if head.fault:
        return f"{entry.folder.name} (cannot be read)"
    batch = f", batch {head.batch}" if head.batch else ""
    kind = head.kind if len(head.kinds) == 1 else plural(len(head.kinds), "kind")
    return f"{named(library.model_name(head.source))} on {head.devices} × {kind}{batch}"


def named(model: str) -> str:
    """Return ``llama3-8b, sequence 2048`` for a model's name with options."""
    name, _, options = model.partition("?")
    return ", ".join([name, *(option.replace("=", " ") for option in options.split("&") if option)])


def _titles_of(library: Library) -> dict[Entry, str]:
    """Return the title of every exploration; equal titles get the settings that differ, else their key."""
    entries = library.entries()
    titles = [title_of(library, e) for e in entries]
    alike: dict[str, list[Entry]] = {}
    for entry, title in zip(entries, titles, strict=True):
        alike.setdefault(title, []).append(entry)
    apart = {e.key: words for some in alike.values() for e, words in _apart(library, some).items()}
    return {e: f"{title}{apart.get(e.key, '')}" for e, title in zip(entries, titles, strict=True)}


def _apart(library: Library, entries: list[Entry]) -> dict[Entry, str]:
    """Return texts that tell explorations of equal titles apart: settings that differ, else the key."""
    if len(entries) < 2:
        return {}
    settings = {e: library.head_of(e).settings for e in entries}
    values = [dict(pairs) for pairs in settings.values()]
    differing = [n for n in values[0] if len({v.get(n) for v in values}) > 1]
    words = {
        e: "".join(f" · {n} {v}" for n, v in pairs if n in differing and v) for e, pairs in settings.items()
    }
    told = list(words.values())
    for entry, said in words.items():
        if not said or told.count(said) > 1:
            words[entry] = f"{said} ({entry.key.removeprefix('opened-')})"
    return words


def choices(library: Library) -> list[dict[str, Any]]:
    """Return all explorations as grouped options of a drop-down list."""
    found: dict[str, list[dict[str, str]]] = {}
    for entry, label in _titles_of(library).items():
        found.setdefault(_GROUPS[entry.origin], []).append({"value": entry.key, "label": label})
    return [{"group": group, "items": items} for group, items in found.items()]


@dataclass(frozen=True)
class ComparedRow:
    """The recommended plan of one exploration, in words."""

    title: str
    plan: str
    needs: str
    time: str
    pace: str
    mark: str
    link: str


@dataclass(frozen=True)
class Compared:
    """Several explorations side by side.

    Attributes:
        frontiers: (title, frontier) of each exploration.
        rows: the recommended plan of each exploration.
        said: sentences on why steps are not comparable, and on explorations that cannot be opened.
        per_sample: whether times are per sample.
    """

    frontiers: list[tuple[str, FrontierData]]
    rows: list[ComparedRow]
    said: list[str]
    per_sample: bool


def compared(library: Library, view: View) -> Compared:
    """Return a view's explorations side by side, each within its own budget."""
    titles = {entry.key: title for entry, title in _titles_of(library).items()}
    frontiers, rows, said, steps = [], [], list[str](), []
    for key in dict.fromkeys((view.exploration, *view.beside)):
        try:
            data = FrontierData.of(library.load(key))
        except TensorOptError as error:
            said.append(str(error))
            continue
        if not len(data.line):
            said.append(f"{titles[key]} holds no points.")
            continue
        own = View(key)
        row = data.chosen(own)
        frontiers.append((titles[key], data))
        steps.append(library.head_of(library.entry(key)))
        rows.append(
            ComparedRow(
                titles[key], data.exploration.names[row], f"{data.units.memory.text(data.needs[row])} "
                f"of {data.limit_words(own)}", two_digits(data.time[row]),
                pace(rates_of(data, own).of(row)), data.mark(own, row), own.link(),
            )
        )  # fmt: skip
    if len({head.source.partition("?")[0] for head in steps}) > 1:
        said.append("The models differ: a step is not the same work.")
    per_sample = len({head.batch for head in steps}) > 1 and all(head.batch for head in steps)
    if per_sample:
        said.append("Batches differ: the plot shows the time per sample.")
    return Compared(frontiers, rows, said, per_sample)

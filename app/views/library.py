"""The explorations as the list in the header shows them."""

from __future__ import annotations

from typing import Any

from ..library import Entry, Library

_GROUPS = {"opened": "Opened", "job": "Jobs", "ready-made": "Ready-made"}


def title_of(library: Library, entry: Entry) -> str:
    """Return a person's name for it, otherwise ``gpt2 on dgx-h100``; the folder's name, and that it is
    damaged, if its file cannot be read."""
    head = library.head_of(entry)
    name = library.labels.of(entry.identity).name
    if name:
        return f"{name} (cannot be read)" if head.fault else name
    return own_title(library, entry)


def own_title(library: Library, entry: Entry) -> str:
    """Return the title of an exploration that nobody gave a name."""
    head = library.head_of(entry)
    if head.fault:
        return f"{entry.folder.name} (cannot be read)"
    return f"{library.model_name(head.source)} on {head.cluster}"


def choices(library: Library) -> list[dict[str, Any]]:
    """Return grouped options for a select."""
    groups: dict[str, list[dict[str, str]]] = {}
    for entry, label in titles_of(library).items():
        groups.setdefault(_GROUPS[entry.origin], []).append({"value": entry.key, "label": label})
    return [{"group": group, "items": items} for group, items in groups.items()]


def titles_of(library: Library) -> dict[Entry, str]:
    """Return the title of every exploration; equal titles are distinguished by what differs, otherwise by
    their key."""
    entries = library.entries()
    titles = [title_of(library, e) for e in entries]
    alike: dict[str, list[Entry]] = {}
    for entry, title in zip(entries, titles, strict=True):
        alike.setdefault(title, []).append(entry)
    apart = {e.key: words for some in alike.values() for e, words in _apart(library, some).items()}
    return {e: f"{title}{apart.get(e.key, '')}" for e, title in zip(entries, titles, strict=True)}


def _apart(library: Library, entries: list[Entry]) -> dict[Entry, str]:
    """Return what is added to the common title of these explorations: settings that differ, or the key if
    none does."""
    if len(entries) < 2:
        return {}
    settings = {e: library.head_of(e).settings for e in entries}
    values = [dict(pairs) for pairs in settings.values()]
    differing = [n for n in values[0] if len({v.get(n) for v in values}) > 1]
    words = {
        e: "".join(f" · {n} {v}" for n, v in pairs if n in differing and v) for e, pairs in settings.items()
    }
    titles = list(words.values())
    for entry, said in words.items():
        if not said or titles.count(said) > 1:
            words[entry] = f"{said} ({entry.key.removeprefix('opened-')})"
    return words

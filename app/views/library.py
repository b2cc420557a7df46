"""The explorations as the header's list shows them."""

from __future__ import annotations

from typing import Any

from ..library import Entry, Library

GROUPS = {"opened": "Opened", "job": "Jobs", "ready-made": "Ready-made"}


def title_of(library: Library, entry: Entry) -> str:
    """``gpt2 on dgx-h100``; the folder's name, and that it is damaged, when its file cannot be read."""
    head = library.head_of(entry)
    if head.fault:
        return f"{entry.folder.name} (cannot be read)"
    return f"{library.model_name(head.source)} on {head.cluster}"


def choices(library: Library) -> list[dict[str, Any]]:
    """Grouped options for a select; equal titles are told apart by their key."""
    entries = library.entries()
    titles = [title_of(library, e) for e in entries]
    found: dict[str, list[dict[str, str]]] = {}
    for entry, title in zip(entries, titles, strict=True):
        label = title if titles.count(title) == 1 else f"{title} ({entry.key.removeprefix('opened-')})"
        found.setdefault(GROUPS[entry.origin], []).append({"value": entry.key, "label": label})
    return [{"group": group, "items": items} for group, items in found.items()]

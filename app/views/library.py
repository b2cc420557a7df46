"""The explorations as the header's list shows them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tensoropt.plan.device_sweep import FILE

from ..library import Entry, Library

GROUPS = {"opened": "Opened", "job": "Jobs", "ready-made": "Ready-made"}
_titles: dict[tuple[Path, int], str] = {}


def title_of(library: Library, entry: Entry) -> str:
    """``gpt2 on dgx-h100``; the folder's name when its file cannot be read."""
    try:
        file = entry.folder / FILE
        key = (file, file.stat().st_mtime_ns)
        if key not in _titles:
            data = json.loads(file.read_text(encoding="utf-8"))
            model = library.model_name(str(data["model"]["source"]))
            _titles[key] = f"{model} on {data['cluster']['name']}"
        return _titles[key]
    except (OSError, ValueError, KeyError, TypeError):
        return entry.key


def choices(library: Library) -> list[dict[str, Any]]:
    """Grouped options for a select; equal titles are told apart by their key."""
    entries = library.entries()
    titles = [title_of(library, e) for e in entries]
    found: dict[str, list[dict[str, str]]] = {}
    for entry, title in zip(entries, titles, strict=True):
        label = title if titles.count(title) == 1 else f"{title} ({entry.key.removeprefix('opened-')})"
        found.setdefault(GROUPS[entry.origin], []).append({"value": entry.key, "label": label})
    return [{"group": group, "items": items} for group, items in found.items()]

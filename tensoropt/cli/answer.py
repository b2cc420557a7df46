"""What a verb gives back."""

from __future__ import annotations

from typing import Any

Answer = tuple[dict[str, Any], str, int]
"""(what ``--json`` writes, what is written otherwise, the exit code)."""

"""The planners by name; each file of this folder adds its own."""

PLANNERS: dict[str, str] = {
    "frontier": "frontier tracking: every trade-off of memory and time that no other strategy beats",
}

"""Explorations: the points of a memory-time frontier, from which plans are chosen, saved and shown."""

"""Explorations: choosing from a frontier, saving it, and what is shown of its points."""

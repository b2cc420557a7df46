"""Explorations: a frontier's points, choosing among them, saving and showing them."""

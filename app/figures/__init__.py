"""Drawings of the view models: plain Plotly dictionaries, so that they are tested without a browser."""

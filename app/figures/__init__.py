"""Drawings of the view models: plain Plotly and Cytoscape dictionaries, so that they are tested without a
browser."""

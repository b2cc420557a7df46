"""Views drawn as plain Plotly dictionaries, so that tests need no browser."""

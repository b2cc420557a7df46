"""The dashboard's plots as plain Plotly dictionaries, so that tests need no browser."""

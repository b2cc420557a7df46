"""Explorations in the background, each in a separate process with a folder that outlives the server."""

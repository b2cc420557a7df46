"""Explorations in the background: each in a process of its own, with a folder that outlives the server."""

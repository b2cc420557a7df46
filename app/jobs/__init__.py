"""Background explorations, each in its own process, with a folder that outlives the server."""

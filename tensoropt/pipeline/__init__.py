"""Pipelines: a model cut into stages, each a sharded strategy of its own on its own devices."""

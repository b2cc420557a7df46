"""Pipelines: a model cut into stages, each with a sharded strategy and devices of its own."""

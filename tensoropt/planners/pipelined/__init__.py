"""Methods that cut a model into stages: one file per method."""

"""Methods that cut a model into pipeline stages: one file per method."""

"""The question that an exploration answers: a model, a cluster, and settings."""

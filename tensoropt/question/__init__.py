"""Questions that explorations answer: a model, a cluster, and settings."""

"""Questions that explorations answer, each a model, a cluster, and settings."""

"""The preparation of a captured model for cost tables, and the simulation of its strategies' steps."""

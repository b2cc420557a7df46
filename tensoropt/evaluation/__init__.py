"""A model prepared for cost tables, and its strategies simulated, as points of a frontier."""

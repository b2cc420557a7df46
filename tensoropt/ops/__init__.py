"""The properties of operators (splits, one rank's call, cost class, precision), in one registry."""

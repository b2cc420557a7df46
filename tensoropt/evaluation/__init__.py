"""A model made ready for costs, and its strategies simulated: from tables to points."""

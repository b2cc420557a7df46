"""A single exploration, from its prepared model to its points: costs, search, simulation, comparison."""

"""The stages that make an exploration of a captured model: cost tables, search, simulation, planners."""

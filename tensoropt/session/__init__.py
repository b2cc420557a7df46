"""The stages that turn a prepared model into an exploration: costs, search, simulation, planners."""

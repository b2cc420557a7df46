"""Pesto: placement and schedule on two devices by an integer program over a coarsened graph.

U. U. Hafeez, X. Sun, A. Gandhi, Z. Liu, *Towards Optimal Placement and Scheduling of DNN Operations with
Pesto*, Middleware 2021. Operators on a device do not overlap, nor do transfers on a link (its congestion
constraints), and memory is balanced between the devices. Large graphs are first coarsened, edge by edge, to
about 200 vertices. CP-SAT orders with one no-overlap constraint instead of big-M rows for every pair. How
uneven memory may be is a setting, with a default of ours.
"""

from __future__ import annotations

from tensoropt.planners.placed.exact.place import ExactPlanner, Solving

place = ExactPlanner(name="pesto", devices=2, most_operators=200).place
DEFAULTS = Solving(most_blocks=60, balance=0.6)

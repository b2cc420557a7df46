"""NetSplit: placement and schedule of forward and backward by an integer program.

NetSplit's program after node co-placement, with limits on groups and a memory rule of ours
(:mod:`.common.contraction`, :mod:`.exact.rules`), solved by CP-SAT instead of Gurobi. The published program
lets operators overlap on a device (:mod:`.netsplit_shared`); this one forbids it. Graphs are contracted to 40
blocks: a few dozen get good schedules within a minute, hundreds hardly ever.
"""

from __future__ import annotations

from tensoropt.planners.placed.exact.place import ExactPlanner, Solving

place = ExactPlanner(name="netsplit").place
DEFAULTS = Solving(most_blocks=40)

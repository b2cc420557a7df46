"""Pesto's integer program as NetSplit extends it to any number of devices, equations (6-2)–(6-7).

The makespan of forward is as short as possible: an operator starts after its inputs arrive, and a message
takes the time of its link. Operators may overlap on a device, backward is not scheduled (it runs in the
opposite order), and there is no memory rule. So on equal devices it is optimal to place all operators on one
of them. If the answer does not fit, the devices' capacity becomes a constraint, which is ours. Larger graphs
are coarsened to 200 blocks, as Pesto's are.
"""

from __future__ import annotations

from tensoropt.planners.placed.exact.place import ExactPlanner, Solving

place = ExactPlanner(
    name="pesto_extended",
    exclusive=False,
    backward=False,
    knows_memory=False,
    promise="it schedules forward alone, and its operators may overlap on a device",
).place
DEFAULTS = Solving(most_blocks=200)

"""NetSplit's program as published: operators on one device may overlap in time.

Every operator is timed by itself, forward and backward. Three things differ from the publication. Groups of
operators that share a device, at most two for each device, are joined along the heaviest edges within limits
of ours (:func:`.common.contraction.share_devices`). The memory rule is ours: the sum of what is stored and
saved between forward and backward (:mod:`.exact.rules`). CP-SAT solves the program.
"""

from __future__ import annotations

from tensoropt.planners.placed.exact.place import ExactPlanner, Solving

place = ExactPlanner(
    name="netsplit_shared", exclusive=False, groups=True, promise="its operators may overlap on a device"
).place
DEFAULTS = Solving()

"""NetSplit's program as published: operators on one device may overlap in time.

Every operator is timed by itself, forward and backward. Three things differ from the publication: groups of
operators that share a device are joined along the heaviest edges within limits of ours
(:func:`.common.contraction.share_devices`), at most two groups for each device; the memory rule is ours, the
sum of what is stored and kept between forward and backward (:mod:`.exact.rules`); CP-SAT solves the program.
"""

from __future__ import annotations

from tensoropt.planners.placed.exact.place import ExactPlanner, Solving

place = ExactPlanner(
    name="netsplit_shared", exclusive=False, groups=True, promise="its operators may overlap on a device"
).place
DEFAULTS = Solving()

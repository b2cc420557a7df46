"""Execution of placed plans: every operator on its device, in the plan's order, forward and backward.

In: a :class:`~tensoropt.placement.strategy.PlacedStrategy`. Out: an :class:`~tensoropt.engine.engine.Engine`
for one process with several devices or for one process per device.
"""

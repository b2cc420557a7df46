"""Execution of placed plans: every operator on its device, in the plan's order, forward and backward."""
